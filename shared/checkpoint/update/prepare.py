"""From the channel to a journal: fetching and staging side by side, and fetching ahead.

Staging follows the fetch block by block. A version's files are verified as a whole before its journal is
complete; where a file had to be fetched twice, staging starts over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, RetryLater, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.directory_store import directory_of
from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.update.fetch import Incoming, OnWait, Spool, check_space, fetch, ignore
from weightcast.shared.checkpoint.update.patch import drop_journal
from weightcast.shared.checkpoint.update.stage import Fetched, Staged, files_of, stage

PreRead = Callable[[int, Path], None]
"""Called with version and channel directory before the version's files are read."""
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Shipment:
    """One version and its files in the channel."""

    index: Index | ForeignIndex
    files: Store


@dataclass(frozen=True)
class Fetching:
    """How versions are fetched. `wait` sleeps, and may raise to give up."""

    spool: Spool
    visible_seconds: float
    pre_read: PreRead | None
    wait: Callable[[float], None]
    advance: Advance | None = None
    on_wait: OnWait = ignore

    def fetch(self, shipment: Shipment, incoming: Incoming) -> None:
        if self.pre_read is not None:
            self.pre_read(shipment.index.version, directory_of(shipment.files))
        fetch(
            self.spool,
            shipment.files,
            shipment.index,
            incoming,
            visible_seconds=self.visible_seconds,
            advance=self.advance,
            wait=self.wait,
            on_wait=self.on_wait,
        )


def prepare(
    local: LocalCheckpoint,
    shipments: Sequence[Shipment],
    fetching: Fetching,
    *,
    threads: int,
    on_phase: Callable[[str], None],
    on_misfit: Callable[[], None],
) -> Staged:
    """Fetches and stages consecutive versions into one journal. Nothing of the checkpoint is written; what
    was fetched is dropped. Raises what fetching or staging raise; `on_misfit` is called before, when verified
    shards do not fit what lies here."""
    check_space(local.paths, [shipment.index for shipment in shipments])
    on_phase("fetch")
    fetched = [
        Fetched(shipment.index, fetching.spool.directory(shipment.index), Incoming())
        for shipment in shipments
    ]
    try:
        with _staging(local, fetched, threads) as staging:
            for shipment, one in zip(shipments, fetched, strict=True):
                with files_of(shipment.index.version):
                    fetching.fetch(shipment, _incoming(one))
            on_phase("stage")
            try:
                return _staged(local, fetched, threads, staging)
            except DamagedFile:
                on_misfit()
                raise
    finally:
        for shipment in shipments:
            fetching.spool.drop(shipment.index)


@contextlib.contextmanager
def _staging(local: LocalCheckpoint, fetched: Sequence[Fetched], threads: int) -> Iterator[Future[Staged]]:
    """Stages in a thread of its own, which ends with the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="stage") as pool:
        try:
            yield pool.submit(stage, local, fetched, threads=threads)
        except BaseException as failure:
            for one in fetched:
                _incoming(one).fail(failure)
            raise


def _staged(
    local: LocalCheckpoint, fetched: Sequence[Fetched], threads: int, staging: Future[Staged]
) -> Staged:
    """What was staged of a copy that had to be made again does not count, also where nothing in it was found
    wrong: only the digests of the index tell forged words from those that were published."""
    try:
        staged = staging.result()
        if not _were_copied_again(fetched):
            return staged
        drop_journal(local, staged.step)
    except DamagedFile:
        if not _were_copied_again(fetched):
            raise
    return stage(local, fetched, threads=threads)


def _were_copied_again(fetched: Sequence[Fetched]) -> bool:
    return any(_incoming(one).restarted for one in fetched)


def _incoming(fetched: Fetched) -> Incoming:
    return Incoming(complete=True) if fetched.incoming is None else fetched.incoming


class Prefetch:
    """Fetches one version ahead while another is patched and engines reload. A failure is nobody's: the step
    that needs the version meets it again."""

    def __init__(self, paths: LocalPaths, find: Callable[[], Shipment | None], fetching: Fetching) -> None:
        self._stop = threading.Event()
        self._paths, self._find = paths, find
        self._fetching = Fetching(fetching.spool, 0.0, fetching.pre_read, self._wait, self._block)
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(WeightcastError, OSError):
            shipment = self._find()
            if shipment is not None:
                check_space(self._paths, [shipment.index])
                self._fetching.fetch(shipment, Incoming())

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise RetryLater("fetching ahead was stopped")

    def _block(self, nbytes: int) -> None:
        self._wait(0.0)

    def finish(self, wait: Callable[[float], None]) -> None:
        """Lets it end. `wait` may raise: then it is stopped."""
        try:
            while self._thread.is_alive():
                wait(_LOOK_EVERY)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
