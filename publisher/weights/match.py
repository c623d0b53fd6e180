"""Names of the new weights against the run's tensors: rules without IO.

Names are read as `names.resolve` does. Aliases (tied tensors) may be given or left out; frozen tensors may be
left out. Everything else that does not fit is looked for, told in one error, and nothing is published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import takewhile

from weightcast.publisher.weights.precision import rounds
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import Refused
from weightcast.shared.checkpoint.verify.seed import listing
from weightcast.shared.files.hf_checkpoint import MERGE_ADAPTER, is_adapter_tensor

_MISSING, _SURPLUS = " is missing", " is not part of the run"
_FEW = 3
"""tensors of another dtype that are named one by one"""
_ENOUGH = 2
"""words at their ends by which two names are taken for those of one tensor"""
_LOOKED_AT = 2000
"""surplus names that are compared with a missing one"""


@dataclass(frozen=True)
class Matched:
    """`sources`: tensor number to the given name whose bytes it gets. `absent`: frozen, keeps its bytes.
    `ties`: given names whose bytes must equal a tensor's. `frozen`: tensors that must not change."""

    sources: Mapping[int, str]
    absent: tuple[int, ...]
    ties: tuple[tuple[str, int], ...]
    frozen: frozenset[int]
    mapped: Mapping[str, int] = field(default_factory=dict)
    """what was done to given names, and to how many"""


def match(
    given: TensorTable,
    table: TensorTable,
    *,
    frozen: Sequence[str],
    aliases: Mapping[str, str],
    partial: bool,
    by_flags: bool = False,
) -> Matched:
    """`partial`: the given tensors are one rank's share, the rest is somebody else's. `by_flags`: remedies
    name options of commands, not Python functions. Raises Refused. Tables that fitted are remembered: a run
    gives the same ones version after version."""
    return _matched(given, table, tuple(frozen), tuple(aliases.items()), partial, by_flags)


@lru_cache(maxsize=2)
def _matched(
    given: TensorTable,
    table: TensorTable,
    frozen: tuple[str, ...],
    tied: tuple[tuple[str, str], ...],
    partial: bool,
    by_flags: bool,
) -> Matched:
    aliases = dict(tied)
    names = resolve((spec.name for spec in given), {*table.numbers, *aliases})
    problems = [f"{one} and {other} both stand for {name}" for name, one, other in names.twice]
    by_run = {run_name: name for name, run_name in names.run_names.items()}
    sources: dict[int, str] = {}
    absent: list[int] = []
    still = frozen_tensors(table, frozen)
    for number, spec in enumerate(table):
        source = _source(spec.name, by_run, aliases)
        if source is not None:
            sources[number] = source
            _check_form(problems, given, source, table, number)
        elif number in still:
            absent.append(number)
        elif not partial:
            problems.append(f"{spec.name}{_MISSING}")
    ties = _ties(problems, given, names, by_run, table, aliases)
    if problems:
        _refuse_adapter(given, names, table)
        problems = _grouped(problems, given, table, sources)
        raise Refused(
            f"the weights do not fit the run: {listing(problems)}",
            remedy=_remedy(_Misfit.of(given, table, sources, problems), by_flags),
        )
    return Matched(sources, tuple(absent), tuple(ties), still, names.rules)


def _refuse_adapter(given: TensorTable, names: Resolved, table: TensorTable) -> None:
    for spec in given:
        if is_adapter_tensor(spec.name) and names.run_names[spec.name] not in table.numbers:
            message = f"the weights hold an unmerged LoRA adapter: {spec.name}"
            raise Refused(message, remedy=MERGE_ADAPTER)


def _grouped(
    problems: list[str], given: TensorTable, table: TensorTable, sources: Mapping[int, str]
) -> list[str]:
    """`problems`, in which many tensors that differ in the dtype alone are told as one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for number, name in sources.items():
        found, wanted = given[given.numbers[name]], table[number]
        if found.dtype != wanted.dtype and found.shape == wanted.shape:
            said: list[str] = []
            _check_form(said, given, name, table, number)
            alike.setdefault((found.dtype, wanted.dtype), []).extend(said)
    for (found_dtype, wanted_dtype), lines in alike.items():
        if len(lines) > _FEW:
            others = set(lines)
            whole = "all " if len(lines) == len(table) else ""
            one = f"{whole}{len(lines):,} tensors are {found_dtype}, the base has {wanted_dtype}"
            problems = [one, *(line for line in problems if line not in others)]
    return problems


@dataclass(frozen=True)
class _Misfit:
    """`missing`, `surplus`: names of the run that are not given, and given ones that are not the run's.
    `dtypes`: given and wanted, of tensors that differ in these alone."""

    missing: Sequence[str]
    surplus: Sequence[str]
    dtypes: Sequence[tuple[str, str]]

    @classmethod
    def of(
        cls, given: TensorTable, table: TensorTable, sources: Mapping[int, str], problems: Sequence[str]
    ) -> _Misfit:
        forms = [(given[given.numbers[name]], table[number]) for number, name in sources.items()]
        return cls(
            [one.removesuffix(_MISSING) for one in problems if one.endswith(_MISSING)],
            [one.removesuffix(_SURPLUS) for one in problems if one.endswith(_SURPLUS)],
            [(a.dtype, b.dtype) for a, b in forms if a.dtype != b.dtype and a.shape == b.shape],
        )

    def rename(self) -> tuple[str, str] | None:
        """The rule for a missing and a surplus name that end alike, as those of a wrapped model or of another
        of its classes do."""
        pairs = ((name, other) for name in self.missing[:_FEW] for other in self.surplus[:_LOOKED_AT])
        return next((rule for name, other in pairs if (rule := _rename(name, other))), None)


def _rename(name: str, other: str) -> tuple[str, str] | None:
    if other.endswith(f".{name}"):
        return other.removesuffix(name), ""
    if name.endswith(f".{other}"):
        return "*", name.removesuffix(other) + "*"
    words, others = name.split("."), other.split(".")
    pairs = zip(reversed(words), reversed(others), strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest = ".".join(words[len(words) - alike :])
    return None if alike < _ENOUGH else (other.removesuffix(rest), name.removesuffix(rest))


def _remedy(misfit: _Misfit, by_flags: bool) -> str:
    """Short, in the words of the entry point that was used."""
    said = []
    if any(rounds(*dtypes) for dtypes in misfit.dtypes):
        said.append("round with --cast (in Python cast=True)" if by_flags else "round with `cast_like`")
    if any(not rounds(*dtypes) for dtypes in misfit.dtypes):
        said.append("quantise as the base is before publishing")
    rename = misfit.rename()
    if rename is not None:
        said.append(f"--rename {rename[0]}={rename[1]}" if by_flags else f"rename {rename[0]} to {rename[1]}")
    elif misfit.surplus and misfit.missing:
        said.append("map names with --rename A=B, or leave out with --drop GLOB" if by_flags else "map names")
    elif misfit.surplus:
        said.append("leave them out, --drop GLOB" if by_flags else "leave out what the run does not have")
    if misfit.missing and rename is None:
        said.append("tensors that never change need a channel made with --frozen")
    return "; ".join([*said, "a changed architecture needs another channel"])


def frozen_tensors(table: TensorTable, globs: Sequence[str]) -> frozenset[int]:
    """Numbers of the tensors that one of the globs names."""
    return frozenset(n for n, spec in enumerate(table) if any(fnmatchcase(spec.name, g) for g in globs))


def _source(name: str, by_run: Mapping[str, str], aliases: Mapping[str, str]) -> str | None:
    return by_run[name] if name in by_run else by_run.get(aliases.get(name, ""))


def _check_form(problems: list[str], given: TensorTable, name: str, table: TensorTable, number: int) -> None:
    found, wanted = given[given.numbers[name]], table[number]
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        tied = "" if name == wanted.name else f" (for {wanted.name})"
        problems.append(
            f"{name}{tied} is {found.dtype} {list(found.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
        )


def _ties(
    problems: list[str],
    given: TensorTable,
    names: Resolved,
    by_run: Mapping[str, str],
    table: TensorTable,
    aliases: Mapping[str, str],
) -> list[tuple[str, int]]:
    ties: list[tuple[str, int]] = []
    for spec in given:
        name = names.run_names[spec.name]
        if name in table.numbers:
            continue
        number = table.numbers.get(aliases.get(name, ""))
        if number is None:
            problems.append(f"{spec.name}{_SURPLUS}")
        else:
            _check_form(problems, given, spec.name, table, number)
            ties.append((spec.name, number))
    # where the base stores both, both may be given; they are tied all the same
    both = table.numbers.keys() & by_run.keys()
    ties.extend((by_run[one], table.numbers[name]) for one, name in aliases.items() if {one, name} <= both)
    return ties


_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_IN_FRONT = ("module", "_forward_module")
_LEVEL = "model"


@dataclass(frozen=True)
class Resolved:
    """`run_names`: given name to the run's. `rules`: what was done to names, and to how many. `twice`: names
    of the run with both given names that stand for it."""

    run_names: Mapping[str, str]
    rules: Mapping[str, int] = field(default_factory=dict)
    twice: tuple[tuple[str, str, str], ...] = ()


def resolve(given: Iterable[str], known: Collection[str]) -> Resolved:
    """Names that nothing leads from to a known one stand for themselves."""
    run_names: dict[str, str] = {}
    owners: dict[str, str] = {}
    rules: Counter[str] = Counter()
    twice = []
    for name in given:
        found, rule = next(((n, rule) for n, rule in _readings(name) if n in known), (name, ""))
        if rule:
            rules[rule] += 1
        if found in owners:
            twice.append((found, owners[found], name))
        owners.setdefault(found, name)
        run_names[name] = found
    return Resolved(run_names, dict(rules), tuple(twice))


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """What a name may stand for, the likeliest first, and the rule that says so."""
    yield name, ""
    kept, dropped = _unwrapped(name.split("."))
    rule = " ".join(f"-{word}." for word in dict.fromkeys(dropped))
    bare = ".".join(kept)
    if rule:
        yield bare, rule
    space = " " if rule else ""
    if kept[0] == _LEVEL and len(kept) > 1:
        yield ".".join(kept[1:]), f"{rule}{space}-{_LEVEL}."
    yield f"{_LEVEL}.{bare}", f"{rule}{space}+{_LEVEL}."


def _unwrapped(words: list[str]) -> tuple[list[str], list[str]]:
    """What is left of a name's words, and what wrappers had put there."""
    kept: list[str] = []
    dropped: list[str] = []
    for word in words[:-1]:
        wraps = word in _ANYWHERE or (not kept and word in _IN_FRONT)
        (dropped if wraps else kept).append(word)
    return [*kept, words[-1]], dropped
