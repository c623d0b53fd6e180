"""Where compiled kernels may be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightcast.shared.kernels.loader import cache_directory, key

CPU = "a cpu"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def test_the_first_place_named_is_taken(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    name = f"kernels-{key(CPU)}"
    own = {**environment, "WEIGHTCAST_CACHE": str(tmp_path / "own")}
    assert cache_directory(own, CPU) == tmp_path / "own" / name
    assert cache_directory(environment, CPU) == tmp_path / "xdg" / "weightcast" / name
    assert cache_directory({"HOME": str(tmp_path)}, CPU) == tmp_path / ".cache" / "weightcast" / name
    assert cache_directory({}, CPU) == tmp_path / "tmp" / f"weightcast-{os.getuid()}" / name


def test_each_cpu_has_its_own() -> None:
    assert key("avx2") != key("avx512") == key("avx512")


def test_a_place_that_is_a_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("")
    found = cache_directory({"WEIGHTCAST_CACHE": str(tmp_path / "own"), "HOME": str(tmp_path)}, CPU)
    assert found is not None and found.parent == tmp_path / ".cache" / "weightcast"


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_place_that_others_may_write_to_is_passed_over(tmp_path: Path, mode: int) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own").chmod(mode)
    found = cache_directory({"WEIGHTCAST_CACHE": str(tmp_path / "own"), "HOME": str(tmp_path)}, CPU)
    assert found is not None and found.parent == tmp_path / ".cache" / "weightcast"


def test_a_link_in_its_place_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f"kernels-{key(CPU)}").symlink_to(tmp_path)
    found = cache_directory({"WEIGHTCAST_CACHE": str(tmp_path / "own")}, CPU)
    assert found is not None and found.is_relative_to(tmp_path / "tmp")


def test_a_place_that_cannot_be_written_to_is_taken_when_it_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that is mounted read-only: rights do not show it, and root has them all."""
    kept = cache_directory({"WEIGHTCAST_CACHE": str(tmp_path / "own")}, CPU)
    assert kept is not None
    both = {"WEIGHTCAST_CACHE": str(tmp_path / "own"), "HOME": str(tmp_path)}
    access, own = os.access, tmp_path / "own"
    monkeypatch.setattr(
        os, "access", lambda path, mode: access(path, mode) and not Path(path).is_relative_to(own)
    )
    assert cache_directory(both, CPU) == tmp_path / ".cache" / "weightcast" / kept.name
    (kept / "complete").touch()
    assert cache_directory(both, CPU) == kept


def test_no_place_at_all(tmp_path: Path) -> None:
    (tmp_path / "tmp").rmdir()
    (tmp_path / "tmp").write_text("")
    assert cache_directory({"HOME": str(tmp_path / "tmp")}, CPU) is None


_HASH = """
import json, numpy as np, sys
from weightcast.shared.digest.checksums import hash_bytes
from weightcast.shared.daemon.status import kernel_status
hash_bytes(np.arange(8, dtype=np.uint8))
print(json.dumps(kernel_status().by_name()), "numba" in sys.modules)
"""


def kernels_in(directory: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*.kernel")}


def run_hash(environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", _HASH]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_kernels_are_kept_there_and_need_no_compiler_once_all_are(tmp_path: Path) -> None:
    environment = {**os.environ, "WEIGHTCAST_CACHE": str(tmp_path / "own"), "NUMBA_DISABLE_JIT": "0"}
    first = run_hash(environment)
    kept = kernels_in(tmp_path / "own")
    assert kept and str(tmp_path / "own") in first and first.endswith("True\n")
    assert run_hash(environment).endswith("True\n"), "more may be to compile: is there a compiler?"
    (next(iter(kept)).parent / "complete").touch()
    assert run_hash(environment).endswith("False\n")
    assert kernels_in(tmp_path / "own") == kept


def test_a_kernel_that_is_damaged_on_disk_is_compiled_again(tmp_path: Path) -> None:
    environment = {**os.environ, "WEIGHTCAST_CACHE": str(tmp_path / "own"), "NUMBA_DISABLE_JIT": "0"}
    run_hash(environment)
    (path,) = kernels_in(tmp_path / "own")
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert '"numba"' in run_hash(environment)
        assert path.stat().st_size == len(whole)


_NO_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""
_ALL = """
from weightcast.shared.kernels.load import mark_complete
mark_complete()
print(kernel_status().problem)
"""


def test_a_cache_without_room_is_told_and_not_taken_for_complete(tmp_path: Path) -> None:
    """Who believed it would begin without a compiler, and need one in the midst of a version."""
    own = tmp_path / "own"
    environment = {**os.environ, "WEIGHTCAST_CACHE": str(own), "NUMBA_DISABLE_JIT": "0"}
    command = [sys.executable, "-c", _NO_ROOM + _HASH + _ALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told, problem = done.stdout.splitlines()
    assert '"numba"' in told and problem.startswith("not all can be kept") and str(own) in problem
    assert [path.name for path in own.rglob("*") if path.is_file()] == []


def test_status_says_why_kernels_cannot_be_compiled() -> None:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    status = "from weightcast.shared.daemon.status import kernel_status; print(kernel_status())"
    done = subprocess.run(
        [sys.executable, "-c", status], env=environment, capture_output=True, text=True, check=True
    )
    assert "unusable" in done.stdout and "NUMBA_DISABLE_JIT is set" in done.stdout
