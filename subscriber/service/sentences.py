"""Moves of the local checkpoint as the console log tells them: one sentence each."""

from __future__ import annotations

from weightcast.shared.errors import counted
from weightcast.shared.service.logs import size_text
from weightcast.subscriber.status import UpdateStatus


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
