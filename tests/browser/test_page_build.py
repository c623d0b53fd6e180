"""The page in the wheel is the one that its sources make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

PAGE = Path(__file__).parents[2] / "publisher" / "page"
BUNDLED = ("preact", "uplot")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_kept_page_is_what_its_sources_build(built: Path) -> None:
    assert files(PAGE / "dist") == files(built / "dist"), (
        "run `npm run build` in publisher/page, and commit dist"
    )


def test_what_is_bundled_comes_with_its_licence() -> None:
    notices = (PAGE / "dist" / "licenses.txt").read_text()
    versions = json.loads((PAGE / "package.json").read_text())["dependencies"]
    assert sorted(versions) == sorted(BUNDLED)
    for name in BUNDLED:
        assert f"{name} {versions[name]} (MIT)" in notices
    assert notices.count("Permission is hereby granted") == len(BUNDLED)
    assert b"licenses.txt" in (PAGE / "dist" / "page.js").read_bytes()[:200]


def test_the_lock_names_every_package_by_its_content() -> None:
    packages = json.loads((PAGE / "package-lock.json").read_text())["packages"]
    assert all("integrity" in entry for name, entry in packages.items() if name)
    assert not any("resolved" in entry for entry in packages.values())
