"""Buckets of the Hugging Face hub in this process, as huggingface_hub's client shows them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

models = pytest.importorskip("huggingface_hub")


class Hub:
    """One bucket. `batches`: the names that each call made visible or removed."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, str]] = {}
        """content by path, and when it was uploaded"""
        self.contents: dict[str, bytes] = {}
        self.batches: list[list[str]] = []
        self.downloads: list[str] = []
        self._lock = threading.Lock()

    def _file(self, path: str) -> Any:
        data, uploaded = self.files[path]
        digest = hashlib.sha256(data).hexdigest()
        return models.BucketFile(
            type="file", path=path, size=len(data), xetHash=digest, mtime=None, uploadedAt=uploaded
        )

    def list_bucket_tree(
        self, bucket_id: str, prefix: str | None = None, *, recursive: bool | None = None
    ) -> Iterator[Any]:
        """The server compares `prefix` as text: `logs` also lists `logs.json`."""
        found = {path: self._file(path) for path in sorted(self.files) if path.startswith(prefix or "")}
        if recursive:
            yield from found.values()
            return
        above = f"{prefix}/" if prefix else ""
        shown = set()
        for path, file in found.items():
            start = above if path.startswith(above) else above.rpartition("/")[0].rpartition("/")[0]
            name, slash, _ = path[len(start) :].partition("/")
            if not slash:
                yield file
            elif start + name not in shown:
                shown.add(start + name)
                yield models.BucketFolder(type="directory", path=start + name, uploadedAt=None)

    def get_bucket_paths_info(self, bucket_id: str, paths: Iterable[str]) -> Iterator[Any]:
        for path in paths:
            if path in self.files:
                yield self._file(path)

    def batch_bucket_files(
        self,
        bucket_id: str,
        *,
        add: list[tuple[str | bytes, str]] | None = None,
        copy: list[tuple[str, str, str, str]] | None = None,
        delete: list[str] | None = None,
    ) -> None:
        new = {
            path: source if isinstance(source, bytes) else Path(source).read_bytes()
            for source, path in add or []
        }
        new |= {path: self.contents[digest] for _, _, digest, path in copy or []}
        with self._lock:
            self.batches.append([*new, *(delete or [])])
            for path, data in new.items():
                self.contents[hashlib.sha256(data).hexdigest()] = data
                self.files[path] = data, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            for path in delete or []:
                self.files.pop(path, None)

    def download_bucket_files(self, bucket_id: str, files: list[tuple[Any, Path]]) -> None:
        for file, path in files:
            self.downloads.append(file.path)
            path.write_bytes(self.contents[file.xet_hash])
