"""The publisher daemon's work thread: its start (watched directory, channel, local checkpoint), then steps. A
step finishes what is unfinished, takes the next job of its sources
(HTTP requests, hand-overs, watched directory), publishes it, records it, then does background work."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from weightcast.publisher.api import PublisherOptions
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.components import TrainedOn, facts_of
from weightcast.publisher.daemon.record import Meter, PublisherMetrics, Record
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources.handed import HandOverSource
from weightcast.publisher.daemon.sources.layouts import save_of
from weightcast.publisher.daemon.sources.queue import Queue
from weightcast.publisher.daemon.sources.source import LastContent, Source, SourceJob, read_back
from weightcast.publisher.daemon.sources.watched import MAIN_VERSION, WatchedAdapters, WatchedDirectory
from weightcast.publisher.daemon.status import ComponentStatus, PublisherStatus, UpkeepStatus
from weightcast.publisher.maintenance.orders import Held
from weightcast.publisher.maintenance.repair import ChannelCheck
from weightcast.publisher.maintenance.upkeep import Upkeep
from weightcast.publisher.publish.commit import PostWrite
from weightcast.publisher.publish.publish_job import Publication
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import (
    RESUME,
    NeedsReseed,
    Refused,
    RetryLater,
    Stopped,
    WeightcastError,
    WrongRun,
    on_error,
)
from weightcast.shared.channel import pins
from weightcast.shared.channel.awaited import unanswered
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.claims import current_epoch
from weightcast.shared.channel.components import (
    COMPONENTS,
    REGISTRY,
    Component,
    component_store,
    read_components,
)
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import CHANNEL_JSON, index_key, read_pointer
from weightcast.shared.channel.pins import Rollback
from weightcast.shared.channel.rate import Rate
from weightcast.shared.channel.run_files import Base
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, ensure_room
from weightcast.shared.checkpoint.update.sources import find_base, open_base
from weightcast.shared.checkpoint.verify.hashing import Scrub
from weightcast.shared.checkpoint.verify.seed import check_other_files, check_table
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import Stop, Wakeup, failure_of
from weightcast.shared.daemon.metrics import DiskMetrics, Metrics, error_kind
from weightcast.shared.daemon.status import Failure
from weightcast.shared.daemon.timing import Due
from weightcast.shared.files.disk_errors import disk_error, error_text
from weightcast.shared.files.hf_checkpoint import side_files
from weightcast.shared.files.paths import ChannelAddress, exists, is_directory, require_no_overlap
from weightcast.shared.files.probes import CONSUME_NEEDS, require

_LOOK_SECONDS = 5.0
_QUEUE, _HANDED = "publications.json", "handed.json"

log = get_log("publisher")


def open_watched(settings: PublisherSettings, renamed: deque[str], began: float) -> WatchedDirectory | None:
    """Before the channel is made: what is complete now was there before. `began`: when the process began, as
    unix time. None where nothing is watched. Raises Refused."""
    if settings.watch is None:
        return None
    if settings.consume and is_directory(settings.watch):
        require("--watch", settings.watch, CONSUME_NEEDS)
    watched = WatchedDirectory(settings.watch, settings, renamed)
    ensure_room(LocalPaths(settings.local))
    watched.ignore_existing(began, _version_of(settings.channel))
    return watched


def _version_of(channel: ChannelAddress, component: str = MAIN) -> int:
    """Of a channel that may not be there yet, or not be readable: opening it reports that."""
    try:
        store = open_store(channel)
        pointer = read_pointer(store if component == MAIN else component_store(store, component))
    except (OSError, WeightcastError):
        return 0
    return 0 if pointer is None else pointer.version


def ready_channel(settings: PublisherSettings, meter: Meter) -> int:
    """Makes the channel from the base, or checks that it was. Returns the bytes of a version. Weights
    are compared as long as nothing is seeded from them: later the base is no longer read. Raises Refused."""
    known = exists(LocalPaths(settings.local).state)
    made = settings.has_channel
    if known and not made:
        raise RetryLater(
            f"{settings.local} is of a run whose channel is not at {settings.channel}",
            remedy="mount the channel; for a new run give another --local",
        )
    directory = _base_of(settings, known)
    if directory is not None and (not made or not known):
        init_channel(
            settings.channel,
            directory,
            frozen=settings.frozen,
            aliases=settings.aliases,
            threads=settings.worker_threads,
            advance=meter.advance,
            unfenced=settings.unfenced,
            sign_key=settings.sign_key,
            trusted_keys=settings.trusted_key,
        )
    file, base = Channel.open(open_store(settings.channel)).require_ours()
    if not made:
        new, run_id = f"made a new channel {settings.channel}", file.run_id
        said = f"{new}, run {run_id}: hosts of another run do not follow it"
        log.info("channel made", sentence=said, channel=str(settings.channel), run_id=run_id)
    if settings.base is not None:
        _check_base(settings.base, base)
    return base.table.nbytes


def _base_of(settings: PublisherSettings, is_seeded: bool) -> Path | None:
    """None where it is not known and not needed. Raises Refused where it is needed."""
    if settings.base is not None:
        return settings.base
    try:
        found = find_base(Channel.open(open_store(settings.channel)))
    except Refused as error:
        if not is_seeded:
            raise
        log.info("running without a base", reason=error.message)
        return None
    log.info("base found", base=str(found))
    return found


def _check_base(directory: Path, base: Base) -> None:
    checkpoint = open_base(directory)
    for note in checkpoint.notes:
        log.info("small fault in the base, tolerated", base=str(directory), note=note)
    check_table(directory, checkpoint.table, base.table)
    check_other_files(directory, side_files(checkpoint).files, base.all_files)


def open_publisher(settings: PublisherSettings, stop: Stop, meter: Meter) -> RunPublisher:
    def wait(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped("the process ends", remedy="the next start continues")

    return RunPublisher.open(
        settings.channel,
        local=settings.local,
        base=settings.base,
        encoding=settings.encoding,
        options=PublisherOptions(
            threads=settings.worker_threads,
            take_over=settings.take_over,
            unfenced=settings.unfenced,
            post_write=_hook(settings),
            upkeep=settings.upkeep,
            upkeep_thread=False,
            deadline_seconds=settings.publish_seconds,
            sign_key=settings.sign_key,
            trusted_keys=settings.trusted_key,
            publish_rate=Rate(int(settings.publish_rate), wait),
            non_finite=settings.non_finite,
            until="out",
            carry_config=settings.carry_config,
            layout=settings.layout,
            advance=meter.advance,
        ),
    )


def _hook(settings: PublisherSettings) -> PostWrite | None:
    command, deadline = settings.post_write, settings.hook_seconds
    if command is None:
        return None

    def post_write(version: int, directory: ChannelAddress, phase: str) -> None:
        # channel, "components", "adapter", NAME, and perhaps the version
        below = str(directory).removeprefix(str(settings.channel)).strip("/").split("/")
        component = "/".join(below[1:3]) if below[0] == COMPONENTS else MAIN
        run_hook(
            command,
            version=version,
            directory=directory,
            phase=phase,
            deadline_seconds=deadline,
            more={"WEIGHTCAST_COMPONENT": component},
        )

    return post_write


class PublishLoop:
    """`start`, `step` and `close` belong to one thread; `status` and `queue` may be read by any."""

    def __init__(
        self,
        settings: PublisherSettings,
        registry: Metrics,
        wakeup: Wakeup,
        stop: Stop,
        renamed: deque[str],
        began: float | None = None,
    ) -> None:
        """`renamed`: names in the watched directory that were seen to be renamed into place; `began`: when
        the process began, as unix time; None: now."""
        self._began = time.time() if began is None else began
        self.queue: Queue | None = None
        """None until the channel is taken"""
        self.superseded: Refused | None = None
        """why this publisher may not go on"""
        self._settings = settings
        self._wakeup, self._stop, self._renamed = wakeup, stop, renamed
        self._meter, self._metrics = Meter(), PublisherMetrics(registry)
        self.record = Record(
            self._metrics,
            PublisherStatus(
                channel=str(settings.channel), local=str(settings.local), encoding=settings.encoding
            ),
        )
        self._publisher: RunPublisher | None = None
        self._watched: WatchedDirectory | None = None
        self._adapters: WatchedAdapters | None = None
        self._listed: tuple[Component, ...] = ()
        self._held: dict[str, str | None] = {}
        """why nothing is published, by component"""
        self._waiting: list[str] | None = None
        """what a rollback of main keeps from being published, as the channel has it"""
        self._troubles: dict[str, str] = {}
        """of components, by name"""
        self._sources: list[Source] = []
        """in the order in which they are asked"""
        self._recovered = False
        self._disk = DiskMetrics(registry, {"channel": settings.channel, "local": settings.local})
        self._look_due, self._owner_due = Due(_LOOK_SECONDS), Due(_LOOK_SECONDS)
        self._components_due, self._shown_due = Due(_LOOK_SECONDS), Due(_LOOK_SECONDS)
        self._scrubs = defaultdict[str, Scrub](partial(Scrub, int(settings.verify_rate), stop=stop.is_set))
        """of the local checkpoints, by component"""
        self._check = ChannelCheck(int(settings.verify_rate))
        self._background: Upkeep | None = None
        self._full_bytes = 0

    def status(self) -> PublisherStatus:
        jobs = () if self.queue is None else self.queue.open()
        now: dict[str, Any] = {"publishing": self._meter.get(), "queue": jobs}
        if silent := unanswered():
            now |= {"ready": False, "not_ready_reasons": (silent,)}
        return self.record.status.model_copy(update=now)

    def start(self) -> None:
        """Makes or checks the channel, takes it, seeds the local checkpoint. Raises what ends the daemon."""
        settings, paths = self._settings, LocalPaths(self._settings.local)
        # before anything is made in one of them
        require_no_overlap("--local", settings.local, "--channel", settings.channel)
        self._watched = open_watched(settings, self._renamed, self._began)
        if self._watched is not None and settings.layout == "plain":
            self._adapters = WatchedAdapters(self._watched)
            if self._watched.is_first:
                self._adapters.ignore_existing(self._began, partial(_version_of, settings.channel))
        self._meter.begin("base", 0)
        try:
            self._full_bytes = ready_channel(settings, self._meter)
            self._meter.begin("base", self._full_bytes)
            self._meter.phase("seed")
            self._publisher = open_publisher(settings, self._stop, self._meter)
        finally:
            self._meter.end()
        with on_error(self.close):
            queue = Queue(
                paths.room / _QUEUE,
                settings.roots,
                settings.rules,
                self._watched,
                adapters=self._adapters,
            )
            self._sources = [queue]
            if settings.hand_over is not None:
                memory = paths.room / _HANDED
                self._sources.append(HandOverSource(settings.hand_over, memory, settings.rules))
            # an adapter next to full weights was trained on them
            watched = (self._watched, self._adapters)
            self._sources += [source for source in watched if source is not None]
            self._resume()
            self.queue = queue
            self._show()
        self._background = self._publisher.work_in_background()
        log.info("channel taken", channel=str(settings.channel), epoch=self._publisher.epoch)
        if self._publisher.left_behind:
            log.info("files left behind", files=list(self._publisher.left_behind))

    @property
    def _owned(self) -> RunPublisher:
        if self._publisher is None:
            raise RetryLater("the publisher has not started")
        return self._publisher

    def _resume(self) -> None:
        for source in self._sources:
            source.resume(self._owned)
        self._recovered = True

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def step(self, stop: Stop) -> None:
        try:
            self._step()
        except Exception as error:
            self._recovered = False
            if isinstance(error, NoChannel | WrongRun):
                # it was there: what a first start needs would make another run
                error.remedy = "mount the run's channel there again, or correct --channel"
            self.record.error(failure_of(error))
            self._show(error_text(error))
            raise
        self._show()

    def _step(self) -> None:
        publisher = self._owned
        if self._owner_due.take():
            self._check_owner()
        # before recovery: that may fail for what a repair fixes
        self.record.repaired(publisher.obey_repair())
        if not self._recovered:
            publisher.recover()
            self._resume()
        self._care()
        order = publisher.obey_orders(lambda one: self.record.show(held=one.became(None).text))
        self.record.show(held=self._note_held(publisher, order))
        if order is not None:
            self._note_waiting(publisher)
            return
        self._waiting = None
        jobs = (source.next(publisher) for source in self._sources)
        job = next((job for job in jobs if job is not None), None)
        if job is not None:
            self._publish(job)
            self._wakeup.set()
        self.record.patched(publisher.settle())
        publisher.verify_some(self._scrubs[MAIN])
        self.record.repaired(publisher.check_channel(self._check))

    def _note_held(self, publisher: RunPublisher, order: Rollback | None) -> str | None:
        """Why nothing is published; logged when that changes."""
        component, version = publisher.store.component, publisher.version
        held = None if order is None else order.became(version).text
        if held != self._held.get(component):
            if order is None:
                log.info("publishing resumes", component=component)
            else:
                facts = {"component": component, "rolled_back_to": order.to, "version": version}
                log.warning("publishing is held", **facts, remedy=RESUME)
            self._held[component] = held
        return held

    def _note_waiting(self, publisher: RunPublisher) -> None:
        """What waits goes on waiting; whoever resumes reads in the channel what is published then."""
        before = () if self.queue is None else self.queue.requested()
        names = [name for source in self._sources for name in source.upcoming(publisher, before)]
        names = list(dict.fromkeys(names))
        if names != self._waiting:
            pins.note_waiting(publisher.store, names)
            self._waiting = names
            if names:
                log.warning("checkpoints wait for the end of the rollback", checkpoints=names, remedy=RESUME)

    def _care(self) -> None:
        """Opens the run's adapters, carries out what was ordered for them, and checks them. One that fails
        keeps neither main nor the others from being published."""
        publisher = self._owned
        if not self._components_due.take():
            return
        with self._noting(REGISTRY):
            self._listed = read_components(publisher.opened())
        for each in self._listed:
            with self._noting(each.name):
                if each.active:
                    nested = publisher.component(each.name)
                    nested.work_in_background()
                    self._note_held(nested, nested.obey_orders())
                    nested.verify_some(self._scrubs[each.name])
                elif publisher.components is not None:
                    publisher.components.drop(each.name)

    @contextlib.contextmanager
    def _noting(self, component: str) -> Iterator[None]:
        try:
            yield
            self._troubles.pop(component, None)
        except (WeightcastError, OSError) as error:
            self._troubles[component] = error_text(error)

    def _publish(self, job: SourceJob) -> None:
        self._meter.begin(job.name, self._full_bytes)
        try:
            known = job.known()
            if job.has_sample(known) or self._is_published(job, known):
                job.unchanged(known)
            else:
                channel, component = self._settings.channel, job.component
                before = self._owned.version if component == MAIN else _version_of(channel, component)
                job.done(self._publish_new(job, job.begin(before)))
            # while it still counts as being published: whoever waits for its end sees all of it
            self._show()
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, WeightcastError):
                error = disk_error(error, job.name)
            job.interrupted(error)
            raise error
        finally:
            self._meter.end()

    def _is_published(self, job: SourceJob, known: LastContent) -> bool:
        """Whether the job has the content of that version. False for what cannot be compared:
        publishing it says what is wrong with it."""
        if known.version is None or not known.root:
            return False
        self._meter.phase("compare")
        try:
            target = job.target(self._owned)
            return target.has_content(job.open, known.version, known.root, self._meter.advance)
        except (Refused, NeedsReseed, FileNotFoundError):
            return False

    def _publish_new(self, job: SourceJob, request: str) -> Publication | Failure:
        """What became of it. Raises what may pass: the same publication is then tried again."""
        target, before = self._owned, 0
        try:
            target = job.target(target)
            before = target.version
            report = target.publish_weights(
                job.open,
                step=job.step,
                advance=self._meter.advance,
                watching=self._meter.phase,
                request=request,
                trained_on=None if target is self._owned else self._trained_on(job, target),
            )
        except Held as error:
            raise RetryLater(error.message, remedy=error.remedy) from error
        except (Refused, NeedsReseed, FileNotFoundError, RetryLater) as error:
            return self._judge(error, target, before, job, request)
        if report.anchor_problem:
            log.warning("no anchor", version=report.version, error=report.anchor_problem)
        return self._done(report.shown(job.name), job)

    def _trained_on(self, job: SourceJob, target: RunPublisher) -> TrainedOn:
        """As the job says, or the newest; the log warns where main moved on since the last version."""
        told = job.main_version()
        found = self._owned.trained_on(told)
        before = target.opened().own_index(target.version) if told is None and target.version else None
        main = next((each for each in self.record.status.publications if each.component == MAIN), None)
        of_one_save = main is not None and save_of(main.source) == save_of(job.name)
        if before is not None and before.main_version != found[0] and not of_one_save:
            log.warning(
                "main has moved since the last version",
                component=job.component,
                main_version=found[0],
                main_version_before=before.main_version,
                remedy=f"where that is wrong, write its number into the file {MAIN_VERSION} of its save",
            )
        return found

    def _judge(
        self, error: Exception, publisher: RunPublisher, before: int, job: SourceJob, request: str
    ) -> Publication | Failure:
        """An error after the commit point leaves a version to be finished, not a failure."""
        self._check_owner()
        if isinstance(error, RetryLater):
            # the local checkpoint catches up in the next step, not only at the next publication
            self._recovered = False
        else:
            publisher.recover()
        made = publisher.made_for(request, before)
        if made is not None:
            return self._done(read_back(publisher, made, job.name), job)
        if isinstance(error, RetryLater):
            raise error
        failure = failure_of(error)
        self.record.failed(error_kind(error), failure, job.name, job.component)
        return failure

    def _check_owner(self) -> None:
        """Raises Refused where another publisher has the channel now, and ends the daemon."""
        try:
            self._owned.check_owner()
        except Refused as error:
            self.superseded = error
            self._stop.set()
            raise

    def _done(self, done: Publication, job: SourceJob) -> Publication:
        same = self.record.version_with(done.root)
        if done.component != MAIN:
            # it may be new
            self._components_due.at_once()
        self._shown_due.at_once()
        if same is None and self._watched is not None:
            same = self._watched.version_with(done.root)
        done = self.record.published(done, same, self._facts(), job.key)
        self._look_due.at_once()
        return done

    def _facts(self) -> dict[str, object]:
        publisher = self._owned
        return {
            "run_id": publisher.run_id,
            "version": publisher.version,
            "epoch": publisher.epoch,
            "left_behind": publisher.left_behind,
            "config_changed": publisher.config_changed,
        }

    def _components(self, publisher: RunPublisher) -> Iterator[ComponentStatus]:
        run = publisher.opened()
        if REGISTRY in self._troubles:
            yield ComponentStatus(name=REGISTRY, state="", problem=self._troubles[REGISTRY])
        for each in self._listed:
            inbox = None if self._adapters is None else self._adapters.of(each.name)
            said = None if inbox is None else inbox.status(held=self.record.status.held is not None)
            facts: dict[str, Any] = {"name": each.name, "state": each.state}
            problem = self._troubles.get(each.name, "") if each.active else ""
            try:
                facts |= facts_of(run, each)
            except (WeightcastError, OSError) as error:
                problem = problem or error_text(error)
            if said is not None:
                facts |= {"waiting": said.waiting, "refused": said.refused}
            known = {name: facts[name] for name in facts.keys() & ComponentStatus.model_fields.keys()}
            yield ComponentStatus(**known, problem=problem)

    def _show(self, problem: str = "") -> None:
        publisher, background = self._publisher, self._background
        held = self.record.status.held is not None
        inbox = None if self._watched is None else self._watched.status(held=held)
        if inbox is not None and self._adapters is not None:
            inbox = self._adapters.status(inbox, held=held)
        self.record.show(
            inbox=inbox,
            verify=self._scrubs[MAIN].status,
            ready=not problem,
            not_ready_reasons=(problem,) if problem else (),
        )
        if publisher is not None and not problem:
            self.record.show(**self._facts())
            if self._shown_due.take():
                self.record.show(components=tuple(self._components(publisher)))
        if background is not None:
            self.record.show(
                upkeep=UpkeepStatus(busy=background.busy, made=background.made, problem=background.problem)
            )
            self._metrics.show_written(background.written)
        self._read_channel()
        self._disk.show()
        self._metrics.show(self.status())

    def _read_channel(self) -> None:
        """What changes there without this publisher's doing."""
        version, publisher = self.record.status.version, self._publisher
        if publisher is not None and self._look_due.take():
            with contextlib.suppress(OSError):
                # before the first version, when the channel came to be
                found = publisher.store.stat(index_key(version) if version else CHANNEL_JSON)
                if found is not None:
                    self._metrics.show_channel(found.written, current_epoch(publisher.store))
