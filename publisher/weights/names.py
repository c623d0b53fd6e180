"""What trainers call tensors and what the run calls them: rules without IO.

Wrappers put words into the names of what they wrap (`module.` of DistributedDataParallel, `_orig_mod.` of
torch.compile, `_fsdp_wrapped_module.`), and the module that is handed over may be one level above or below
the one that was saved (`model.`). A name that the run knows stands for itself, whatever is in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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
