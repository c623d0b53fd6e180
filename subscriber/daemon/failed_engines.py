"""Tells a supervisor of engines that have failed, once for each failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.logs import get_log
from weightcast.subscriber.status import EngineStatus, HostStatus

EXIT = "exit"
NO_VERSION = -1

log = get_log("engines")


class FailedEngines:
    """`command`: run for every engine that fails, in a thread of its own; `exit`: `stop` is called instead,
    and `error` says why; None: a line in the log is all."""

    def __init__(self, command: str | None, hook_seconds: float, stop: Callable[[], None]) -> None:
        self._command = command
        self._seconds = hook_seconds
        self._stop = stop
        self._told: frozenset[str] = frozenset()
        self.error: EngineFailed | None = None

    def tell(self, status: HostStatus) -> None:
        failed = {engine.name: engine for engine in status.engines if engine.state == "failed"}
        for name in failed.keys() - self._told:
            self._tell(failed[name], status)
        self._told = frozenset(failed)

    def _tell(self, engine: EngineStatus, status: HostStatus) -> None:
        log.error("engine failed", engine=engine.name, reason=engine.reason, failures=engine.failures)
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
            log.error("hook failed", engine=engine.name, error=error.message, remedy=error.remedy)
