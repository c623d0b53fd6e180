"""Every way in which a file system refuses leaves a command with a sentence, a remedy and an exit code."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, tensor, write_checkpoint
from failing_calls import CALLS, failing
from in_process import Command

from weightcast.shared.base.errors import EngineFailed, NotInTime, Refused, RetryLater
from weightcast.shared.files.disk_errors import disk_error

ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE),
    *(errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.ENOTEMPTY, errno.EMFILE),
    *(errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.EMLINK, errno.ETXTBSY, errno.EINVAL),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENODEV, errno.ENOMEM, errno.ETIMEDOUT, errno.ENOTCONN),
)
CODES = (0, Refused.exit_code, NotInTime.exit_code, EngineFailed.exit_code, RetryLater.exit_code)
Verb = Callable[[Command, Path], tuple[int, str, str]]


def initialize(weightcast: Command, root: Path) -> tuple[int, str, str]:
    return weightcast("channel", "init", "--channel", root / "channel", "--base", root / "base")


def publish(name: str) -> Verb:
    def call(weightcast: Command, root: Path) -> tuple[int, str, str]:
        places = ("--channel", root / "channel", "--local", root / "publisher", "--base", root / "base")
        return weightcast("publish", root / name, *places)

    return call


def sync(weightcast: Command, root: Path) -> tuple[int, str, str]:
    places = ("--channel", root / "channel", "--local", root / "host", "--base", root / "base")
    return weightcast("sync", *places, "--visible-deadline", "0.2")


def doctor(weightcast: Command, root: Path) -> tuple[int, str, str]:
    places = ("--channel", root / "channel", "--local", root / "host")
    code, out, err = weightcast("doctor", *places, "--role", "publisher")
    return code, out, err + out.replace("→ ", "remedy: ")


def verify(weightcast: Command, root: Path) -> tuple[int, str, str]:
    code, out, err = weightcast("channel", "verify", "--channel", root / "channel")
    return code, out, err + out + "remedy: "


STEPS: tuple[Verb, ...] = (initialize, publish("first"), sync, publish("second"), sync)
PLACES = {
    "init": (initialize, 0, ("base", "channel")),
    "first publish": (publish("first"), 1, ("channel", "publisher", "base", "first")),
    "first sync": (sync, 2, ("channel", "host", "base")),
    "publish": (publish("second"), 3, ("channel", "publisher", "second")),
    "sync": (sync, 4, ("channel", "host")),
    "doctor": (doctor, 5, ("channel",)),
    "verify": (verify, 5, ("channel",)),
}
"""by name: the command, how many steps come before it, directories whose file system fails"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each number of steps that were taken."""
    return tmp_path_factory.mktemp("stages")


@pytest.fixture
def staged(stages: Path, weightcast: Command, tmp_path: Path) -> Callable[[int], Path]:
    root = tmp_path / "run"

    def stage(steps: int) -> Path:
        shutil.rmtree(root, ignore_errors=True)
        made = stages / str(steps)
        if not made.exists():
            _make(weightcast, steps, root)
            shutil.copytree(root, made)
        else:
            shutil.copytree(made, root)
        return root

    return stage


def _make(weightcast: Command, steps: int, root: Path) -> None:
    rng = np.random.default_rng(7)
    model: Model = {name: tensor(rng, "BF16", 64, 32) for name in ("v", "w")}
    for name in ("base", "first", "second"):
        write_checkpoint(root / name, model)
        model = {name: one.changed(rng, 40) for name, one in model.items()}
    for step in STEPS[:steps]:
        code, _, text = step(weightcast, root)
        assert code == 0, text


def cases(places: tuple[str, ...], name: str) -> Iterator[tuple[str, str, int]]:
    errors = cycle(ERRORS)
    for _ in range(sum(map(ord, name)) % len(ERRORS)):
        next(errors)
    yield from ((place, call, next(errors)) for place in places for call in CALLS)


@pytest.mark.parametrize("name", PLACES)
def test_no_bare_error_reaches_anybody(name: str, staged: Callable[[int], Path], weightcast: Command) -> None:
    verb, steps, places = PLACES[name]
    met = set()
    for place, call, code in cases(places, name):
        root = staged(steps)
        with failing(call, root / place, code) as failure:
            ended, _, text = verb(weightcast, root)
        case = f"{call} in {place}, {errno.errorcode[code]}: exit {ended}, {text}"
        assert ended in CODES and "[Errno" not in text and "Traceback" not in text, case
        if failure.met and ended:
            met.add(call)
            assert "remedy: " in text and (str(root / place) in text or verb is doctor), case
    assert {"create", "open"} & met


@pytest.mark.parametrize("number", ERRORS)
def test_every_error_has_a_sentence_and_a_remedy(number: int) -> None:
    told = disk_error(OSError(number, os.strerror(number), "/data/file"), "elsewhere")
    assert told.message.startswith("/data/file: ") and len(f"{told}") < 200
    assert told.remedy and told.exit_code in (3, 75)
    named = OSError(number, os.strerror(number))
    named.add_note("fsync")
    assert disk_error(named, "/data").message.startswith("/data: fsync failed: ")


def test_a_rename_names_both_places() -> None:
    error = OSError(errno.EXDEV, os.strerror(errno.EXDEV), "/a/x", None, "/b/y")
    assert disk_error(error, "").message == "/a/x -> /b/y: Invalid cross-device link"
