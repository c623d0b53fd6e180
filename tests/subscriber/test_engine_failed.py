"""An engine that has failed: what a supervisor is told, and by which route."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from weightcast.subscriber.daemon.announce import FailedEngines
from weightcast.subscriber.status import EngineStatus, HostStatus

NOTE = (
    "import os, sys; names = [name for name in sorted(os.environ) if name.startswith('WEIGHTCAST_')];"
    "open(sys.argv[1], 'a').write(repr([(name, os.environ[name]) for name in names]) + chr(10))"
)


def status(tmp_path: Path, *states: str) -> HostStatus:
    engines = tuple(
        EngineStatus(
            name=f"e{number}",
            kind="sglang",
            url=f"http://e{number}",
            mark="suspect",
            version=1,
            confirmed_by="label",
            process=None,
            aligned=False,
            reachable=True,
            reason="it does not load",
            state=state,  # type: ignore[arg-type]
            failures=5,
        )
        for number, state in enumerate(states)
    )
    return HostStatus(
        software="", host="h", channel="c", local=str(tmp_path), target="latest", local_version=3,
        engines=engines,
    )  # fmt: skip


def test_the_hook_runs_once_for_every_failure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = shlex.join([sys.executable, "-I", "-c", NOTE, str(out)])
    failed = FailedEngines(command, 30, stop=lambda: pytest.fail("it shall not end"))

    def lines() -> list[str]:
        return out.read_text().splitlines() if out.exists() else []

    failed.tell(status(tmp_path, "serving", "suspect"))
    failed.tell(status(tmp_path, "serving", "failed"))
    failed.tell(status(tmp_path, "serving", "failed"))
    wait_until(lambda: len(lines()) == 1)
    known = dict(eval(lines()[0]))
    assert known.pop("WEIGHTCAST_DEADLINE") and not known.keys() & {"WEIGHTCAST_TOKEN"}
    wanted = {
        "WEIGHTCAST_VERSION": "3",
        "WEIGHTCAST_DIR": str(tmp_path),
        "WEIGHTCAST_PHASE": "engine_failed",
        "WEIGHTCAST_ENGINE_NAME": "e1",
        "WEIGHTCAST_ENGINE_URL": "http://e1",
        "WEIGHTCAST_ENGINE_REASON": "it does not load",
    }
    assert wanted.items() <= known.items()
    failed.tell(status(tmp_path, "serving", "serving"))
    failed.tell(status(tmp_path, "serving", "failed"))
    wait_until(lambda: len(lines()) == 2)


def test_a_hook_that_fails_ends_nothing(tmp_path: Path) -> None:
    failed = FailedEngines("/no/such/hook", 30, stop=lambda: pytest.fail("it shall not end"))
    failed.tell(status(tmp_path, "failed"))
    assert failed.error is None


def test_the_word_exit_ends_the_daemon_with_the_reason(tmp_path: Path) -> None:
    ends: list[str] = []
    failed = FailedEngines("exit", 30, stop=lambda: ends.append("now"))
    failed.tell(status(tmp_path, "suspect"))
    assert ends == [] and failed.error is None
    failed.tell(status(tmp_path, "failed"))
    assert ends == ["now"] and failed.error is not None and failed.error.exit_code == 5
    assert "e0 has failed: it does not load" in failed.error.message


def test_without_a_hook_it_is_told_and_that_is_all(tmp_path: Path) -> None:
    failed = FailedEngines(None, 30, stop=lambda: pytest.fail("it shall not end"))
    failed.tell(status(tmp_path, "failed"))
    assert failed.error is None
