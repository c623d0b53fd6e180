"""Adapters of a run on a host: each follows a channel of its own, within the run's, and engines load its
finished versions under names of their own. `Adapters._bring` is the order.

An adapter is loaded only into an engine that holds the main weights it was trained on. Before an engine is
paused for other main weights, all adapters are taken from it. What a process of an engine has loaded is
recorded durably once it was loaded, and forgotten before it is unloaded: a name that is not in the record is
not trusted, and unloaded when it is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from weightcast.shared.base.errors import (
    DamagedFile,
    EngineFailed,
    NeedsReseed,
    Refused,
    RetryLater,
    Stopped,
    Untrusted,
    WeightcastError,
)
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import (
    ADAPTER,
    REGISTRY,
    open_component,
    read_registry,
)
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.run_files import FORMAT, is_adapter
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.state.state import LocalState, Phase, Position
from weightcast.shared.checkpoint.verify.hashing import Credit, Scrub
from weightcast.shared.daemon.timing import Backoff, Due
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import Members, write_object
from weightcast.subscriber.engines.adapter import NoAdapters
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.groups.messages import AdaptersUsed
from weightcast.subscriber.status import AdapterStatus
from weightcast.subscriber.sync.exported import Exported, ExportedAdapters
from weightcast.subscriber.sync.host import LOOK_SECONDS, StepHost, known

GRACE_SECONDS = 60.0
"""before an old version is unloaded where no gate counts the requests that use it"""
_RETRY = Backoff(1.0, 60.0)
_DRIFTED = "publish the adapter over version {}, retire it, or give --allow-base-drift"


@dataclass
class _Adapter:
    """`updater`: None once it is retired, or not wanted here."""

    name: str
    updater: LocalUpdater | None
    channel: Channel | None = None
    target: int | None = None
    here: int | None = None
    """the version of its local checkpoint, as far as this process brought it there"""
    versions: dict[int, Exported] = field(default_factory=dict)
    """exported, by number"""
    newest: Exported | None = None
    """that was ever here"""
    error: WeightcastError | None = None
    old_since: dict[int, float] = field(default_factory=dict)
    """when a version that engines may have was first not kept any more"""


@dataclass(frozen=True)
class _Loaded:
    """What a process of an engine has loaded: the version's digest, by its name."""

    process: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


class Adapters:
    """Used by the work thread; `withdraw` by threads of a reload, while that waits. An error of an adapter is
    its own: all others, and the main component, go on."""

    def __init__(self, host: StepHost) -> None:
        self._host, self._options, self._engines = host, host.options, host.engines
        self._store, self._exported = host.updater.store, ExportedAdapters(host.options.local / "adapters")
        self._adapters: dict[str, _Adapter] = {}
        self._main: Position | None = None
        """of the main component, as it is here"""
        self._loaded: dict[str, _Loaded] = {}
        """by engine"""
        self._begun = self._listed = False
        """the disk was read; the registry was"""
        self._registry = 0
        """the highest number that was signed with one"""
        self._others: Mapping[str, bool] = {}
        """adapters of the run that are retired (False), or not followed here (True)"""
        self._new: set[str] = set()
        """engines that are given all that is kept, since they started"""
        self._failed: dict[tuple[str, str], tuple[int, float, WeightcastError]] = {}
        """by engine and name, or by adapter alone: failures in a row, when the next try is due, why"""
        self._saving, self._sharing = threading.Lock(), threading.Lock()
        self._shared: Set[str] | None = None
        """labels in the last list that all members of the group have"""
        self._leader_uses: Set[str] = frozenset()
        """of a follower: labels in the last list; before the first one all that was here at its start"""
        self._present: dict[str, str] = {}
        """digests of all that is exported, by label"""
        self._credit: Credit | None = None
        """of background verify, and how many local checkpoints and versions that has read"""
        self._verified = 0
        self._run: Channel | None = None
        self._looks = Due(0.0 if self._store.renames else LOOK_SECONDS, host.clock)
        host.adapters = self._status
        for engine in self._engines.engines:
            engine.before_pause = partial(self.withdraw, engine)

    def close(self) -> None:
        for one in self._adapters.values():
            if one.updater is not None:
                one.updater.close()

    def begin(self) -> None:
        """Of a pass, before any engine is paused or open to requests: which adapters there are."""
        if not self._begun:
            self._recover()
        try:
            self._read_registry()
        except (WeightcastError, OSError) as error:
            text = f"adapters: {known(error).message}"
            self._host.degrade(text)
            # a channel that is away keeps no host from serving main
            self._host.adapters_trouble = text if isinstance(error, Refused) else ""
        if self._listed or self._adapters:
            self._host.adapters_trouble = ""
        for pattern in self._options.adapters if self._listed else ():
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in self._adapters):
                self._host.degrade(f"--adapters {pattern} matches no adapter of the run")
        self._name_all()

    def _name_all(self) -> None:
        if self._engines.traffic is not None:
            followed = {name: one.target or 0 for name, one in self._adapters.items() if self._wanted(one)}
            models = {name for each in self._engines.engines for name in each.adapter.models}
            retired = {name for name, is_active in self._others.items() if not is_active}
            self._engines.traffic.name_adapters({**dict.fromkeys(self._others), **followed}, models, retired)

    def _recover(self) -> None:
        """What an earlier process left here."""
        for found in sorted(self._exported.scan(), key=lambda each: each.version):
            one = self._adapter(found.name)
            one.versions[found.version] = one.newest = found
        if self._options.group_follower:
            self._leader_uses = {each.label for each in self._all_exported()}
        for name in self._exported.left():
            self._adapter(name)
        try:
            what = str(self._exported.state)
            members = Members(self._exported.read_state(), what)
            self._registry = members.integer("registry") if "registry" in members else 0
            for name, value in members.object("engines").items():
                row = Members(value, what)
                process = None if row.is_null("process") else row.text("process")
                if name in {engine.name for engine in self._engines.engines}:
                    self._loaded[name] = _Loaded(process, row.text_map("loaded"))
        except DamagedFile:
            self._loaded = {}  # nothing is trusted: all is loaded anew
        self._begun = True

    def step(self, main: LocalState | None, *, follow: bool = True) -> None:
        """`main`: of the main component, as it is here. Without `follow` the channel is left alone: engines
        get what is here."""
        if self._host.lead.members and self._shared != (used := self._used()):
            with suppress(EngineFailed):  # the next step tells them
                self._host.lead.share_adapters(used)
                self._shared = used
        known_here = self._adapters or self._loaded or self._others
        if main is None or main.phase is not Phase.CLEAN or not (self._options.adapters or known_here):
            return
        self._main = main.position
        for one in self._adapters.values():
            for exported in self._exported.lost(one.versions.values()):
                self._drop(one, exported)
        in_sync = self._engines.in_sync(main)
        engines = [each for each in self._engines.engines if each.name in in_sync]
        if known_here:
            for engine in engines:
                self._look_at(engine)
        for one in list(self._adapters.values()):
            self._bring(one, engines, follow)
        self._new.clear()
        self._name_all()

    def _bring(self, one: _Adapter, engines: Sequence[HostEngine], follow: bool) -> None:
        """One adapter to its newest version, as far as it goes."""
        one.error = None
        try:
            if follow:
                self._require_due("", one.name)
                self._follow(one)
                self._export(one)
                self._failed.pop(("", one.name), None)
        except Stopped:
            raise
        except (WeightcastError, OSError) as error:
            one.error, one.here = known(error), None
            self._fail("", one.name, one.error)
        for engine in engines:
            kept = self._kept(one, engine)  # those that belong to the main weights here
            self._load(engine, one, kept)  # and record
            self._name(engine, one, kept)
            self._offer(engine, one, kept)
            self._unload_old(engine, one, kept)
        self._delete_old(one, self._kept(one))

    def withdraw(self, engine: HostEngine) -> None:
        """Before the engine is paused for other main weights. Raises EngineFailed where it keeps one."""
        loaded = self._loaded.get(engine.name, _Loaded())
        if self._options.allow_base_drift or not (self._adapters or loaded.digests):
            return
        if self._engines.traffic is not None:
            self._engines.traffic.withdraw(engine.name)
        if loaded.digests:
            self._record(engine, _Loaded(loaded.process))
        with suppress(NoAdapters):
            self._unload_strange(engine, engine.adapters(), ())
        failpoint("adapter.withdrawn")

    def verify_some(self, scrub: Scrub) -> bool:
        """Reads a local checkpoint or an exported version whole, the next one at each turn that the rate of
        `scrub` allows. What differs is taken from engines. Returns whether there is something to repair."""
        self._credit = self._credit or Credit(scrub.status.rate, self._host.clock)
        self._credit.earn()
        all_here = [(one, each) for one in self._adapters.values() for each in (None, *one.versions.values())]
        if self._credit.left <= 0 or not all_here:
            return False
        self._verified += 1
        one, exported = all_here[self._verified % len(all_here)]
        try:
            if exported is not None:
                self._credit.spend(self._exported.verify(exported))
            elif one.updater is not None and one.updater.local is not None:
                self._credit.spend(one.updater.local.table.nbytes)
                one.updater.rehash()
                if one.updater.repairable:
                    raise NeedsReseed(one.updater.trouble)
            return False
        except (WeightcastError, OSError) as error:
            scrub.fault(f"adapter {one.name}: {known(error).message}")
        one.here = None
        if exported is not None:
            self._drop(one, exported)
            for engine in self._engines.engines:
                self._look_at(engine)
            self._exported.delete(exported)
        return True

    def _drop(self, one: _Adapter, exported: Exported) -> None:
        """Its files are damaged or gone: the next look takes it from engines, and the newest version is
        exported again."""
        del one.versions[exported.version]
        one.here = None
        for engine in self._engines.engines:
            self._offer(engine, one, self._kept(one, engine))

    def _adapter(self, name: str) -> _Adapter:
        return self._adapters.setdefault(name, _Adapter(name, None))

    def _wanted(self, one: _Adapter) -> bool:
        """Until the registry was read nothing is known to be retired."""
        return one.updater is not None or not self._listed

    # from the channel

    def _read_registry(self) -> None:
        if not self._looks.take():
            return
        active: dict[str, bool] = {}
        if self._store.stat(REGISTRY) is not None:
            self._run = Channel.open(self._store, self._options.trust, self._run)
            listed, number = read_registry(self._run)
            self._require_newer(number)
            active = {one.name.removeprefix(ADAPTER): one.active for one in listed if is_adapter(one.name)}
        elif (self._adapters or self._registry) and self._options.adapters:
            raise RetryLater(
                f"{self._store.place(REGISTRY)} is gone",
                remedy="check the channel mount; local state was left unchanged",
            )
        patterns = self._options.adapters
        wanted = {n for n in active if active[n] and any(fnmatchcase(n, pattern) for pattern in patterns)}
        self._others = {name: active[name] for name in active.keys() - wanted}
        for name in wanted:
            one = self._adapter(name)
            if one.updater is None:
                one.updater = self._host.updater_of(ADAPTER + name, self._exported.followed(name))
        for one in self._adapters.values():
            if one.name not in wanted and one.updater is not None:
                one.updater.close()
                one.updater = one.channel = one.target = None
        self._listed = True

    def _require_newer(self, number: int) -> None:
        """Raises Untrusted for a registry older than the newest that was read here."""
        if self._options.trust is None:
            return
        if number < self._registry:
            raise Untrusted(
                f"{self._store.place(REGISTRY)} is number {number}; number {self._registry} was read before",
                remedy="an older file was put back: find out who can write to the channel",
            )
        if number > self._registry:
            with self._saving:
                self._registry = number
                self._save()

    def _follow(self, one: _Adapter) -> None:
        """Its local checkpoint to its newest version, where that is not exported yet."""
        if one.updater is None or self._run is None:
            return
        if not (one.here or one.versions):
            # other tensors may replace those of a version 0
            one.channel = None
        if one.channel is None or self._store.renames:
            one.channel = open_component(self._run, ADAPTER + one.name, one.channel)
        one.target = (one.channel.pointer() or Pointer(0)).version
        is_here = one.target in (None, 0, one.here, *one.versions)
        if one.updater.repairable or not is_here:
            one.updater.update_to(one.channel, advance=self._host.advance)
            one.here = None if one.updater.state is None else one.updater.state.position.version

    def _export(self, one: _Adapter) -> None:
        local = None if one.updater is None else one.updater.local
        if one.updater is None or one.channel is None or local is None:
            return
        position = local.state.position
        if position.version in (0, *one.versions) or local.state.phase is not Phase.CLEAN:
            return
        index = one.channel.index(one.channel.pointer() or Pointer(0), position.version, local.table)
        if not isinstance(index, Index) or index.version_digest != position.digest:
            raise RetryLater(
                f"the index of {one.name}@{position.version} is gone", remedy="wait for a newer one"
            )
        made = Exported(one.name, index.version, position.digest, index.main_version, index.main_root)
        one.newest = made
        if self._is_past(made):
            return
        carried = [name for name in one.updater.side_files.names(position) if "/" not in name]
        try:
            self._exported.export(made, local, carried, self._options.readable_by)
        except NeedsReseed:
            one.updater.rehash()  # the next step repairs it
            raise
        one.versions[made.version] = made

    def _is_past(self, of: Exported) -> bool:
        """Whether it belongs to main weights that this host has left."""
        return not self._fits(of) and self._main is not None and of.main_version < self._main.version

    def _fits(self, of: Exported) -> bool:
        return self._options.allow_base_drift or (self._main is not None and of.main_root == self._main.root)

    def _kept(self, one: _Adapter, engine: HostEngine | None = None) -> list[Exported]:
        """Newest first. `engine`: those for which it has room, the newest in any case."""
        fit = [each for each in one.versions.values() if self._wanted(one) and self._fits(each)]
        most = self._options.adapters_kept
        if engine is not None and (slots := engine.limits.most) is not None:
            each = slots // max(1, sum(map(self._wanted, self._adapters.values())))
            most = min(most, max(1, each - self._options.adapters_plain_names))
        return sorted(fit, key=lambda each: -each.version)[:most]

    def _used(self) -> Set[str]:
        """Labels of exported versions that engines have loaded."""
        loaded = {digest for each in self._loaded.values() for digest in each.digests.values()}
        return {each.label for each in self._all_exported() if each.digest in loaded}

    def _all_exported(self) -> list[Exported]:
        return [each for one in self._adapters.values() for each in one.versions.values()]

    def share(self, used: AdaptersUsed) -> dict[str, str]:
        """Of a follower; by any thread."""
        with self._sharing:
            self._leader_uses = frozenset(used.labels)
            return self._present

    def _delete_old(self, one: _Adapter, kept: Sequence[Exported]) -> None:
        newest, old = max(one.versions, default=None), list[Exported]()
        with self._sharing:
            used = self._used() | self._leader_uses
            for each in list(one.versions.values()):
                waits = self._wanted(one) and each.version == newest and not self._is_past(each)
                if not (waits or each in kept or each.label in used):
                    old.append(one.versions.pop(each.version))
            self._present = {each.label: each.digest for each in self._all_exported()}
        for each in old:
            self._exported.delete(each)
        if not self._wanted(one) and not one.versions:
            self._exported.forget(one.name)
            del self._adapters[one.name]

    # engines

    def _look_at(self, engine: HostEngine) -> None:
        before, process = self._loaded.get(engine.name, _Loaded()), engine.facts.process
        if before.process != process or not before.digests:
            self._new.add(engine.name)
        if before.process != process:
            before = _Loaded()
            self._failed = {key: each for key, each in self._failed.items() if key[0] != engine.name}
        own = {(name, e.digest): e for e in self._all_exported() for name in (e.label, e.name)}
        try:
            there = engine.adapters()
            trusted = {
                label: digest
                for label, digest in before.digests.items()
                if (each := own.get((label, digest))) and self._path(engine, each) == there.get(label)
            }
            if self._loaded.get(engine.name) != (now := _Loaded(process, trusted)):
                self._record(engine, now)
            self._unload_strange(engine, there, trusted)
            engine.read_limits()
            self._failed.pop((engine.name, ""), None)
        except (EngineFailed, OSError) as error:
            self._fail(engine.name, "", known(error))

    def _unload_strange(self, engine: HostEngine, there: Mapping[str, str], trusted: Collection[str]) -> None:
        """What the engine has of ours beyond what is `trusted`: loaded by a process that was killed, or over
        other main weights."""
        for label, path in there.items():
            ours = label.partition("@")[0] in self._adapters or path.startswith(self._path(engine))
            if ours and label not in trusted:
                engine.unload_adapter(label)
                failpoint("adapter.unloaded")

    def _path(self, engine: HostEngine, exported: Exported | None = None) -> str:
        """As the engine sees it."""
        return f"{engine.spec.path.rstrip('/')}/adapters/{exported.directory if exported else ''}"

    def _load(self, engine: HostEngine, one: _Adapter, kept: Sequence[Exported]) -> None:
        """The newest version; an engine that started since gets all that are kept."""
        for each in kept if engine.name in self._new else kept[:1]:
            if each.label in self._of(engine):
                continue
            try:
                self._require_due(engine.name, "")
                self._require_due(engine.name, each.label)
                self._make_room(engine, one, kept)
                self._load_one(engine, each.label, each)
                self._failed.pop((engine.name, each.label), None)
            except (EngineFailed, DamagedFile, OSError) as error:
                self._fail(engine.name, each.label, failure := known(error))
                if each is kept[0]:
                    one.error = failure

    def _make_room(self, engine: HostEngine, one: _Adapter, kept: Sequence[Exported]) -> None:
        """Of an engine that would unload the adapter used least, whether or not requests use it."""
        most, option = engine.limits.most, f"--{engine.limits.slots.replace('_', '-')}"
        if not engine.limits.drops or most is None or len(self._of(engine)) < most:
            return
        self._offer(engine, one, kept)
        self._unload_old(engine, one, kept)
        if len(self._of(engine)) >= most:
            raise EngineFailed(
                f"engine {engine.name} has no room for adapter/{one.name}: it uses {most} others",
                remedy=f"restart it with a higher {option}, or follow fewer by --adapters",
            )

    def _load_one(self, engine: HostEngine, name: str, exported: Exported) -> None:
        """`name`: its label, or the adapter's own."""
        try:
            self._load_files(engine, name, exported)
        except (EngineFailed, DamagedFile, OSError) as failure:
            try:
                self._exported.verify(exported)
            except (WeightcastError, OSError) as error:
                self._exported.delete(exported)  # as if it had been lost
                text, remedy = f"{exported.label}: {known(error).message}", "wait: it is exported again"
                raise EngineFailed(text, remedy=remedy) from failure
            raise
        failpoint("adapter.loaded")
        there, before = engine.adapters(), {**self._of(engine), name: exported.digest}
        left = {label: digest for label, digest in before.items() if label in there}
        self._record(engine, _Loaded(engine.facts.process, left))

    def _load_files(self, engine: HostEngine, name: str, exported: Exported) -> None:
        engine.limits.require(f"adapter/{exported.name}", self._exported.config(exported))
        for member, has in self._host.lead.share_adapters({*self._used(), exported.label}).items():
            if has.get(exported.label) != exported.digest:
                raise EngineFailed(
                    f"group member {member} has not exported {exported.label} yet",
                    remedy="it is asked again; see that host's subscriber, and its --adapters",
                )
        engine.load_adapter(name, self._path(engine, exported))

    def _name(self, engine: HostEngine, one: _Adapter, kept: Sequence[Exported]) -> None:
        """Moves the adapter's own name to the newest loaded version. In between the engine has no such name:
        replaced in place (`load_inplace`), vLLM would read the files again for every token."""
        loaded = self._of(engine)
        newest = next((each for each in kept if each.label in loaded), None)
        if not self._options.adapters_plain_names or newest is None or loaded.get(one.name) == newest.digest:
            return
        try:
            self._require_due(engine.name, one.name)
            self._unload(engine, one.name)
            self._load_one(engine, one.name, newest)
            self._failed.pop((engine.name, one.name), None)
        except (EngineFailed, DamagedFile, OSError) as error:
            self._fail(engine.name, one.name, failure := known(error))
            one.error = one.error or failure

    def _unload(self, engine: HostEngine, label: str) -> None:
        loaded = dict(self._of(engine))
        if loaded.pop(label, None) is not None:
            self._record(engine, _Loaded(engine.facts.process, loaded))
            engine.unload_adapter(label)
            failpoint("adapter.unloaded")

    def _of(self, engine: HostEngine) -> Mapping[str, str]:
        return self._loaded.get(engine.name, _Loaded()).digests

    def _fail(self, engine: str, name: str, failure: WeightcastError) -> None:
        times, due, _ = self._failed.get((engine, name), (0, 0.0, failure))
        now = self._host.clock()
        if now >= due:
            times, due = times + 1, now + _RETRY.pause(times + 1)
        self._failed[engine, name] = times, due, failure

    def _require_due(self, engine: str, name: str) -> None:
        """Raises what the last try failed with; of an engine itself until a look succeeds."""
        _, due, failure = self._failed.get((engine, name), (0, 0.0, None))
        if failure is not None and (not name or self._host.clock() < due):
            raise failure

    def _record(self, engine: HostEngine, loaded: _Loaded) -> None:
        """Durable when it returns."""
        with self._saving:
            self._loaded = {**self._loaded, engine.name: loaded}
            self._save()
        failpoint("adapter.recorded")

    def _save(self) -> None:
        rows = {n: {"process": one.process, "loaded": one.digests} for n, one in self._loaded.items()}
        self._exported.directory.mkdir(exist_ok=True)
        facts = {"format": FORMAT, "engines": rows, "registry": self._registry}
        durable.replace(self._exported.state, write_object(facts))

    def _offer(self, engine: HostEngine, one: _Adapter, kept: Sequence[Exported]) -> None:
        if self._engines.traffic is not None:
            loaded = self._of(engine)
            versions = {each.version for each in kept if each.label in loaded}
            self._engines.traffic.offer(engine.name, one.name, versions)

    def _unload_old(self, engine: HostEngine, one: _Adapter, kept: Sequence[Exported]) -> None:
        """Once no request can be using it."""
        names = {each.label for each in kept}
        if kept and self._options.adapters_plain_names:
            names.add(one.name)
        for label in self._of(engine).keys() - names:
            name, _, version = label.partition("@")
            if name != one.name or (version and self._in_use(engine, one, int(version))):
                continue
            try:
                self._unload(engine, label)
            except (EngineFailed, OSError) as error:
                self._fail(engine.name, "", known(error))

    def _in_use(self, engine: HostEngine, one: _Adapter, version: int) -> bool:
        traffic = self._engines.traffic
        uses = traffic is not None and traffic.uses(engine.name, one.name, version)
        if uses or (traffic is not None and not self._options.adapters_plain_names):
            return uses
        now = self._host.clock()
        return now - one.old_since.setdefault(version, now) < GRACE_SECONDS

    # for people

    def _status(self) -> Iterator[AdapterStatus]:
        """Also while engines are reloaded."""
        engines = self._engines.engines
        found = [(engine.facts.process, self._loaded.get(engine.name)) for engine in engines]
        held = [each.digests for process, each in found if each and each.process == process]
        for one in self._adapters.values():
            if not self._wanted(one):
                continue
            kept, newest = self._kept(one), one.newest
            in_all = [each.version for each in kept if all(each.label in its for its in held)]
            loaded = in_all if len(held) == len(engines) else []
            text, remedy = ("", "") if one.error is None else (one.error.message, one.error.remedy)
            if not text and newest is not None and self._main is not None and not self._fits(newest):
                text = (
                    f"version {newest.version} belongs to main version {newest.main_version}, and this host "
                    f"has {self._main.version}"
                )
                remedy = _DRIFTED.format(self._main.version) if self._is_past(newest) else ""
            is_here = bool(loaded) and (one.target or 0) <= loaded[0]
            yield AdapterStatus(
                name=one.name,
                version=one.here if newest is None else newest.version,
                target=one.target,
                main_version=None if newest is None else newest.main_version,
                loaded=tuple(loaded),
                state="failed" if one.error else "loaded" if is_here else "behind" if loaded else "waiting",
                error=text,
                remedy=remedy,
                ready=bool(loaded) or one.target == 0,
            )
