"""Layout `stitch`: a channel in ROOT/updates, and ROOT/latest for Stitch's replicas. docs/FORMAT.md, Stitch.

They read versions of the slime format under their numbers, and nothing else of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.directory_store import mounted, open_store
from weightcast.shared.channel.index import STEP_ENCODINGS, Encoding
from weightcast.shared.channel.layout import (
    LATEST,
    POINTER_LIMIT,
    RUN_DIRECTORY,
    parse_pointer,
    version_name,
)
from weightcast.shared.channel.store import Store, read_if_there


def check_layout(place: str, encoding: Encoding, extras: bool) -> None:
    """`place`: of the channel; `extras`: whether anchors, multi-step deltas or pruning are on. Raises Refused
    for what Stitch's replicas cannot read, or would read in vain."""
    is_s3_or_path = place.startswith("s3://") or "://" not in place
    if place.rstrip("/").rpartition("/")[2] != RUN_DIRECTORY or not is_s3_or_path:
        raise Refused(
            f"layout stitch: {place} is not ROOT/{RUN_DIRECTORY} in a directory or S3",
            remedy=f"give --channel ROOT/{RUN_DIRECTORY}, with the ROOT that Stitch is given",
        )
    if encoding in STEP_ENCODINGS:
        raise Refused(
            f"layout stitch: Stitch cannot read encoding {encoding}",
            remedy="give --encoding xor or overwrite",
        )
    if extras:
        raise Refused(
            "layout stitch: Stitch needs every delta, and its replicas would download anchors and multi-step "
            "deltas too",
            remedy="leave out the options of anchors, multi-step deltas and pruning",
        )


@dataclass
class StitchPointer:
    """`root`: where Stitch looks for the pointer. It is moved by their rules: within a run only up."""

    root: Store
    run_id: str
    version: int = field(default=-1, init=False)
    """at which it was seen or put last"""

    @classmethod
    def of(cls, channel: Store, run_id: str) -> StitchPointer:
        directory = mounted(channel)
        root = channel.place().rpartition("/")[0] if directory is None else directory.absolute().parent
        return cls(open_store(root), run_id)

    def move(self, version: int) -> None:
        """To `version` of this run, unless it is there or above; 0 claims the root for the run. Raises
        Refused where another run has it, and Changed where another writer was faster."""
        if version <= self.version:
            return
        before = read_if_there(self.root, LATEST, POINTER_LIMIT)
        pointer = None if before is None else parse_pointer(before, self.root.place(LATEST))
        if pointer is not None and pointer.run != self.run_id and (version > 0 or pointer.run is None):
            raise Refused(
                f"{self.root.place(LATEST)} names run {pointer.run}, this channel is run {self.run_id}",
                remedy="stop the other trainer, or give this run a root of its own",
            )
        if pointer is None or pointer.run != self.run_id or pointer.version < version:
            data = f"{self.run_id}/{version_name(version)}".encode()
            if before is None:
                self.root.create(LATEST, data)
            else:
                self.root.replace(LATEST, data, expected=before)
        self.version = version
