"""What an export needs to become the run's weights: quantised, tensors left out, renamed, cast (`--quantise`,
`--drop`, `--rename`, `--cast`), in that order. A rule that matches nothing is noted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.weights.match import frozen_tensors, resolve
from weightcast.publisher.weights.precision import STORED, rounded, rounds
from weightcast.publisher.weights.quantise import QuantisedWeights
from weightcast.publisher.weights.tensors import Adapted, NewWeights
from weightcast.shared.base.elements import DTYPES, Chunk, TensorSpec, TensorTable, Words
from weightcast.shared.base.errors import USAGE, Refused
from weightcast.shared.channel.run_files import ChannelFile


class BadRule(Refused):
    """A usage error: the text of a rule is wrong."""

    exit_code = USAGE


class Rename(NamedTuple):
    """`old` and `new` are prefixes, or patterns with as many `*`, which stand for the same texts in order."""

    old: str
    new: str

    @classmethod
    def of(cls, text: str) -> Rename:
        """Raises BadRule."""
        old, equals, new = text.partition("=")
        if not equals or not old or old == new or old.count("*") != new.count("*"):
            raise BadRule(
                f"--rename {text[:80]!r} is not A=B",
                remedy="give two prefixes (model.language_model.=model.), or two patterns with as many *",
            )
        return cls(old, new)

    def applied(self, name: str) -> str | None:
        """None where it does not apply."""
        if "*" not in self.old:
            return self.new + name.removeprefix(self.old) if name.startswith(self.old) else None
        found = re.fullmatch("(.*?)".join(map(re.escape, self.old.split("*"))), name)
        if found is None:
            return None
        return "".join(map("".join, zip_longest(self.new.split("*"), found.groups(), fillvalue="")))

    def __str__(self) -> str:
        return f"--rename {self.old}={self.new}"


@dataclass(frozen=True)
class ExportRules:
    """`drop`: globs of names as the export has them. `rename`: the first that applies counts. `cast`:
    floating-point tensors are rounded to the run's dtypes. `quantise`: a scheme, or empty."""

    cast: bool = False
    rename: tuple[Rename, ...] = ()
    drop: tuple[str, ...] = ()
    quantise: str = ""

    @classmethod
    def of(cls, cast: bool, rename: Iterable[str], drop: Iterable[str], quantise: str = "") -> ExportRules:
        """Raises BadRule."""
        return cls(cast, tuple(map(Rename.of, rename)), tuple(drop), quantise)

    def renamed(self, name: str) -> tuple[str, Rename | None]:
        """With the rule that applied."""
        for rule in self.rename:
            new = rule.applied(name)
            if new is not None:
                return new or name, rule
        return name, None


NO_RULES = ExportRules()


@dataclass(frozen=True)
class _Plan:
    table: TensorTable
    sources: Mapping[str, str]
    """name by which a tensor is published to the export's own"""
    adapted: Adapted
    notes: tuple[str, ...]


def adapt(weights: NewWeights, rules: ExportRules, file: ChannelFile, table: TensorTable) -> NewWeights:
    """`weights` as `rules` change them, for a run of `table`. Raises Refused where two tensors get one name
    or a tensor that the run needs is dropped; `weights` stay open then."""
    if rules == NO_RULES:
        return weights
    if rules.quantise:
        weights = QuantisedWeights(weights, rules.quantise)
    plan = _planned(weights.table, rules, table, tuple(file.aliases.items()), file.frozen)
    return AdaptedWeights(weights, plan)


@lru_cache(maxsize=2)
def _planned(
    given: TensorTable,
    rules: ExportRules,
    table: TensorTable,
    aliases: tuple[tuple[str, str], ...],
    frozen: tuple[str, ...],
) -> _Plan:
    """Remembered: a run gives the same tables version after version."""
    dropped: dict[str, str] = {}
    sources: dict[str, str] = {}
    used: list[Rename] = []
    for spec in given:
        glob = next((glob for glob in rules.drop if fnmatchcase(spec.name, glob)), None)
        if glob is not None:
            dropped[spec.name] = glob
            continue
        name, rule = rules.renamed(spec.name)
        if rule is not None:
            used.append(rule)
        other = sources.setdefault(name, spec.name)
        if other != spec.name:
            raise Refused(
                f"{other} and {spec.name} both become {name}",
                remedy="narrow --rename, or --drop one of them",
            )
    ties = dict(aliases)
    run_names = resolve(sources, {*table.numbers, *ties}).run_names
    owners = {name: ties.get(run_name, run_name) for name, run_name in run_names.items()}
    still = {table[number].name for number in frozen_tensors(table, frozen)}
    _check_dropped(dropped, {*table.numbers} - still - {*owners.values()})
    specs, cast = [], 0
    for name, source in sources.items():
        spec = given.named(source)._replace(name=name)
        wanted = table.named(owners[name]).dtype if owners[name] in table.numbers else spec.dtype
        if rules.cast and rounds(spec.dtype, wanted):
            spec = spec._replace(dtype=wanted, nbytes=spec.elements * DTYPES[wanted][0])
            cast += 1
        specs.append(spec)
    unused = [f"--drop {glob}" for glob in rules.drop if not any(fnmatchcase(n, glob) for n in dropped)]
    unused += [str(rule) for rule in rules.rename if rule not in used]
    notes = tuple(f"{rule} applied to no tensor" for rule in unused)
    return _Plan(TensorTable.of(specs), sources, Adapted(cast, len(used), len(dropped)), notes)


def _check_dropped(dropped: Mapping[str, str], needed: set[str]) -> None:
    """`needed`: names of the run that nothing else gives."""
    for name, run_name in resolve(dropped, needed).run_names.items():
        if run_name in needed:
            raise Refused(
                f"--drop {dropped[name]} takes {name}, which the run needs", remedy="narrow the pattern"
            )


class AdaptedWeights(NewWeights):
    """Names and dtypes are changed as the words are read: nothing is copied before."""

    by_flags = True

    def __init__(self, weights: NewWeights, plan: _Plan) -> None:
        self._weights, self._sources = weights, plan.sources
        notes = (*weights.facts.notes, *plan.notes)
        self.table, self.facts = plan.table, replace(weights.facts, adapted=plan.adapted, notes=notes)

    def words_in(self, name: str, start: int, stop: int) -> Words:
        spec, source = self.table.named(name), self._sources[name]
        found = self._weights.table.named(source)
        if spec.dtype == found.dtype:
            return self._weights.words_in(source, start, stop)
        per, per_found = _words_per_element(spec), _words_per_element(found)
        low, high = start // per, -(-stop // per)
        words = self._weights.words_in(source, low * per_found, high * per_found)
        values = rounded(words.view(STORED[found.dtype]), found.dtype, spec.dtype)
        made: Words = np.ascontiguousarray(values).view(spec.kind.numpy)
        return made[start - low * per : stop - low * per]

    def run_in(self, chunk: Chunk, tensors: NDArray[np.int64]) -> Words | None:
        return None if self.facts.adapted.cast else self._weights.run_in(chunk, self._numbers[tensors])

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        """Of each tensor its source's; the last, -1, is that of none."""
        theirs = self._weights.table.numbers
        return np.array([*(theirs[self._sources[name]] for name in self.table.names), -1], np.int64)

    def finish(self) -> None:
        self._weights.finish()

    def close(self) -> None:
        self._weights.close()


def _words_per_element(spec: TensorSpec) -> int:
    """8 for F64, whose words are bytes."""
    return DTYPES[spec.dtype][0] // spec.kind.width
