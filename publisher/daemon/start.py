"""What the publisher's daemon does before its first step: watched directory, channel, local checkpoint."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from weightcast.publisher.api import PublisherOptions
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.daemon.record import Meter
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources.watched import WatchedDirectory
from weightcast.publisher.publish.commit import PostWrite
from weightcast.publisher.service_publisher import ServicePublisher
from weightcast.shared.base.errors import Refused, RetryLater, Stopped, WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import read_pointer
from weightcast.shared.channel.rate import Rate
from weightcast.shared.channel.run_files import Base
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths, ensure_room
from weightcast.shared.checkpoint.update.sources import find_base, open_base
from weightcast.shared.checkpoint.verify.seed import check_other_files, check_table
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import Stop
from weightcast.shared.files.hf_checkpoint import side_files
from weightcast.shared.files.paths import ChannelAddress, exists, is_directory
from weightcast.shared.files.probes import CONSUME_NEEDS, require

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


def _version_of(channel: ChannelAddress) -> int:
    """Of a channel that may not be there yet, or not be readable: opening it reports that."""
    try:
        pointer = read_pointer(open_store(channel))
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
            sign_key=settings.sign_key,
            trusted_keys=settings.trusted_key,
        )
    _, base = Channel.open(open_store(settings.channel)).require_ours()
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


def open_publisher(settings: PublisherSettings, stop: Stop) -> ServicePublisher:
    def wait(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped("the process ends", remedy="the next start continues")

    return ServicePublisher.open(
        settings.channel,
        local=settings.local,
        base=settings.base,
        encoding=settings.encoding,
        options=PublisherOptions(
            threads=settings.worker_threads,
            take_over=settings.take_over,
            post_write=_hook(settings),
            upkeep=settings.upkeep,
            deadline_seconds=settings.publish_seconds,
            sign_key=settings.sign_key,
            trusted_keys=settings.trusted_key,
            publish_rate=Rate(int(settings.publish_rate), wait),
            non_finite=settings.non_finite,
            until="out",
            carry_config=settings.carry_config,
            layout=settings.layout,
        ),
    )


def _hook(settings: PublisherSettings) -> PostWrite | None:
    command, deadline = settings.post_write, settings.hook_seconds
    if command is None:
        return None

    def post_write(version: int, directory: Path, phase: str) -> None:
        run_hook(command, version=version, directory=directory, phase=phase, deadline_seconds=deadline)

    return post_write
