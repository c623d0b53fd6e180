"""A publisher of the field's plain format, written from its description alone: no code of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import obstore
from field_writer import write_skyrl, write_version
from hosts import Weights
from obstore.store import from_url

Encoding = Literal["xor", "overwrite", "xor_sparse"]
Dialect = Literal["plain", "stitch", "skyrl"]


class FieldChannel:
    """`url`: of a prefix in an object store, to which every version is uploaded before its pointer moves, as
    that system's own upload does. `boot`: the version that the base is."""

    def __init__(
        self,
        root: Path,
        base: Weights,
        dialect: Dialect = "plain",
        run: str = "run-a",
        *,
        url: str = "",
        boot: int = 0,
    ) -> None:
        self.root, self.dialect, self.run, self.url, self.boot = root, dialect, run, url, boot
        self.weights = [base]
        self.versions_dir.mkdir(parents=True)

    @property
    def versions_dir(self) -> Path:
        return self.root / "updates" if self.dialect == "stitch" else self.root

    @property
    def address(self) -> Path | str:
        """What a host follows."""
        return self.url or self.root

    def directory(self, version: int) -> Path:
        name = f"delta-{version:08d}" if self.dialect == "skyrl" else f"weight_v{version:06d}"
        return self.versions_dir / name

    def point(self, version: int) -> None:
        name = f"{version:06d}" if self.dialect == "plain" else f"{self.run}/weight_v{version:06d}"
        if self.dialect != "skyrl":
            temporary = self.root / "latest.tmp"
            temporary.write_text(name)
            temporary.rename(self.root / "latest")
        if self.url:
            self.upload(version)

    def upload(self, version: int) -> None:
        """Weights, index, pointer."""
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        store = from_url(f"s3://{bucket}", client_options={"allow_http": True})
        files = self.directory(version).glob("*")
        for path in (*sorted(files, key=lambda path: path.suffix == ".json"), self.root / "latest"):
            if path.is_file():
                obstore.put(store, f"{prefix}/{path.relative_to(self.root)}", path)

    def publish(
        self,
        new: Weights,
        encoding: Encoding = "xor",
        form: str = "xxh3-128",
        ranks: int = 1,
        version: int | None = None,
    ) -> int:
        number = self.newest + 1 if version is None else version
        old, directory = self.weights[number - 1 - self.boot], self.directory(number)
        if self.dialect == "skyrl":
            write_skyrl(directory, number, old.tensors, new.tensors, checksum=form, files=ranks)
        else:
            write_version(
                directory, number, old.data, new.data, encoding=encoding, checksum=form, shards=ranks
            )
        self.point(number)
        self.weights[number - self.boot :] = [new]
        return number

    def publish_full(self, new: Weights) -> int:
        number = self.newest + 1
        new.write(self.directory(number))
        self.weights.append(new)
        self.point(number)
        return number

    @property
    def newest(self) -> int:
        return self.boot + len(self.weights) - 1

    def digest(self, version: int) -> str:
        return self.weights[version - self.boot].digest()
