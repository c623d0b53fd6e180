"""What the daemon tells people as it happens: lines in the log, and the hook for failed engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from weightcast.shared.base.errors import EngineFailed, WeightcastError, counted
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.logs import get_log, size_text
from weightcast.subscriber.status import EngineStatus, HostStatus, UpdateStatus

EXIT = "exit"
NO_VERSION = -1

log = get_log("sync")
engines_log = get_log("engines")


class Announcer:
    """Lines of the log, each when what it says has changed."""

    def __init__(self) -> None:
        self._said: dict[str, object] = {}
        self._untaken: int | None = None
        """the version of a reload of this step that no engine took"""

    def _is_news(self, subject: str, facts: object) -> bool:
        before = self._said.get(subject, ())
        self._said[subject] = facts
        return facts != before

    def waits(self, status: HostStatus) -> None:
        """Once for each file, also where several steps wait for it."""
        waiting = status.waiting_for
        if waiting is not None and self._is_news("awaited", waiting.file):
            seconds = round(waiting.until - time.time())
            log.warning(
                "waiting for a file", sentence=f"{waiting}; up to {seconds} s more", **waiting.by_name()
            )

    def moved(self, move: UpdateStatus, status: HostStatus, words: int) -> None:
        """At once: what follows in the same step may take long. `words`: all that the model has."""
        if move.kind == "reload" and not move.taken:
            self._untaken = move.version
            return
        parts = {f"{part}_s": round(seconds, 4) for part, seconds in move.seconds.items()}
        log.info(
            "engines reloaded" if move.kind == "reload" else "version",
            sentence=sentence_of(move, status.served_version, words),
            kind=move.kind,
            from_version=move.from_version,
            version=move.version,
            step=move.step,
            target=status.target_version,
            folded=move.folded,
            bytes=move.bytes,
            changes=move.changes,
            pause_total_s=None if move.pause_seconds is None else round(move.pause_seconds, 4),
            **parts,
        )

    def not_taken(self, status: HostStatus) -> None:
        """After every step: what no engine took, unless the last line said the same."""
        version, self._untaken = self._untaken, None
        reasons = status.not_ready_reasons
        if version is not None and self._is_news("troubles", reasons):
            log.warning("engines not reloaded", version=version, reasons=list(reasons))

    def ended_well(self, status: HostStatus) -> None:
        """After a step without an error."""
        self._said.pop("awaited", None)
        if self._is_news("to restart", status.engines_to_restart) and status.engines_to_restart:
            engines, files = list(status.engines_to_restart), list(status.carried)
            log.warning("config files changed: restart engines", engines=engines, files=files)
        if self._is_news("left behind", status.left_behind):
            log.info("files left behind", files=list(status.left_behind))
        if self._is_news("base notes", status.base_notes):
            log.info("small faults in the base, tolerated", notes=list(status.base_notes))
        for name in [each for each in self._said if each.startswith("adapter ")]:
            if name not in status.components:
                log.info("adapter", sentence=f"{name} is retired, or excluded by --adapters", loaded=[])
                del self._said[name]
        for name, one in status.components.items():
            if self._is_news(name, one.loaded) and one.loaded:
                did = "serving" if status.engines else "exported"
                log.info("adapter", sentence=f"{did} {one.name}@{one.loaded[0]}", loaded=list(one.loaded))
        troubles = (*status.not_ready_reasons, *status.degraded)
        if self._is_news("troubles", troubles):
            if troubles:
                log.warning(
                    "not ready" if status.not_ready_reasons else "degraded",
                    version=status.local_version,
                    reasons=list(troubles),
                )
            else:
                sentence = f"all engines serve version {status.local_version}"
                log.info("all engines serve", sentence=sentence, version=status.local_version)


def sentence_of(move: UpdateStatus, served_version: int | None, words: int) -> str:
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


class FailedEngines:
    """Tells a supervisor of engines that have failed, once for each failure. `command`: run for every engine
    that fails, in a thread of its own; `exit`: `stop` is called instead, and `error` says why; None: a line
    in the log is all."""

    def __init__(self, command: str | None, hook_seconds: float, stop: Callable[[], None]) -> None:
        self._command, self._seconds, self._stop = command, hook_seconds, stop
        self._told: frozenset[str] = frozenset()
        self.error: EngineFailed | None = None

    def tell(self, status: HostStatus) -> None:
        failed = {engine.name: engine for engine in status.engines if engine.state == "failed"}
        for name in failed.keys() - self._told:
            self._tell(failed[name], status)
        self._told = frozenset(failed)

    def _tell(self, engine: EngineStatus, status: HostStatus) -> None:
        engines_log.error("engine failed", engine=engine.name, reason=engine.reason, failures=engine.failures)
        if self._command == EXIT:
            self.error = EngineFailed(
                f"engine {engine.name} has failed: {engine.reason}", remedy="restart the engine; see its log"
            )
            self._stop()
        elif self._command is not None:
            threading.Thread(
                target=self._run, args=(self._command, engine, status), name="engine-failed", daemon=True
            ).start()

    def _run(self, command: str, engine: EngineStatus, status: HostStatus) -> None:
        try:
            run_hook(
                command,
                version=NO_VERSION if status.local_version is None else status.local_version,
                directory=Path(status.local),
                phase="engine_failed",
                deadline_seconds=self._seconds,
                more={
                    "WEIGHTCAST_ENGINE_NAME": engine.name,
                    "WEIGHTCAST_ENGINE_URL": engine.url,
                    "WEIGHTCAST_ENGINE_REASON": engine.reason.replace("\0", " "),
                },
            )
        except WeightcastError as error:
            engines_log.error("hook failed", engine=engine.name, error=error.message, remedy=error.remedy)
