"""The run's draft model on a host: a local checkpoint of its own, from which engines run their drafter.

A draft model changes how fast tokens come, never which ones: nothing of the main weights waits for it. Its
files move to the newest version that was not trained on main weights that are yet to come. An engine loads
them in the pause of a reload of the main weights; where the draft model alone moved, in a pause of its own.

    choose -> fetch, stage, patch -> prove -> load -> record

A kill leaves a local checkpoint that the next start finishes, or an engine without a record: it loads the
draft model again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from weightcast.shared.base.errors import NeedsReseed, Stopped, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import open_component, require_listed
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.run_files import DRAFT
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, grant_read
from weightcast.shared.checkpoint.state.state import EngineState, LocalState, Mark, Phase, Position
from weightcast.shared.checkpoint.update.patch import prove
from weightcast.shared.daemon.timing import Backoff, Due
from weightcast.shared.files.paths import require_no_overlap
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.status import AdapterStatus
from weightcast.subscriber.sync.host import LOOK_SECONDS, StepHost, known

_RETRY = Backoff(1.0, 60.0)


class Draft:
    """Used by the work thread; `_load` by threads of a reload, while that waits. An error is the draft
    model's own: the main component goes on."""

    def __init__(self, host: StepHost) -> None:
        self._host, self._options, self._engines = host, host.options, host.engines
        self._run: Channel | None = None
        self._channel: Channel | None = None
        self._target: int | None = None
        self._main_version: int | None = None
        """that the local version was trained on"""
        self._failed: Mapping[str, tuple[int, float, WeightcastError]] = {}
        """failures in a row, when the next try is due, why: by engine, of the files themselves by no name"""
        self._lock = threading.Lock()
        self._looks = Due(0.0 if host.updater.store.renames else LOOK_SECONDS, host.clock)
        if self._options.draft is None:
            self._updater = None
            return
        for name, place in {"--local": self._options.local, "--channel": self._options.channel}.items():
            require_no_overlap("--draft", self._options.draft, name, place)
        self._updater = host.updater_of(DRAFT, self._options.draft)
        host.bring_draft, host.draft = self.bring, self._status
        for engine in self._takers:
            engine.after_reload = partial(self._load, engine)

    def close(self) -> None:
        if self._updater is not None:
            self._updater.close()

    def step(self, main: LocalState | None, *, follow: bool = True) -> None:
        """`main`: of the main component, as it is here. Without `follow` the channel is left alone: engines
        get what is here."""
        if self._updater is None or main is None or main.phase is not Phase.CLEAN:
            return
        if not follow:
            self._try("", partial(self._updater.load, None))
        elif self._looks.take():
            self._try("", partial(self._follow, main.position))
        in_sync, here = self._engines.in_sync(main), self._version
        stale = [each for each in self._takers if each.name in in_sync and self._held(each) != here]
        if any(self._is_due(engine.name) for engine in stale):
            self._prove()
        for engine in stale:
            self._load(engine)

    def bring(self, main: Position) -> None:
        """Before engines are reloaded with `main`."""
        self._try("", partial(self._follow, main))
        self._prove()

    @property
    def _takers(self) -> list[HostEngine]:
        return [engine for engine in self._engines.engines if engine.spec.draft]

    @property
    def _version(self) -> int | None:
        """Here, also while it is not open."""
        state = None if self._updater is None else self._updater.state
        return None if state is None or not state.position.version else state.position.version

    @property
    def _local(self) -> LocalCheckpoint | None:
        """Once it has a version."""
        local = None if self._updater is None else self._updater.local
        is_whole = local is not None and local.state.phase is Phase.CLEAN and self._version is not None
        return local if is_whole else None

    def _try(self, name: str, work: Callable[[], None]) -> None:
        """`name`: as of `_failed`. Nothing is done before the next try is due."""
        if not self._is_due(name):
            return
        try:
            work()
            self._failed = {key: each for key, each in self._failed.items() if key != name}
        except Stopped:
            raise
        except (WeightcastError, OSError) as error:
            times = 1 + self._failed[name][0] if name in self._failed else 1
            due = self._host.clock() + _RETRY.pause(times)
            self._failed = {**self._failed, name: (times, due, known(error))}

    def _is_due(self, name: str) -> bool:
        return name not in self._failed or self._failed[name][1] <= self._host.clock()

    # the local checkpoint

    def _follow(self, main: Position) -> None:
        updater = self._updater
        assert updater is not None
        updater.load(None, self._host.advance)
        self._run = Channel.open(self._host.updater.store, self._options.trust, self._run)
        require_listed(self._run, DRAFT)
        self._channel = opened = open_component(self._run, DRAFT, self._channel)
        try:
            updater.load(opened, self._host.advance)
            self._target = (opened.pointer() or Pointer(0)).version
            wanted = self._choose(opened, self._target, main)
            if updater.local is None or updater.local.state.position.version != wanted:
                updater.update_to(opened, None if wanted == self._target else wanted, self._host.advance)
                failpoint("draft.patched")
        except BaseException:
            updater.release()
            raise
        if updater.local is not None and self._options.readable_by is not None:
            grant_read(updater.local, self._options.readable_by)

    def _choose(self, channel: Channel, target: int, main: Position) -> int:
        """The newest version that was trained on `main`, or on older main weights. Where none is here, any
        will do: engines do not start without a draft model."""
        here = 0 if self._local is None else self._local.state.position.version
        for version in range(target, here, -1):
            index = channel.own_index(version)
            if index is not None and (index.main_root == main.root or index.main_version < main.version):
                break
        else:
            version = here or target
            is_known = version == 0 or (here > 0 and self._main_version is not None)
            index = None if is_known else channel.own_index(version)
        self._main_version = self._main_version if index is None else index.main_version
        return version

    def _prove(self) -> None:
        """As main weights are proven before engines load them."""
        local = self._local
        if self._updater is None or local is None:
            return
        try:
            prove(local, self._options.verified_within)
        except NeedsReseed as error:
            self._updater.mark_damaged(error)  # the next step repairs it
        except OSError:
            self._updater.release()

    # engines

    def _held(self, engine: HostEngine) -> int | None:
        """The version that its present process has loaded."""
        state = None if self._updater is None else self._updater.state
        record = None if state is None else state.engines.get(engine.name)
        return record.version if record is not None and record.process == engine.facts.process else None

    def _load(self, engine: HostEngine) -> None:
        local = self._local
        if local is not None:
            self._try(engine.name, partial(self._load_now, engine, local))

    def _load_now(self, engine: HostEngine, local: LocalCheckpoint) -> None:
        engine.load_draft()
        failpoint("draft.loaded")
        version, process = local.state.position.version, engine.facts.process
        record = EngineState(Mark.SERVED, version, "status-only", process, "")
        with self._lock:
            local.save(local.state.but(engines={**local.state.engines, engine.name: record}))
        failpoint("draft.recorded")

    # for people

    def _status(self) -> AdapterStatus:
        """Also while engines are reloaded."""
        here, (*_, error) = self._version, next(iter(self._failed.values()), (None,))
        held = [self._held(engine) for engine in self._takers] or [here]
        loaded = [] if None in held else [min(each for each in held if each is not None)]
        is_newest = bool(loaded) and (self._target or 0) <= loaded[0]
        return AdapterStatus(
            name=DRAFT,
            version=here,
            target=self._target,
            main_version=self._main_version,
            loaded=tuple(loaded),
            state="failed" if error else "loaded" if is_newest else "behind" if loaded else "waiting",
            error="" if error is None else error.message,
            remedy="" if error is None else error.remedy,
            ready=here is not None,
        )
