"""What `publish`, `sync` and help do without: imports take long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from weightcast.publisher import init_channel
from weightcast.shared.cli.main import COMMANDS
from weightcast.shared.daemon.status import VERSION

HEAVY = (
    "asyncio", "cryptography", "email", "fastapi", "httpx", "importlib.metadata", "llvmlite", "numba",
    "prometheus_client", "pydantic", "rich", "ssl", "starlette", "structlog", "torch",
    "uvicorn",
)  # fmt: skip
COMMAND = """
import json, sys
from weightcast.shared.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""


_TELL = "import json; print(json.dumps(sorted(sys.modules)))"


def checkpoint(directory: Path, seed: int) -> Path:
    directory.mkdir()
    words = np.random.default_rng(seed).standard_normal(1000).astype(np.float16)
    save_file({"w": words}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def imported_by(*arguments: object) -> tuple[dict[str, object], set[str]]:
    """What the command printed, and the heavy modules that it imported."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WEIGHTCAST_")}
    environment |= {key: os.environ[key] for key in ("WEIGHTCAST_CACHE",) if key in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    *printed, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    assert code == 0, done.stdout
    report = json.loads(printed[-1]) if "--json" in arguments else {}
    return report, set(modules) & set(HEAVY)


def test_help_imports_nothing_that_takes_long() -> None:
    """Settings are models of pydantic, which looks for its plugins with importlib.metadata."""
    of_settings = {"pydantic", "email", "importlib.metadata"}
    words = [words for words, (place, _) in COMMANDS.items() if place]
    settings = [one for one in words if one == "sync" or one.endswith(" run") or one.startswith("config")]
    light = [one for one in words if one not in settings and not needs_numpy(one)]
    assert len(light) > 6 and helped(light) == set()
    assert len(settings) > 7 and helped(settings) <= of_settings
    assert helped(words) <= {"numpy", "rich", *of_settings}


def needs_numpy(command: str) -> bool:
    """For the types and defaults that its module names; `doctor` also rich."""
    return command.split()[0] in ("channel", "mirror", "keygen", "quantise", "doctor", "run-engine")


def helped(commands: Sequence[str]) -> set[str]:
    """Heavy modules that their help imports, in one process."""
    lines = f"for words in {commands!r}: assert run([*words.split(), '--help']) == 0"
    code = "\n".join(("import sys", "from weightcast.shared.cli.main import run", lines, _TELL))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1])) & {*HEAVY, "numpy"}


def test_commands_of_every_version_import_no_framework(tmp_path: Path) -> None:
    base, channel = checkpoint(tmp_path / "base", 1), tmp_path / "channel"
    init_channel(channel, base)
    new = checkpoint(tmp_path / "new", 2)
    places = ("--channel", channel, "--base", base, "--json")
    report, heavy = imported_by("publish", new, "--local", tmp_path / "publisher", *places)
    # a machine without kept kernels compiles them
    assert heavy <= {"numba", "llvmlite", "email", "importlib.metadata"} and report["version"] == 1
    status, heavy = imported_by("sync", "--local", tmp_path / "host", *places)
    # its settings are the daemon's
    assert (
        heavy <= {"numba", "llvmlite", "email", "importlib.metadata", "pydantic"}
        and status["local_version"] == 1
    )


def test_a_result_that_nobody_reads_changes_no_exit_code(tmp_path: Path) -> None:
    base, channel = checkpoint(tmp_path / "base", 1), tmp_path / "channel"
    init_channel(channel, base)
    new = checkpoint(tmp_path / "new", 2)
    for arguments in (
        ("publish", new, "--local", tmp_path / "publisher", "--channel", channel, "--base", base),
        ("sync", "--local", tmp_path / "host", "--channel", channel, "--base", base),
        ("sync", "--local", tmp_path / "host", "--channel", channel, "--base", base, "--json"),
        ("channel", "log", "--channel", channel),
        ("fleet", "--watch", "--channel", channel),
        ("fleet", "--watch", "--json", "--channel", channel),
    ):
        assert unread(*arguments) == (0, ""), arguments
    assert unread("channel", "log", "--channel", tmp_path / "nowhere")[0] == 75


def unread(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdout is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "weightcast.shared.cli.main", *map(str, arguments)]
    try:
        done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, timeout=300, check=False)
    finally:
        os.close(writer)
    return done.returncode, done.stderr.decode()


def test_the_version_that_is_shown_is_the_installed_one() -> None:
    assert version("weightcast") == VERSION
