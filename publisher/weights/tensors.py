"""New weights as words: from a checkpoint directory or from tensors in process.

torch is not imported unless a torch tensor is given.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.weights.config import AdapterConfig, component_config, digest_of
from weightcast.publisher.weights.given import (
    CastTensor,
    RawTensor,
    Shard,
    in_torch,
    pairs_of,
    settle,
    shard_of,
    spec_of,
    to_host,
    torch,
)
from weightcast.publisher.weights.shard_spec import Box
from weightcast.shared.base.elements import DTYPES, MAIN, Chunk, TensorSpec, TensorTable, Words, kind_of
from weightcast.shared.base.errors import Refused, RetryLater
from weightcast.shared.checkpoint.verify.seed import ReadCheckpoint
from weightcast.shared.files.hf_checkpoint import (
    Checkpoint,
    changed_since,
    first_hole,
    open_checkpoint,
    run_of,
)
from weightcast.shared.files.paths import is_same
from weightcast.shared.kernels.parallel import scratch

_PIECE = 1 << 22
"""words compared at a time"""
_Read = Callable[[int, int], Words]
"""words [start, stop) of a tensor"""


class Adapted(NamedTuple):
    """How many tensors were cast, renamed and left out by options."""

    cast: int = 0
    renamed: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class InputFacts:
    """What a report says of the input, also after the input itself was closed."""

    adapted: Adapted = field(default_factory=Adapted)
    notes: tuple[str, ...] = ()
    """what was tolerated or had no effect, for whoever publishes them"""
    configs: Mapping[str, str] | None = None
    """BLAKE3 hex by name of config files beside the weights, empty where it says what the base's says; None:
    there are no files"""
    carry: Mapping[str, bytes] = field(default_factory=dict)
    """those that differ, where the version is to carry them"""
    mapped: Mapping[str, int] = field(default_factory=dict)
    """what was done to the given names, and to how many"""


NO_FACTS = InputFacts()


class NewWeights(ABC):
    """What is to be published, by the names that its owner gives. Those that are given whole, one by one, on
    the host say `words_in` alone."""

    table: TensorTable
    """of whole tensors, also where only a piece is given"""
    by_flags = False
    """they come from a command or daemon: messages name its options, not Python functions"""
    facts = NO_FACTS

    @abstractmethod
    def words_in(self, name: str, start: int, stop: int) -> Words:
        """Words [start, stop) of what is given of a tensor, row-major, on the host; not to be written."""

    def box(self, name: str) -> Box:
        return Box.whole(self.table.named(name).shape)

    def pieces(self) -> Sequence[str]:
        """Names of the tensors that are given in part."""
        return ()

    def run_in(self, chunk: Chunk, tensors: NDArray[np.int64]) -> Words | None:
        """The chunk's words, where they lie in one run; None: they are to be gathered. `tensors`: of each
        span the tensor's number in this table, -1 for none."""
        return None

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same form and bytes, as far as they are given."""
        one, another = (self.table.named(each) for each in (name, other))
        return (one.dtype, one.shape) == (another.dtype, another.shape) and _equal_words(
            one.words, partial(self.words_in, name), partial(self.words_in, other)
        )

    def finish(self) -> None:  # noqa: B027
        """Raises Refused when the weights changed while they were read."""

    def close(self) -> None:  # noqa: B027
        """Gives back what reading holds; the owner's tensors stay."""


class CheckpointWeights(NewWeights):
    """A complete checkpoint directory; file identities are compared before and after reading."""

    by_flags = True

    def __init__(self, directory: Path, *, follow_links: bool = True, adapter: bool = False) -> None:
        """`adapter`: as of `open_checkpoint`."""
        try:
            self.checkpoint: Checkpoint = open_checkpoint(
                directory, follow_links=follow_links, adapter=adapter
            )
            self._read = ReadCheckpoint(self.checkpoint)
        except FileNotFoundError as error:
            raise Refused(
                f"{error.filename or directory} does not exist", remedy="give a checkpoint directory"
            ) from error
        notes, hole = self.checkpoint.notes, first_hole(self.checkpoint)
        if hole:
            notes = (*notes, f"{hole}, which reads as zeros: check that the save was complete")
        self.table, self.facts = self.checkpoint.table, InputFacts(notes=notes)

    def words_in(self, name: str, start: int, stop: int) -> Words:
        try:
            return self._read.words_in(self.table.numbers[name], start, stop)
        except RetryLater as error:
            raise self._changed() from error

    def run_in(self, chunk: Chunk, tensors: NDArray[np.int64]) -> Words | None:
        place = run_of(chunk, self.checkpoint.places, tensors)
        if place is None:
            return None
        try:
            words = self._read.bytes_at(place).view(chunk.kind.numpy)
        except RetryLater as error:
            raise self._changed() from error
        return words if words.flags.aligned else None

    def finish(self) -> None:
        try:
            changed = changed_since(self.checkpoint)
        except FileNotFoundError:
            changed = True
        if changed:
            raise self._changed()

    def _changed(self) -> Refused:
        return Refused(
            f"{self.checkpoint.directory} changed while it was read; nothing was published",
            remedy="rename complete checkpoints in, or publish them after they are written",
        )

    def close(self) -> None:
        self._read.close()


def refuse_local(checkpoint: Path, local: Path) -> None:
    """Raises Refused for a publisher's own local checkpoint, which holds what was published before."""
    if is_same(checkpoint, local):
        raise Refused(
            f"{checkpoint} is this publisher's own local checkpoint",
            remedy="give the checkpoint directory that the trainer wrote",
        )


class _Given(NamedTuple):
    """A tensor of the caller's: a numpy array or a torch tensor on any device. `whole`: the tensor whose
    piece `box` it is."""

    spec: TensorSpec
    tensor: Any
    whole: TensorSpec
    box: Box

    @classmethod
    def of(cls, name: str, tensor: Any) -> _Given:
        """Of a distributed tensor only the local shard is looked at; nothing is communicated."""
        shard = shard_of(name, tensor)
        if shard is None:
            whole = spec_of(name, tensor)
            return cls(whole, tensor, whole, Box.whole(whole.shape))
        spec = spec_of(name, shard.tensor)
        # ranks beyond the last row, or outside of the mesh, hold nothing
        nothing = Box((0,) * len(shard.shape), (0,) * len(shard.shape))
        box = Box(shard.offsets, spec.shape) if spec.elements else nothing
        if spec.elements and not box.fits(shard.shape):
            raise Refused(
                f"{name}: a shard of {list(spec.shape)} at {list(shard.offsets)} in {list(shard.shape)}",
                remedy="give each shard's first element and the shape of the whole tensor",
            )
        nbytes = math.prod(shard.shape) * DTYPES[spec.dtype][0]
        return cls(spec, shard.tensor, TensorSpec(name, spec.dtype, shard.shape, nbytes), box)


class GivenWeights(NewWeights):
    """Tensors in process. They must not change until `publish` returns, and nobody looks whether they do.

    The same name twice is taken once when the bytes are equal, else Refused.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        config: AdapterConfig = None,
        component: str = MAIN,
    ) -> None:
        """`config`: of the component."""
        carry = component_config(config, component)
        if carry:
            self.facts = InputFacts(configs={n: digest_of(data) for n, data in carry.items()}, carry=carry)
        given: dict[str, _Given] = {}
        for name, tensor in pairs_of(named_tensors):
            one = _Given.of(name, tensor)
            if name in given and not _equal(given[name], one):
                raise Refused(
                    f"{name} was given twice with different values",
                    remedy="give each tensor once, or tie them",
                )
            given.setdefault(name, one)
        settle(one.tensor for one in given.values())
        self._given = given
        self.table = TensorTable.of([one.whole for one in given.values()])
        self._flat = lru_cache(maxsize=2)(lambda name: _flat(given[name].tensor))

    def copied(self) -> GivenWeights:
        """The same in host memory of its own, as the run has it: shards alone, rounded if they are to be."""
        made: dict[object, RawTensor] = {}
        given: dict[str, Any] = {}
        for name, one in self._given.items():
            key = _place(one.tensor)
            if key not in made:
                made[key] = RawTensor(one.spec.dtype, one.spec.shape, _copy(one))
            is_whole = one.spec == one.whole
            given[name] = made[key] if is_whole else Shard(made[key], one.box.offsets, one.whole.shape)
        copy = GivenWeights(given)
        copy.facts = self.facts
        return copy

    def box(self, name: str) -> Box:
        return self._given[name].box

    def pieces(self) -> Sequence[str]:
        return [name for name, one in self._given.items() if one.box != Box.whole(one.whole.shape)]

    def words_in(self, name: str, start: int, stop: int) -> Words:
        return _host_words(self._flat(name), self._given[name].spec, start, stop)

    def run_in(self, chunk: Chunk, tensors: NDArray[np.int64]) -> Words | None:
        """Joined at once: there may be several 100,000. A piece of one tensor is not copied."""
        joined = chunk.is_full and len(chunk.spans) > 1
        given = [self._in_memory[tensor] for tensor in tensors.tolist()] if joined else [None]
        pieces = [
            words[span.start : span.stop]
            for words, span in zip(given, chunk.spans, strict=False)
            if words is not None
        ]
        if len(pieces) != len(chunk.spans):
            return None
        return np.concatenate(pieces, out=scratch().lend("joined", chunk.kind.numpy, chunk.words))

    @cached_property
    def _in_memory(self) -> Sequence[Words | None]:
        """Of each tensor of the table; then None, for no tensor."""
        return [*(_in_host_memory(self._given[name]) for name in self.table.names), None]

    def equal(self, name: str, other: str) -> bool:
        return _equal(self._given[name], self._given[other])

    def close(self) -> None:
        self._flat.cache_clear()
        vars(self).pop("_in_memory", None)


def _in_host_memory(one: _Given) -> Words | None:
    """All words of a whole, contiguous tensor."""
    tensor, kind = one.tensor, one.spec.kind.numpy
    if one.spec is not one.whole:
        return None
    if isinstance(tensor, RawTensor):
        return np.frombuffer(tensor.data, kind)
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(kind) if tensor.flags.c_contiguous else None
    if isinstance(tensor, CastTensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    words: Words = _flat(tensor).view(torch.uint8).numpy().view(kind)
    return words


def _copy(one: _Given) -> np.ndarray[Any, np.dtype[np.uint8]]:
    copy = np.empty(one.spec.nbytes, np.uint8)
    if one.spec.nbytes:
        flat, words = _flat(one.tensor), copy.view(one.spec.kind.numpy)
        for start, stop in _pieces(one.spec.words):
            words[start:stop] = _host_words(flat, one.spec, start, stop)
    return copy


def _place(tensor: Any) -> object:
    """Equal for tied weights, which are one memory under two names."""
    if isinstance(tensor, CastTensor):
        return _place(tensor.tensor), tensor.dtype
    if not in_torch(tensor) or tensor.is_conj() or tensor.is_neg():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _flat(tensor: Any) -> Any:
    """One-dimensional; no copy when the tensor is contiguous."""
    if isinstance(tensor, CastTensor):
        tensor = tensor.made()
    if isinstance(tensor, RawTensor):
        # by element: words of 8-byte dtypes are bytes
        return tensor.flat.view(f"<u{DTYPES[tensor.dtype][0]}")
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1)
    # views may negate or conjugate what lies in memory
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _host_words(flat: Any, spec: TensorSpec, start: int, stop: int) -> Words:
    """Only [start, stop) crosses from a device. Word indices are byte indices for 8-byte dtypes."""
    kind = kind_of(spec.dtype)
    per_element = max(1, spec.nbytes // max(1, spec.elements)) // kind.width
    low, high = start // per_element, -(-stop // per_element)
    piece = flat[low:high]
    if not isinstance(piece, np.ndarray):
        piece = to_host(piece.view(torch.uint8)).numpy()
    words: Words = np.ascontiguousarray(piece).view(kind.numpy)
    return words[start - low * per_element : stop - low * per_element]


def _equal(one: _Given, other: _Given) -> bool:
    """By bits; tensors of one device are compared there."""
    if (one.whole.dtype, one.whole.shape, one.box) != (other.whole.dtype, other.whole.shape, other.box):
        return False
    if _place(one.tensor) == _place(other.tensor):
        return True
    flats = [_flat(given.tensor) for given in (one, other)]
    if all(in_torch(given.tensor) for given in (one, other)) and one.tensor.device == other.tensor.device:
        here, there = (flat.view(torch.uint8) for flat in flats)
        return all(bool(here[a:b].equal(there[a:b])) for a, b in _pieces(one.spec.nbytes))
    return _equal_words(one.spec.words, *(partial(_host_words, flat, one.spec) for flat in flats))


def _equal_words(count: int, one: _Read, other: _Read) -> bool:
    return all(np.array_equal(one(start, stop), other(start, stop)) for start, stop in _pieces(count))


def _pieces(words: int) -> Iterator[tuple[int, int]]:
    for start in range(0, words, _PIECE):
        yield start, min(start + _PIECE, words)
