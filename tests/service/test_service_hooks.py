from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import is_running, wait_until

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.base.errors import NotInTime, Refused, RetryLater
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.settings import describe_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings


@pytest.fixture
def hook(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "a hook.py"
        path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
        path.chmod(0o755)
        return f"'{path}' 'two words' $HOME"

    return write


def run(command: str, seconds: float = 30.0) -> None:
    run_hook(command, version=8, directory=Path("/channel"), phase="pre_read", deadline_seconds=seconds)


def test_a_hook_sees_its_facts_and_no_shell(hook: Callable[[str], str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(
        hook(
            f"names = [f'WEIGHTCAST_{{n}}' for n in ('VERSION', 'DIR', 'PHASE', 'DEADLINE')]\n"
            f"open({str(out)!r}, 'w').write(repr([os.environ[n] for n in names] + sys.argv[1:]))\n"
            f"assert sys.stdin.read() == ''"
        )
    )
    assert out.read_text() == repr(["8", "/channel", "pre_read", "30", "two words", "$HOME"])


SETTINGS = [
    (setting.env, not setting.flag)
    for side in (PublisherSettings, SubscriberSettings)
    for setting in describe_settings(side)
]


@pytest.mark.parametrize("in_case", [str.upper, str.lower], ids=["upper", "lower"])
def test_no_secret_of_any_setting_reaches_a_hook(
    hook: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_case: Callable[[str], str]
) -> None:
    for name, is_secret in SETTINGS:
        monkeypatch.setenv(in_case(name), "hidden" if is_secret else "told")
    out = tmp_path / "out"
    run(hook(f"open({str(out)!r}, 'w').write(repr(dict(os.environ)))"))
    seen = ast.literal_eval(out.read_text())
    assert "hidden" not in seen.values()
    assert {name for name, value in seen.items() if value == "told"} == {
        in_case(name) for name, is_secret in SETTINGS if not is_secret
    }
    assert ("WEIGHTCAST_GROUP_TOKEN", True) in SETTINGS


def test_75_means_later(hook: Callable[[str], str]) -> None:
    with pytest.raises(RetryLater, match="mount is busy"):
        run(hook("print('mount is busy'); sys.exit(75)"))


def test_failure_is_refused_with_the_end_of_the_output(hook: Callable[[str], str]) -> None:
    with pytest.raises(Refused) as refused:
        run(hook("print('x' * 3_000_000); sys.stderr.write('no bucket'); sys.exit(4)"))
    assert "exit code 4" in refused.value.message
    assert refused.value.message.endswith("no bucket")
    assert len(refused.value.message) < 4000


def test_a_signal_is_named(hook: Callable[[str], str]) -> None:
    with pytest.raises(Refused, match="killed by signal 9"):
        run(hook("os.kill(os.getpid(), 9)"))


def test_the_deadline_kills_the_whole_group(hook: Callable[[str], str], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = hook(
        f"child = os.fork()\n"
        f"if child: open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child}}')\n"
        f"print('waiting', flush=True)\n"
        f"time.sleep(600)"
    )
    assert any("waiting" in message_of_the_killed(command, seconds) for seconds in (1.0, 10.0, 60.0, 120.0))
    own, child = map(int, pids.read_text().split())
    wait_until(lambda: not is_running(own) and not is_running(child))


def message_of_the_killed(command: str, seconds: float) -> str:
    """On a loaded machine an interpreter may take longer than that to begin."""
    with pytest.raises(NotInTime) as late:
        run(command, seconds)
    return late.value.message


def test_a_child_left_behind_holds_nobody_up(hook: Callable[[str], str], tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    os.mkfifo(go)
    command = hook(
        f"print('up', flush=True)\n"
        f"if os.fork() == 0:\n"
        f"    open({str(go)!r}).read(); print('still here', flush=True)\n"
        f"    open({str(done)!r}, 'w').close()"
    )
    run(command, 60)
    assert not done.exists()
    go.write_text("")
    wait_until(done.exists)


@pytest.mark.parametrize("command", ["", "   ", "'open quote", "/no/such/hook", "/"])
def test_commands_that_cannot_run_are_refused(command: str) -> None:
    with pytest.raises(Refused) as refused:
        run(command)
    assert refused.value.remedy
