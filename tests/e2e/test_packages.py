"""Both distributions as they are released: built by `make dist`, installed from a directory into clean
environments of every Python that is here, and used as the tutorial says."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from test_tutorial import follow

from weightcast.shared.daemon.status import VERSION

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
BIN = Path(sys.executable).parent


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "WEIGHTCAST_"))
    }
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what `make dist` makes of the last commit."""
    source = tmp_path_factory.mktemp("source") / "weightcast"
    run("git", "clone", "-q", ROOT, source)
    # what is installed here is what it was installed from
    run("make", "-o", "install", "dist", f"BIN={BIN}", cwd=source)
    return source / "dist"


def sums(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_builds_of_one_commit_have_the_same_bytes(built: Path, tmp_path: Path) -> None:
    run("git", "clone", "-q", built.parent, tmp_path / "again")
    run("make", "-o", "install", "dist", f"BIN={BIN}", cwd=tmp_path / "again")
    assert sums(tmp_path / "again" / "dist") == sums(built)
    assert len(sums(built)) == 4


def test_an_index_would_take_them(built: Path) -> None:
    run(BIN / "twine", "check", "--strict", *built.iterdir())
    run(BIN / "check-wheel-contents", *built.glob("*.whl"))


def python(version: str) -> Path | None:
    """An interpreter of that version, in PATH or among pyenv's."""
    found = [Path(sys.executable)] if version == OWN else []
    found += [Path(name) for name in [shutil.which(f"python{version}")] if name]
    found += sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for path in found:
        # a shim of pyenv may name a version that is switched off
        done = subprocess.run([path, "-c", "import venv"], check=False, capture_output=True)
        if done.returncode == 0:
            return path
    return None


def installed(built: Path, room: Path, interpreter: Path, more: Sequence[str] = ()) -> Path:
    """The programs of a clean environment. What a distribution needs comes from the usual index, and the
    distributions from the directory alone: so their lists of dependencies are proven complete."""
    run(interpreter, "-m", "venv", room)
    pip = (room / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    (wheel,) = built.glob("weightcast-*.whl")
    run(*pip, "--no-deps", wheel)
    (metadata,) = (room / "lib").glob("python*/site-packages/weightcast-*.dist-info")
    needs = [need for need in Distribution.at(metadata).requires or () if "extra ==" not in need]
    run(BIN / "uv", "pip", "install", "-q", "-p", room, "-c", ROOT / "constraints.txt", *needs, *more)
    run(room / "bin" / "python", "-m", "pip", "uninstall", "-q", "-y", "weightcast")
    run(*pip, "--no-index", "--find-links", built, "weightcast", "weightcast-engine")
    run(room / "bin" / "python", "-m", "pip", "check")
    return room / "bin"


@pytest.mark.parametrize("version", PYTHONS)
def test_hosts_and_publisher_need_no_torch(built: Path, tmp_path: Path, version: str) -> None:
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(f"Python {version} is not here")
    if version == OWN and any(python(other) for other in PYTHONS if other != OWN):
        pytest.skip("with torch below")
    own = installed(built, tmp_path / "venv", interpreter)
    assert run(own / "weightcast", "--version") == f"{VERSION}\n"
    without = "import importlib.util as u; assert u.find_spec('torch') is None; import weightcast_engine"
    run(own / "python", "-c", without)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "weightcast").symlink_to(own / "weightcast")
    # the tutorial's trainer is not part of the product
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    (tmp_path / "tutorial").mkdir()
    follow(tmp_path / "tutorial", programs)


def test_with_torch_trainer_and_daemons_share_an_environment(built: Path, tmp_path: Path) -> None:
    own = installed(built, tmp_path / "venv", Path(sys.executable), ("torch==2.13.0", "safetensors"))
    (tmp_path / "tutorial").mkdir()
    follow(tmp_path / "tutorial", own)
