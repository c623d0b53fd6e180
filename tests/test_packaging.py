"""The package as it is installed: its list, its wheel, and a host without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from weightcast import publisher
from weightcast.shared.daemon.status import VERSION

ROOT = Path(__file__).parents[1]
SIDES = ("shared", "publisher", "subscriber")
TOP = ROOT / "shared" / "top"
"""the package `weightcast` itself; the sides are mapped into it"""
OTHER_DISTRIBUTION = ROOT / "subscriber" / "engine_plugin"
"""what is installed into an engine's environment, where nothing else of weightcast is"""
NEEDS_TORCH = {
    "weightcast.integrations.nemo_rl",
    "weightcast.integrations.prime_rl",
    "weightcast.integrations.skyrl",
    "weightcast.integrations.transfer",
    "weightcast.integrations.verl",
    "weightcast.publisher.transformers_hook",
}


def package(path: Path) -> str:
    """The name under which a folder of the sources is imported."""
    below = path.relative_to(TOP if path.is_relative_to(TOP) else ROOT)
    return ".".join(("weightcast", *below.parts))


def folders() -> list[str]:
    """Every folder with an __init__.py, as the package that it is mapped to."""
    return sorted(package(path.parent) for side in SIDES for path in sources(side, "__init__.py"))


def sources(side: str, pattern: str = "*.py") -> list[Path]:
    found = sorted((ROOT / side).rglob(pattern))
    return [path for path in found if OTHER_DISTRIBUTION not in path.parents]


def modules(side: str) -> list[str]:
    return [
        package(path.parent) if path.name == "__init__.py" else f"{package(path.parent)}.{path.stem}"
        for path in sources(side)
    ]


def settings() -> dict[str, object]:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found: dict[str, object] = tools["setuptools"]
    return found


def test_the_package_list_is_the_folders() -> None:
    assert settings()["packages"] == folders()


def test_the_public_names_can_be_discovered(tmp_path: Path) -> None:
    code = "import weightcast, weightcast.publisher as p; print(*dir(p)); print(*dir(weightcast)); help(p)"
    names, top, *text = run(code, cwd=tmp_path).splitlines()
    assert names.split() == sorted(publisher.__all__) and top.split() == [
        "__version__",
        "client",
        "integrations",
        "publisher",
    ]
    shown = "\n".join(text)
    assert all(f" {name}(" in shown for name in publisher.__all__)


def test_no_module_lies_outside_a_package() -> None:
    for side in SIDES:
        for path in sources(side):
            assert (path.parent / "__init__.py").exists(), path


def test_every_side_is_typed() -> None:
    assert all((ROOT / side / "py.typed").exists() for side in SIDES)


def run(code: str, *arguments: str, cwd: Path, path: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code],
        check=False,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NoTorch())
"""
SEEN_NONE = """
assert not any(name.partition(".")[0] in ("torch", "safetensors") for name in sys.modules)
print("done")
"""
ROUND_TRIP = """
import numpy as np
from pathlib import Path
from core_cases import tensor, write_checkpoint, read_checkpoint
from weightcast.publisher import Publisher, init_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater
here = Path.cwd()
write_checkpoint(here / "base", {"w": tensor(np.random.default_rng(0), "F32", 9, 5)})
init_channel(here / "channel", here / "base")
new = np.full((9, 5), 2.5, np.float32)
with Publisher.open(here / "channel", local=here / "pub", base=here / "base") as publisher:
    publisher.publish({"w": new})
store = open_store(here / "channel")
updater = LocalUpdater(store, here / "host", here / "base")
updater.update_to(Channel.open(store))
updater.close()
assert read_checkpoint(here / "host") == {"w": new.tobytes()}
"""


@pytest.mark.parametrize("side", SIDES)
def test_all_modules_import_without_torch(side: str, tmp_path: Path) -> None:
    """The publisher's too: a sidecar reads checkpoint directories."""
    imports = "\n".join(f"import {name}" for name in modules(side) if name not in NEEDS_TORCH)
    assert run(NO_TORCH + imports + SEEN_NONE, cwd=tmp_path) == "done\n"


def test_publishing_and_following_without_torch(tmp_path: Path) -> None:
    assert run(NO_TORCH + ROUND_TRIP + SEEN_NONE, cwd=tmp_path, path=str(ROOT / "tests")) == "done\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files beside its sources."""
    room = tmp_path_factory.mktemp("wheel")
    source = room / "source"
    for side in SIDES:
        shutil.copytree(
            ROOT / side, source / side, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
        )
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "package.md", source / "deploy")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(room), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = room.glob("*.whl")
    return built


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{package(path.parent).replace('.', '/')}/{path.name}"
        for side in SIDES
        for path in [
            *sources(side),
            *sources(side, "py.typed"),
            *(ROOT / side).glob("page/dist/*"),
        ]
        if "node_modules" not in path.parts
    }
    assert {name for name in names if name.startswith("weightcast/")} == expected
    assert not [name for name in names if name.split("/")[0] in (*SIDES, "tests", "examples")]


def test_both_distributions_come_with_the_license(wheel: Path) -> None:
    (held,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/licenses/LICENSE")]
    assert zipfile.ZipFile(wheel).read(held) == (ROOT / "LICENSE").read_bytes()
    assert (OTHER_DISTRIBUTION / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_s_command_runs_from_an_install_of_its_own(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(target), str(wheel)], check=True, timeout=120, capture_output=True)
    code = "import weightcast.publisher.daemon.publish_loop, weightcast.subscriber.sync.sync\n"
    code += "import weightcast as top, weightcast.shared as s\n"
    code += "print(s.__file__, top.__file__, top.__version__)"
    *files, version = run(code, cwd=tmp_path, path=str(target)).split()
    assert all(Path(file).is_relative_to(target) for file in files)
    assert version == VERSION == next(target.glob("weightcast-*.dist-info")).name.split("-")[1][:-5]
    entries = next(target.glob("weightcast-*.dist-info")) / "entry_points.txt"
    assert "weightcast.shared.cli.main:main" in entries.read_text()
    command = "import sys; from weightcast.shared.cli.main import main; sys.argv[1:] = ['--help']; main()"
    environment = {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    verbs = {line.split()[0] for line in done.stdout.splitlines() if line.split()}
    assert {"publish", "sync"} <= verbs and "bench" not in verbs, "benchmarks need a checkout"
