"""A publisher of the field's plain format, written from its description alone: no code of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from field_writer import write_version
from hosts import Weights

Encoding = Literal["xor", "overwrite", "xor_sparse"]
Dialect = Literal["plain", "stitch"]


class FieldChannel:
    def __init__(self, root: Path, base: Weights, dialect: Dialect = "plain", run: str = "run-a") -> None:
        self.root, self.dialect, self.run = root, dialect, run
        self.weights = [base]
        self.versions_dir.mkdir(parents=True)

    @property
    def versions_dir(self) -> Path:
        return self.root if self.dialect == "plain" else self.root / "updates"

    def directory(self, version: int) -> Path:
        return self.versions_dir / f"weight_v{version:06d}"

    def point(self, version: int) -> None:
        name = f"{version:06d}" if self.dialect == "plain" else f"{self.run}/weight_v{version:06d}"
        temporary = self.root / "latest.tmp"
        temporary.write_text(name)
        temporary.rename(self.root / "latest")

    def publish(
        self,
        new: Weights,
        encoding: Encoding = "xor",
        form: str = "xxh3-128",
        ranks: int = 1,
        version: int | None = None,
    ) -> int:
        number = len(self.weights) if version is None else version
        old, directory = self.weights[number - 1], self.directory(number)
        write_version(directory, number, old.data, new.data, encoding=encoding, checksum=form, shards=ranks)
        self.point(number)
        self.weights[number:] = [new]
        return number

    def publish_full(self, new: Weights) -> int:
        number = len(self.weights)
        new.write(self.directory(number))
        self.weights.append(new)
        self.point(number)
        return number

    def digest(self, version: int) -> str:
        return self.weights[version].digest()
