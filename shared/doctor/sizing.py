"""Bytes, rates and times of a run that does not exist yet, and their tables. Each function names its source.

Bytes are compared with real publications and syncs (tests/service/test_sizing.py). Seconds are guesses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from weightcast.shared.base.elements import CHUNK_WORDS, TensorTable
from weightcast.shared.base.errors import counted
from weightcast.shared.daemon.environment import DAEMON_BYTES, MEMORY_BUDGET, SCRATCH_BYTES
from weightcast.shared.daemon.logs import size_text

Encoding = Literal["fast", "small"]

_RECORD_BYTES = 32
_NEAR = 254
"""the widest gap that a journal keeps in one byte (docs/FORMAT.md, Journal)"""
_WHOLE_FROM = 0.75
"""share of changed words from which decoders show, and journals keep, all (shared/codec/container.py)"""
_INDEX_TENSOR_BYTES = 84
"""of an index's JSON for a changed tensor, in addition to its name, which occurs twice"""
_INDEX_CHUNK_BYTES = 120
_INDEX_FIXED_BYTES = 800

_STEP_BITS = 1.59
_STEP_BITS_RISE = 2.05
_DENSE_FROM, _DENSE_BITS = 0.18, 10.94
"""bits for signs and lengths of steps: measured less the entropy of positions, simulated Adam steps of bf16
at 0.3, 1.4, 18 and 100% (docs/measurements/benchmarks.md, Chunks in memory)"""
_SMALL_SAVES = 1.3
"""bits per power of ten of sparseness that `small` needs less than `fast`; same table"""
_WIDTH_BITS = {1: -0.6, 2: 0.0, 4: 16.0}
"""on top for words of other widths: an fp8 step is a single unit mostly; an fp32 one has 16 more bits"""

_SKIP_EXPONENT = 0.6
"""a delta over n versions has n^0.6 times the bytes of one: 32 versions, 6.3 to 9.6 times (docs/adr/0004)"""
_SKIP_ODD = 2.0
"""a host at a distance that no power of two divides reads about twice that (same place)"""
SKIP_SPAN = 64

CHANGES_PER_SECOND = 3.25e6
"""staged and patched by a thread, of bf16 at 1.4% on shared virtual cores (README, Figures: two threads,
0.97 GB/s)"""
DEFAULT_THREADS = MEMORY_BUDGET // SCRATCH_BYTES
LINK_SHARE = 0.1
"""of the interval that fetching a version may take, for versions to be fresh"""


GET_PRICE, PUT_PRICE = 0.0004, 0.005
"""dollars per 1,000 requests: the list price of S3 Standard in us-east-1 (aws.amazon.com/s3/pricing, 2025)"""
REPORT_SECONDS = 30.0
_READ_BYTES, _PART_BYTES = 8 << 20, 5 << 20
"""of large objects, per request"""


@dataclass(frozen=True)
class Requests:
    """To a bucket: `gets` and HEAD; `puts`, POST and LIST, which cost more."""

    gets: float
    puts: float

    def times(self, count: float) -> Requests:
        return Requests(self.gets * count, self.puts * count)


HOST_POLL = Requests(1, 0)
HOST_VERSION = Requests(8, 4)
HOST_REPORT = Requests(3, 1)
"""its reading by the publisher included"""
PUBLISHER_POLL = Requests(13, 1)
PUBLISHER_VERSION = Requests(60, 36)
"""with its share of multi-step deltas. Bounds, without requests for bytes (tests/e2e/test_object_store.py)"""


@dataclass(frozen=True)
class Weights:
    """`words`: by width in bytes; `names`: bytes of all tensor names together."""

    nbytes: int
    words: Mapping[int, int]
    tensors: int
    names: int

    @classmethod
    def of(cls, table: TensorTable) -> Weights:
        words: Counter[int] = Counter()
        for spec in table:
            words[spec.kind.width] += spec.words
        return cls(table.nbytes, dict(words), len(table), sum(len(spec.name.encode()) for spec in table))

    @property
    def chunks(self) -> int:
        """Of the grid, about: long tensors end with a chunk that is not full."""
        return sum(-(-words // CHUNK_WORDS) for words in self.words.values())


@dataclass(frozen=True)
class Workload:
    """`density`: share of the elements that a version changes; `interval`: seconds between versions; `away`:
    seconds that a host misses; `link`: bits per second of a host; `threads`: of a host; `skips`: whether
    deltas over many versions are made; `poll`: seconds between two looks at the channel; prices: dollars per
    1,000 requests."""

    density: float
    interval: float
    encoding: Encoding = "fast"
    hosts: int = 1
    away: float = 600.0
    link: float = 10e9
    threads: int = DEFAULT_THREADS
    skips: bool = True
    poll: float = 1.0
    get_price: float = GET_PRICE
    put_price: float = PUT_PRICE


@dataclass(frozen=True)
class PerVersion:
    changed: int
    """words"""
    delta_bytes: int
    """shards and index"""
    index_bytes: int
    journal_bytes: int
    """of a host or publisher, while it takes the version"""


@dataclass(frozen=True)
class Amount:
    """`copies` of the weights, buffers, and room for `steps`: a version with its journal."""

    copies: int = 0
    fixed_bytes: int = 0
    steps: int = 0

    def nbytes(self, full: int, step: int) -> int:
        return self.copies * full + self.fixed_bytes + self.steps * step


@dataclass(frozen=True)
class RoleBytes:
    name: str
    memory_bytes: int
    cache_bytes: int
    disk_bytes: int


ROLES: Mapping[str, tuple[Amount, Amount, Amount]] = {
    "trainer, Publisher in process": (Amount(0, SCRATCH_BYTES), Amount(1), Amount(2, 0, 1)),
    "trainer, hand-over": (Amount(2), Amount(), Amount()),
    "publisher's daemon": (Amount(0, DAEMON_BYTES), Amount(1), Amount(2, 0, 1)),
    "host, --local on disk": (Amount(0, DAEMON_BYTES), Amount(1), Amount(1, 0, 1)),
    "host, --local in /dev/shm": (Amount(1, DAEMON_BYTES, 1), Amount(), Amount()),
}
"""By role: memory that cannot be given back, page cache that should stay, and use of --local, of it the
publisher's history of journals as much as the weights at most (`--history-share`). Buffers:
tests/publisher/test_core_memory.py; copies: docs/trainers.md, What it costs"""


@dataclass(frozen=True)
class CatchUpCost:
    """Of a host that was away, and of a new one that has nothing."""

    versions: int
    bytes: int
    seconds: float
    new_host_bytes: int
    new_host_seconds: float


@dataclass(frozen=True)
class Sizing:
    full_bytes: int
    per_version: PerVersion
    ratio: float
    """full weights over a version"""
    channel_bytes_per_hour: int
    """deltas, and those over many versions; each anchor is `full_bytes` more"""
    publisher_link: float
    """bits per second on average"""
    host_link: float
    host_link_fresh: float
    """so that a version is fetched in a tenth of the interval"""
    server_link: float
    """what the shared file system hands out to all hosts, on average"""
    catch_up: CatchUpCost
    roles: tuple[RoleBytes, ...]
    requests: Mapping[str, Requests]
    """to a bucket, in an hour"""
    dollars: float
    """for them"""
    behind: bool
    """a host cannot keep up: link or patching take longer than the interval"""


def position_bits(density: float) -> float:
    """Entropy of which words change, per changed word; every coder of positions is bound by it."""
    if not 0 < density < 1:
        return 0.0
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


def change_bits(density: float, width: int = 2, encoding: Encoding = "fast") -> float:
    """Per changed word in the shards; never more than the word and its place take raw."""
    steps = _STEP_BITS + _STEP_BITS_RISE * min(density, _DENSE_FROM)
    if density > _DENSE_FROM:
        steps += (_DENSE_BITS - steps) * (density - _DENSE_FROM) / (1 - _DENSE_FROM)
    bits = position_bits(density) + steps + _WIDTH_BITS[width]
    if encoding == "small":
        bits -= _SMALL_SAVES * math.log10(1 / density)
    return min(bits, 8 * width / density)


def per_version(weights: Weights, density: float, encoding: Encoding = "fast") -> PerVersion:
    changed = {width: round(words * density) for width, words in weights.words.items()}
    if not any(changed.values()):
        return PerVersion(0, _INDEX_FIXED_BYTES, _INDEX_FIXED_BYTES, _RECORD_BYTES)
    bits = sum(count * change_bits(density, width, encoding) for width, count in changed.items())
    # as if every tensor changed
    index = (
        _INDEX_FIXED_BYTES
        + 2 * weights.names
        + weights.tensors * _INDEX_TENSOR_BYTES
        + weights.chunks * _INDEX_CHUNK_BYTES
    )
    return PerVersion(sum(changed.values()), int(bits / 8) + index, index, journal_bytes(weights, density))


def journal_bytes(weights: Weights, density: float) -> int:
    """A gap, the old and the new word of each change, four bytes more for a wide gap, a head for each tensor
    or chunk; a bit for each word instead of gaps where that is less; old and new word of all where few stay
    (docs/FORMAT.md, Journal)."""
    heads = _RECORD_BYTES * (weights.tensors + weights.chunks + 1)
    if density >= _WHOLE_FROM:
        return 2 * weights.nbytes + heads
    gap = 1 + 4 * (1 - density) ** _NEAR
    places = min(gap * density, 1 / 8)
    each = sum(words * (2 * width * density + places) for width, words in weights.words.items())
    return int(each) + heads


def span_bytes(delta_bytes: int, span: int, full_bytes: int) -> int:
    """Of a delta over `span` versions."""
    return min(int(delta_bytes * math.pow(span, _SKIP_EXPONENT)), full_bytes)


def skip_share(delta_bytes: int, full_bytes: int) -> float:
    """Bytes of deltas over many versions for each byte of a delta: one over 2^k at every 2^k-th version."""
    if not delta_bytes:
        return 0.0
    spans = (1 << k for k in range(1, SKIP_SPAN.bit_length()))
    return sum(span_bytes(delta_bytes, span, full_bytes) / span for span in spans) / delta_bytes


def missed_bytes(delta_bytes: int, versions: int, full_bytes: int, skips: bool) -> int:
    """What a host reads that missed so many versions: the cheapest of single deltas, deltas over many
    versions, and full weights."""
    ways = [versions * delta_bytes, full_bytes + delta_bytes]
    if skips and versions > 1:
        whole, rest = divmod(versions, SKIP_SPAN)
        widest = whole * span_bytes(delta_bytes, SKIP_SPAN, full_bytes)
        odd = _SKIP_ODD * span_bytes(delta_bytes, rest, full_bytes) if rest > 1 else rest * delta_bytes
        ways.append(int(widest + odd))
    return min(ways)


def catch_up(weights: Weights, one: PerVersion, asked: Workload) -> CatchUpCost:
    """A host folds what it missed and patches once; a new one reads the base, or an anchor, first."""
    versions = math.ceil(asked.away / asked.interval)
    missed = missed_bytes(one.delta_bytes, versions, weights.nbytes, asked.skips)
    seconds = fetch_seconds(missed, asked.link) + apply_seconds(one, missed, asked.threads)
    return CatchUpCost(
        versions=versions,
        bytes=missed,
        seconds=seconds,
        new_host_bytes=weights.nbytes + missed,
        new_host_seconds=seconds + fetch_seconds(weights.nbytes, asked.link),
    )


def fetch_seconds(nbytes: int, link: float) -> float:
    return 8 * nbytes / link


def apply_seconds(one: PerVersion, nbytes: int, threads: int) -> float:
    """To stage and patch so many bytes of deltas like `one`."""
    return nbytes / one.delta_bytes * one.changed / (CHANGES_PER_SECOND * threads)


def roles(weights: Weights, one: PerVersion) -> tuple[RoleBytes, ...]:
    full, step = weights.nbytes, one.delta_bytes + one.journal_bytes
    return tuple(
        RoleBytes(name, *(each.nbytes(full, step) for each in amounts)) for name, amounts in ROLES.items()
    )


def requests_per_hour(one: PerVersion, asked: Workload) -> dict[str, Requests]:
    versions, polls = 3600 / asked.interval, 3600 / asked.poll
    fetched = Requests(HOST_VERSION.gets + one.delta_bytes // _READ_BYTES, HOST_VERSION.puts)
    parts = one.delta_bytes // _PART_BYTES
    written = Requests(PUBLISHER_VERSION.gets, PUBLISHER_VERSION.puts + parts)
    return {
        "hosts poll": HOST_POLL.times(asked.hosts * polls),
        "hosts read versions": fetched.times(asked.hosts * versions),
        "hosts report": HOST_REPORT.times(asked.hosts * 3600 / REPORT_SECONDS),
        "the publisher polls": PUBLISHER_POLL.times(polls),
        "the publisher writes versions": written.times(versions),
    }


def dollars(requests: Iterable[Requests], asked: Workload) -> float:
    return sum(each.gets * asked.get_price + each.puts * asked.put_price for each in requests) / 1000


def sizing(weights: Weights, asked: Workload) -> Sizing:
    one = per_version(weights, asked.density, asked.encoding)
    hourly = 3600 / asked.interval
    in_channel = one.delta_bytes * (1 + (skip_share(one.delta_bytes, weights.nbytes) if asked.skips else 0.0))
    average = 8 * one.delta_bytes / asked.interval
    requests = requests_per_hour(one, asked)
    busy = fetch_seconds(one.delta_bytes, asked.link) + apply_seconds(one, one.delta_bytes, asked.threads)
    return Sizing(
        full_bytes=weights.nbytes,
        per_version=one,
        ratio=weights.nbytes / one.delta_bytes,
        channel_bytes_per_hour=int(in_channel * hourly),
        publisher_link=8 * in_channel / asked.interval,
        host_link=average,
        host_link_fresh=average / LINK_SHARE,
        server_link=average * asked.hosts,
        catch_up=catch_up(weights, one, asked),
        roles=roles(weights, one),
        requests=requests,
        dollars=dollars(requests.values(), asked),
        behind=busy > asked.interval,
    )


DENSITIES = (0.01, 0.05, 0.2)


def plan_facts(weights: Weights, asked: Workload, found: Sizing) -> dict[str, Any]:
    """All of it for JSON."""
    by_density = {f"{density:g}": journal_bytes(weights, density) for density in DENSITIES}
    return {"asked": asdict(asked), **asdict(found), "journals": by_density}


def show_plan(console: Console, weights: Weights, asked: Workload, found: Sizing) -> None:
    console.print(
        f"{size_text(weights.nbytes)} of weights, {asked.density:.3g} of the elements changed every"
        f" {asked.interval:g} s, encoding {asked.encoding}, {counted(asked.hosts, 'host')}"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in plan_rows(weights, asked, found):
        table.add_row(name, value)
    console.print(table)
    memory = Table(box=None, pad_edge=False)
    for title in ("role", "memory", "page cache", "disk"):
        memory.add_column(title, justify="left" if title == "role" else "right")
    for role in found.roles:
        memory.add_row(
            role.name, size_text(role.memory_bytes), size_text(role.cache_bytes), size_text(role.disk_bytes)
        )
    console.print(memory)
    bucket = Table(box=None, pad_edge=False)
    for title in ("in a bucket, per hour", "GET", "PUT and LIST", "price"):
        bucket.add_column(title, justify="left" if title.startswith("in") else "right")
    for name, each in found.requests.items():
        bucket.add_row(name, f"{each.gets:,.0f}", f"{each.puts:,.0f}", f"${dollars([each], asked):,.2f}")
    bucket.add_row("all", "", "", f"${found.dollars:,.2f}")
    console.print(bucket)
    console.print(
        f"Prices: ${asked.get_price:g} and ${asked.put_price:g} per 1,000 requests; defaults: list prices of"
        " S3 Standard in us-east-1, 2025. Check yours. Bytes and storage come on top."
    )
    console.print(
        f"Seconds are guesses, with {asked.threads} threads of {CHANGES_PER_SECOND / 1e6:g} million changes a"
        " second each, measured on shared virtual cores."
    )


def plan_rows(weights: Weights, asked: Workload, found: Sizing) -> Iterator[tuple[str, str]]:
    one, late = found.per_version, found.catch_up
    less = f"{found.ratio:,.0f} times less than" if found.ratio >= 1.5 else "no less than"
    yield "a version", f"{size_text(one.delta_bytes)}, {less} the weights"
    sizes = (f"{size_text(journal_bytes(weights, density))} at {density:.0%}" for density in DENSITIES)
    yield "journal of a step", f"{size_text(one.journal_bytes)} ({', '.join(sizes)})"
    yield (
        "channel, per hour",
        f"{size_text(found.channel_bytes_per_hour)}; an anchor {size_text(found.full_bytes)}",
    )
    yield "publisher writes", size_text(found.publisher_link, "bit/s")
    fresh = size_text(found.host_link_fresh, "bit/s")
    yield (
        "a host reads",
        f"{size_text(found.host_link, 'bit/s')}; {fresh} to have it in a tenth of the interval",
    )
    yield "all hosts read", size_text(found.server_link, "bit/s")
    yield (
        f"after {asked.away:g} s away",
        f"{counted(late.versions, 'version')}, {size_text(late.bytes)}, about {late.seconds:.2g} s"
        f" on a link of {size_text(asked.link, 'bit/s')}",
    )
    space = late.new_host_bytes + min(late.versions * one.journal_bytes, 2 * weights.nbytes)
    yield (
        "a new host",
        f"{size_text(late.new_host_bytes)}, about {late.new_host_seconds:.2g} s; {size_text(space)} in"
        " --local to take all at once",
    )
    if found.behind:
        more = f"--threads, each with {SCRATCH_BYTES >> 20} MiB of --memory-budget"
        yield (
            "too much",
            f"a host takes longer than the interval for a version: publish less often, or {more}",
        )
