"""A channel in a Hugging Face bucket (`hf://buckets/OWNER/NAME/PREFIX`), through huggingface_hub.

Content is uploaded first; names become visible by one batch call. Nothing is conditional: `create`, `replace`
and `commit` look before they write, so two writers are not kept apart. Files are downloaded whole, into
temporary files.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import tempfile
from collections.abc import Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weightcast.shared.base.errors import Refused, WeightcastError
from weightcast.shared.channel.object_store import Keys, ObjectStore
from weightcast.shared.channel.rate import NO_RATES, Rates
from weightcast.shared.channel.store import (
    POLLED_BYTES,
    AlreadyExists,
    Entry,
    NotFound,
    Pieces,
    Stat,
    Store,
    denied,
    failed,
    joined,
    too_large,
)
from weightcast.shared.files import durable

if TYPE_CHECKING:
    from obstore import UpdateVersion

_PIECE = 1 << 20
"""bytes that are read at a time of a file that was downloaded"""


def open_hf_store(url: str, rates: Rates = NO_RATES) -> HfStore:
    """The token comes from the environment or the hub's own login. Raises Refused."""
    kind, *parts = url.removeprefix("hf://").split("/")
    if kind != "buckets" or len(parts) < 2 or not all(parts[:2]) or any(c in url for c in "?#@"):
        raise Refused("not the URL of a bucket", remedy="give hf://buckets/OWNER/NAME or a prefix in it")
    try:
        hub = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
        api = hub.HfApi()
        api.batch_bucket_files  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise Refused(
            f"{url} needs huggingface_hub 1.5 or newer", remedy="pip install 'weightcast[hf]'"
        ) from error
    return HfStore(api, "/".join(parts[:2]), "/".join(parts[2:]).strip("/"), rates)


class HfStore(ObjectStore):
    """`api`: of huggingface_hub; `bucket`: OWNER/NAME."""

    def __init__(self, api: Any, bucket: str, prefix: str = "", rates: Rates = NO_RATES) -> None:
        super().__init__(api, f"hf://buckets/{bucket}", prefix, rates)
        self._api, self._bucket = api, bucket

    def ignored(self) -> str:
        return "if-none-match and if-match"

    def within(self, prefix: str) -> HfStore:
        return HfStore(self._api, self._bucket, self._key(prefix), self.rates) if prefix else self

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._named(prefix) as key:
            found = [*self._api.list_bucket_tree(self._bucket, prefix=key or None, recursive=False)]
        for each in found:
            # the server compares text, not components
            above, _, name = each.path.rpartition("/")
            if above != key or durable.is_temporary(name):
                continue
            is_file = each.type == "file"
            yield Entry(name, "file", _stat(each)) if is_file else Entry(name, "directory")

    def stat(self, key: str) -> Stat | None:
        with contextlib.suppress(NotFound):
            return _stat(self._info(key))
        return None

    def _info(self, key: str) -> Any:
        """The hub's description of a file."""
        with self._named(key) as full:
            for found in self._api.get_bucket_paths_info(self._bucket, [full]):
                return found
        raise NotFound.at(self.place(key))

    def _read(self, key: str, limit: int) -> tuple[bytes, UpdateVersion]:
        info = self._info(key)
        if info.size > limit:
            raise too_large(self.place(key), limit)
        now: UpdateVersion = {"e_tag": info.xet_hash}
        known = self._polled.get(key)
        if known is None or known[1] != now:
            with self._downloaded(key, info) as file:
                known = file.read(), now
            if info.size <= POLLED_BYTES:
                self._polled[key] = known
        return known

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        with self._downloaded(key, self._info(key)) as file:
            file.seek(offset)
            data = file.read(max(length, 0))
        self.rates.fetch.take(len(data))
        return data

    def pieces(self, key: str) -> Pieces:
        rate = self.rates.fetch
        with self._downloaded(key, self._info(key)) as file:
            yield from rate.paced(iter(partial(file.read, min(_PIECE, rate.piece)), b""))

    def _downloaded(self, key: str, info: Any) -> FileIO:
        with tempfile.TemporaryDirectory() as directory, self._named(key):
            path = Path(directory) / "file"
            self._api.download_bucket_files(self._bucket, [(info, path)])
            return FileIO(path)

    def _put(self, key: str, data: bytes, mode: Any = "overwrite") -> None:
        if mode == "create" and self.stat(key) is not None:
            raise AlreadyExists.at(self.place(key))
        self._change(key, add=[(data, self._key(key))])

    upload = Store.upload

    def upload_file(self, key: str, file: IO[bytes], size: int) -> None:
        file.flush()
        self._change(key, add=[(f"/proc/self/fd/{file.fileno()}", self._key(key))])

    def move(self, source: str, target: str, *, sync: bool = False) -> None:
        moved = self._files(source)
        if not moved:
            raise NotFound.at(self.place(source))
        new, old = self._key(target), self._key(source)
        names = {each.path: new + each.path[len(old) :] for each in moved}
        copies = [("bucket", self._bucket, each.xet_hash, names[each.path]) for each in moved]
        self._change(source, copy=copies)
        self._change(source, delete=[*names])

    def copy(self, source: str, target: str) -> None:
        if self.stat(target) is not None:
            raise AlreadyExists.at(self.place(target))
        copied = ("bucket", self._bucket, self._info(source).xet_hash, self._key(target))
        self._change(target, copy=[copied])

    def _below(self, prefix: str) -> Keys:
        return [each.path for each in self._files(prefix)]

    def _erase(self, prefix: str, keys: Keys) -> None:
        self._change(prefix, delete=keys)

    def now(self, prefix: str = "") -> float:
        key = joined(prefix, f".weightcast-tmp-clock-{secrets.token_hex(4)}")
        self.replace(key, b"clock")
        written = self._info(key)
        self.delete(key)
        return _stat(written).written

    def _files(self, prefix: str) -> tuple[Any, ...]:
        """All files at or below it."""
        with self._named(prefix) as key:
            found = self._api.list_bucket_tree(self._bucket, prefix=key or None, recursive=True)
            return tuple(
                each
                for each in found
                if each.type == "file" and (not key or f"{each.path}/".startswith(f"{key}/"))
            )

    def _change(self, key: str, **changes: Any) -> None:
        if any(changes.values()):
            with self._named(key):
                self._api.batch_bucket_files(self._bucket, **changes)

    @contextlib.contextmanager
    def _named(self, key: str, *, is_long: bool = False) -> Iterator[str]:
        """The key in the bucket. Whatever the hub raises, its own errors, those of its HTTP client and of its
        transfers, as an error of a store without the request in its text."""
        full = self._key(key)
        place = joined(self._url, full)
        try:
            yield full
        except WeightcastError:
            raise
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if type(error).__name__ == "BucketNotFoundError":
                remedy = "create it, correct the URL, or set HF_TOKEN"
                reason = "the bucket does not exist, or is private"
                raise failed(place, reason, remedy, lasting=True) from error
            if status in (401, 403):
                raise denied(place, "check HF_TOKEN, and its rights to this bucket") from error
            if status == 404:
                raise NotFound.at(place) from error
            reason = f"the hub answered {status}" if status else f"the hub failed: {type(error).__name__}"
            raise failed(place, reason, "check the network") from error


def _stat(found: Any) -> Stat:
    written = found.uploaded_at or found.mtime
    nanoseconds = 0 if written is None else int(written.timestamp()) * 10**9
    return Stat(found.size, nanoseconds, found.xet_hash)
