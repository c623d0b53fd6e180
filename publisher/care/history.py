"""Journals of the last steps, kept in the publisher's local checkpoint: with them its bytes can be read as
they were some versions ago.

`.weightcast/history/<version>.journal` and `<version>.json`, the step it belongs to; `<version>.index` and
`.sig`, copies of what was committed. They are a cache: what is damaged or does not continue what lies here is
dropped, and nothing depends on them but the work they save.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from weightcast.shared.channel.index import INDEX_LIMIT
from weightcast.shared.channel.layout import Layout, digits
from weightcast.shared.channel.signing import SIGNATURE_LIMIT, signature_path
from weightcast.shared.errors import WeightcastError
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.entries import matching
from weightcast.shared.files.strict_json import parse_object
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.spare import keep_journal
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
        self.paths = paths
        self._directory = paths.room / "history"

    def keep(self, step: Step, channel: Layout) -> None:
        """Gives the step's journal a second name, and copies its index. Where that cannot be done nothing is
        kept."""
        number = step.target.version
        with contextlib.suppress(WeightcastError, OSError):
            self._directory.mkdir(exist_ok=True)
            self.drop(number)
            try:
                self._keep(number, step, channel)
            except BaseException:
                self.drop(number)
                raise

    def _keep(self, number: int, step: Step, channel: Layout) -> None:
        os.link(self.paths.journal(step.journal), self._journal(number))
        failpoint("history.linked", self._directory)
        self._step(number).write_text(json.dumps(step_json(step)))
        index = channel.index(number)
        with contextlib.suppress(FileNotFoundError):
            signature = read_file(signature_path(index), SIGNATURE_LIMIT)
            self._signature(number).write_bytes(signature)
        self._index(number).write_bytes(read_file(index, INDEX_LIMIT))
        failpoint("history.kept", self._directory)

    def index(self, position: Position) -> bytes | None:
        """The exact bytes of a version's index, if they are kept."""
        with contextlib.suppress(WeightcastError, OSError):
            data = read_file(self._index(position.version), INDEX_LIMIT)
            return data if blake3(data).hexdigest() == position.digest else None
        return None

    def signature(self, version: int) -> bytes | None:
        with contextlib.suppress(WeightcastError, OSError):
            return read_file(self._signature(version), SIGNATURE_LIMIT)
        return None

    def _index(self, version: int) -> Path:
        return self._directory / f"{digits(version)}.index"

    def _signature(self, version: int) -> Path:
        return self._directory / f"{digits(version)}.sig"

    def _journal(self, version: int) -> Path:
        return self._directory / f"{digits(version)}.journal"

    def _step(self, version: int) -> Path:
        return self._directory / f"{digits(version)}.json"

    def drop(self, version: int) -> None:
        for path in self._files(version):
            path.unlink(missing_ok=True)

    def _files(self, version: int) -> tuple[Path, ...]:
        return self._step(version), self._journal(version), self._index(version), self._signature(version)

    def clear(self) -> None:
        for version in self._left():
            self.drop(version)

    def trim(self, most_steps: int, most_bytes: int) -> None:
        """Drops the oldest beyond either bound, and what a kill left without its step. The journal of one of
        them is written over by the next."""
        for version in set(self._left()) - set(self._versions()):
            self.drop(version)
        left = most_bytes
        for count, version in enumerate(sorted(self._versions(), reverse=True)):
            with contextlib.suppress(FileNotFoundError):
                left -= self._journal(version).stat().st_size
                left -= self._index(version).stat().st_size
            if count >= most_steps or left < 0:
                self._step(version).unlink(missing_ok=True)
                keep_journal(self.paths, self._journal(version))
                self.drop(version)

    def drop_oldest(self, most: int | None) -> bool:
        """The oldest step, if it led to no later version than `most`. False when none is dropped."""
        oldest = min(self._left(), default=None)
        if oldest is None or (most is not None and oldest > most):
            return False
        self.drop(oldest)
        return True

    def _versions(self) -> list[int]:
        return self._numbers("*.json")

    def _left(self) -> list[int]:
        """Those of which anything lies there."""
        return self._numbers("*")

    def _numbers(self, pattern: str) -> list[int]:
        return [int(path.stem) for path in matching(self._directory, pattern) if path.stem.isdecimal()]

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
