"""Sizes and speeds of the encodings on chunks in memory, checksums included, next to slime's format.

Contenders take turns within each round, so that all meet the same machine, and another one begins each, so
that what one leaves to the next counts for all alike. The first round is not counted.
Publishing a chunk compares, hashes all new bytes, sums the touched words, encodes; the field's way is xor,
zstd and hash. Applying decodes with the sums over touched words, and writes; the field's way is zstd, xor and
hash. Both read and write the same words, forth and back in turns. Chunks without changes are not stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import CHUNK_WORDS, Chunk, Span
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.codec.changes import compare, scan
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk
from weightcast.shared.digest.checksums import hash_bytes
from weightcast.shared.kernels.parallel import ordered

from .field_path import FieldChunks
from .results import ChunkRow, FloorRow, Spread

Words = NDArray[np.uint16]

_STD = 0.02
"""of the weights"""
_UPDATE = 0.3
"""standard deviation of Adam's update in units of the learning rate"""
_PROBE = 1 << 18


@dataclass(frozen=True)
class Case:
    """Words of one tensor before and after a step."""

    name: str
    old: Words
    new: Words

    @property
    def density(self) -> float:
        return float(np.count_nonzero(self.old != self.new)) / len(self.old)


def rounded(values: NDArray[np.float32]) -> Words:
    """The nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def simulated(words: int, density: float, seed: int) -> Case:
    """fp32 masters from N(0, 0.02) move by N(0, 0.3 lr); lr such that about `density` of the words change;
    for 1 nearly all, for 0 none."""
    rng = np.random.default_rng(seed)
    masters = (rng.standard_normal(words) * _STD).astype(np.float32)
    update = (rng.standard_normal(words) * _UPDATE).astype(np.float32)
    rate = _rate(masters[:_PROBE], update[:_PROBE], density) if density else 0.0
    return Case(f"{density:.1%}", rounded(masters), rounded(masters + update * np.float32(rate)))


class Masters:
    """fp32 weights of one tensor that take steps as in `simulated`; `words` are their bf16."""

    def __init__(self, words: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._values = self._rng.standard_normal(words, dtype=np.float32) * np.float32(_STD)
        self._probe = self._rng.standard_normal(min(words, _PROBE), dtype=np.float32) * np.float32(_UPDATE)
        self.words = rounded(self._values)

    def step(self, density: float) -> None:
        """One that changes about this share of the words."""
        rate = _rate(self._values[: len(self._probe)], self._probe, density)
        update = self._rng.standard_normal(len(self._values), dtype=np.float32)
        update *= np.float32(_UPDATE * rate)
        self._values += update
        self.words[:] = rounded(self._values)


def step_rate(density: float) -> float:
    """The learning rate at which `simulated` changes about this share of the words."""
    rng = np.random.default_rng(0)
    masters, update = (rng.standard_normal(_PROBE, np.float32) for _ in range(2))
    return _rate(masters * np.float32(_STD), update * np.float32(_UPDATE), density)


def _rate(masters: NDArray[np.float32], update: NDArray[np.float32], density: float) -> float:
    low, high = 1e-9, 1.0
    old = rounded(masters)
    for _ in range(40):
        middle = (low * high) ** 0.5
        changed = np.count_nonzero(old != rounded(masters + update * np.float32(middle))) / len(old)
        low, high = (middle, high) if changed < density else (low, middle)
    return low


def unrelated(words: int, seed: int) -> Case:
    """Random bits before, other random bits after: what no encoding can help with."""
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(0, 1 << 16, words, np.uint16) for _ in range(2))
    return Case("unrelated", old, new)


def trained(rates: tuple[float, ...], warm_steps: int = 100) -> Iterator[Case]:
    """Steps of a transformer that learns a Markov chain, fp32 masters under AdamW: after `warm_steps` at a
    high rate, one case for each of `rates`, when its moments have settled. Needs torch."""
    import torch

    torch.manual_seed(0)
    vocabulary, width, length, batch = 512, 256, 32, 8
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    parts = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(vocabulary, width),
            "body": torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
            "head": torch.nn.Linear(width, vocabulary),
        }
    )
    likely = torch.randint(vocabulary, (vocabulary, 4))
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-4)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length)

    def step() -> None:
        tokens = torch.randint(vocabulary, (batch, 1))
        for _ in range(length):
            following = likely[tokens[:, -1:], torch.randint(4, (batch, 1))]
            tokens = torch.cat([tokens, following], 1)
        hidden = parts["body"](parts["embed"](tokens[:, :-1]), mask=mask, is_causal=True)
        scores = parts["head"](hidden).flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def words() -> Words:
        return np.concatenate([rounded(p.detach().numpy().reshape(-1)) for p in parts.parameters()])

    for _ in range(warm_steps):
        step()
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(5):
            step()
        old = words()
        step()
        yield Case(f"trained, lr {rate:g}", old, words())


_SHIFT, _MASK, _SIGN = 7, 0xFF, 0x8000


@dataclass(frozen=True)
class Bounds:
    """Bits per changed word. `fast` knows how many words change, `small` how many of each old exponent do;
    both know the old exponent of a changed word, and neither can predict a sign."""

    fast: float
    small: float


def bounds(case: Case) -> Bounds:
    changed = case.old != case.new
    exponents = ((case.old >> _SHIFT) & _MASK).astype(np.int64)
    count = int(changed.sum())
    lengths = np.abs(_ordinals(case.new[changed]) - _ordinals(case.old[changed]))
    magnitudes = sum(
        _entropy_sum(np.unique(lengths[exponents[changed] == e], return_counts=True)[1])
        for e in np.unique(exponents[changed])
    )
    whole = _positions(np.array([len(changed)]), np.array([count]))
    classed = _positions(
        np.bincount(exponents, minlength=256), np.bincount(exponents[changed], minlength=256)
    )
    return Bounds(1 + (whole + magnitudes) / count, 1 + (classed + magnitudes) / count)


def _ordinals(words: NDArray[np.uint16]) -> NDArray[np.int64]:
    wide = words.astype(np.int64)
    return np.where(wide & _SIGN, -1 - (wide ^ _SIGN), wide)


def _positions(words: NDArray[np.int64], changed: NDArray[np.int64]) -> float:
    """Bits that say which words of each group change."""
    return sum(
        _entropy_sum(np.array([hit, many - hit]))
        for many, hit in zip(words.tolist(), changed.tolist(), strict=True)
        if many
    )


def _entropy_sum(counts: NDArray[np.int64]) -> float:
    used = counts[counts > 0].astype(float)
    return float(-(used * np.log2(used / used.sum())).sum())


DENSITIES = (0.0, 0.003, 0.014, 0.04, 0.08, 0.18, 0.28, 0.35, 0.5, 1.0)
RATES = (2e-7, 5e-7, 1e-6, 3e-6, 1e-5)
"""learning rates of the trained traces"""

CHUNKS = 8
"""per thread: more than caches hold"""
_PASSES = 4
"""over them in a row, so that the begin and the end, where one thread waits, count little"""

Job = Callable[[], object]
Trace = Literal["simulated", "trained", "unrelated"]
_FIELD = FieldChunks()


Blobs = tuple[bytes, bytes]
"""of a chunk: forth, back"""


@dataclass
class _Piece:
    """One chunk of a case, and words to write to: the old ones until `arrived`."""

    chunk: Chunk
    old: Words
    new: Words
    target: Words
    arrived: bool = False

    def back(self) -> _Piece:
        return replace(self, old=self.new, new=self.old)


def _pieces(case: Case, most: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for start in range(0, min(len(case.old), most * CHUNK_WORDS), CHUNK_WORDS):
        old, new = case.old[start : start + CHUNK_WORDS], case.new[start : start + CHUNK_WORDS]
        count = len(old) & ~63
        chunk = Chunk(0, "BF16", len(pieces), (Span(0, 0, count, 0),), count)
        pieces.append(_Piece(chunk, old[:count], new[:count], old[:count].copy()))
    return pieces


def _publish(piece: _Piece, encoding: StepEncoding) -> bytes:
    changes = scan(piece.chunk, piece.old, piece.new).changes
    if not len(changes):
        return b""
    return encode_chunk(piece.chunk, piece.old, piece.new, changes, encoding)


def _apply(piece: _Piece, blob: bytes) -> None:
    changes, _ = decode_step(blob, piece.chunk, piece.target)
    changes.apply(piece.target)


def _publish_field(piece: _Piece) -> bytes:
    return _FIELD.encode(piece.old.view(np.uint8), piece.new.view(np.uint8))[0]


def _apply_field(piece: _Piece, blob: bytes) -> None:
    _FIELD.decode(blob, piece.target.view(np.uint8))


@dataclass(frozen=True)
class _Contender:
    publish: Callable[[_Piece], bytes]
    apply: Callable[[_Piece, bytes], None]
    own: StepEncoding | None

    def move(self, piece: _Piece, blobs: Blobs) -> None:
        """Forth, or back where it has arrived. Nothing where nothing changes."""
        blob = blobs[piece.arrived]
        if blob:
            self.apply(piece, blob)
            piece.arrived = not piece.arrived


_CONTENDERS: dict[str, _Contender] = {
    **{name: _Contender(partial(_publish, encoding=name), _apply, name) for name in get_args(StepEncoding)},
    "field": _Contender(_publish_field, _apply_field, None),
}


def _times(jobs: Mapping[str, list[Job]], threads: int, rounds: int) -> dict[str, Spread]:
    """Seconds of each for all of its jobs, which run in threads as the daemons' do."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    order = deque(jobs.items())
    for _ in range(rounds + 1):
        order.rotate(-1)
        for name, mine in order:
            # a job comes again only when it is over
            passes = _PASSES if len(mine) > 2 * threads else 1
            began = perf_counter()
            deque(ordered(lambda job: job(), passes * mine, threads), maxlen=0)
            taken[name].append((perf_counter() - began) / passes)
    return {name: Spread.of(seconds[1:]) for name, seconds in taken.items()}


def measure_case(case: Case, trace: Trace, threads: int, rounds: int) -> Iterator[ChunkRow]:
    """A row for each contender. Raises WeightcastError when one does not bring the new words back."""
    pieces = _pieces(case, CHUNKS * threads)
    blobs = {
        name: [(one.publish(piece), one.publish(piece.back())) for piece in pieces]
        for name, one in _CONTENDERS.items()
    }
    _check(pieces, blobs)
    published = _times(
        {name: [partial(one.publish, p) for p in pieces] for name, one in _CONTENDERS.items()},
        threads,
        rounds,
    )
    applied = _times(
        {
            name: [partial(one.move, *pair) for pair in zip(pieces, blobs[name], strict=True)]
            for name, one in _CONTENDERS.items()
        },
        threads,
        rounds,
    )
    changed = sum(int(np.count_nonzero(piece.old != piece.new)) for piece in pieces)
    ideal: dict[str, float] = asdict(bounds(case)) if changed else {}
    for name, made in blobs.items():
        yield ChunkRow(
            trace=trace,
            case=case.name,
            threads=threads,
            encoding=name,
            modes="".join(sorted({str(forth[0]) for forth, _ in made if forth}))
            if _CONTENDERS[name].own
            else "",
            raw_bytes=sum(piece.old.nbytes for piece in pieces),
            chunks=len(pieces),
            words=sum(len(piece.old) for piece in pieces),
            changed=changed,
            payload_bytes=sum(len(forth) for forth, _ in made),
            bound_bits=ideal.get(name),
            publish=published[name],
            apply=applied[name],
        )


def _check(pieces: Sequence[_Piece], blobs: Mapping[str, Sequence[Blobs]]) -> None:
    for name, one in _CONTENDERS.items():
        for piece, both in zip(pieces, blobs[name], strict=True):
            for words in (piece.new, piece.old):
                one.move(piece, both)
                if not np.array_equal(piece.target, words):
                    raise WeightcastError(f"{name} did not bring the right words")


def measure_floor(threads: int, rounds: int) -> FloorRow:
    """memcpy, reading alone, and the passes that publishing is made of, at 1.4%; `scan` compares, hashes and
    sums."""
    pieces = _pieces(simulated(CHUNKS * threads * CHUNK_WORDS, 0.014, 1), CHUNKS * threads)
    jobs: dict[str, list[Job]] = {
        "memcpy": [partial(np.copyto, piece.target, piece.old) for piece in pieces],
        "read": [partial(np.bitwise_xor.reduce, piece.old.view(np.uint64)) for piece in pieces],
        "compare": [partial(compare, piece.old, piece.new) for piece in pieces],
        "hash": [partial(hash_bytes, piece.old.view(np.uint8)) for piece in pieces],
        "scan": [partial(scan, piece.chunk, piece.old, piece.new) for piece in pieces],
    }
    return FloorRow(
        threads=threads,
        nbytes=sum(piece.old.nbytes for piece in pieces),
        seconds=_times(jobs, threads, rounds),
    )
