"""From what a step knows to the status that HTTP threads show: one frozen snapshot, swapped whole."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from weightcast.shared.channel.signing import Trust
from weightcast.shared.checkpoint.state.state import EngineState, LocalState, Mark, Phase
from weightcast.shared.daemon.status import SOFTWARE, Snapshot, verify_status
from weightcast.subscriber.engines.host import Engines, HostEngine
from weightcast.subscriber.groups.lead import Lead, Line
from weightcast.subscriber.status import (
    KEPT_UPDATES,
    BlockedStatus,
    EngineCondition,
    EngineStatus,
    EngineVerifyStatus,
    GroupStatus,
    HostStatus,
    LastError,
    MemberStatus,
    UpdateStatus,
    served,
    weakest,
)
from weightcast.subscriber.sync.host import SyncOptions
from weightcast.subscriber.sync.step_log import Failed
from weightcast.subscriber.sync.sync import Sync

if TYPE_CHECKING:
    from weightcast.subscriber.sync.group_follower import Post


from weightcast.shared.base.errors import counted
from weightcast.shared.daemon.logs import size_text

ShownMark = Literal["served", "pausing", "suspect", "unknown"]
_MARKS: Mapping[Mark, ShownMark] = {
    Mark.SERVED: "served",
    Mark.PAUSING: "pausing",
    Mark.SUSPECT: "suspect",
}


class StatusBuilder:
    """`show` is what `Sync` calls; `status` is read by any thread."""

    def __init__(self, options: SyncOptions) -> None:
        self.status = Snapshot(
            HostStatus(
                software=SOFTWARE,
                host=socket.gethostname(),
                channel=str(options.channel.absolute()),
                local=str(options.local.absolute()),
                target=options.target.text,
            )
        )
        self._updates: deque[UpdateStatus] = deque(maxlen=KEPT_UPDATES)
        self._taken = 0

    def show(self, sync: Sync) -> None:
        self._take_moves(sync)
        view, state = sync.log.view, sync.host.state
        engines = engines_status(sync.engines, state, view.engine_verify)
        local_version = _readable_version(state)
        confirmed = served(engines, local_version)
        target = view.target_version
        self.status.set(
            self.status.get().but(
                state=view.state,
                progress_bytes=view.progress_bytes,
                bytes_read=view.bytes_read,
                bytes_by_cause=view.bytes_by_cause,
                local_version=local_version,
                target_version=target,
                served_version=confirmed,
                confirmed_by=weakest(engine.confirmed_by for engine in engines),
                lag_versions=None if None in (target, confirmed) else target - confirmed,  # type: ignore[operator]
                updates=tuple(self._updates),
                signed=_signed(sync.options.trust, state),
                engines=engines,
                degraded=view.degraded,
                carried=view.files.carried,
                engines_to_restart=view.files.to_restart,
                left_behind=view.files.left_behind,
                base_notes=view.files.base_notes,
                base_files=view.files.base_files,
                last_error=_last_error(view.last_error),
                waiting_for=view.waiting_for,
                ready=not view.not_ready,
                not_ready_reasons=view.not_ready,
                verify=verify_status(view.scrub),
                reload_proof=view.proof,
                **_of_state(state),
            )
        )

    def _take_moves(self, sync: Sync) -> None:
        """`moves` starts anew with every step."""
        moves = sync.log.moves
        if len(moves) < self._taken:
            self._taken = 0
        self._updates.extend(moves[self._taken :])
        self._taken = len(moves)


def _last_error(failed: Failed | None) -> LastError | None:
    if failed is None:
        return None
    error = failed.error
    return LastError(error=type(error).__name__, message=error.message, remedy=error.remedy, at=failed.at)


def _signed(trust: Trust | None, state: LocalState | None) -> str:
    if trust is None:
        return "not checked"
    key = None if state is None else trust.signer(state.position.digest)
    return "not verified" if key is None else f"verified by {key}"


def _readable_version(state: LocalState | None) -> int | None:
    """None while nothing is seeded, or the bytes are being written."""
    if state is None or state.phase in (Phase.SEEDING, Phase.DIRTY):
        return None
    return state.position.version


def _of_state(state: LocalState | None) -> dict[str, object]:
    if state is None:
        return {}
    return {
        "run_id": state.run_id,
        "local_root": state.position.root,
        "last_full_hash": state.last_full_hash,
        "assurance": "changed-tensors" if state.foreign else "full",
        "blocked": tuple(
            BlockedStatus(version=b.version, digest=b.digest, reason=b.reason, attempts=b.attempts)
            for b in state.blocked
        ),
    }


def engines_status(
    engines: Engines, state: LocalState | None, verified: Mapping[str, EngineVerifyStatus]
) -> tuple[EngineStatus, ...]:
    in_sync = frozenset[str]() if state is None else engines.in_sync(state)
    serving = frozenset[str]() if state is None else engines.serving(state)

    def status(engine: HostEngine) -> EngineStatus:
        spec, name, facts, last = engine.spec, engine.name, engine.facts, engine.last
        record = None if state is None else state.engines.get(name)
        phases = {} if last is None else last.phases
        return EngineStatus(
            name=name,
            kind=spec.kind,
            url=spec.shown_url,
            mark="unknown" if record is None else _MARKS[record.mark],
            version=None if record is None else record.version,
            confirmed_by="" if record is None else record.confirmed_by,
            process=facts.process if record is None else record.process,
            aligned=name in in_sync,
            reachable=facts.reachable,
            reason="" if name in serving else engine.reason,
            ready=name in serving,
            state=_condition(engine, record, in_sync=name in in_sync, serving=name in serving),
            failures=engine.failures,
            seconds={phase: round(seconds, 6) for phase, seconds in phases.items()},
            pause_seconds=None if last is None else last.pause_seconds,
            via=spec.via,
            drafter=facts.drafter,
            live=None if engine.live is None else engine.live.facts.but(verify=verified.get(name)),
        )

    return tuple(map(status, engines.engines))


def _condition(
    engine: HostEngine, record: EngineState | None, *, in_sync: bool, serving: bool
) -> EngineCondition:
    if serving:
        return "serving"
    if in_sync:
        return "paused"
    if engine.failed:
        return "failed"
    if not engine.facts.reachable:
        return "silent"
    return "suspect" if record is not None and record.mark is Mark.SUSPECT else "waiting"


def group_status(lead: Lead, post: Post | None) -> GroupStatus | None:
    """As of now."""
    if post is not None:
        hold = post.hold()
        return GroupStatus(
            role="follower",
            leader=hold.leader,
            state=hold.state,
            ordered_version=hold.version,
            reason=hold.reason,
            lease_seconds_left=hold.seconds_left,
            heard_seconds_ago=post.heard_seconds(),
        )
    if lead.members:
        return GroupStatus(role="leader", members=tuple(map(_member_status, lead.lines)))
    return None


def _member_status(line: Line) -> MemberStatus:
    hold = line.hold
    return MemberStatus(
        url=line.member.url,
        state="unknown" if hold is None else hold.state,
        version=None if hold is None else hold.local_version,
        reason=line.failure or ("" if hold is None else hold.reason),
        seconds_left=None if hold is None else hold.seconds_left,
    )


def of_move(move: UpdateStatus, served_version: int | None, words: int) -> str:
    """`served_version`: what engines confirmed; `words`: all that the model has."""
    version = f"version {move.version}" + ("" if move.step is None else f" (step {move.step})")
    facts = [f"{move.seconds['total']:.2f} s"]
    if move.pause_seconds is not None:
        facts.append(f"pause {1000 * move.pause_seconds:.0f} ms")
    match move.kind:
        case "patch":
            facts[:0] = [f"{size_text(move.bytes)} fetched", f"{move.changes / max(words, 1):.1%} changed"]
            done = "serving" if served_version == move.version else "local checkpoint is now"
        case "seed":
            facts[:0] = [f"{size_text(move.bytes)} read"]
            done = "seeded"
        case "repair":
            facts[:0] = [counted(move.changes, "wrong word")]
            done = "repaired"
        case "undo":
            done = "rolled back to"
        case "relabel":
            done = "same weights are now"
        case _:
            done = "engines reloaded with"
    return f"{done} {version}: {', '.join(facts)}"
