"""A channel in an object store (S3, Azure Blob Storage, Google Cloud Storage, memory), through obstore.

Conditional puts replace renames: `create` is a put with if-none-match, `replace` one with if-match of the
ETag that was read, and a version is committed by creating its index last. A put whose answer was lost is
decided by reading back. A large object is uploaded in parts while it is made; one whose head is known last
waits in a temporary file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from hashlib import file_digest, sha256
from io import BufferedRandom
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import ObjectStore as Client
from obstore.store import from_url

from weightcast.shared.base.errors import USAGE, DamagedFile, Refused
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.awaited import awaited
from weightcast.shared.channel.rate import NO_RATES, Rates
from weightcast.shared.channel.store import (
    POLLED_BYTES,
    AlreadyExists,
    Changed,
    Entry,
    NotFound,
    Pieces,
    Stat,
    Store,
    StoreError,
    Unavailable,
    bad_certificate,
    check_head,
    check_key,
    denied,
    failed,
    joined,
    too_large,
)
from weightcast.shared.files import durable
from weightcast.shared.kernels.parallel import ordered

if TYPE_CHECKING:
    from obstore import GetOptions, UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

Keys: TypeAlias = list[str]
"""the class below has a method of the name `list`"""
_PART = 8 << 20
"""bytes per request of a large object"""
_READS = 5
"""requests at a time of an object that is read; a part more may wait in memory"""
_UPLOADS, _PACED_UPLOADS = 8, 4
_PARTS = 10_000
"""of an upload, at most: as S3 has it"""
_LEAST_PART = {"s3": 5 << 20, "gs": 5 << 20}
"""bytes; by scheme, elsewhere a MiB"""
_CLIENT: ClientConfig = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRY: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}
"""of a request; the callers of a store try again as their own deadlines say"""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""by scheme of a URL: variables that name another server than the provider's"""
_METADATA = re.compile(r"performing [A-Z]+ \S+/latest/(api|meta-data)/")
_NO_KEY = "no AWS credentials found (AWS_ACCESS_KEY_ID is not set, no instance metadata service answers)"
_SERVER = re.compile(r"(https?://)(?:[^/@\s]*@)?([\w.:\[\]-]+)(?![^/?\s])")
"""scheme and host; other URLs make the client panic, or wait for an answer"""
_CREDENTIALS = {"SecretAccessKey": "AWS_SECRET_ACCESS_KEY", "AccessKeyId": "AWS_ACCESS_KEY_ID"}
"""as the client of S3 names what it lacks: the variable"""
_CLOCK, _PROBE = ".weightcast-tmp-clock", ".weightcast-tmp-probe"
_PROBE_BYTES = 100
_SHA256 = "stitch-sha256"
"""metadata by which Stitch checks what it uploaded"""
_REQUEST = re.compile(r"performing (list request|[A-Z]+)")
_STATUS = re.compile(r"status code: (\d{3}[^:\n]{0,40})")


def open_object_store(url: str, rates: Rates = NO_RATES, *, stitch: bool = False) -> ObjectStore:
    """`s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`. `stitch`: as of ObjectStore.
    Credentials come from the environment and the clients' own chains. Raises Refused for invalid URLs, and
    for credentials in a URL."""
    parts = urlsplit(url)
    if parts.scheme not in _ENDPOINTS:
        raise Refused(
            f"channels at {parts.scheme}:// are not supported",
            remedy="give a directory, or a URL that begins with s3://, gs:// or az://",
        )
    if parts.username or parts.password or parts.query:
        raise Refused(
            f"{parts.scheme}://{parts.hostname}{parts.path} contains credentials or a query",
            remedy="put credentials into the environment; see docs/stores.md",
        )
    endpoints = {name: os.environ[name] for name in _ENDPOINTS[parts.scheme] if name in os.environ}
    for name, given in endpoints.items():
        if not _SERVER.match(given):
            text = f"{name} {given.rpartition('@')[2]!r} is not an http:// or https:// URL"
            wrong = Refused(text, remedy=f"set {name} to http[s]://HOST[:PORT], or unset it")
            wrong.exit_code = USAGE
            raise wrong
    # a plain endpoint in the environment is the user's word for it; nothing else is sent unencrypted
    plain = any(given.startswith("http://") for given in endpoints.values())
    bucket = f"{parts.scheme}://{parts.netloc}"
    try:
        client = from_url(
            bucket,
            config={"checksum_algorithm": "sha256"} if stitch else None,
            client_options={**_CLIENT, "allow_http": plain},
            retry_config=_RETRY,
        )
    except (exceptions.BaseError, ValueError) as error:
        reason = str(error).splitlines()[0]
        missing = next((name for text, name in _CREDENTIALS.items() if text in reason), "")
        raise Refused(
            f"{url}: {reason}", remedy=f"set {missing}" if missing else "correct the URL or the environment"
        ) from error
    return ObjectStore(client, bucket, parts.path.strip("/"), rates, stitch=stitch)


class ObjectStore(Store):
    """`client`: of obstore, for the bucket; `url`: of the bucket; `prefix`: of every key; `stitch`: objects
    get their SHA-256 as user metadata."""

    def __init__(
        self, client: Client, url: str, prefix: str = "", rates: Rates = NO_RATES, *, stitch: bool = False
    ) -> None:
        self._client, self._url, self._prefix, self.rates = client, url, prefix, rates
        self._stitch = stitch
        self._polled: dict[str, tuple[bytes, UpdateVersion]] = {}

    def place(self, key: str = "") -> str:
        return joined(self._url, joined(self._prefix, key) if key else self._prefix)

    def within(self, prefix: str) -> ObjectStore:
        if not prefix:
            return self
        return ObjectStore(self._client, self._url, self._key(prefix), self.rates, stitch=self._stitch)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._named(prefix) as key:
            found = obstore.list_with_delimiter(self._client, key)
        for path in found["common_prefixes"]:
            yield Entry(path.rpartition("/")[2], "directory")
        for meta in found["objects"]:
            name = str(meta["path"]).rpartition("/")[2]
            if not durable.is_temporary(name):
                yield Entry(name, "file", _stat(meta))

    def stat(self, key: str) -> Stat | None:
        with contextlib.suppress(NotFound), self._named(key) as full:
            return _stat(obstore.head(self._client, full))
        return None

    def read(self, key: str, limit: int) -> bytes:
        return self._read(key, limit)[0]

    def _read(self, key: str, limit: int) -> tuple[bytes, UpdateVersion]:
        """Content, and what a conditional put names: in Google Cloud Storage the version, elsewhere the tag.
        What is as small as a pointer is polled: it is asked for by its last tag."""
        known = self._polled.get(key)
        known = None if known is None or len(known[0]) > limit else known
        with self._named(key) as full:
            try:
                unless: GetOptions = {} if known is None else {"if_none_match": known[1]["e_tag"]}
                found = obstore.get(self._client, full, options=unless)
            except exceptions.NotModifiedError:
                if known is None:
                    raise
                return known
            if found.meta["size"] > limit:
                raise too_large(self.place(key), limit)
            content = bytes(found.bytes()), _version(found.meta)
        if len(content[0]) <= POLLED_BYTES and "e_tag" in content[1]:
            self._polled[key] = content
        return content

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        self.rates.fetch.take(length)
        return bytes(self._part(key, offset, length)[0])

    def pieces(self, key: str) -> Pieces:
        """Parts are asked for ahead, several at a time; a small object is one request."""
        rate = self.rates.fetch
        step = min(_PART, rate.piece)
        first, size = self._part(key, 0, step)
        rate.take(len(first))
        yield first

        def read(start: int) -> memoryview:
            length = min(step, size - start)
            rate.take(length)
            return self._part(key, start, length)[0]

        yield from ordered(read, range(step, size, step), _READS, each=1)

    def _part(self, key: str, offset: int, length: int) -> tuple[memoryview, int]:
        """What the object has of a range of at least a byte, and its size."""
        with self._named(key) as full:
            try:
                found = obstore.get(self._client, full, options={"range": (offset, offset + length)})
                return memoryview(found.bytes()), found.meta["size"]
            except exceptions.GenericError:
                # the answer to a range that begins at the end
                size = obstore.head(self._client, full)["size"]
                if offset < size:
                    raise
                return memoryview(b""), size

    def create(self, key: str, data: bytes) -> None:
        try:
            self._put(key, data, "create")
        except AlreadyExists as error:
            if self.stat(key) is not None:
                raise
            # a server may say so while it works on a put of the same object whose answer was lost
            place, remedy = self.place(key), "try again; if that fails too, run `weightcast doctor`"
            text = f"{place}: the server refused to create it, and it does not exist"
            raise Unavailable(text, errno.EBUSY, place, remedy=remedy) from error

    def _put(self, key: str, data: bytes, mode: Any = "overwrite") -> None:
        attributes = {_SHA256: sha256(data).hexdigest()} if self._stitch else None
        self._send(key, data, attributes=attributes, mode=mode, use_multipart=False)

    def _send(self, key: str, data: Any, **how: Any) -> None:
        """`data`, `how`: as obstore takes them."""
        failpoint("object.begun", self.place(key))
        with self._named(key, is_long="chunk_size" in how) as full:
            obstore.put(self._client, full, data, **how)
        failpoint("object.written", self.place(key))

    def replace(
        self,
        key: str,
        data: bytes,
        *,
        expected: bytes | None = None,
        allowed: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> None:
        if expected is None:
            if allowed is not None:
                allowed()
            self._put(key, data)
            return
        try:
            there, seen = self._read(key, len(expected))
        except (NotFound, DamagedFile) as error:
            raise Changed.at(self.place(key)) from error
        if there != expected:
            raise Changed.at(self.place(key))
        if allowed is not None:
            allowed()
        self._put_if_match(key, data, seen)

    def _put_if_match(self, key: str, data: bytes, seen: UpdateVersion) -> None:
        """Ceph 16 and some others answer 412 to a quoted ETag that matches: it is sent again unquoted. Raises
        Changed."""
        tag = seen.get("e_tag") or ""
        for attempt in dict.fromkeys((tag, tag.strip('"'))):
            try:
                self._put(key, data, {**seen, "e_tag": attempt})
                return
            except Changed:
                there, now = self._read(key, 1 << 20)
                if there == data:
                    return  # the answer to our own put was lost
                if now != seen:
                    raise
        raise Changed.at(self.place(key))

    def write(self, key: str, *, reserve: int = 0, sync: bool = True) -> _Writer:
        if self.stat(key) is not None:
            raise AlreadyExists.at(self.place(key))
        return _Writer(self, key, reserve)

    def upload(self, key: str, pieces: Iterable[durable.Piece]) -> None:
        if self._stitch:
            # the digest of all bytes goes ahead of the first
            return super().upload(key, pieces)
        if self.stat(key) is not None:
            raise AlreadyExists.at(self.place(key))
        head, rest, part = bytearray(), self._paced(pieces), self._part_size()
        for piece in rest:
            head += piece
            if len(head) > part:
                break
        if len(head) <= part:
            self._send(key, head, use_multipart=False)
            return
        self._send_parts(key, chain([memoryview(head)], rest), part)

    def upload_file(self, key: str, file: IO[bytes], size: int) -> None:
        part = max(self._part_size(), size // (_PARTS - 1))
        attributes = None
        if self._stitch:
            attributes = {_SHA256: file_digest(cast(BufferedRandom, file), "sha256").hexdigest()}
            file.seek(0)
        pieces = self._paced(iter(partial(file.read, _PART), b""))
        body = pieces if self.rates.publish.limits else file
        self._send_parts(key, body, part, attributes=attributes)

    def _part_size(self) -> int:
        """Bytes of a part. Whatever waits for a rate moves in parts as small as the store allows, and few at
        a time: a part that is complete is sent at once, at any speed."""
        least = _LEAST_PART.get(urlsplit(self._url).scheme, 1 << 20)
        return max(least, min(_PART, self.rates.publish.piece))

    def _send_parts(self, key: str, data: Any, part: int, **how: Any) -> None:
        uploads = _PACED_UPLOADS if self.rates.publish.limits else _UPLOADS
        self._send(key, data, chunk_size=part, max_concurrency=uploads, **how)

    def _paced(self, pieces: Iterable[durable.Piece]) -> Iterator[memoryview]:
        return (piece for whole in pieces for piece in self.rates.publish.pieces(whole))

    def begin(self, draft: str) -> ObjectStore:
        if self.names(draft) or self.stat(draft) is not None:
            raise AlreadyExists.at(self.place(draft))
        return self.within(draft)

    def move(self, source: str, target: str, *, sync: bool = False) -> None:
        """Copies within the store, then deletes."""
        new = self._key(target)
        with self._named(source, is_long=True) as old:
            moved = self._below(source) or [old]
            for key in moved:
                obstore.copy(self._client, key, new + key[len(old) :])
            obstore.delete(self._client, moved)

    def copy(self, source: str, target: str) -> None:
        if self.stat(target) is not None:
            raise AlreadyExists.at(self.place(target))
        with self._named(source, is_long=True) as full:
            obstore.copy(self._client, full, self._key(target))

    def commit(
        self,
        draft: str,
        name: str,
        index: str,
        data: bytes,
        allowed: Callable[[], None] | None = None,
    ) -> None:
        there = joined(name, index)
        if self._has(there, data):
            return
        if allowed is not None:
            allowed()
        try:
            self.create(there, data)
        except StoreError:
            # of our own put the answer may be lost
            if not self._has(there, data):
                raise

    def _has(self, key: str, data: bytes) -> bool:
        with contextlib.suppress(NotFound, DamagedFile):
            return self.read(key, len(data)) == data
        return False

    def discard(self, prefix: str) -> None:
        keys = self._below(prefix)
        indexes = [key for key in keys if key.endswith(".index.json")]
        self._erase(prefix, indexes)
        failpoint("index.deleted", self.place(prefix))
        self._erase(prefix, [key for key in keys if key not in indexes])

    def _erase(self, prefix: str, keys: Keys) -> None:
        """`keys`: in the bucket."""
        # Azure says so of objects that another process, or a request whose answer was lost, deleted
        with contextlib.suppress(NotFound), self._named(prefix, is_long=True):
            obstore.delete(self._client, keys)

    def _below(self, prefix: str) -> Keys:
        with self._named(prefix, is_long=True) as full:
            return [meta["path"] for batch in obstore.list(self._client, full) for meta in batch]

    def delete(self, key: str) -> bool:
        if self.stat(key) is None:
            return False
        self._erase(key, [self._key(key)])
        return True

    def ignored(self) -> str:
        key = f"{_PROBE}-{secrets.token_hex(4)}"
        try:
            for data in (b"first", b"second"):
                with contextlib.suppress(AlreadyExists):
                    self.create(key, data)
            there, seen = self._read(key, _PROBE_BYTES)
            if there != b"first":
                return "if-none-match"
            self._put(key, b"third")
            with contextlib.suppress(Changed):
                self._put_if_match(key, b"fourth", seen)
            if self.read(key, _PROBE_BYTES) != b"third":
                return "if-match"
            self.replace(key, b"fifth", expected=b"third")
            return ""
        finally:
            self.delete(key)

    def now(self, prefix: str = "") -> float:
        with self._named(joined(prefix, f"{_CLOCK}-{secrets.token_hex(4)}")) as key:
            obstore.put(self._client, key, b"", use_multipart=False)
            found = obstore.head(self._client, key)
            obstore.delete(self._client, key)
        return found["last_modified"].timestamp()

    def _key(self, key: str) -> str:
        return joined(self._prefix, check_key(key)) if key else self._prefix

    @contextlib.contextmanager
    def _named(self, key: str, *, is_long: bool = False) -> Iterator[str]:
        """The key in the bucket. Errors of obstore as those of a store, with the object's URL and no request
        in their text. `is_long`: several requests, or as many bytes as the object has."""
        full = self._key(key)
        place = joined(self._url, full)
        try:
            with contextlib.nullcontext() if is_long else awaited(place):
                yield full
        except StoreError:
            raise
        except FileNotFoundError as error:
            if error.errno is not None:
                raise  # of a file that is uploaded
            _check_bucket(place, error)
            raise NotFound.at(place) from error
        except exceptions.AlreadyExistsError as error:
            raise AlreadyExists.at(place) from error
        except exceptions.PreconditionError as error:
            raise Changed.at(place) from error
        except exceptions.BaseError as error:
            text = str(error)
            found = _STATUS.search(text)
            if "InvalidCertificate" in text:
                raise bad_certificate(place, "") from error
            if _METADATA.search(text):
                remedy = "set them in the environment; see docs/stores.md"
                raise failed(place, _NO_KEY, remedy, lasting=_is_denied(error)) from error
            if _is_denied(error):
                request = _REQUEST.search(text)
                remedy = "check the credentials in the environment and their rights; see docs/stores.md"
                raise denied(place, remedy, request[1] if request else "no rights") from error
            _check_bucket(place, error)
            url = _SERVER.search(text)
            server = "the server" if url is None else f"the server {url[1]}{url[2]}"
            reason = f"{server} answered {found[1].strip()}" if found else f"{server} cannot be reached"
            raise failed(place, reason, "check the endpoint and the network") from error
        except BaseException as error:
            # of Rust code: not an Exception, and of a class that cannot be imported
            if type(error).__name__ != "PanicException":
                raise
            remedy = "check the endpoint and the environment"
            raise failed(place, f"the store's client crashed: {error}", remedy) from error


def _is_denied(error: exceptions.BaseError) -> bool:
    """Refused lists and deletes are errors without a class of their own."""
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return True
    return re.search("code: 40[13]|AccessDenied", str(error)) is not None


def _check_bucket(place: str, error: Exception) -> None:
    if re.search("NoSuchBucket|The specified (bucket|container) does not exist", str(error)):
        remedy = "create it, or correct the URL"
        # not Refused: a server that starts again says so for a while, and a daemon that runs tries again
        raise failed(place, "the bucket does not exist", remedy, lasting=True) from error


def _stat(meta: Any) -> Stat:
    # in whole seconds: a listing has fractions that other answers lack
    # and Azure's has tags without quotes
    tag = (meta["e_tag"] or "").strip('"')
    return Stat(meta["size"], int(meta["last_modified"].timestamp()) * 10**9, tag)


def _version(meta: Any) -> UpdateVersion:
    return cast("UpdateVersion", {name: meta[name] for name in ("e_tag", "version") if meta[name]})


class _Writer:
    def __init__(self, store: ObjectStore, key: str, reserve: int) -> None:
        self._store, self._key, self._reserve = store, key, reserve
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._file.seek(reserve)

    def write(self, data: durable.Piece) -> None:
        self._file.write(data)

    def write_head(self, head: bytes) -> None:
        check_head(self._store.place(self._key), head, self._reserve)
        self._file.seek(0)
        self._file.write(head)

    def finish(self) -> None:
        with self._file:
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            self._store.upload_file(self._key, self._file, size)

    def discard(self) -> None:
        self._file.close()
