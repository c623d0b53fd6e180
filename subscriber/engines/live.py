"""Engines that take patches of the weights in their memory, with the reload from disk behind them.

A patch is tried once, and only if the engine has checked it before: in one order with its pause where the
engine takes that, else in a pause of ours. Whatever else comes of it than a success that is said, the engine
loads the checkpoint from disk: at once where nothing was changed, and as a suspect, paused, where nobody
knows.

Offers: one patch file per version, made from the journals and checked by each engine while it serves. An
engine that cannot take it loads the checkpoint from disk, and its offer says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers, grant_read_patches
from weightcast.shared.checkpoint.state.state import EngineState, Mark, Position, Step
from weightcast.shared.checkpoint.update.engine_patch import drop_engine_patches, write_engine_patch
from weightcast.shared.files.disk_errors import disk_text
from weightcast.subscriber.engines.base import (
    QUOTED,
    Confirmation,
    Done,
    Engine,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    ReloadOutcome,
    Suspect,
)
from weightcast.subscriber.engines.proxy import guarded
from weightcast.subscriber.engines.rules import Observation, is_in_sync, weights_of

Way = Literal["", "live", "reload"]
Why = Literal[
    "unknown", "group", "journal", "unpatchable", "patch", "refused", "rolled-back", "in-doubt", "waiting",
    "align",
]  # fmt: skip
"""Why an engine loads from disk: what it holds is not known; it is one of a group; the steps from what it
holds are not at hand; it cannot be patched at all; no patch was made; it refused the patch while it served;
it took nothing of it, or took it back, in the pause; nobody knows what it took; after such failures; no
version came, but the engine is brought to the local one, or back."""
MOST_WAITED = 63
"""versions loaded from disk after failures in the pause"""


ALIGNED = "it was brought to the local version, as after its start"


class NotTaken(EngineFailed):
    """The engine will not take the patch; it serves what it served."""


@dataclass(frozen=True)
class PatchFile:
    """As the engine gets it: the name of a file in its directory, and the version that it leads to."""

    name: str
    version: int
    root: str
    changes: int


@dataclass(frozen=True)
class EngineLanes:
    """Lanes of live parameters as hex text, as of `version`; `refused`: tensors without lanes, and why.
    `changed`: a patch came between."""

    version: int | None
    lanes: Mapping[str, str]
    refused: Mapping[str, str]
    changed: bool


def lanes_of(fields: Mapping[str, object]) -> EngineLanes:
    """As the plugin's door `digest` tells them."""
    version = fields.get("version")
    return EngineLanes(
        version if type(version) is int else None,
        _texts(fields.get("lanes")),
        _texts(fields.get("refused")),
        fields.get("changed") is True,
    )


def held_of(fields: Mapping[str, object]) -> HeldWeights | None:
    """What the plugin says that the engine holds; None where it does not know."""
    version, root = fields.get("version"), fields.get("root")
    if type(version) is not int or not isinstance(root, str) or len(root) > QUOTED:
        return None
    return HeldWeights(version, root)


def _texts(value: object) -> dict[str, str]:
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


class Patchable(Protocol):
    """An engine whose memory can be patched, spoken to in its dialect. What Engine says of the methods that
    it has too holds here."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def pauses_itself(self) -> bool:
        """Whether it takes a patch with the pause around it as one order."""

    def probe(self) -> EngineFacts: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...

    def reload(self, path: str, label: str) -> ReloadOutcome:
        """From disk. The engine then holds nothing that it has a name for, until `hold`."""

    def hold(self, held: HeldWeights, label: str) -> None:
        """Tells the engine what it has loaded from disk. Raises EngineFailed."""

    def check(self, patch: PatchFile) -> None:
        """Whether all of its workers could take it now, while it serves. Raises NotTaken."""

    def apply(self, patch: PatchFile, label: str, *, pausing: bool) -> ReloadOutcome:
        """Sent once. `pausing`: with a pause of its own, as part of the order; else it is paused. Intact:
        nothing of it is in the weights."""

    def confirm(self, held: HeldWeights | None, label: str) -> Confirmation:
        """Asks what it holds. EngineFailed when it names other weights."""

    def relabel(self, label: str) -> Confirmation: ...

    def lanes(self, names: Sequence[str]) -> EngineLanes:
        """Of these tensors, read from its memory while it serves. Raises EngineFailed."""


@dataclass(frozen=True)
class Aim:
    """Where a reload leads. `patch`: checked by the engine; without one, `why` and `reason` say so.
    `watched`: others are asked while the engine is paused, so that only the caller may resume it."""

    held: HeldWeights
    patch: PatchFile | None = None
    why: Why = "align"
    reason: str = ALIGNED
    watched: bool = False


@dataclass(frozen=True)
class LiveFacts:
    """Since the start. `way`: how it came to what it holds; `because`: reloads from disk by their cause;
    `reason`: of the last one, empty after a patch."""

    way: Way = ""
    patches: int = 0
    reloads: int = 0
    because: Mapping[Why, int] = field(default_factory=dict)
    reason: str = ""


class Live:
    """As the engine that it wraps, with a patch before its reload where `aim` names one."""

    def __init__(self, engine: Patchable) -> None:
        self.engine = engine
        self._aim: Aim | None = None
        self._untried: PatchFile | None = None
        self._pauses_itself = False
        """with the patch that is untried"""
        self._why: Why = "align"
        self._reason = ""
        self._way: Way = ""
        self._patches, self._because = 0, Counter[Why]()
        self._failures = self._wait = 0

    @property
    def spec(self) -> EngineSpec:
        return self.engine.spec

    @property
    def copies_weights(self) -> bool:
        return True

    @property
    def facts(self) -> LiveFacts:
        return LiveFacts(
            self._way, self._patches, sum(self._because.values()), dict(self._because), self._reason
        )

    def waits(self) -> bool:
        """Whether this version is to be loaded from disk, since patches failed in the pause before. Called
        once per version."""
        waits = self._wait > 0
        self._wait -= waits
        return waits

    def aim(self, aim: Aim) -> None:
        """Before every alignment."""
        self._aim, self._untried = aim, aim.patch
        self._pauses_itself = aim.patch is not None and not aim.watched and self.engine.pauses_itself
        self._why, self._reason = aim.why, aim.reason

    def probe(self) -> EngineFacts:
        return self.engine.probe()

    def pause(self) -> None:
        """Left to the patch where it pauses the engine itself."""
        if not self._pauses_itself:
            self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def relabel(self, label: str) -> Confirmation:
        return self.engine.relabel(label)

    def close(self) -> None:
        self.engine.close()

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        patch, self._untried = self._untried, None
        if patch is not None:
            outcome = self.engine.apply(patch, label, pausing=self._pauses_itself)
            failpoint("engine.applied")
            if isinstance(outcome, Done):
                self._patched()
                return outcome
            self._failed("in-doubt" if isinstance(outcome, Suspect) else "rolled-back", outcome.reason)
            if isinstance(outcome, Suspect):
                return outcome
        try:
            self._pause_after_all()
        except EngineFailed as failure:
            return Intact(str(failure), unpaused=failure)
        return self._reload(path, label)

    def _pause_after_all(self) -> None:
        """Before a reload in the place of a patch that would have paused the engine itself."""
        if self._pauses_itself:
            self.engine.pause()
            self._pauses_itself = False

    def _reload(self, path: str, label: str) -> ReloadOutcome:
        outcome = self.engine.reload(path, label)
        if isinstance(outcome, Done):
            self._way = "reload"
            self._because[self._why] += 1
            self._hold(label)
        return outcome

    def _hold(self, label: str) -> None:
        """What was loaded is known here also when the engine does not take it: then it is not patched
        next."""
        if self._aim is not None:
            try:
                self.engine.hold(self._aim.held, label)
            except EngineFailed as failure:
                self._aim, self._reason = None, str(failure)

    def _patched(self) -> None:
        self._way, self._why, self._reason = "live", "align", ""
        self._pauses_itself = False
        self._patches += 1
        self._failures = 0

    def _failed(self, why: Why, reason: str) -> None:
        self._why, self._reason = why, reason
        self._failures += 1
        self._wait = min(2 ** min(self._failures - 1, 30) - 1, MOST_WAITED)

    def read_back(self, label: str) -> Confirmation:
        return self.engine.confirm(None if self._aim is None else self._aim.held, label)


def live_of(engine: Engine) -> Live | None:
    """The adapter, if its engine takes patches."""
    return engine if isinstance(engine, Live) else None


@dataclass(frozen=True)
class Offer:
    """`patch`: checked; None: the engine loads from disk, because of `why`."""

    patch: PatchFile | None = None
    why: Why = "align"
    reason: str = ALIGNED

    def aim(self, target: Position) -> Aim:
        """Towards the local checkpoint's version; a patch that leads elsewhere is none."""
        held = weights_of(target)
        if self.patch is not None and HeldWeights(self.patch.version, self.patch.root) != held:
            return Aim(held)
        return Aim(held, self.patch, self.why, self.reason)


@dataclass(frozen=True)
class Candidate:
    """An engine that takes patches, and what is known of it now."""

    name: str
    live: Live
    record: EngineState | None
    observation: Observation
    grouped: bool = False
    """it is one of a group whose other hosts stage no patches"""


def start_of(one: Candidate, steps: Sequence[Step]) -> int | Offer:
    """The first of `steps` that the engine needs, else why it loads from disk. No IO."""
    record, facts = one.record, one.observation.facts
    if one.grouped:
        return Offer(None, "group", "its other hosts stage no patches: --group-patch is not set")
    if facts.unpatchable:
        return Offer(None, "unpatchable", facts.unpatchable)
    served = None if record is None or record.mark is not Mark.SERVED else record.version
    held = facts.held
    # what it holds is found among the steps by its root
    if (
        served is None
        or held is None
        or not is_in_sync(record, one.observation, HeldWeights(served, held.root))
    ):
        return Offer(None, "unknown", "it was started, or its weights were changed, since the last version")
    for number, step in enumerate(steps):
        if held.root == step.base.root:
            return number
    return Offer(
        None, "journal", f"no journals lead from what it holds to version {steps[-1].target.version}"
    )


def make_offers(
    local: LocalCheckpoint,
    steps: Sequence[Step],
    candidates: Sequence[Candidate],
    each: Callable[[Sequence[Candidate], Callable[[Candidate], Offer]], Sequence[Offer]],
    readers: Readers | None,
) -> dict[str, Offer]:
    """By name. `steps` as of `write_engine_patch`; `each` runs a function for all engines at once. Raises
    nothing for what an engine, a journal or the disk does."""
    starts = {one.name: start_of(one, steps) for one in candidates}
    found = {name: start for name, start in starts.items() if isinstance(start, Offer)}
    found |= {one.name: _WAITS for one in candidates if one.name not in found and one.live.waits()}
    bases = {
        one.name: _Base(held.version, start)
        for one in candidates
        if one.name not in found
        and isinstance(start := starts[one.name], int)
        and (held := one.observation.facts.held) is not None
    }
    if not bases:
        return found
    base, _ = Counter(bases.values()).most_common(1)[0]
    found |= {name: _APART for name, its in bases.items() if its != base}
    fit = [one for one in candidates if one.name not in found]
    patch = write_patch(local, steps[base.start :], base.version, readers)
    checked = [patch] * len(fit) if isinstance(patch, Offer) else each(fit, lambda one: _checked(one, patch))
    failpoint("engine.checked")
    return found | {one.name: offer for one, offer in zip(fit, checked, strict=True)}


@dataclass(frozen=True)
class _Base:
    """The version that engines hold, and the first step from there."""

    version: int
    start: int


_WAITS = Offer(None, "waiting", "patches failed in the pause before; some versions are loaded from disk")
_APART = Offer(None, "journal", "other engines hold another version, and a patch has one base")


def write_patch(
    local: LocalCheckpoint, steps: Sequence[Step], base_version: int, readers: Readers | None
) -> PatchFile | Offer:
    """In the place of older ones. Raises nothing for what a journal or the disk does."""
    try:
        drop_engine_patches(local.paths)
        made = write_engine_patch(local, steps, base_version)
        if readers is not None:
            grant_read_patches(local, readers)
    except WeightcastError as error:
        return Offer(None, "patch", error.message)
    except OSError as error:
        return Offer(None, "patch", disk_text(error, local.paths.room))
    failpoint("engine.staged")
    return PatchFile(made.name, made.version, made.root, made.changes)


def _checked(one: Candidate, patch: PatchFile) -> Offer:
    try:
        with guarded(one.live.spec):
            one.live.engine.check(patch)
    except EngineFailed as refusal:
        return Offer(None, "refused", refusal.message)
    return Offer(patch)
