"""The verb `weightcast bench`, in a checkout: the benchmarks are not part of the wheel."""

from __future__ import annotations

import sys
from importlib import import_module, util
from pathlib import Path

import typer

from weightcast.shared.files.paths import exists

_NAME = "weightcast.benchmarks"
_ROOM = Path(__file__).parents[2] / "benchmarks"


def register(app: typer.Typer) -> None:
    if exists(_ROOM / "__main__.py"):
        _import_room()
        import_module(f"{_NAME}.__main__").register(app)


def _import_room() -> None:
    found = util.spec_from_file_location(
        _NAME, _ROOM / "__init__.py", submodule_search_locations=[str(_ROOM)]
    )
    if found is not None and found.loader is not None and _NAME not in sys.modules:
        sys.modules[_NAME] = util.module_from_spec(found)
        found.loader.exec_module(sys.modules[_NAME])
