"""The systemd units: command lines with the real command, texts with systemd where it is installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.subscriber.daemon.settings import SubscriberSettings

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/weightcast/bin/weightcast"
COMMAND = str(Path(sys.executable).with_name("weightcast"))
PUBLISHER, SUBSCRIBER = "weightcast-publisher.service", "weightcast-subscriber@.service"
ROLES: dict[str, type[ServiceSettings]] = {PUBLISHER: PublisherSettings, SUBSCRIBER: SubscriberSettings}


def service(unit: str) -> dict[str, list[str]]:
    """The section [Service]: all values of each key."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().partition("[Service]\n")[2].partition("\n[")[0].splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def start(unit: str) -> list[str]:
    (line,) = service(unit)["ExecStart"]
    program, *arguments = shlex.split(line)
    assert program == INSTALLED
    return [COMMAND, *arguments]


def environment(unit: str) -> dict[str, str]:
    return dict(line.replace("%i", "a").split("=", 1) for line in service(unit)["Environment"])


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTCAST_")}
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("unit", ROLES)
def test_the_command_line_is_one_of_the_command(unit: str) -> None:
    done = run([*start(unit), "--help"], {})
    assert done.returncode == 0, done.stderr
    assert "--config" in done.stdout


@pytest.mark.parametrize("unit", ROLES)
def test_settings_come_from_the_environment_and_wrong_ones_stop_it_for_good(unit: str) -> None:
    """Everything is taken from the environment but one value, which no daemon takes."""
    given = environment(unit) | {"WEIGHTCAST_CHANNEL": "/c", "WEIGHTCAST_BASE": "/b", "WEIGHTCAST_PORT": "x"}
    given.pop("WEIGHTCAST_CACHE")
    done = run(start(unit), given)
    assert done.returncode == 2
    problems = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert len(problems) == 1, done.stderr
    assert problems[0].startswith("port:")
    assert "2" in service(unit)["RestartPreventExitStatus"][0].split()


@pytest.mark.parametrize("unit", ROLES)
def test_the_step_may_end_before_systemd_kills(unit: str) -> None:
    stop_seconds = ROLES[unit].model_fields["stop_seconds"].default
    assert float(service(unit)["TimeoutStopSec"][0]) > stop_seconds
    assert service(unit)["Restart"] == ["on-failure"]
    assert service(unit)["KillMode"] == ["mixed"]


@pytest.mark.parametrize("unit", ROLES)
def test_the_local_checkpoint_lies_where_the_unit_may_write(unit: str) -> None:
    local = Path(environment(unit)["WEIGHTCAST_LOCAL"])
    state = service(unit)["StateDirectory"][0].replace("%i", "a")
    assert local.parent == Path("/var/lib") / state
    assert service(unit)["ProtectSystem"] == ["strict"]
    assert service(unit)["ReadWritePaths"] == ["/srv/weightcast"]


@pytest.mark.parametrize("unit", ROLES)
def test_the_compiler_of_numba_may_write_and_execute(unit: str) -> None:
    cache = service(unit)["CacheDirectory"][0]
    assert environment(unit)["WEIGHTCAST_CACHE"] == f"/var/cache/{cache}"
    assert "MemoryDenyWriteExecute" not in service(unit)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in ROLES:
        text = (UNITS / unit).read_text().replace(INSTALLED, COMMAND)
        (tmp_path / unit.replace("@.", "@a.")).write_text(text)
    units = [str(path) for path in tmp_path.iterdir()]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
