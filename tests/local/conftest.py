import shutil
from pathlib import Path

import pytest
from local_cases import Run


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    """A copy of the module's own."""
    shutil.copytree(made.channel, tmp_path / "channel")
    shutil.copytree(made.base, tmp_path / "base")
    return Run(tmp_path, made.models)
