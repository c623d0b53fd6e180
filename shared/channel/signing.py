"""Signatures over indexes and base.json: what is stated, what a reader demands. docs/FORMAT.md, Signatures.

Rules without IO: the store reads the files, the publisher writes them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from weightcast.shared.channel.base import Base
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.keys import SIGNATURE_BYTES, PrivateKey, PublicKey, trusted_keys
from weightcast.shared.channel.records import FORMAT, check_format, is_hex, run_id
from weightcast.shared.errors import DamagedFile, UnknownFormat, Untrusted
from weightcast.shared.files.strict_json import Members, parse_object, write_object

SIGNATURE_LIMIT = 16 << 10
_CONTEXT = b"weightcast signature 1\n"
_REMEMBERED = 4096

StatedKind = Literal["base", "delta", "anchor"]


@dataclass(frozen=True)
class Statement:
    """What a key vouches for. `blake3`: of the exact bytes of the signed file; `main`: digest of the main
    index for one that lies beside it (anchor, delta from an older version), else empty; `time`: the index's
    `created`. The rest is as in the index; of base.json: version 0, base_version -1, epoch 0."""

    run_id: str
    kind: StatedKind
    version: int
    base_version: int
    epoch: int
    time: float
    parent: str
    main: str
    blake3: str


def signature_path(path: Path) -> Path:
    """Where the signature over the file `path` lies."""
    return path.with_name(f"{path.name}.sig")


def stated_by(index: Index, digest: str, main: str = "") -> Statement:
    """`digest`: of the index's exact bytes."""
    return Statement(
        run_id=index.run_id,
        kind=index.kind,
        version=index.version,
        base_version=index.base_version,
        epoch=index.epoch,
        time=index.created,
        parent=index.parent,
        main=main,
        blake3=digest,
    )


def stated_by_base(base: Base, time: float) -> Statement:
    return Statement(base.run_id, "base", 0, -1, 0, time, "", "", base.digest)


def write_signature(statement: Statement, key: PrivateKey) -> bytes:
    """The bytes of a signature file."""
    text = write_object({"format": FORMAT, **asdict(statement)})
    signature = key.sign(_CONTEXT + text)
    return write_object(
        {
            "format": FORMAT,
            "key": key.public.id,
            "statement": text.decode(),
            "signature": base64.b64encode(signature).decode(),
        }
    )


@dataclass(frozen=True)
class _Signed:
    key: str
    text: bytes
    signature: bytes


def _parse_signature(data: bytes, what: str) -> _Signed:
    members = Members(parse_object(data, what), what)
    check_format(members, what)
    try:
        signature = base64.b64decode(members.text("signature", 128), validate=True)
    except (binascii.Error, ValueError) as error:
        raise members.bad("signature", "base64") from error
    if len(signature) != SIGNATURE_BYTES:
        raise members.bad("signature", f"{SIGNATURE_BYTES} bytes in base64")
    return _Signed(members.hex("key", 16), members.text("statement", 8192).encode(), signature)


def _parse_statement(text: bytes, what: str) -> Statement:
    members = Members(parse_object(text, what), what)
    check_format(members, what)
    for key in ("parent", "main"):
        if members.text(key, 64) and not is_hex(members.text(key, 64), 64):
            raise members.bad(key, "64 hex digits or nothing")
    return Statement(
        run_id=run_id(members),
        kind=_kind(members),
        version=members.integer("version"),
        base_version=members.integer("base_version", -1),
        epoch=members.integer("epoch"),
        time=members.number("time"),
        parent=members.text("parent", 64),
        main=members.text("main", 64),
        blake3=members.hex("blake3", 64),
    )


def _kind(members: Members) -> StatedKind:
    match members.text("kind", 32):
        case "base" | "delta" | "anchor" as kind:
            return kind
    raise members.bad("kind", "base, delta or anchor")


@dataclass(frozen=True)
class Trust:
    """Keys from the reader's own configuration. Remembers whose word the files are that it has checked."""

    keys: Mapping[str, PublicKey]
    """by id"""
    _verified: dict[str, str] = field(default_factory=dict, repr=False)
    """digest to key id, the newest last"""

    @classmethod
    def of(cls, keys: Iterable[PublicKey]) -> Trust:
        return cls({key.id: key for key in keys})

    @classmethod
    def load(cls, texts: Iterable[str | Path]) -> Trust | None:
        """None without any key: then nothing is checked. Raises Refused for what is no key."""
        given = list(texts)
        return cls.of(key for text in given for key in trusted_keys(text)) if given else None

    def check(self, signature: bytes | None, what: str, digest: str) -> Statement:
        """What is stated of the file `what` with BLAKE3 `digest`. Raises Untrusted unless one of the keys
        signed exactly this file. Whether it belongs where it lies is for `require_same`."""
        if signature is None:
            raise _untrusted(f"{what} is not signed", "is its publisher run with --sign-key?")
        try:
            signed = _parse_signature(signature, f"{what}.sig")
            key = self.keys.get(signed.key)
            if key is None:
                raise _untrusted(
                    f"{what} is signed by key {signed.key}, which is not trusted here",
                    "add it to --trusted-key if it is your publisher's",
                )
            if not key.verifies(signed.signature, _CONTEXT + signed.text):
                raise _untrusted(f"{what}.sig: its signature is wrong: it was altered or forged", _ALTERED)
            stated = _parse_statement(signed.text, f"{what}.sig: statement")
        except (DamagedFile, UnknownFormat) as error:
            raise _untrusted(error.message, error.remedy or _ALTERED) from error
        if stated.blake3 != digest:
            raise _untrusted(f"{what} is not the file that was signed: it was altered or swapped", _ALTERED)
        self._remember(digest, signed.key)
        return stated

    def signer(self, digest: str) -> str | None:
        """Id of the key whose signature over the file with this digest was checked; None if none was."""
        return self._verified.get(digest)

    def _remember(self, digest: str, key: str) -> None:
        self._verified.pop(digest, None)
        self._verified[digest] = key
        if len(self._verified) > _REMEMBERED:
            self._verified.pop(next(iter(self._verified)), None)


_ALTERED = "find out who can write to the channel; nothing was taken from it"


def _untrusted(message: str, remedy: str) -> Untrusted:
    return Untrusted(message, remedy=remedy)


def require_same(stated: Statement, found: Statement, what: str) -> None:
    """Raises Untrusted when a signature speaks of another place in the history than where it is found."""
    different = [
        f"{name} {theirs!r} instead of {ours!r}"
        for (name, theirs), ours in zip(asdict(stated).items(), asdict(found).values(), strict=True)
        if theirs != ours
    ]
    if different:
        raise _untrusted(
            f"{what}: its signature is for another place: {'; '.join(different)[:400]}",
            "a file was replayed or swapped: find out who can write to the channel",
        )
