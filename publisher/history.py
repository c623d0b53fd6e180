"""Journals of the last steps, kept in the publisher's local checkpoint: with them its bytes can be read as
they were some versions ago.

`.weightcast/history/<version>.journal` and `<version>.json`, the step it belongs to. They are a cache: what
is damaged or does not continue what lies here is dropped, and nothing depends on them but the work they save.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.channel.layout import digits
from weightcast.shared.errors import WeightcastError
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.strict_json import parse_object
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.state import Position, Step, parse_step, step_json

_STEP_LIMIT = 256 << 20


@dataclass(frozen=True)
class Kept:
    """A step whose journal is kept at `path`."""

    step: Step
    path: Path
    nbytes: int


class History:
    def __init__(self, paths: LocalPaths) -> None:
        self._paths = paths
        self._directory = paths.room / "history"

    def keep(self, step: Step) -> None:
        """Gives the step's journal a second name. Where that cannot be done nothing is kept."""
        number = step.target.version
        with contextlib.suppress(OSError):
            self._directory.mkdir(exist_ok=True)
            self.drop(number)
            os.link(self._paths.journal(step.journal), self._journal(number))
            self._step(number).write_text(json.dumps(step_json(step)))

    def _journal(self, version: int) -> Path:
        return self._directory / f"{digits(version)}.journal"

    def _step(self, version: int) -> Path:
        return self._directory / f"{digits(version)}.json"

    def drop(self, version: int) -> None:
        self._step(version).unlink(missing_ok=True)
        self._journal(version).unlink(missing_ok=True)

    def clear(self) -> None:
        for version in self._versions():
            self.drop(version)

    def trim(self, most_steps: int, most_bytes: int) -> None:
        """Drops the oldest beyond either bound."""
        left = most_bytes
        for count, version in enumerate(sorted(self._versions(), reverse=True)):
            with contextlib.suppress(FileNotFoundError):
                left -= self._journal(version).stat().st_size
            if count >= most_steps or left < 0:
                self.drop(version)

    def _versions(self) -> list[int]:
        names = self._directory.glob("*.json") if self._directory.is_dir() else ()
        return [int(path.stem) for path in names if path.stem.isdecimal()]

    def back_from(self, position: Position) -> Mapping[int, Kept]:
        """The steps that led to `position`, by the version that each led to, without a gap."""
        found: dict[int, Kept] = {}
        at = position
        while (kept := self._read(at.version)) is not None and _same(kept.step.target, at):
            found[at.version] = kept
            at = kept.step.base
        return found

    def _read(self, version: int) -> Kept | None:
        path = self._journal(version)
        try:
            data = parse_object(read_file(self._step(version), _STEP_LIMIT), str(path))
            return Kept(parse_step(data), path, path.stat().st_size)
        except (WeightcastError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _same(one: Position, other: Position) -> bool:
    return (one.version, one.digest, one.root) == (other.version, other.digest, other.root)
