"""What trainers and routers written for Stitch send to a replica, and read from it: names, in their words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.subscriber.gate.traffic import Traffic

MEMBER = "weight_version"
"""of a request: an object with the versions that it accepts"""


def conditions(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Values of another type count as none."""
    return {name: asked[name] for name in ("min_version", "exact_version") if type(asked.get(name)) is int}


def not_ready(message: str, served: int | None, target: int) -> dict[str, object]:
    """The body of a 409."""
    kind = "WeightVersionNotReady"
    return {"type": kind, "target_version": target, "applied": served, "message": message}


def add_versions(answer: dict[str, Any], low: int, high: int) -> None:
    found = answer.get("meta_info")
    holder = found if isinstance(found, dict) else answer
    holder |= {"weight_version_start": low, "weight_version_end": high}


def server_info(traffic: Traffic, run_id: str) -> dict[str, object]:
    """What an engine's own answer lacks."""
    served, target = traffic.served, traffic.target
    run = f"{run_id}/" if run_id else ""
    return {
        "ready": traffic.is_healthy,
        "applied": None if served is None else f"{run}weight_v{served:06d}",
        "sync_state": "COMMITTING" if served is None else "IDLE" if served == target else "FETCHING",
        "reason": None,
        "run_id": run_id or None,
        "commit_mode": "in_place" if traffic.policy == "pass" else "quiesce",
        "active_requests": sum(len(door.calls) for door in traffic.doors.values()),
        "update_destination_ready": True,
        "update_destination_error": None,
        "terminal_error": None,
        "metrics": {"applied_version": served, "target_version": target},
    }
