"""Patches offered to engines: one file per version, made from the journals and checked by each engine while
it serves. Whoever cannot take it loads the checkpoint from disk, and the offer says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.access import Readers, let_read_patches
from weightcast.shared.checkpoint.state.state import EngineState, Mark, Position, Step
from weightcast.shared.checkpoint.update.engine_patch import drop_engine_patches, write_engine_patch
from weightcast.shared.files.disk_errors import disk_text
from weightcast.subscriber.engines.base import HeldWeights
from weightcast.subscriber.engines.live import ALIGNED, Aim, Live, PatchFile, Why
from weightcast.subscriber.engines.proxy import guarded
from weightcast.subscriber.engines.rules import Sight, is_aligned, weights_of


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
    sight: Sight
    grouped: bool = False
    """it is one of a group whose other hosts stage no patches"""


def start_of(one: Candidate, steps: Sequence[Step]) -> int | Offer:
    """The first of `steps` that the engine needs, else why it loads from disk. No IO."""
    record, facts = one.record, one.sight.facts
    if one.grouped:
        return Offer(None, "group", "its other hosts stage no patches: --group-patch is not set")
    if facts.unpatchable:
        return Offer(None, "unpatchable", facts.unpatchable)
    served = None if record is None or record.mark is not Mark.SERVED else record.version
    held = facts.held
    # what it holds is found among the steps by its root
    if served is None or held is None or not is_aligned(record, one.sight, HeldWeights(served, held.root)):
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
        and (held := one.sight.facts.held) is not None
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
            let_read_patches(local, readers)
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
