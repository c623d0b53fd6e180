"""A copy in a directory of what is in a bucket, read without weightcast's code and without threads."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import httpx
from s3_gateway import Gateway, gateway_of_environment

_LOOKS = 50


@dataclass
class BucketCopy:
    """`prefix` of `bucket` in `directory`: each object that is there when `refresh` looks, under its key."""

    gateway: Gateway
    bucket: str
    prefix: str
    directory: Path
    _tags: dict[str, str] = field(default_factory=dict)
    _client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))

    @classmethod
    def of(cls, url: str, directory: Path) -> BucketCopy:
        """`url`: `s3://bucket/prefix`; the gateway is the environment's."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        directory.mkdir(parents=True)
        return cls(gateway_of_environment(), bucket, prefix, directory)

    def refresh(self) -> Path:
        """The copy as the bucket is now: what two listings agree on."""
        for _ in range(_LOOKS):
            listed = self._listed()
            if listed == self._tags:
                return self.directory
            for key in self._tags.keys() - listed.keys():
                self._remove(key)
            for key, tag in listed.items():
                if self._tags.get(key) != tag:
                    self._fetch(key)
        raise RuntimeError(f"{self.bucket}/{self.prefix} changes all the time")

    def _listed(self) -> dict[str, str]:
        """Tags by key."""
        found: dict[str, str] = {}
        after = ""
        while True:
            query = {"list-type": "2", "prefix": f"{self.prefix}/", "start-after": after}
            answer = self.gateway.ask("GET", self.bucket, self._client, **query).raise_for_status()
            root = ElementTree.fromstring(answer.text)
            for entry in root.iterfind("{*}Contents"):
                after = entry.findtext("{*}Key", "")
                found[after.removeprefix(f"{self.prefix}/")] = entry.findtext("{*}ETag", "")
            if root.findtext("{*}IsTruncated") != "true":
                return found

    def _fetch(self, key: str) -> None:
        """Unless it is gone by now."""
        answer = self.gateway.ask("GET", f"{self.bucket}/{self.prefix}/{key}", self._client)
        if answer.is_success:
            path = self.directory / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(answer.content)
            self._tags[key] = answer.headers["etag"]

    def _remove(self, key: str) -> None:
        del self._tags[key]
        path = self.directory / key
        path.unlink()
        with contextlib.suppress(OSError):  # while there are others
            for parent in path.relative_to(self.directory).parents[:-1]:
                (self.directory / parent).rmdir()

    def read_number(self, key: str) -> int:
        """Of one object as it is now; 0 where there is none."""
        answer = self.gateway.ask("GET", f"{self.bucket}/{self.prefix}/{key}", self._client)
        return int(answer.text) if answer.is_success else 0

    def close(self) -> None:
        self._client.close()
