"""What trainers and routers written for Stitch send to a replica, and read from it: names, in their words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEMBER = "weight_version"
"""of a request: an object with the versions that it accepts"""


def conditions(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Values of another type count as none."""
    return {name: asked[name] for name in ("min_version", "exact_version") if type(asked.get(name)) is int}


def not_ready(message: str, served: int | None, target: int) -> dict[str, object]:
    """The body of a 409."""
    facts = {"type": "WeightVersionNotReady", "target_version": target, "applied": served}
    return {**facts, "message": message}


def add_versions(answer: dict[str, Any], low: int, high: int) -> None:
    found = answer.get("meta_info")
    holder = found if isinstance(found, dict) else answer
    holder |= {"weight_version_start": low, "weight_version_end": high}


def health(error: str) -> dict[str, object]:
    return {"ready": False, "reason": error} if error else {"ready": True}


def server_info(
    *, ready: bool, run_id: str, served: int | None, target: int, requests: int, in_place: bool
) -> dict[str, object]:
    """What an engine's own answer lacks."""
    run = f"{run_id}/" if run_id else ""
    state = "COMMITTING" if served is None else "IDLE" if served == target else "FETCHING"
    return {
        "ready": ready,
        "applied": None if served is None else f"{run}weight_v{served:06d}",
        "sync_state": state,
        "reason": None,
        "run_id": run_id or None,
        "commit_mode": "in_place" if in_place else "quiesce",
        "active_requests": requests,
        "update_destination_ready": True,
        "update_destination_error": None,
        "terminal_error": None,
        "metrics": {"applied_version": served, "target_version": target},
    }
