"""Paths of a channel in a directory, for tests that look at its files or damage them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.layout import (
    ANCHOR,
    BASE_JSON,
    CHANNEL_JSON,
    HOSTS,
    LATEST,
    PUBLISHERS,
    from_name,
    report_key,
    version_name,
)
from weightcast.shared.channel.store import TRASH


@dataclass(frozen=True)
class Layout:
    """Paths of a channel in a directory."""

    channel: Path

    @property
    def latest(self) -> Path:
        return self.channel / LATEST

    @property
    def channel_json(self) -> Path:
        return self.channel / CHANNEL_JSON

    @property
    def base_json(self) -> Path:
        return self.channel / BASE_JSON

    def version_dir(self, version: int) -> Path:
        return self.channel / version_name(version)

    def index(self, version: int) -> Path:
        return self.version_dir(version) / INDEX_NAME

    def from_dir(self, version: int, base_version: int) -> Path:
        """The delta of `version` from a version older than the one before it."""
        return self.version_dir(version) / from_name(base_version)

    def anchor_dir(self, version: int) -> Path:
        return self.version_dir(version) / ANCHOR

    @property
    def publishers_dir(self) -> Path:
        return self.channel / PUBLISHERS

    def claim(self, epoch: int) -> Path:
        return self.publishers_dir / f"{epoch}.json"

    @property
    def hosts_dir(self) -> Path:
        return self.channel / HOSTS

    def report(self, host: str, local_path: Path | str) -> Path:
        return self.channel / report_key(host, local_path)

    @property
    def trash(self) -> Path:
        return self.channel / TRASH
