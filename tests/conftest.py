"""Makes the modules of this folder importable from the tests of every room."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if os.environ.get("WEIGHTCAST_TEST_ORACLE"):  # before anything imports the kernels
    import numpy_kernels

    numpy_kernels.install()

from emulators import EMULATORS, Emulator
from in_process import Command, Done
from s3_gateway import Gateway, gateway, running_gateway

from weightcast.shared.cli.main import run
from weightcast.shared.daemon import logs
from weightcast.shared.files.system import file_system

# how fast inputs are drawn says more about the machine's other work than about a strategy
# the gate draws the same examples every time; `make fuzz` looks for new ones
settings.register_profile(
    "shared-machine",
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)
settings.load_profile("shared-machine")

# set in the processes of pytest-xdist: what goes into a pipe would be wrapped as on a small terminal
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)


# there files have no blocks to write over, and Debian 13 has /tmp so
if "TMPDIR" not in os.environ and file_system(os.stat(tempfile.gettempdir()).st_dev) == "tmpfs":
    os.environ["TMPDIR"] = "/var/tmp"
    tempfile.tempdir = None


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    """A command that sets up its log in this process writes to the streams of its own test alone."""
    yield
    logs.forget_setup()


@pytest.fixture
def weightcast(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process."""

    def call(*words: object) -> Done:
        capsys.readouterr()
        code = run([*map(str, words)])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A real S3 server, for tests with the mark `s3`. WEIGHTCAST_TEST_S3: the directory of a running one."""
    if running := os.environ.get("WEIGHTCAST_TEST_S3"):
        yield running_gateway(Path(running))
        return
    with gateway(tmp_path_factory.mktemp("ceph")) as made:
        yield made


@pytest.fixture(scope="session")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Emulator]]:
    """A running one by its name, for tests with the mark `stores`."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(EMULATORS[name](tmp_path_factory.mktemp(name))))


@pytest.fixture
def make_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """URL of a new bucket of a dialect of tests/emulators.py, with its credentials in the environment."""

    def make(dialect: str) -> str:
        if dialect == "s3":
            s3 = request.getfixturevalue("s3")
            environment, url = s3.environment(), f"s3://{s3.make_bucket()}"
        else:
            emulator = request.getfixturevalue("emulators")(dialect)
            environment, url = emulator.environment, emulator.make_bucket()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return url

    return make


@pytest.fixture
def bucket(make_bucket: Callable[[str], str]) -> str:
    """Of the real S3 server."""
    return make_bucket("s3")
