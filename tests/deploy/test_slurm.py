"""The job script for Slurm, without Slurm: its syntax, and that what it names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from test_docs_commands import own_words, problem_of

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.daemon.environment import SETTINGS
from weightcast.subscriber.daemon.settings import SubscriberSettings

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "weightcast.sbatch"
TEXT = SCRIPT.read_text()
COMMAND = re.compile(r"(?:^|\s)(weightcast (?:publisher|subscriber|run-engine|status|sync)\b.*)")
OWN_SETTING = re.compile(r"\b(?!WEIGHTCAST_)([A-Z_]+)=\$\{\1:[-?]")
"""NAME=${NAME:-default}"""


def command_lines() -> Iterator[list[str]]:
    for line in TEXT.replace("\\\n", " ").splitlines():
        found = None if line.startswith("#") else COMMAND.search(line)
        if found is not None:
            yield own_words(shlex.split(found[1])[1:])


def default(name: str) -> float:
    found = re.search(rf"{name}=\$\{{{name}:-(\d+)\}}", TEXT)
    assert found is not None, name
    return float(found[1])


def test_bash_reads_it() -> None:
    done = subprocess.run(
        ["bash", "-n", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_its_commands_exist_with_their_options() -> None:
    lines = list(command_lines())
    commands = {" ".join(words[: 1 + (words[0] in ("publisher", "subscriber"))]) for words in lines}
    assert commands == {"publisher run", "subscriber run", "run-engine", "status"}
    # values are the shell's variables, which are not looked at
    assert not [problem for words in lines if "o such" in (problem := problem_of(words))]
    assert "--no-such" in problem_of([*lines[0], "--no-such"])


def test_its_variables_are_settings() -> None:
    named = set(re.findall(r"WEIGHTCAST_[A-Z_]+", TEXT))
    assert {"WEIGHTCAST_CHANNEL", "WEIGHTCAST_TOKEN"} <= named
    assert named <= SETTINGS


def test_everything_may_end_before_slurm_kills() -> None:
    warned = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", TEXT, re.MULTILINE)
    assert warned is not None
    longest = max(
        SubscriberSettings.model_fields["engine_deadline"].default,
        PublisherSettings.model_fields["stop_seconds"].default,
    )
    assert float(warned[1]) > default("STOP_SECONDS") > longest


def test_the_document_tells_its_settings_with_their_names() -> None:
    section = (ROOT / "docs" / "deploying.md").read_text().partition("\n## Slurm\n")[2].partition("\n## ")[0]
    told = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert {name for name in told if not name.startswith("WEIGHTCAST_")} == set(OWN_SETTING.findall(TEXT))
    assert {name for name in told if name.startswith("WEIGHTCAST_")} <= SETTINGS
