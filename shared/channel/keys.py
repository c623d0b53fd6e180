"""Ed25519 keys: files that hold them, and what they sign. The only module that knows the library, which it
imports when there is a key: most channels have none."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from weightcast.shared.errors import Refused
from weightcast.shared.files import durable
from weightcast.shared.files.paths import at_home

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
    it, and when it is no Ed25519 key."""
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
            raise Refused(
                f"{path} is the public key", remedy="give the private one beside it, the file without .pub"
            )
        if private and os.fstat(fd).st_mode & _OTHERS:
            raise Refused(f"{path} may be used by others than its owner", remedy=f"chmod 600 {path}")
    if len(data) > KEY_LIMIT:
        raise Refused(f"{path} is larger than {KEY_LIMIT} bytes", remedy="is it a key?")
    return data
