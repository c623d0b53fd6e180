"""Rank 0's first step: what a killed publication left is finished or cleared away, and the local checkpoint
brought to the pointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weightcast.publisher.publish.commit import (
    advance_pointer,
    announced,
    drop_parts,
    put_pointer_right,
    verify_files,
)
from weightcast.publisher.publish.publish_job import PublishOptions
from weightcast.shared.base.errors import (
    DamagedFile,
    Linked,
    NeedsReseed,
    Refused,
    RetryLater,
    Untrusted,
    WrongRun,
)
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import committed
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import Pointer, version_name
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.files.disk_errors import NoRoom, lacks_room
from weightcast.shared.files.system import nearest_directory, space_of

Made = TypeVar("Made")


class Recovery:
    def __init__(self, updater: LocalUpdater, claim: Claim, options: PublishOptions) -> None:
        self._updater, self._claim, self._options = updater, claim, options

    def channel(self) -> Channel:
        return Channel.open(self._updater.store, self._options.trust)

    def hold_pointer(self) -> None:
        """Moves the pointer to where this owner last had it, if another owner put it back since."""
        put_pointer_right(self._claim)

    def recover(self, advance: Advance | None = None) -> Channel:
        """Finishes a version that was committed and never pointed to, deletes parts of failed attempts, and
        brings the local checkpoint to the pointer."""
        channel = self.channel()
        put_pointer_right(self._claim)
        self._finish_committed(channel)
        drop_parts(self._claim)
        try:
            self._catch_up(channel, advance)
        except (WrongRun, Untrusted):
            raise
        except OSError:
            # which of two states is on disk is unknown
            self._updater.release()
            raise
        except Linked as error:
            # what an operator can mend is no reason to publish full weights
            self._updater.release()
            raise RetryLater(error.message, remedy=error.remedy) from error
        except Refused as error:
            # the next publication begins a new chain with an anchor
            self._updater.release()
            self._updater.trouble = error.message
        return channel

    def _catch_up(self, channel: Channel, advance: Advance | None) -> None:
        def catch_up() -> None:
            try:
                self._updater.update_to(channel, advance=advance)
            except BaseException as error:
                if lacks_room(error):
                    self._updater.release()
                raise

        try:
            self.with_room(catch_up)
        except NeedsReseed as error:
            self._updater.mark_dirty(error.message)
            self.with_room(catch_up)

    def with_room(self, work: Callable[[], Made], nbytes: int = 0) -> Made:
        """Calls `work`, which writes `nbytes` and a little more to the local disk. While the disk is full,
        gives up what is kept there for speed and calls it again."""
        while self._free_bytes() < nbytes and self._made_room():
            pass
        while True:
            try:
                return work()
            except (OSError, NoRoom) as error:
                if not lacks_room(error) or not self._made_room():
                    raise

    def _made_room(self) -> bool:
        """By giving up one file. While somebody still reads it, its room is not free."""
        free = self._free_bytes()
        return self._options.free_space() and self._free_bytes() > free

    def _free_bytes(self) -> int:
        return space_of(nearest_directory(self._updater.paths.room)).free_bytes

    def _finish_committed(self, channel: Channel) -> None:
        _, base = channel.require_ours()
        at = channel.pointed()
        for version in committed(channel.store, at):
            try:
                index = channel.index(Pointer(version), version, base.table)
                finish = isinstance(index, Index) and _follows(channel, at, index)
                if isinstance(index, Index) and finish:
                    verify_files(channel.store.within(version_name(version)), index)
            except (DamagedFile, Untrusted):
                # its number is lost: the next publication begins a new chain behind it
                continue
            if finish:
                advance_pointer(self._claim, version, self._options.post_write)
                at = version


def _follows(channel: Channel, at: int, index: Index) -> bool:
    if index.kind == "anchor":
        return True
    if index.base_version != at:
        return False
    return index.parent == (channel.require_ours()[1] if at == 0 else announced(channel, at)).digest
