"""Weights on their way from a trainer to a publisher beside it, in a memory-backed directory of two slots.

    <directory>/writer.lock          held by the trainer's side for its life
    <directory>/<slot>.lock          exclusive while a slot is written, shared while it is read
    <directory>/<slot>/model.safetensors
    <directory>/<slot>.json          the slot is complete: what it holds

`<slot>.json` is removed before the first byte of a slot changes and made after the last: the commit point. A
process that dies leaves no lock behind, and a slot that it was writing without this file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from weightcast.shared.errors import DamagedFile, Refused, WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.entries import is_link
from weightcast.shared.files.strict_json import Members, parse_object, write_object
from weightcast.shared.local.locks import FileLock

FORMAT = 1
SLOTS = ("a", "b")
WEIGHTS = "model.safetensors"
_RECORD_LIMIT = 64 << 10


@dataclass(frozen=True)
class Handed:
    """One complete slot. `writer` names the process that wrote it, `sequence` rises with every one."""

    writer: str
    sequence: int
    slot: str
    step: int | None
    nbytes: int
    """of the file"""


@dataclass(frozen=True)
class Export:
    """Where things lie; refuses links."""

    directory: Path

    def check(self) -> None:
        """Raises Refused when the directory, or a slot, is a link."""
        for path in (self.directory, *(self.slot(slot) for slot in SLOTS)):
            if is_link(path):
                raise Refused(f"{path} is a symbolic link", remedy="give a directory of its own")

    @property
    def writer(self) -> FileLock:
        return FileLock(self.directory / "writer.lock")

    def lock(self, slot: str) -> FileLock:
        return FileLock(self.directory / f"{slot}.lock")

    def slot(self, slot: str) -> Path:
        return self.directory / slot

    def weights(self, slot: str) -> Path:
        return self.directory / slot / WEIGHTS

    def record(self, slot: str) -> Path:
        return self.directory / f"{slot}.json"

    def read(self, slot: str) -> Handed | None:
        """None when the slot is not complete. Raises DamagedFile."""
        path = self.record(slot)
        try:
            data = durable.read_file(path, _RECORD_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return None
        members = Members(parse_object(data, str(path)), str(path))
        if members.integer("format") != FORMAT or members.text("slot") != slot:
            raise DamagedFile(f"{path} does not describe this slot", remedy="hand the weights over again")
        return Handed(
            members.text("writer", 64),
            members.integer("sequence"),
            slot,
            members.optional_integer("step"),
            members.integer("nbytes"),
        )

    def newest(self) -> Handed | None:
        """Of the complete slots; what cannot be read counts for nothing."""
        found = [handed for handed in map(self._complete, SLOTS) if handed is not None]
        return max(found, key=lambda handed: handed.sequence, default=None)

    def _complete(self, slot: str) -> Handed | None:
        try:
            return self.read(slot)
        except (OSError, WeightcastError):
            return None

    def commit(self, handed: Handed) -> None:
        durable.replace(self.record(handed.slot), write_object({"format": FORMAT, **asdict(handed)}))

    def withdraw(self, slot: str) -> None:
        self.record(slot).unlink(missing_ok=True)
