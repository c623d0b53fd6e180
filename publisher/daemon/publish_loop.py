"""What the publisher's daemon does in its work thread: finish what is unfinished, then publish what was asked
for over HTTP, then what lies in the watched directory. One step publishes at most one version."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM
from pathlib import Path

from weightcast.publisher.api import Publisher
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.daemon.metrics import PublisherMetrics
from weightcast.publisher.daemon.progress import Meter
from weightcast.publisher.daemon.routes import check_checkpoint
from weightcast.publisher.daemon.settings import THREADS, PublisherSettings
from weightcast.publisher.daemon.sources.handed import HandOverSource
from weightcast.publisher.daemon.sources.inbox import Candidate, Choice, InboxRules, LastContent
from weightcast.publisher.daemon.sources.layouts import step_of
from weightcast.publisher.daemon.sources.observation import marks
from weightcast.publisher.daemon.sources.queue import Job, Queue, unread
from weightcast.publisher.daemon.sources.watched import RenamedDirectories, WatchedDirectory
from weightcast.publisher.daemon.status import (
    PUBLICATIONS_SHOWN,
    REFUSED_SHOWN,
    DatedFailure,
    DatedRefusal,
    InboxStatus,
    PublisherStatus,
    RefusedStatus,
    RepairStatus,
    SkippedStatus,
    UpkeepStatus,
    add,
    waiting_status,
)
from weightcast.publisher.fleet.version_history import ROWS_LIMIT
from weightcast.publisher.maintenance.orders import Held
from weightcast.publisher.maintenance.repair import ChannelCheck, Repairs
from weightcast.publisher.maintenance.upkeep import Background
from weightcast.publisher.publish.commit import PostWrite
from weightcast.publisher.publish.report import Publication, publication, report_of, total_seconds
from weightcast.publisher.trainer.handover import Handed
from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules
from weightcast.publisher.weights.side_configs import CONFIG_REMEDY
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.errors import (
    NeedsReseed,
    NotInTime,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import current_epoch
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import Layout, read_pointer
from weightcast.shared.channel.run_files import Base
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, ensure_room
from weightcast.shared.checkpoint.local_updater import open_base
from weightcast.shared.checkpoint.state.known_bases import find_base
from weightcast.shared.checkpoint.verify.scrub import Scrub
from weightcast.shared.checkpoint.verify.seed import check_other_files, check_table
from weightcast.shared.daemon.backoff import Due
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.logs import get_log, size_text
from weightcast.shared.daemon.loop import Stop, Wakeup, failure_of
from weightcast.shared.daemon.metrics import DiskMetrics, Metrics, error_kind
from weightcast.shared.daemon.status import Failure, Snapshot, verify_status
from weightcast.shared.daemon.threads import working_threads
from weightcast.shared.files.disk_errors import disk_error, disk_text, error_text
from weightcast.shared.files.paths import exists, is_directory, require_no_overlap
from weightcast.shared.files.probes import CONSUME_NEEDS, require
from weightcast.shared.files.side_files import side_files

_LOOK_SECONDS = 5.0
_CLOSED = frozenset({EACCES, EPERM, ELOOP, ENAMETOOLONG, EISDIR, ENOTDIR})
_INBOX, _QUEUE, _HANDED = "inbox.json", "publications.json", "handed.json"

log = get_log("publisher")


class PublishLoop:
    """`start`, `step` and `close` belong to one thread; `status` and `queue` may be read by any."""

    def __init__(
        self,
        settings: PublisherSettings,
        registry: Metrics,
        wakeup: Wakeup,
        stop: Stop,
        renamed: RenamedDirectories,
        began: float | None = None,
    ) -> None:
        """`began`: when the process began, as unix time; None: now."""
        self._began = time.time() if began is None else began
        self.queue: Queue | None = None
        """None until the channel is taken"""
        self.superseded: Refused | None = None
        """why this publisher may not go on"""
        self._settings = settings
        self._wakeup, self._stop, self._renamed = wakeup, stop, renamed
        self._meter, self._metrics = Meter(), PublisherMetrics(registry)
        self.publish_seconds: Mapping[int, float] = {}
        """of what this process published; replaced as a whole"""
        self._publisher: Publisher | None = None
        self._watched: WatchedDirectory | None = None
        self._handed_over: HandOverSource | None = None
        self._recovered = False
        self._disk = DiskMetrics(registry, {"channel": settings.channel, "local": settings.local})
        self._look_due, self._owner_due = Due(_LOOK_SECONDS), Due(_LOOK_SECONDS)
        self._scrub = Scrub(int(settings.verify_rate), stop=lambda: stop.requested)
        self._check = ChannelCheck(int(settings.verify_rate))
        self._held: str | None = None
        self._background: Background | None = None
        self._poison = ""
        """job whose publication crashed: not tried again"""
        self._ended: deque[Publication] = deque(maxlen=PUBLICATIONS_SHOWN)
        self._full_bytes = 0
        self._status = Snapshot(
            PublisherStatus(
                channel=str(settings.channel), local=str(settings.local), encoding=settings.encoding
            )
        )

    def status(self) -> PublisherStatus:
        jobs = () if self.queue is None else self.queue.open()
        return self._status.get().model_copy(update={"publishing": self._meter.get(), "queue": jobs})

    def start(self) -> None:
        """Makes or checks the channel, takes it, seeds the local checkpoint. Raises what ends the daemon."""
        settings, paths = self._settings, LocalPaths(self._settings.local)
        # before anything is made in one of them
        require_no_overlap("--local", settings.local, "--channel", settings.channel)
        if settings.watch is not None:
            rules = InboxRules(
                settings.every,
                settings.marker,
                settings.settle_seconds,
                settings.existing,
                settings.consume,
                settings.watch_pattern,
            )
            memory = paths.room / _INBOX
            if settings.consume and is_directory(settings.watch):
                require("--watch", settings.watch, CONSUME_NEEDS)
            # A trainer may save over the base, as over any checkpoint.
            own = [path for name, path in settings.own_places.items() if name != "base"]
            self._watched = WatchedDirectory(settings.watch, memory, rules, self._renamed, own)
            ensure_room(paths)
            self._watched.ignore_existing(self._began, _version_of(settings.channel))
        self._meter.begin("base", 0)
        try:
            self._full_bytes = ready_channel(settings, self._meter)
            self._meter.phase("seed")
            self._publisher = open_publisher(settings)
        finally:
            self._meter.end()
        try:
            self._take_up(self._publisher, Queue(paths.room / _QUEUE))
        except BaseException:
            self.close()
            raise
        self._background = self._publisher.work_in_background()
        log.info("channel taken", channel=str(settings.channel), epoch=self._publisher.epoch)
        if self._publisher.left_behind:
            log.info("files left behind", files=list(self._publisher.left_behind))

    def _take_up(self, publisher: Publisher, queue: Queue) -> None:
        if self._watched is not None:
            self._watched.start(publisher.made_for, None if self._settings.rename else publisher.run[1].table)
        if self._settings.hand_over is not None:
            memory = LocalPaths(self._settings.local).room / _HANDED
            self._handed_over = HandOverSource(self._settings.hand_over, memory)
            self._handed_over.resume(publisher.made_for)
        self._resume_jobs(publisher, queue)
        self.queue, self._recovered = queue, True
        self._show()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def step(self, stop: Stop) -> None:
        try:
            self._step()
        except Exception as error:
            self._recovered = False
            self._note(failure_of(error))
            self._show(error_text(error))
            raise
        self._show()

    def _step(self) -> None:
        publisher, queue = self._opened()
        if self._owner_due.take():
            self._check_owner(publisher)
        # before recovery: that may fail for what a repair fixes
        self._repaired(publisher.obey_repair())
        if not self._recovered:
            self._recover(publisher, queue)
        order = publisher.obey_orders()
        self._held = None if order is None else f"rolled back to version {order.to}"
        jobs = queue.open()
        if order is not None:
            # what waits goes on waiting
            return
        if jobs:
            self._run_job(publisher, queue, jobs[0])
        elif self._handed_over is not None and (handed := self._handed_over.next()) is not None:
            self._publish_handed(publisher, self._handed_over, handed)
        elif self._watched is not None:
            self._run_inbox(publisher, self._watched)
        self._settle(publisher)
        publisher.verify_some(self._scrub)
        self._repaired(publisher.check_channel(self._check))

    def _repaired(self, repairs: Repairs | None) -> None:
        if repairs is None:
            return
        left = tuple(problem.message for problem in repairs.left)
        result = RepairStatus(at=time.time(), done=tuple(repairs.done), left=left, notes=tuple(repairs.notes))
        self._status.set(self._status.get().model_copy(update={"repair": result}))
        report = log.warning if left or repairs.notes else log.info
        report("channel repaired", done=repairs.done, left=list(left), notes=repairs.notes)

    def _settle(self, publisher: Publisher) -> None:
        """Those who asked are answered already; the local checkpoint follows."""
        report = publisher.settle()
        if report is None or not self._ended or report.version != self._ended[0].version:
            return
        last = self._ended[0]
        if "patch" in report.seconds and "patch" not in last.seconds:
            self._ended[0] = last.but(seconds=dict(report.seconds))
            self._metrics.followed(report.seconds["patch"])

    def _opened(self) -> tuple[Publisher, Queue]:
        if self._publisher is None or self.queue is None:
            raise RetryLater("the publisher has not started")
        return self._publisher, self.queue

    def _recover(self, publisher: Publisher, queue: Queue) -> None:
        publisher.recover()
        self._resume_jobs(publisher, queue)
        poison = queue.get(self._poison)
        if poison is not None and poison.state == "queued":
            queue.change(poison, state="failed")
        if self._watched is not None:
            self._watched.resume(publisher.made_for)
        if self._handed_over is not None:
            self._handed_over.resume(publisher.made_for)
        self._recovered = True

    def _resume_jobs(self, publisher: Publisher, queue: Queue) -> None:
        def ended(job: Job) -> Publication | None:
            index = None if job.before is None else publisher.made_for(job.id, job.before)
            return None if index is None else self._read_back(publisher, index, job.checkpoint)

        queue.resume(ended)

    def _run_job(self, publisher: Publisher, queue: Queue, job: Job) -> None:
        job = queue.change(job, state="running", before=publisher.version, repeat=False)
        try:
            self._publish_asked(publisher, queue, job)
        except Exception as error:
            queue.change(job, error=failure_of(error))
            self._poison = "" if isinstance(error, RetryLater | NotInTime) else job.id
            raise
        self._wakeup.set()

    def _publish_asked(self, publisher: Publisher, queue: Queue, job: Job) -> None:
        try:
            directory = check_checkpoint(job.checkpoint, self._settings.roots)
        except Refused as error:
            if job.earlier is None:
                queue.change(job, state="failed", error=failure_of(error))
            else:
                queue.change(job, state="done", report=job.earlier, note=unread(job.earlier))
            return
        ended = self._publish_directory(publisher, job, directory)
        if isinstance(ended, Publication):
            queue.succeed(job, ended)
        else:
            log.warning("not published", checkpoint=job.checkpoint, **ended.by_name())
            queue.change(job, state="failed", error=ended)

    def _publish_directory(self, publisher: Publisher, job: Job, directory: Path) -> Publication | Failure:
        seen = None if self._watched is None else self._watched.see(directory)

        def read() -> NewWeights:
            return open_asked(publisher, directory, self._settings.rules)

        known = job.earlier
        root = "" if known is None else known.root or publisher.root_of(known.version)
        if known is not None and self._is_published(
            publisher, read, LastContent(known.version, root), job.checkpoint
        ):
            log.info("retried publication is unchanged", key=job.key, version=known.version)
            ended: Publication | Failure = known.but(root=root)
        else:
            ended = self._publish_read(publisher, read, job.step, job.checkpoint, job.id)
        if self._watched is not None and seen is not None and isinstance(ended, Publication):
            self._watched.adopt(seen, ended.version, ended.root)
        return ended

    def _is_published(
        self, publisher: Publisher, read: Callable[[], NewWeights], known: LastContent, source: str
    ) -> bool:
        """Whether what `read` opens has the content of that version. False for what cannot be compared:
        publishing it says what is wrong with it."""
        if known.version is None or not known.root:
            return False
        self._meter.begin(source, self._full_bytes)
        self._meter.phase("compare")
        try:
            return publisher.has_content(read, known.version, known.root, self._meter.advance)
        except (Refused, NeedsReseed, FileNotFoundError):
            return False
        except OSError as error:
            raise disk_error(error, source) from error
        finally:
            self._meter.end()

    def _run_inbox(self, publisher: Publisher, watched: WatchedDirectory) -> None:
        choice = watched.next()
        for broken in choice.refused:
            if broken.problem is not None:
                self._failed(broken.problem.error, broken.problem, broken.name)
        if choice.chosen is not None:
            self._publish_chosen(publisher, watched, choice, choice.chosen)
            self._wakeup.set()

    def _publish_chosen(
        self, publisher: Publisher, watched: WatchedDirectory, choice: Choice, chosen: Candidate
    ) -> None:
        directory = watched.directory / chosen.name

        def read() -> NewWeights:
            return open_chosen(publisher, directory, chosen, self._settings.rules)

        known = watched.content(chosen, publisher.root_of)
        if watched.has_sample(chosen, known.sample):
            return watched.skip_unread(chosen, known)
        if self._is_published(publisher, read, known, chosen.name):
            return watched.skip_published(chosen, known)
        request = watched.begin(choice, publisher.version)
        ended = self._publish_read(publisher, read, step_of(chosen.name), chosen.name, request)
        if isinstance(ended, Publication):
            watched.succeed(chosen, ended.version, ended.root)
        else:
            watched.fail(chosen, ended)

    def _publish_handed(self, publisher: Publisher, handed_over: HandOverSource, handed: Handed) -> None:
        request = handed_over.begin(handed, publisher.version)
        source = f"{handed_over.export.slot(handed.slot)} #{handed.sequence}"

        def read() -> NewWeights:
            return publisher.adapted(handed_over.open(handed), self._settings.rules)

        ended = self._publish_read(publisher, read, handed.step, source, request)
        if isinstance(ended, Failure):
            log.warning("not published", checkpoint=source, **ended.by_name())
        handed_over.end()
        self._wakeup.set()

    def _publish_read(
        self,
        publisher: Publisher,
        read: Callable[[], NewWeights],
        step: int | None,
        source: str,
        request: str,
    ) -> Publication | Failure:
        """What became of it. Raises what may pass: the same publication is then tried again."""
        before = publisher.version
        self._meter.begin(source, self._full_bytes)
        try:
            report = publisher.publish_weights(
                read, step=step, advance=self._meter.advance, watching=self._meter.phase, request=request
            )
        except Held as error:
            raise RetryLater(error.message, remedy=error.remedy) from error
        except (Refused, NeedsReseed, FileNotFoundError) as error:
            return self._judge(publisher, error, before, source, request)
        except RetryLater:
            self._check_owner(publisher)
            made = publisher.made_for(request, before)
            if made is None:
                raise
            # the local checkpoint catches up in the next step, not only at the next publication
            self._recovered = False
            return self._done(self._read_back(publisher, made, source))
        except OSError as error:
            raise disk_error(error, source) from error
        finally:
            self._meter.end()
        if report.anchor_problem:
            log.warning("no anchor", version=report.version, error=report.anchor_problem)
        return self._done(publication(report, source))

    def _judge(
        self, publisher: Publisher, error: Exception, before: int, source: str, request: str
    ) -> Publication | Failure:
        """An error after the commit point leaves a version to be finished, not a failure."""
        self._check_owner(publisher)
        publisher.recover()
        made = publisher.made_for(request, before)
        if made is not None:
            return self._done(self._read_back(publisher, made, source))
        failure = failure_of(error)
        self._failed(error_kind(error), failure, source)
        return failure

    def _failed(self, kind: str, failure: Failure, source: str) -> None:
        """A publication. `kind`: the error's class."""
        self._metrics.failed(kind)
        self._note(failure)
        status = self._status.get()
        totals = status.totals.model_copy(update={"failures": status.totals.failures + 1})
        refused = DatedRefusal(**failure.by_name(), at=time.time(), source=source)
        self._status.set(status.model_copy(update={"totals": totals, "last_refused": refused}))

    def _read_back(self, publisher: Publisher, index: Index, source: str) -> Publication:
        """Of a version whose publication did not live to report."""
        directory = Layout(self._settings.channel).version_dir(index.version)
        return publication(report_of(index, publisher.run[1].table, directory), source)

    def _check_owner(self, publisher: Publisher) -> None:
        """Raises Refused where another publisher has the channel now, and ends the daemon."""
        try:
            publisher.check_owner()
        except Refused as error:
            self.superseded = error
            self._stop.request()
            raise

    def _done(self, done: Publication) -> Publication:
        same = self._version_with(done.root)
        self._ended.appendleft(done)
        self._metrics.published(done)
        self._look_due.at_once()
        known = {**self.publish_seconds, done.version: total_seconds(done.seconds)}
        self.publish_seconds = dict(list(known.items())[-ROWS_LIMIT:])
        status = self._status.get()
        self._status.set(status.model_copy(update={"totals": add(status.totals, done)}))
        for note in done.notes:
            log.info("publication note", version=done.version, source=done.source, note=note)
        log.info(
            "version published",
            sentence=_published(done),
            version=done.version,
            step=done.step,
            source=done.source,
            root=done.root,
            density=round(done.density_elements, 6),
            delta_bytes=done.delta_bytes,
            full_bytes=done.full_bytes,
            **{what: count for what, count in done.adapted.items() if count},
            **{f"{phase}_s": round(seconds, 4) for phase, seconds in done.seconds.items()},
        )
        if done.not_carried:
            log.warning(
                "config changed beside the weights: hosts keep the base's",
                version=done.version,
                source=done.source,
                files=list(done.not_carried),
                remedy=CONFIG_REMEDY,
            )
        if len(done.not_carried) < len(done.config_changed):
            log.info("config carried", version=done.version, files=list(done.carried))
        if done.resumed_from_step is not None:
            log.warning(
                "step went back: the trainer resumed from an earlier step",
                version=done.version,
                step=done.step,
                resumed_from_step=done.resumed_from_step,
            )
        if same is not None:
            log.info("content equals an earlier version", version=done.version, earlier=same)
        return done

    def _version_with(self, root: str) -> int | None:
        ended = next((each.version for each in self._ended if each.root == root), None)
        return ended if ended is not None or self._watched is None else self._watched.version_with(root)

    def _note(self, failure: Failure) -> None:
        dated = DatedFailure(**failure.by_name(), at=time.time())
        self._status.set(self._status.get().model_copy(update={"last_error": dated}))

    def _show(self, problem: str = "") -> None:
        facts: dict[str, object] = {
            "publications": tuple(self._ended),
            "inbox": self._inbox_status(),
            "verify": verify_status(self._scrub.status),
            "held": self._held,
            "upkeep": self._upkeep_status(),
            "ready": not problem,
            "not_ready_reasons": (problem,) if problem else (),
        }
        if self._publisher is not None and not problem:
            facts |= {
                "run_id": self._publisher.run_id,
                "version": self._publisher.version,
                "epoch": self._publisher.epoch,
                "left_behind": self._publisher.left_behind,
                "config_changed": self._publisher.config_changed,
            }
        self._status.set(self._status.get().model_copy(update=facts))
        self._read_channel()
        self._disk.show()
        self._metrics.show(self.status())
        if self._background is not None:
            self._metrics.show_written(self._background.written)

    def _read_channel(self) -> None:
        """What changes there without this publisher's doing."""
        channel, version = self._settings.channel, self._status.get().version
        if self._look_due.take():
            with contextlib.suppress(OSError):
                self._metrics.show_channel(created_at(channel, version), current_epoch(channel))

    def _upkeep_status(self) -> UpkeepStatus:
        if self._background is None:
            return UpkeepStatus()
        return UpkeepStatus(
            busy=self._background.busy, made=self._background.made, problem=self._background.problem
        )

    def _inbox_status(self) -> InboxStatus | None:
        if self._watched is None:
            return None
        refused, left = self._watched.refused(), self._watched.left_alone()
        return InboxStatus(
            watch=str(self._watched.directory),
            waiting=waiting_status(self._watched.waiting),
            refused=tuple(
                RefusedStatus(name=name, error=failure) for name, failure in refused[-REFUSED_SHOWN:]
            ),
            waiting_count=len(self._watched.waiting),
            refused_count=len(refused),
            skipped=tuple(
                SkippedStatus(name=name, reason=reason) for name, reason in self._watched.skipped.items()
            ),
            skipped_count=self._watched.skips,
            left_alone=waiting_status(left),
            left_alone_count=len(left),
        )


def open_chosen(
    publisher: Publisher, directory: Path, chosen: Candidate, rules: ExportRules = NO_RULES
) -> NewWeights:
    """What was looked at, and nothing else: raises Refused where weights were saved over since. From here on
    the checkpoint itself tells when it changes."""
    weights = publisher.open_checkpoint(directory, rules)
    if not chosen.weights <= marks(directory):
        weights.close()
        raise Refused(
            f"{directory} changed after it was looked at",
            remedy="nothing to do: it is looked at again; rename complete checkpoints in",
        )
    return weights


def open_asked(publisher: Publisher, directory: Path, rules: ExportRules = NO_RULES) -> NewWeights:
    """A checkpoint that somebody named. Raises Refused where its files are such as no later try can open."""
    try:
        return publisher.open_checkpoint(directory, rules)
    except OSError as error:
        if error.errno not in _CLOSED:
            raise
        raise Refused(
            disk_text(error, directory),
            remedy="let the publisher's user read the checkpoint and its files, and ask again",
        ) from error


def _version_of(channel: Path) -> int:
    """Of a channel that may not be there yet, or not be readable: that is told when it is opened."""
    try:
        pointer = read_pointer(channel)
    except (OSError, WeightcastError):
        return 0
    return 0 if pointer is None else pointer.version


def created_at(channel: Path, version: int | None) -> float:
    """When a version came to be, as unix time of the channel's clock; before the first, when the channel did.
    Raises OSError."""
    layout = Layout(channel)
    file = layout.index(version) if version else layout.channel_json
    return file.stat().st_mtime


def ready_channel(settings: PublisherSettings, meter: Meter) -> int:
    """Makes the channel from the base, or checks that it was. Returns the bytes of a version. Weights
    are compared as long as nothing is seeded from them: later the base is no longer read. Raises Refused."""
    threads = working_threads(settings.threads, settings.memory_budget, default=THREADS)
    known = exists(LocalPaths(settings.local).state)
    made = exists(Layout(settings.channel).channel_json)
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
            threads=threads,
            advance=meter.advance,
            sign_key=settings.sign_key,
            trusted_keys=settings.trusted_key,
        )
    _, base = Channel.open(settings.channel).require_ours()
    if settings.base is not None:
        _check_base(settings.base, base)
    return base.table.nbytes


def _base_of(settings: PublisherSettings, is_seeded: bool) -> Path | None:
    """None where it is not known and not needed. Raises Refused where it is needed."""
    if settings.base is not None:
        return settings.base
    try:
        found = find_base(Channel.open(settings.channel))
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


def open_publisher(settings: PublisherSettings) -> Publisher:
    return Publisher.open(
        settings.channel,
        local=settings.local,
        base=settings.base,
        encoding=settings.encoding,
        threads=working_threads(settings.threads, settings.memory_budget, default=THREADS),
        take_over=settings.take_over,
        post_write=None if settings.post_write is None else _hook(settings.post_write, settings.hook_seconds),
        upkeep=settings.upkeep,
        deadline_seconds=settings.publish_seconds,
        sign_key=settings.sign_key,
        trusted_keys=settings.trusted_key,
        non_finite=settings.non_finite,
        until="out",
        carry_config=settings.carry_config,
    )


def _hook(command: str, deadline_seconds: float) -> PostWrite:
    def post_write(version: int, directory: Path, phase: str) -> None:
        run_hook(
            command, version=version, directory=directory, phase=phase, deadline_seconds=deadline_seconds
        )

    return post_write


def _published(done: Publication) -> str:
    """For the console log."""
    step = "" if done.step is None else f" (step {done.step})"
    facts = f"{size_text(done.delta_bytes)}, {done.density_elements:.1%} changed"
    return f"published version {done.version}{step}: {facts}, {total_seconds(done.seconds):.2f} s"
