"""Tensors that live on a device are compared there, against what was published last.

A *baseline* is a chunk's words as the local checkpoint has them, held on the device, else in pinned host
memory, else brought from the local checkpoint for every publication. It is a cache: a publication changes it
as it compares, and the next one forgets it unless the local checkpoint's lanes say that it was published.

What the device finds is held to what is recorded: the full lanes of the new words, summed on the device, must
be the recorded lanes plus what the found changes make of them (`diff.PartWriter`).

torch's integers are signed: products and sums wrap as the format's do (docs/FORMAT.md, Lanes), and a logical
shift is an arithmetic one under a mask.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.weights.given import in_torch, on_cuda, torch
from weightcast.shared.base.elements import Chunk, ChunkKey, WordKind, Words
from weightcast.shared.base.errors import NeedsReseed
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import lanes_list
from weightcast.shared.codec.changes import Changes, Scan
from weightcast.shared.digest.checksums import Lanes, SpanSums, hash_bytes, span_sums
from weightcast.shared.kernels.constants import MIX_A, MIX_B


def words_of(flat: Any, kind: WordKind) -> Any:
    """A one-dimensional contiguous tensor, viewed as integers as wide as its words."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.width])


def on_host(words: Words) -> Any:
    """The same memory as a torch tensor of `words_of`'s dtype."""
    # torch warns about arrays that may not be written, although nothing writes here
    writable = words if words.flags.writeable else words.copy()
    return torch.from_numpy(writable if words.itemsize == 1 else writable.view(f"<i{words.itemsize}"))


def settle(tensors: Iterable[Any]) -> None:
    """Returns when what their streams have queued is done: other streams and threads read them then."""
    for device in {tensor.device for tensor in tensors if on_cuda(tensor)}:
        torch.cuda.synchronize(device)


def to_host(tensor: Any) -> Any:
    """Through pinned memory, which torch keeps for the next one: a copy to other memory takes four times as
    long, and one thread at a time."""
    if tensor.device.type == "cuda":
        try:
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # the host has no more memory to pin
            return tensor.cpu()
        pinned.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return pinned
    return tensor.cpu()


def has_whole_eights(words: Any) -> bool:
    """True when 8-byte words can be seen in place."""
    return bool(words.storage_offset() * words.itemsize % 8 == 0 and words.data_ptr() % 8 == 0)


def differing(old: Any, new: Any) -> Any:
    """int64[k], ascending: where two tensors of words differ."""
    return (old != new).nonzero().reshape(-1)


def span_lanes(chunk: Chunk, words: Any) -> Any:
    """Raw lanes of each span, int64[spans, 2]. `words`: the chunk's with zero padding, as `words_of` views
    them; `has_whole_eights`."""
    eights, (first, *rounds) = words.view(torch.int64), _rounds(words.device)
    # both lanes in one: a kernel's start costs as much as its work
    lanes = first * _numbers(chunk, words.device)
    lanes[0].bitwise_xor_(eights)
    lanes[1].add_(eights)
    for shift, mask, factor in rounds:
        lanes.bitwise_xor_((lanes >> shift).bitwise_and_(mask)).mul_(factor)
    return _sums(chunk, lanes).T


@cache
def _rounds(device: Any) -> Any:
    """The factors of an 8-byte word's number, then shift, mask and factor of each round: int64[2, 1]."""

    def both(a: int, b: int) -> Any:
        return torch.tensor([[one - (1 << 64) if one >> 63 else one] for one in (a, b)], device=device)

    shifts = ((32, 31), (29, 33), (32, 30))
    masks = [[(1 << (64 - bits)) - 1 for bits in pair] for pair in shifts]
    factors = [*zip(MIX_A[1:], MIX_B[1:], strict=True), (1, 1)]
    rounds = [tuple(both(*pair) for pair in each) for each in zip(shifts, masks, factors, strict=True)]
    return both(MIX_A[0], MIX_B[0]), *rounds


def _numbers(chunk: Chunk, device: Any) -> Any:
    """The number, from 1, of each 8-byte word of the chunk in its tensor: int64."""
    per_word = 8 // chunk.kind.width
    count = chunk.words // per_word
    firsts = [(span.start - span.offset) // per_word + 1 for span in chunk.spans]
    if len(firsts) == 1:
        return torch.arange(firsts[0], firsts[0] + count, device=device)
    edges = [span.offset // per_word for span in chunk.spans] + [count]
    lengths = torch.tensor(np.diff(edges), device=device)
    shifts = torch.tensor(firsts, device=device).repeat_interleave(lengths, output_size=count)
    return shifts.add_(torch.arange(count, device=device))


def _sums(chunk: Chunk, mixed: Any) -> Any:
    """Per lane and span the sum over its 8-byte words, its tail included, padding not: int64[2, spans]."""
    per_word = 8 // chunk.kind.width
    if len(chunk.spans) == 1:
        return mixed[:, : -(-chunk.spans[0].words // per_word)].sum(1, keepdim=True)
    places = [(span.offset // per_word, -(-span.words // per_word)) for span in chunk.spans]
    starts = torch.tensor([start for start, _ in places], device=mixed.device)
    stops = torch.tensor([start + count for start, count in places], device=mixed.device)
    before = torch.cat([mixed.new_zeros(2, 1), mixed.cumsum(1)], 1)
    return before[:, stops] - before[:, starts]


@dataclass(frozen=True)
class Found:
    """What crosses to the host for a chunk. `index`: uint32[k]; `new`: word[k]; `lanes`: per span, over all
    of its new words."""

    index: NDArray[np.uint32]
    new: Words
    lanes: tuple[Lanes, ...]


def fetch(index: Any, new: Any, lanes: Any, kind: WordKind) -> Found:
    """In one copy. `index`: int32[k]; `new`: the k words; `lanes`: int64[spans, 2]."""
    pieces = [piece.reshape(-1).view(torch.uint8) for piece in (lanes, index, new)]
    data = np.asarray(to_host(torch.cat(pieces)).numpy())
    ends = np.cumsum([len(piece) for piece in pieces])
    packed = data[: ends[0]].view("<u8").reshape(-1, 2)
    return Found(
        data[ends[0] : ends[1]].view("<u4"),
        data[ends[1] : ends[2]].view(kind.numpy),
        tuple(Lanes(a, b) for a, b in packed.tolist()),
    )


When = Literal["auto", "always", "never"]
Flat = Callable[[int], Any]
"""tensor number to the given tensor, one-dimensional and contiguous"""

_FEW = 4
"""a chunk with more than one change in so many words crosses as a whole, which is shorter"""


@dataclass
class _Held:
    """`words`: the baseline, on `device` or pinned."""

    chunk: Chunk
    device: Any
    words: Any
    pinned: bool


class Baselines:
    """Of one publisher, for its life."""

    def __init__(self, when: When, device_bytes: int, pinned_bytes: int, *, whole_old: bool) -> None:
        """`when`: auto compares tensors on CUDA devices (ROCm's too) there if a baseline may be held, since
        without one as many bytes cross as for a comparison on the host; always also torch's on the CPU.
        `device_bytes`, `pinned_bytes`: how much of a baseline may be held on the devices together and in
        pinned host memory; in addition each device needs about 200 MB while a chunk is compared, for each
        thread. `whole_old`: the encoding reads all old words on the host, not only those that change, so that
        all of them are proven."""
        self._when, self.whole_old = when, whole_old
        self.compared = 0
        """chunks that the last publication compared on a device"""
        self._room: dict[bool, float] = {False: device_bytes, True: pinned_bytes}
        """bytes left, pinned or not"""
        self._holds = device_bytes + pinned_bytes > 0
        self._held: dict[ChunkKey, _Held] = {}
        self._base = ""
        self._lanes: Mapping[int, Lanes] = {}
        """of the tensors that are held"""
        self._lock = threading.Lock()
        self._under_way = False

    def takes(self, tensor: Any) -> bool:
        """Whether it is to be compared where it lives."""
        if self._when == "never" or not in_torch(tensor):
            return False
        return self._when == "always" or (self._holds and on_cuda(tensor))

    def open(self, local: LocalCheckpoint, flat: Flat, devices: Mapping[int, Any]) -> DeviceComparison | None:
        """`devices`: where the tensors lie that are compared there. None after a publication that failed in
        its comparison: the next one is compared on the host, whatever was wrong."""
        failed, self._under_way, self.compared = self._under_way, False, 0
        if failed:
            self._forget()
            return None
        recorded = lanes_list(local.state.position.lanes)
        same_base = local.base.digest == self._base
        if not same_base or any(recorded[tensor] != lanes for tensor, lanes in self._lanes.items()):
            self._forget()
        self._base, self._under_way = local.base.digest, True
        return DeviceComparison(self, flat, devices)

    def _forget(self) -> None:
        for key in list(self._held):
            self.drop(key)
        self._lanes = {}

    def done(self, seen: Collection[ChunkKey], full: Mapping[int, Lanes]) -> None:
        """`seen`: chunks that were compared; of others nothing is known from now on. `full`: new lanes of
        each tensor."""
        for key in list(self._held):
            if key not in seen:
                self.drop(key)
        self._lanes, self._under_way = full, False
        self.compared = len(seen)

    def out_of_memory(self) -> None:
        """The device is the trainer's first: nothing is held there again."""
        self._room[False] = -math.inf
        for key, held in list(self._held.items()):
            if not held.pinned:
                self.drop(key)

    def words(self, chunk: Chunk, old: Words, device: Any) -> Any:
        """The baseline on `device`, not to be written. `old`: the same words on the host."""
        held = self._held.get(chunk.key)
        if held is not None and (held.chunk != chunk or held.device != device):
            self.drop(chunk.key)
            held = None
        if held is None:
            held = self._new(chunk, old, device)
        return on_host(old).to(device) if held is None else held.words.to(device, non_blocking=True)

    def _new(self, chunk: Chunk, old: Words, device: Any) -> _Held | None:
        if self._take(False, old.nbytes):
            words, pinned = on_host(old).to(device, copy=True), False
        elif self._take(True, old.nbytes):
            here = on_host(old)
            try:
                words = torch.empty_like(here, pin_memory=device.type == "cuda").copy_(here)
            except RuntimeError:
                # the host has no more memory to pin
                self._room[True] = -math.inf
                return None
            pinned = True
        else:
            return None
        held = self._held[chunk.key] = _Held(chunk, device, words, pinned)
        return held

    def _take(self, pinned: bool, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._room[pinned]:
                return False
            self._room[pinned] -= nbytes
            return True

    def change(self, key: ChunkKey, place: Any, words: Any) -> None:
        """To what the publication under way makes of it."""
        held = self._held.get(key)
        if held is not None:
            held.words[place.to(held.words.device)] = words.to(held.words.device)

    def drop(self, key: ChunkKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            with self._lock:
                self._room[held.pinned] += held.words.nbytes


class DeviceComparison:
    """Of one publication."""

    def __init__(self, baselines: Baselines, flat: Flat, devices: Mapping[int, Any]) -> None:
        self._baselines, self._flat, self._devices = baselines, flat, devices
        self._seen: set[ChunkKey] = set()

    def scan(self, chunk: Chunk, old: Words) -> Scan | None:
        """`old`: the local checkpoint's words. None: to be compared on the host, as its tensors do not lie on
        one device, too much of it changes, or the device has no memory left. From several threads at once."""
        with torch.no_grad():
            try:
                found = self._found(chunk, old)
            except torch.cuda.OutOfMemoryError:
                self._baselines.out_of_memory()
                found = None
        if found is None:
            self._baselines.drop(chunk.key)
            return None
        self._seen.add(chunk.key)
        return self._with_old(chunk, old, found)

    def done(self, full: Mapping[int, Lanes]) -> None:
        """All chunks were compared and agree with what is recorded. `full`: new lanes of each tensor."""
        self._baselines.done(self._seen, full)

    def _found(self, chunk: Chunk, old: Words) -> Found | None:
        devices = {self._devices.get(span.tensor) for span in chunk.spans}
        if None in devices or len(devices) != 1:
            return None
        new = self._gathered(chunk)
        place = differing(self._baselines.words(chunk, old, devices.pop()), new)
        if _FEW * len(place) > sum(span.words for span in chunk.spans):
            return None
        changed = new[place]
        self._baselines.change(chunk.key, place, changed)
        return fetch(place.to(torch.int32), changed, span_lanes(chunk, new), chunk.kind)

    def _gathered(self, chunk: Chunk) -> Any:
        first = chunk.spans[0]
        pieces = [
            words_of(self._flat(span.tensor), chunk.kind)[span.start : span.stop] for span in chunk.spans
        ]
        if first.words == chunk.words and has_whole_eights(pieces[0]):
            return pieces[0]
        words = pieces[0].new_zeros(chunk.words)
        for span, piece in zip(chunk.spans, pieces, strict=True):
            words[span.offset : span.offset + span.words] = piece
        return words

    def _with_old(self, chunk: Chunk, old: Words, found: Found) -> Scan:
        """Old words come from the host's memory: what of them is not as recorded shows in the sums."""
        # numpy's `take` lets other threads go on, and an index does not
        before = old.take(found.index)
        if (before == found.new).any():
            raise drifted(chunk)
        changes = Changes(found.index, before, found.new)
        sums = span_sums(chunk, old, changes.index, changes.new)
        if self._baselines.whole_old and len(changes):
            _check_whole(chunk, old, found.lanes, sums)
        return Scan(changes, np.array(found.lanes, np.uint64), sums)


def _check_whole(chunk: Chunk, old: Words, full: Iterable[Lanes], sums: SpanSums) -> None:
    step, found = sums.total(), Lanes()
    for span in chunk.spans:
        data = old[span.offset : span.offset + span.words].view(np.uint8)
        found = found.plus(hash_bytes(data, span.start * old.itemsize // 8))
    if found != reduce(Lanes.plus, full).minus(step.new).plus(step.old):
        raise drifted(chunk)


def drifted(chunk: Chunk) -> NeedsReseed:
    return NeedsReseed(
        f"chunk {chunk.number} of {chunk.dtype}: the local checkpoint and its copy on the device differ; "
        "nothing was published",
        remedy="publish again: the local checkpoint is seeded again from base and channel",
    )
