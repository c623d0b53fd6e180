"""What ranks tell each other in an attempt's directory beside their parts. Its files live as long as the
attempt: all ranks run the same release, and hosts never see them.

`holds-<rank>.json`   which boxes the rank holds, before anything is compared
`plan.json`           all ranks' holds, from rank 0: each rank computes the same division from it
`sent-<rank>.json`    changes to what others write, chunk by chunk of theirs; digests of what it holds doubly
`sent-<rank>.bin`     the blobs of those chunks
`sums-<rank>.json`    sums over its segments of tensors that are split, so that rank 0 can prove the whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from weightcast.publisher.ranks.shard_assignment import Holds
from weightcast.publisher.weights.shard_spec import Box
from weightcast.shared.base.elements import CHUNK_WORDS, ChunkKey, TensorTable
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.delta_reader import read_exactly
from weightcast.shared.channel.store import Store
from weightcast.shared.digest.checksums import Lanes
from weightcast.shared.files.safetensors import naturals
from weightcast.shared.files.strict_json import Members, parse_object, write_object

LIMIT = 128 << 20
_BLOB_LIMIT = 4 * CHUNK_WORDS + 4096
"""bytes; a blob is no longer than its words, but for its header"""
PLAN = "plan.json"


def rank_file(kind: str, rank: int, suffix: str = "json") -> str:
    """The name of what a rank leaves."""
    return f"{kind}-{rank:05d}.{suffix}"


def blobs_name(rank: int) -> str:
    return rank_file("sent", rank, "bin")


def write_holds(holds: Holds, table: TensorTable) -> bytes:
    return write_object({"holds": _rows(holds, table)})


def write_plan(holds: Sequence[Holds], table: TensorTable) -> bytes:
    return write_object({"ranks": [_rows(one, table) for one in holds]})


def parse_holds(data: bytes, what: str, table: TensorTable) -> Holds:
    """Raises DamagedFile."""
    return _holds(Members(parse_object(data, what), what).array("holds"), table, what)


def parse_plan(data: bytes, what: str, table: TensorTable) -> list[Holds]:
    """Raises DamagedFile."""
    rows = Members(parse_object(data, what), what).array("ranks")
    return [_holds(one, table, what) for one in rows]


def _rows(holds: Holds, table: TensorTable) -> list[list[object]]:
    """`[tensors]` for tensors held whole, `[tensors, offsets, sizes]` for those with the same box: layers are
    alike."""
    alike: dict[Box | None, list[int]] = {}
    for tensor, box in sorted(holds.items()):
        whole = box == Box.whole(table[tensor].shape)
        alike.setdefault(None if whole else box, []).append(tensor)
    return [
        [tensors] if box is None else [tensors, list(box.offsets), list(box.sizes)]
        for box, tensors in alike.items()
    ]


def _holds(rows: object, table: TensorTable, what: str) -> Holds:
    if type(rows) is not list:
        raise DamagedFile(f"{what}: expected an array of held pieces")
    holds: dict[int, Box] = {}
    for row in cast(list[object], rows):
        for tensor, box in _boxes(row, table, what):
            if tensor in holds or not box.fits(table[tensor].shape):
                raise DamagedFile(f"{what}: impossible piece of tensor {tensor}")
            holds[tensor] = box
    return holds


def _boxes(row: object, table: TensorTable, what: str) -> list[tuple[int, Box]]:
    cells = cast(list[object], row) if type(row) is list and len(row) in (1, 3) else []
    numbers = [naturals(cell, len(table) if n == 0 else 64) for n, cell in enumerate(cells)]
    if not numbers or None in numbers:
        raise DamagedFile(f"{what}: bad row {repr(row)[:60]}")
    tensors, *box = cast(list[tuple[int, ...]], numbers)
    if any(tensor >= len(table) for tensor in tensors):
        raise DamagedFile(f"{what}: unknown tensor number")
    if box:
        return [(tensor, Box(box[0], box[1])) for tensor in tensors]
    return [(tensor, Box.whole(table[tensor].shape)) for tensor in tensors]


@dataclass(frozen=True)
class SegmentSums:
    """Over one part's segments of a tensor that other parts have segments of too: the touched 8-byte words
    before and after, and all words after."""

    old: Lanes
    new: Lanes
    full: Lanes

    def plus(self, other: SegmentSums) -> SegmentSums:
        return SegmentSums(self.old.plus(other.old), self.new.plus(other.new), self.full.plus(other.full))

    def proves(self, recorded: Lanes) -> bool:
        """Over the whole tensor: whether these bytes are the recorded ones with these changes."""
        return recorded.minus(self.old).plus(self.new) == self.full


@dataclass(frozen=True)
class Share:
    """What a rank holds of a chunk of another's: the blob's place, length 0 where nothing changed; lanes of
    the packed words before and after."""

    offset: int
    length: int
    old: Lanes
    new: Lanes


@dataclass(frozen=True)
class Sent:
    """`shares`: by part (the writing rank) and chunk. `digests`: of tensors that another rank holds too."""

    shares: Mapping[ChunkKey, Share] = field(default_factory=dict)
    digests: Mapping[int, str] = field(default_factory=dict)


def write_sent(sent: Sent) -> bytes:
    rows = [
        [key.part, key.dtype, key.number, one.offset, one.length, one.old.hex(), one.new.hex()]
        for key, one in sent.shares.items()
    ]
    return write_object({"shares": rows, "digests": [[n, text] for n, text in sent.digests.items()]})


def parse_sent(data: bytes, what: str) -> Sent:
    """Raises DamagedFile."""
    facts = Members(parse_object(data, what), what)
    shares = dict(_share(row, what) for row in facts.array("shares"))
    digests = dict(_digest(row, what) for row in facts.array("digests"))
    if len(shares) != len(facts.array("shares")) or len(digests) != len(facts.array("digests")):
        raise DamagedFile(f"{what}: duplicate entry")
    return Sent(shares, digests)


def _share(row: object, what: str) -> tuple[ChunkKey, Share]:
    cells = cast(list[object], row) if type(row) is list and len(row) == 7 else [None] * 7
    part, dtype, number, offset, length, old, new = cells
    counts = naturals([part, number, offset, length], 4)
    if counts is None or type(dtype) is not str or counts[3] > _BLOB_LIMIT:
        raise DamagedFile(f"{what}: bad row {repr(row)[:60]}")
    return ChunkKey(counts[0], dtype, counts[1]), Share(
        counts[2], counts[3], _lanes(old, what), _lanes(new, what)
    )


def _digest(row: object, what: str) -> tuple[int, str]:
    if type(row) is not list or len(row) != 2 or type(row[1]) is not str or naturals(row[:1], 1) is None:
        raise DamagedFile(f"{what}: bad digest {repr(row)[:60]}")
    return row[0], row[1]


def _lanes(value: object, what: str) -> Lanes:
    try:
        return Lanes.from_hex(value if type(value) is str else "")
    except ValueError as error:
        raise DamagedFile(f"{what}: {error}") from error


def write_sums(sums: Mapping[int, SegmentSums]) -> bytes:
    rows = [[tensor, one.old.hex(), one.new.hex(), one.full.hex()] for tensor, one in sums.items()]
    return write_object({"sums": rows})


def parse_sums(data: bytes, what: str, table: TensorTable) -> dict[int, SegmentSums]:
    """Raises DamagedFile."""
    found: dict[int, SegmentSums] = {}
    for row in Members(parse_object(data, what), what).array("sums"):
        cells = cast(list[object], row) if type(row) is list and len(row) == 4 else [None]
        numbers = naturals(cells[:1], 1)
        if numbers is None or numbers[0] >= len(table) or numbers[0] in found:
            raise DamagedFile(f"{what}: bad row {repr(row)[:60]}")
        found[numbers[0]] = SegmentSums(*(_lanes(cell, what) for cell in cells[1:]))
    return found


def read_blob(files: Store, rank: int, share: Share) -> bytes:
    """Of a rank's blobs. Raises DamagedFile when they end too early."""
    name = blobs_name(rank)
    return read_exactly(files, name, share.offset, share.length, files.place(name))
