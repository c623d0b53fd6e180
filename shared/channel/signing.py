"""Signatures over indexes and base.json: what is stated, what a reader demands. docs/FORMAT.md, Signatures.

Rules without IO: the store reads the files, the publisher writes them.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from annotated_types import Ge, MaxLen
from blake3 import blake3

from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat, Untrusted
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.run_files import FORMAT, Base, check_format, is_hex, run_id
from weightcast.shared.files import durable
from weightcast.shared.files.paths import at_home
from weightcast.shared.files.strict_json import Hex, Members, parse_object, write_object

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_LIMIT = 64 << 10
SIGNATURE_BYTES = 64
_PREFIX = "ed25519:"
_PUBLIC_BYTES = 32
_FIELD = 2**255 - 19
_CURVE_D = -121665 * pow(121666, -1, _FIELD)
"""-x^2 + y^2 = 1 + d x^2 y^2 (RFC 8032)"""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class PublicKey:
    """`raw`: 32 bytes, RFC 8032."""

    raw: bytes

    @property
    def id(self) -> str:
        """The first 16 hex digits of BLAKE3 of the raw key: a name, not a proof."""
        return blake3(self.raw).hexdigest()[:16]

    def __str__(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """Never shown: neither in messages nor by `repr`."""

    _key: Ed25519PrivateKey = field(repr=False)
    public: PublicKey

    @classmethod
    def generate(cls) -> PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> PrivateKey:
        return cls(key, PublicKey(key.public_key().public_bytes_raw()))

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def pem(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def load_private_key(path: Path) -> PrivateKey:
    """An unencrypted PEM PKCS#8 file. Raises Refused when it is not there, when others than its owner may use
    it, and when it is not an Ed25519 key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, private=True)
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # not chained: what the parser says may quote the file
        raise _no_key(path) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(path)
    return PrivateKey._of(key)


def _no_key(path: Path) -> Refused:
    return Refused(
        f"{path} is not an unencrypted Ed25519 key in PEM (PKCS#8)",
        remedy="make one with `weightcast keygen`",
    )


def write_private_key(path: Path, key: PrivateKey) -> None:
    """For its owner alone, durable. Raises FileExistsError."""
    durable.create(path, key.pem(), mode=0o600)


def trusted_keys(text: str | Path) -> tuple[PublicKey, ...]:
    """The keys that `text` gives: one written out (`ed25519:<base64>`), or a file with one per line, empty
    lines and lines with # left out. Raises Refused; a file without any key is an error too."""
    if isinstance(text, str) and text.startswith(_PREFIX):
        return (parse_public_key(text, "trusted key"),)
    if not str(text):
        raise Refused("a trusted key is empty", remedy="give ed25519:<base64>, or a file of such lines")
    path = at_home(Path(text))
    lines = _read(path, private=False).decode(errors="replace").splitlines()
    wanted = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not wanted:
        raise Refused(f"{path} has no keys", remedy="one line per key: ed25519:<base64>")
    return tuple(parse_public_key(line, str(path)) for line in wanted)


def parse_public_key(text: str, where: str) -> PublicKey:
    """Raises Refused; `where` names the place that it comes from."""
    try:
        raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True) if text.startswith(_PREFIX) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _PUBLIC_BYTES:
        # not quoted: a private key in the wrong place must not reach a log
        raise Refused(f"{where}: not a public key", remedy="a key is one line: ed25519:<base64 of 32 bytes>")
    if _is_of_small_order(raw):
        raise Refused(
            f"{where}: a key with which anybody can sign (of small order, as all zeros are)",
            remedy="give a key that `weightcast keygen` made",
        )
    return PublicKey(raw)


def _is_of_small_order(raw: bytes) -> bool:
    """Whether eight times the point is nothing: such a key takes signatures that no private key made."""
    y = int.from_bytes(raw, "little") % (1 << 255)
    # y of the points of order 1 and 2, of order 4, and, from x^2 = -y^2 in the curve's equation, of order 8
    return (y * y - 1) * y * (_CURVE_D * y**4 + 2 * y * y - 1) % _FIELD == 0


def _read(path: Path, *, private: bool) -> bytes:
    """Links are followed: secrets are mounted as such."""
    try:
        fd = durable.open_regular(path, follow_links=True)
    except OSError as error:
        raise Refused(
            f"key file {path} cannot be read: {error.strerror}", remedy="check its name and permissions"
        ) from error
    with os.fdopen(fd, "rb") as file:
        data = file.read(KEY_LIMIT + 1)
        if private and data.startswith(_PREFIX.encode()):
            raise Refused(f"{path} is the public key", remedy="give the private key: the file without .pub")
        if not private and b"PRIVATE KEY-----" in data:
            raise Refused(f"{path} is the private key", remedy=f"give {path}.pub")
        if private and os.fstat(fd).st_mode & _OTHERS:
            raise Refused(f"{path} may be used by others than its owner", remedy=f"chmod 600 {path}")
    if len(data) > KEY_LIMIT:
        raise Refused(f"{path} is larger than {KEY_LIMIT} bytes", remedy="is it a key?")
    return data


SIGNATURE_LIMIT = 16 << 10
_CONTEXT = b"weightcast signature 1\n"
_REMEMBERED = 4096

StatedKind = Literal["base", "delta", "anchor", "components"]


@dataclass(frozen=True)
class Statement:
    """What a key vouches for. `blake3`: of the exact bytes of the signed file; `main`: digest of the main
    index for the index of an anchor or a multi-step delta, else empty; `time`: the index's
    `created`. The rest is as in the index; of base.json: version 0, base_version -1, epoch 0. Of
    components.json as of base.json, and `version` rises with every one."""

    run_id: str
    kind: StatedKind
    version: int
    base_version: Annotated[int, Ge(-1)]
    epoch: int
    time: float
    parent: Annotated[str, MaxLen(64)]
    main: Annotated[str, MaxLen(64)]
    blake3: Annotated[str, Hex(64)]


def signature_key(key: str) -> str:
    """Of the signature over the object `key`."""
    return f"{key}.sig"


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


def stated_by_components(run: str, version: int, time: float, digest: str) -> Statement:
    return Statement(run, "components", version, -1, 0, time, "", "", digest)


def stated_in(signature: bytes, what: str) -> Statement:
    """What a signature file says, whoever wrote it. Raises DamagedFile and UnknownFormat."""
    return _parse_statement(_parse_signature(signature, what).text, what)


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
    kind = members.text("kind", 32)
    if kind not in get_args(StatedKind):
        raise members.bad("kind", "base, delta, anchor or components")
    stated = members.record(Statement, run_id=run_id(members), kind=kind)
    for key in ("parent", "main"):
        if getattr(stated, key) and not is_hex(getattr(stated, key), 64):
            raise members.bad(key, "64 hex digits or nothing")
    return stated


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
        """None without any key: then nothing is checked. Raises Refused for invalid keys."""
        given = list(texts)
        return cls.of(key for text in given for key in trusted_keys(text)) if given else None

    def check(self, signature: bytes | None, what: str, digest: str) -> Statement:
        """What is stated of the file `what` with BLAKE3 `digest`. Raises Untrusted unless one of the keys
        signed exactly this file. `require_same` checks its place in the history."""
        if signature is None:
            raise Untrusted(f"{what} is not signed", remedy="is its publisher run with --sign-key?")
        try:
            signed = _parse_signature(signature, f"{what}.sig")
            key = self.keys.get(signed.key)
            if key is None:
                raise Untrusted(
                    f"{what} is signed by key {signed.key}, which is not trusted here",
                    remedy="add it to --trusted-key if it is your publisher's",
                    unknown_key=True,
                )
            if not key.verifies(signed.signature, _CONTEXT + signed.text):
                raise Untrusted(
                    f"{what}.sig: its signature is wrong: it was altered or forged", remedy=_ALTERED
                )
            stated = _parse_statement(signed.text, f"{what}.sig: statement")
        except (DamagedFile, UnknownFormat) as error:
            raise Untrusted(error.message, remedy=error.remedy or _ALTERED) from error
        if stated.blake3 != digest:
            raise Untrusted(
                f"{what} is not the file that was signed: it was altered or swapped", remedy=_ALTERED
            )
        self._verified.pop(digest, None)
        self._verified[digest] = signed.key
        if len(self._verified) > _REMEMBERED:
            self._verified.pop(next(iter(self._verified)), None)
        return stated

    def signer(self, digest: str) -> str | None:
        """Id of the key whose signature over the file with this digest was checked; None if none was."""
        return self._verified.get(digest)


_ALTERED = "find out who can write to the channel; nothing was taken from it"


def require_same(stated: Statement, found: Statement, what: str) -> None:
    """Raises Untrusted when a signature speaks of another place in the history than where it is found."""
    different = [
        f"{name} {theirs!r} instead of {ours!r}"
        for (name, theirs), ours in zip(asdict(stated).items(), asdict(found).values(), strict=True)
        if theirs != ours
    ]
    if different:
        raise Untrusted(
            f"{what}: its signature is for another place: {'; '.join(different)[:400]}",
            remedy="a file was replayed or swapped: find out who can write to the channel",
        )
