"""Names of the new weights against the run's tensors: rules without IO.

Names are read as `names.resolve` does. Aliases (tied tensors) may be given or left out; frozen tensors may be
left out. Everything else that does not fit is looked for, reported in one error, and nothing is published.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.weights.precision import rounds
from weightcast.shared.base.elements import MAIN, TensorSpec, TensorTable
from weightcast.shared.base.errors import Refused, counted
from weightcast.shared.channel.run_files import DRAFT, ChannelFile
from weightcast.shared.checkpoint.verify.seed import listing
from weightcast.shared.files.hf_checkpoint import MERGE_ADAPTER, is_adapter_tensor

OF_A_MODEL = re.compile(r"lora_(A|B|embedding_A|embedding_B)\.(?!weight$|bias$)[^.]+(\.|$)")
"""a model has the adapter's name there"""
_MAP_NAMES = "map names: give ((new_name(name), tensor) for name, tensor in ...); or leave out others"
_LORA_A = re.compile(r"([^.]+)\.lora_A(\.|$)")
AS_PEFT_SAVES = "give peft.get_peft_model_state_dict(model)"
_FEW = 3
"""tensors of another dtype that are named one by one"""
_MANY = 10
"""tensors of other names that are named one by one"""
_ENOUGH = 2
"""words at their ends by which two names are taken for those of one tensor"""
_LOOKED_AT = 2000
"""surplus names that are compared with a missing one"""


@dataclass(frozen=True)
class Matched:
    """`sources`: tensor number to the given name whose bytes it gets; `numbers`: int64[tensors], that one's
    number among the given ones, -1 for none. `absent`: frozen, keeps its bytes.
    `ties`: given names whose bytes must equal a tensor's. `frozen`: tensors that must not change."""

    sources: Mapping[int, str]
    numbers: NDArray[np.int64]
    absent: tuple[int, ...]
    ties: tuple[tuple[str, int], ...]
    frozen: frozenset[int]
    mapped: Mapping[str, int] = field(default_factory=dict)
    """what was done to given names, and to how many"""


def match(
    given: TensorTable, table: TensorTable, file: ChannelFile, *, partial: bool, by_flags: bool = False
) -> Matched:
    """`file`: has frozen tensors and aliases. `partial`: the given tensors are one rank's share, the rest is
    somebody else's. `by_flags`: remedies name options of commands, not Python functions. Raises Refused.
    Tables that fitted are remembered: a run gives the same ones version after version."""
    return _matched(given, table, file.frozen, tuple(file.aliases.items()), partial, by_flags)


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
    by_run = {run_name: name for name, run_name in names.run_names.items()}
    twice = [f"{one} and {other} both stand for {name}" for name, one, other in names.twice]
    other = [] if partial else _other_adapter(given, table)
    misfit = _Misfit(len(table), by_flags, twice, table.component, other, partial)
    sources: dict[int, str] = {}
    absent: list[int] = []
    still = frozen_tensors(table, frozen)
    for number, wanted in enumerate(table):
        source = by_run.get(wanted.name, by_run.get(aliases.get(wanted.name, "")))
        if source is not None:
            sources[number] = source
            misfit.compare(given.named(source), wanted)
        elif number in still:
            absent.append(number)
        else:
            (misfit.elsewhere if partial else misfit.missing).append(wanted.name)
    ties: list[tuple[str, int]] = []
    for spec in given:
        name = names.run_names[spec.name]
        tie = table.numbers.get(aliases.get(name, ""))
        if name in table.numbers:
            continue
        if tie is not None:
            misfit.compare(spec, table[tie])
            ties.append((spec.name, tie))
        elif is_adapter_tensor(spec.name) and table.component == MAIN:
            message = f"the weights hold an unmerged LoRA adapter: {spec.name}"
            raise Refused(message, remedy=MERGE_ADAPTER)
        else:
            misfit.surplus.append(spec.name)
    misfit.check()
    # where the base stores both, both may be given; they are tied all the same
    both = table.numbers.keys() & by_run.keys()
    ties.extend((by_run[one], table.numbers[name]) for one, name in aliases.items() if {one, name} <= both)
    numbers = np.full(len(table), -1, np.int64)
    numbers[list(sources)] = [given.numbers[name] for name in sources.values()]
    return Matched(sources, numbers, tuple(absent), tuple(ties), still, names.rules)


def _other_adapter(given: TensorTable, table: TensorTable) -> list[tuple[str, str]]:
    """As of `_Misfit`; nothing for what is not LoRA, or not an adapter's."""
    (targets, ranks), (own_targets, own_ranks) = map(_lora_of, (given, table))
    found = []
    if targets and own_targets and targets != own_targets:
        text = f"target_modules {own_targets}"
        found.append((f"target_modules {targets}, expected {own_targets}", text))
    if ranks and own_ranks and ranks != own_ranks:
        found.append((f"rank {ranks}, {table.component} has {own_ranks}", f"rank {own_ranks}"))
    return found


def _lora_of(table: TensorTable) -> tuple[str, str]:
    """Its target modules and ranks."""
    found = [(match[1], spec.shape) for spec in table if (match := _LORA_A.search(spec.name))]
    ranks = sorted({shape[0] for _, shape in found if shape})
    return ",".join(sorted({module for module, _ in found})), ",".join(map(str, ranks))


@dataclass
class _Misfit:
    """What does not fit a run of so many `tensors`. `missing`: names of the run that are not given;
    `surplus`: given ones that are not the run's; `forms`: of each tensor of another dtype or shape the given
    and the wanted one."""

    tensors: int
    by_flags: bool
    twice: list[str]
    component: str
    other_adapter: list[tuple[str, str]]
    """what an adapter was trained with otherwise, and with what to save it again"""
    partial: bool
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    forms: list[tuple[TensorSpec, TensorSpec]] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    """of the run, not given here: perhaps by another rank"""

    def compare(self, found: TensorSpec, wanted: TensorSpec) -> None:
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            self.forms.append((found, wanted))

    def check(self) -> None:
        """Raises Refused where something does not fit."""
        problems = [*self.twice, *self._forms(), *self._names()]
        if problems:
            problems = [text for text, _ in self.other_adapter] or problems
            message = f"the weights do not fit the run: {listing(problems)}"
            if self.component != MAIN:
                message = message.replace("the run", self.component, 1)
            raise Refused(message, remedy=self._remedy())

    def _names(self) -> Iterator[str]:
        """Those that one rule makes fit are reported as one."""
        rule = self._rename()
        if rule is not None and len(self.missing) > _FEW:
            old, new = rule[0].removesuffix("*"), rule[1].removesuffix("*")
            if {new + name.removeprefix(old) for name in self.surplus} == set(self.missing):
                whole = "all " if len(self.missing) >= self.tensors else ""
                yield (
                    f"{whole}{counted(len(self.missing), 'name')} differ: {self.surplus[0]} is given, "
                    f"{self.missing[0]} expected"
                )
                return
        missing = [f"{name} is missing" for name in self.missing]
        surplus = [f"{name} is not part of the run" for name in self.surplus]
        if len(surplus) > _MANY:
            first = self.surplus[0]
            near = get_close_matches(first, (self.missing or self.elsewhere)[:_LOOKED_AT], 1)
            lacks = f", which is missing ({len(self.missing):,})" if self.missing else ""
            has = f"; the run has {near[0]}{lacks}" if near else ""
            surplus = [f"{len(surplus):,} tensors are not part of the run, as {first}{has}"]
            missing = [] if near else missing
        yield from (*missing, *surplus)

    def _forms(self) -> Iterator[str]:
        """Many tensors that differ in the dtype alone are reported as one."""
        dtypes = Counter((a.dtype, b.dtype) for a, b in self.forms if a.shape == b.shape)
        for (found, wanted), count in dtypes.items():
            if count > _FEW:
                whole = "all " if count >= self.tensors else ""
                yield f"{whole}{count:,} tensors are {found}, the base has {wanted}"
        for a, b in self.forms:
            if a.shape != b.shape or dtypes[a.dtype, b.dtype] <= _FEW:
                tied = "" if a.name == b.name else f" (for {b.name})"
                yield f"{a.name}{tied} is {a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"

    def _remedy(self) -> str:
        """Short, in the words of the entry point that was used."""
        if self.component != MAIN:
            if any(OF_A_MODEL.search(name) for name in self.surplus):
                return AS_PEFT_SAVES
            if self.component == DRAFT:
                return "make a channel for a new run"
            other, again = f"retire {self.component} and add it under another name", self.other_adapter
            if self.partial:
                # one rank alone replaces them by itself
                other += f"; before version 1: `weightcast channel component add {self.component} --like DIR`"
            return f"save it again with {' and '.join(to for _, to in again)}; or {other}" if again else other
        said = []
        kinds = {rounds(a.dtype, b.dtype) for a, b in self.forms if a.shape == b.shape}
        if True in kinds:
            said.append(
                "round with --cast (in Python cast=True)" if self.by_flags else "round with `cast_like`"
            )
        if False in kinds:
            said.append(
                "quantise with --quantise" if self.by_flags else "quantise as the base is: `Quantiser`"
            )
        rename = self._rename()
        if rename is not None:
            old, new = rename
            dropped = f"drop the prefix {old} from all names" if not new else f"rename {old} to {new}"
            added = f"put {new.removesuffix('*')} in front of all names" if old == "*" else dropped
            said.append(f"--rename {old}={new}" if self.by_flags else added)
        elif self.surplus and (self.missing or self.elsewhere):
            flags = "map names with --rename A=B, or leave out with --drop GLOB"
            said.append(flags if self.by_flags else _MAP_NAMES)
        elif self.surplus:
            flags = "leave them out, --drop GLOB"
            said.append(flags if self.by_flags else "leave out what the run does not have")
        if self.missing and rename is None:
            said.append("tensors that never change need a channel made with --frozen")
        return "; ".join([*said, "a changed architecture needs another channel"])

    def _rename(self) -> tuple[str, str] | None:
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


def frozen_tensors(table: TensorTable, globs: Sequence[str]) -> frozenset[int]:
    """Numbers of the tensors that one of the globs names."""
    return frozenset(n for n, spec in enumerate(table) if any(fnmatchcase(spec.name, g) for g in globs))


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


def bare_name(name: str) -> str:
    """Without what wrappers put into it."""
    return ".".join(_unwrapped(name.split("."))[0])


def _unwrapped(words: list[str]) -> tuple[list[str], list[str]]:
    """What is left of a name's words, and what wrappers had put there."""
    kept: list[str] = []
    dropped: list[str] = []
    for word in words[:-1]:
        wraps = word in _ANYWHERE or (not kept and word in _IN_FRONT)
        (dropped if wraps else kept).append(word)
    return [*kept, words[-1]], dropped
