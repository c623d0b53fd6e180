"""What a host says of itself: `GET /v1/status`, `weightcast sync --json`, and the report in the channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Literal

from weightcast.shared.checkpoint.state.state import Blocked, LocalState, Mark, Phase
from weightcast.shared.checkpoint.verify.hashing import ScrubStatus
from weightcast.shared.daemon.status import Facts, Failure, FollowerStatus, KernelStatus

KEPT_UPDATES = 32

State = Literal[
    "starting", "waiting", "loading", "planning", "seeding", "fetching", "staging", "patching", "reloading",
    "hashing", "repairing", "gathering", "idle", "stopped",
]  # fmt: skip
MoveKind = Literal["seed", "patch", "relabel", "reload", "undo", "repair"]
Cause = Literal["step", "skip", "anchor", "repair"]
"""What bytes of the channel are read for: the delta from the version before, one from an older version, full
weights, or making damaged tensors anew (what comes from the base for that is counted too)."""
Assurance = Literal["full", "changed-tensors"]
"""What was proven of the local bytes: all of them against the run's root, or (foreign channels state no more)
the tensors that a version changed."""


EngineCondition = Literal["serving", "waiting", "paused", "suspect", "failed", "silent"]


class LastError(Failure):
    at: float
    """unix time"""


class EngineVerifyStatus(Facts):
    """What was read of an engine's memory, since the start."""

    done_bytes: int = 0
    """of this pass"""
    total_bytes: int = 0
    passes: int = 0
    full_pass: float | None = None
    """unix time at which the last whole pass began"""
    version: int | None = None
    """the last one at which every tensor was read and was right"""
    refused: int = 0
    """tensors in this pass that the engine cannot read back"""
    faults: int = 0
    last_fault: str = ""
    last_fault_at: float | None = None
    """unix time"""


class LiveStatus(Facts):
    """Of an engine with `via=live`, since the start."""

    way: Literal["", "live", "reload"] = ""
    """how it came to the version that it holds; empty: not since the start"""
    patches: int = 0
    reloads: int = 0
    because: Mapping[str, int] = field(default_factory=dict)
    """reloads from disk by their cause; docs/engines.md has the list"""
    reason: str = ""
    """of the last reload from disk; empty after a patch"""
    verify: EngineVerifyStatus | None = None
    """null until its memory was first read"""


class EngineStatus(Facts):
    name: str
    kind: str
    url: str
    mark: Mark | Literal["unknown"]
    version: int | None
    """confirmed last"""
    confirmed_by: str
    """digest, label or status-only"""
    process: str | None
    aligned: bool
    """it holds the local version's bytes, by a reload of ours in its present process"""
    reachable: bool
    reason: str
    """why it is not ready"""
    ready: bool = False
    """`aligned`, and not paused by somebody else: requests may be sent to it"""
    state: EngineCondition = "waiting"
    """`serving`: ready; `waiting`: it is yet to be reloaded; `paused`: aligned, and paused by somebody else;
    `suspect`: paused, as nobody knows what it holds; `failed`: it took no reload for too long, or cannot be
    used as it was started; `silent`: it does not answer"""
    failures: int = 0
    """rounds of failed reloads in a row"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """of its last reload: pause, patch, reload, read_back, resume"""
    pause_seconds: float | None = None
    """of its last reload: from the first call of the pause until the resume returned"""
    via: Literal["reload", "live", "ipc"] = "reload"
    """as configured"""
    drafter: str = ""
    """its draft model: `none`, the method of speculative decoding, or `unknown`; empty: not asked yet"""
    live: LiveStatus | None = None
    """null without `via=live`"""


class WaitingFor(Facts):
    """A file of the channel that the running step waits for."""

    version: int
    file: str
    reason: str
    """what is wrong with it"""
    retries: int
    since: float
    """unix time"""
    until: float
    """unix time at which the wait is given up; `--visible-deadline`"""

    def __str__(self) -> str:
        return f"waiting for version {self.version}: {self.reason}"


class ReloadProof(Facts):
    """What was proven of the local checkpoint's bytes before the last reload of engines."""

    bound_seconds: float
    """bytes last hashed longer ago are hashed again before a reload; 0: all bytes, before every reload"""
    age_seconds: float | None = None
    """of the oldest hash when the last reload began; null: none since the start"""
    at: float | None = None
    """unix time of that reload"""
    faults: int = 0
    """damaged tensors found before reloads since the start; each was repaired before an engine loaded it"""
    last_fault: str = ""
    last_fault_at: float | None = None
    """unix time"""


class UpdateStatus(Facts):
    """One move of the local checkpoint, or one reload of engines."""

    kind: MoveKind
    from_version: int | None
    version: int
    folded: int
    """versions taken in one step"""
    bytes: int
    """read from the channel or the base"""
    changes: int
    """words changed"""
    seconds: Mapping[str, float]
    """by phase: plan, seed, fetch, stage, offer (a patch for engines' memory, made and checked), group
    (waiting for its hosts), lock, patch, verify (hashing before a reload), pause, reload, read_back, resume,
    total; of several engines the slowest"""
    pause_seconds: float | None
    """longest time that an engine was paused"""
    around: tuple[str, ...] = ()
    """what of the channel is damaged and was gone around"""
    step: int | None = None
    """the trainer's, of a patch; information only"""
    taken: bool = True
    """false: no engine took the version, by this patch, relabel or reload"""
    at: float
    """unix time of its end"""


class MemberStatus(Facts):
    url: str
    state: str
    """free, working, prepared, held, refused, failed; unknown: not heard yet"""
    version: int | None
    """of its local checkpoint"""
    reason: str
    """why it is not where the leader wants it, or does not answer"""
    seconds_left: float | None
    """of its lease, when it last answered"""


class GroupStatus(Facts):
    """`members`: a leader's; the rest: a follower's."""

    role: Literal["leader", "follower"]
    members: tuple[MemberStatus, ...] = ()
    leader: str = ""
    """whose order is here, or was last"""
    state: str = ""
    ordered_version: int | None = None
    reason: str = ""
    lease_seconds_left: float | None = None
    heard_seconds_ago: float | None = None
    """since anybody last asked"""


class GateStatus(Facts):
    port: int
    url: str = ""
    """at which other machines reach it; in the host's report"""
    version: int | None
    """lowest version of the engines that requests are admitted to; null: none is"""
    requests: Mapping[str, int] = field(default_factory=dict)
    """under way, by engine"""
    waiting: int = 0
    """requests that no engine can take now"""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """what became of requests since the start, as in `weightcast_gate_requests_total`"""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """of answers, as engines count them, by the version that served when they were admitted"""


class AdapterStatus(Facts):
    name: str
    version: int | None
    """the newest that is here, proven"""
    target: int | None
    """the newest in the channel; null: not known yet"""
    main_version: int | None
    """that its version was trained on"""
    loaded: tuple[int, ...]
    """versions that every engine has, newest first"""
    state: Literal["loaded", "behind", "waiting", "failed"]
    """`loaded`: every engine has the newest; `behind`: an older one; `waiting`: none yet; `failed`: an error
    keeps it from the newest"""
    error: str = ""
    """what keeps it from the newest"""
    remedy: str = ""
    ready: bool = False
    """every engine has a version that belongs to the main weights here, or none was published yet"""


class HostStatus(FollowerStatus):
    """`served_version`: the lowest that an engine confirmed; without engines the local version."""

    state: State = "starting"
    progress_bytes: int = 0
    """done in this state"""
    progress_total: int | None = None
    """of a fetch: the bytes of the versions that are fetched together"""
    local_root: str | None = None
    confirmed_by: str = ""
    """the weakest of what the engines' confirmations rest on"""
    updates: tuple[UpdateStatus, ...] = ()
    """newest last"""
    bytes_read: int = 0
    """from the channel, since the start"""
    bytes_by_cause: Mapping[Cause, int] = field(default_factory=dict)
    """the same bytes, once what they are for has ended"""
    engines: tuple[EngineStatus, ...] = ()
    last_full_hash: float | None = None
    """unix time at which every byte was last read and agreed with the root"""
    last_full_hash_age_seconds: float | None = None
    verify: ScrubStatus | None = None
    """null until it first read"""
    reload_proof: ReloadProof | None = None
    """null until an engine was reloaded"""
    assurance: Assurance = "full"
    signed: str = ""
    """whose signature the local version bears: `verified by` and the key's id; `not verified` since the
    start; `not checked` without trusted keys"""
    degraded: tuple[str, ...] = ()
    """why the host is not where it should be, although it may be ready"""
    carried: tuple[str, ...] = ()
    """config files that the local version has in place of the base's"""
    engines_to_restart: tuple[str, ...] = ()
    """those that read config files at their start alone, and run since before these last changed"""
    left_behind: tuple[str, ...] = ()
    """files of the base that hosts do not get: other formats of the weights, trainer state, hidden ones"""
    base_notes: tuple[str, ...] = ()
    """small faults in the base that are tolerated"""
    base_files: str = ""
    """which of the others are missing here, or why that is not known; empty: all are here"""
    blocked: tuple[Blocked, ...] = ()
    waiting_for: WaitingFor | None = None
    """null unless the running step has waited for some seconds"""
    last_error: LastError | None = None
    kernels: KernelStatus = KernelStatus()
    group: GroupStatus | None = None
    """null: the host is in no engine group"""
    gate: GateStatus | None = None
    """null without --gate"""
    adapters: tuple[AdapterStatus, ...] = ()
    """those of the run that are followed here"""
    draft: AdapterStatus | None = None
    """the draft model as a component of its own; null without --draft"""

    @property
    def components(self) -> dict[str, AdapterStatus]:
        """All but main, as people name them."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {f"adapter {one.name}": one for one in self.adapters} | draft

    @property
    def lacking(self) -> dict[str, AdapterStatus]:
        """Components that keep the host from ready: not an adapter that fails where others are served."""
        serves = any(one.loaded for one in self.adapters)
        spared = [one for one in self.adapters if serves and one.state == "failed"]
        return {name: one for name, one in self.components.items() if not one.ready and one not in spared}


_WEAKEST_FIRST = ("status-only", "label", "digest")


def weakest(confirmations: Iterable[str]) -> str:
    found = set(confirmations)
    return next((one for one in _WEAKEST_FIRST if one in found), "")


def served(engines: Iterable[EngineStatus], local_version: int | None) -> int | None:
    """Lowest version confirmed; None as soon as one engine confirmed nothing, or may no longer serve it."""
    known = tuple(engines)
    if not known:
        return local_version
    versions = [engine.version for engine in known if engine.mark == "served"]
    if len(versions) < len(known):
        return None
    return min((version for version in versions if version is not None), default=None)


def with_local(status: HostStatus, state: LocalState | None, engines: tuple[EngineStatus, ...]) -> HostStatus:
    """The status with what the local state says, as far as there is one, and its engines."""
    if state is not None:
        status = status.but(
            run_id=state.run_id,
            local_root=state.position.root,
            last_full_hash=state.last_full_hash,
            assurance="changed-tensors" if state.foreign else "full",
            blocked=state.blocked,
        )
    # None while nothing is seeded, or the bytes are being written
    readable = state is not None and state.phase not in (Phase.SEEDING, Phase.DIRTY)
    version = state.position.version if state is not None and readable else None
    confirmed, target = served(engines, version), status.target_version
    return status.but(
        local_version=version,
        served_version=confirmed,
        confirmed_by=weakest(engine.confirmed_by for engine in engines),
        lag_versions=None if target is None or confirmed is None else target - confirmed,
        engines=engines,
    )
