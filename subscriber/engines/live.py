"""Patches of the weights in an engine's memory, with the reload from disk behind them.

A patch is tried once, and only if the engine has checked it before: in one order with its pause where the
engine takes that, else in a pause of ours. Whatever else comes of it than a success that is said, the engine
loads the checkpoint from disk: at once where nothing was changed, and as a suspect, paused, where nobody
knows.

Offers: one patch file per version, made from the journals and checked by each engine while it serves. An
engine that cannot take it loads the checkpoint from disk, and its offer says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers, grant_read_patches
from weightcast.shared.checkpoint.state.state import EngineState, Mark, Step
from weightcast.shared.checkpoint.update.engine_patch import (
    EnginePatch,
    drop_engine_patches,
    write_engine_patch,
)
from weightcast.shared.files.disk_errors import disk_text
from weightcast.subscriber.engines.adapter import LiveAdapter, guarded
from weightcast.subscriber.engines.base import Confirmation, Done, HeldWeights, Intact, ReloadOutcome, Suspect
from weightcast.subscriber.engines.rules import is_in_sync
from weightcast.subscriber.status import EngineVerifyStatus, LiveStatus

if TYPE_CHECKING:
    from weightcast.subscriber.engines.host import HostEngine

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
E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True)
class Offer:
    """How an engine comes to a version: by `patch`, which it checked; None: from disk, because of `why`."""

    patch: EnginePatch | None = None
    why: Why = "align"
    reason: str = "it was brought to the local version, as after its start"


class Live:
    """How an engine that takes patches is paused and brought to a version, and how that went."""

    def __init__(self, adapter: LiveAdapter) -> None:
        self.adapter = adapter
        self.facts = LiveStatus()
        self._aim: HeldWeights | None = None
        """what it holds after the next reload; None: it did not take our word for that"""
        self._untried: EnginePatch | None = None
        self._pauses_itself = False
        """with the patch that is untried"""
        self._why: Why = "align"
        self._failures = self._wait = 0

    def waits(self) -> bool:
        """Whether this version is to be loaded from disk, since patches failed in the pause before. Called
        once per version."""
        waits = self._wait > 0
        self._wait -= waits
        return waits

    def check(self, patch: EnginePatch) -> Offer:
        """Has the engine check it while it serves."""
        try:
            with guarded(self.adapter.spec):
                self.adapter.check(patch)
        except EngineFailed as refusal:
            return Offer(None, "refused", refusal.message)
        return Offer(patch)

    def aim(self, held: HeldWeights, offer: Offer, *, watched: bool) -> None:
        """Before every reload: towards the local checkpoint's version; a patch that leads elsewhere is none.
        `watched`: others are asked while the engine is paused, so that only the caller may resume it."""
        patch = offer.patch
        if patch is not None and HeldWeights(patch.version, patch.root) != held:
            offer, patch = Offer(), None
        self._aim, self._untried, self._why = held, patch, offer.why
        self._pauses_itself = patch is not None and not watched and self.adapter.pauses_itself
        self.facts = self.facts.but(reason=offer.reason)

    def pause(self) -> None:
        """Left to the patch where it pauses the engine itself."""
        if not self._pauses_itself:
            self.adapter.pause()

    def reload(self, path: str, label: str) -> ReloadOutcome:
        patch, self._untried = self._untried, None
        if patch is not None:
            outcome = self.adapter.apply(patch, label, pausing=self._pauses_itself)
            failpoint("engine.applied")
            if isinstance(outcome, Done):
                self._pauses_itself, self._why, self._failures = False, "align", 0
                patches = self.facts.patches + 1
                self.facts = self.facts.but(way="live", patches=patches, reason="")
                return outcome
            self._why = "in-doubt" if isinstance(outcome, Suspect) else "rolled-back"
            self.facts = self.facts.but(reason=outcome.reason)
            self._failures += 1
            self._wait = min(2 ** min(self._failures - 1, 30) - 1, MOST_WAITED)
            if isinstance(outcome, Suspect):
                return outcome
        if self._pauses_itself:
            try:
                self.adapter.pause()
            except EngineFailed as failure:
                return Intact(str(failure), unpaused=failure)
            self._pauses_itself = False
        outcome = self.adapter.reload(path, label)
        if isinstance(outcome, Done):
            because = {**self.facts.because, self._why: self.facts.because.get(self._why, 0) + 1}
            self.facts = self.facts.but(way="reload", because=because, reloads=self.facts.reloads + 1)
            self._hold(label)
        return outcome

    def _hold(self, label: str) -> None:
        """What was loaded is known here also when the engine does not take it: then it is not patched
        next."""
        if self._aim is not None:
            try:
                self.adapter.hold(self._aim, label)
            except EngineFailed as failure:
                self._aim = None
                self.facts = self.facts.but(reason=str(failure))

    def note_read(self, facts: EngineVerifyStatus | None) -> None:
        """What was read of its memory since the start."""
        self.facts = self.facts.but(verify=facts)

    def read_back(self, label: str) -> Confirmation:
        return self.adapter.confirm(self._aim, label)


def start_of(
    engine: HostEngine, record: EngineState | None, steps: Sequence[Step], *, grouped: bool
) -> tuple[int, int] | Offer:
    """The version that the engine holds, and the first of `steps` from there, else why it loads from disk.
    No IO."""
    facts = engine.facts
    if grouped:
        return Offer(None, "group", "its other hosts stage no patches: --group-patch is not set")
    if facts.unpatchable:
        return Offer(None, "unpatchable", facts.unpatchable)
    served = None if record is None or record.mark is not Mark.SERVED else record.version
    held = facts.held
    # what it holds is found among the steps by its root
    if (
        served is None
        or held is None
        or not is_in_sync(record, engine.observation, HeldWeights(served, held.root))
    ):
        return Offer(None, "unknown", "it was started, or its weights were changed, since the last version")
    for number, step in enumerate(steps):
        if held.root == step.base.root:
            return held.version, number
    return Offer(
        None, "journal", f"no journals lead from what it holds to version {steps[-1].target.version}"
    )


WAITS = Offer(None, "waiting", "patches failed in the pause before; some versions are loaded from disk")
APART = Offer(None, "journal", "other engines hold another version, and a patch has one base")


def write_patch(
    local: LocalCheckpoint, steps: Sequence[Step], base_version: int, readers: Readers | None
) -> EnginePatch | Offer:
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
    return made


def side_by_side(engines: Sequence[E], work: Callable[[E], T]) -> list[T]:
    """In threads, so that an interrupt of the caller waits for engines that are paused."""
    if not engines:
        return []
    with ThreadPoolExecutor(len(engines), thread_name_prefix="engine") as pool:
        return list(pool.map(work, engines))
