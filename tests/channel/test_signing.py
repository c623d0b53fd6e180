"""Signature files and keys: golden bytes, everything altered refused, and nothing secret in any message."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.base.errors import Refused, Untrusted
from weightcast.shared.channel.signing import (
    PrivateKey,
    PublicKey,
    Statement,
    Trust,
    load_private_key,
    parse_public_key,
    require_same,
    trusted_keys,
    write_private_key,
    write_signature,
)

SEED = bytes(range(32))
"""of the key in docs/FORMAT.md's example"""
FILE = b'{"an": "index"}'
DIGEST = blake3(FILE).hexdigest()
STATED = Statement("run-1", "delta", 8, 7, 3, 1700000000.5, "ab" * 32, "", DIGEST)
GOLDEN_KEY = "ed25519:A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="
GOLDEN_ID = "98ba85304ac639f0"
GOLDEN_SIGNATURE = "5inuQCKbAs1uf+V3Emzwu55NzNvctncELWbSzyDFX00xc2u7K/FKANaE+RRQhic7z0/sZyL8fenCBDKQ46j6AA=="


def pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey, secret: bytes | None = None) -> bytes:
    how = NoEncryption() if secret is None else BestAvailableEncryption(secret)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def key_file(directory: Path, data: bytes, mode: int = 0o600) -> Path:
    path = directory / "key.pem"
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    return load_private_key(key_file(tmp_path, pem(ed25519.Ed25519PrivateKey.from_private_bytes(SEED))))


def test_golden_signature(key: PrivateKey) -> None:
    """docs/FORMAT.md, Signatures: the example, checked here with the library alone."""
    assert str(key.public) == GOLDEN_KEY
    assert key.public.id == GOLDEN_ID == blake3(base64.b64decode(GOLDEN_KEY[8:])).hexdigest()[:16]
    made = write_signature(STATED, key)
    members = json.loads(made)
    assert list(members) == ["format", "key", "statement", "signature"]
    text = (
        '{"format":1,"run_id":"run-1","kind":"delta","version":8,"base_version":7,"epoch":3,'
        f'"time":1700000000.5,"parent":"{"ab" * 32}","main":"","blake3":"{DIGEST}"}}'
    )
    assert members["statement"] == text and members["key"] == GOLDEN_ID
    assert members["signature"] == GOLDEN_SIGNATURE
    public = ed25519.Ed25519PrivateKey.from_private_bytes(SEED).public_key()
    public.verify(base64.b64decode(members["signature"]), b"weightcast signature 1\n" + text.encode())


def test_a_signature_is_checked_and_its_signer_remembered(key: PrivateKey) -> None:
    trust = Trust.of([PrivateKey.generate().public, key.public])
    assert trust.signer(DIGEST) is None
    assert trust.check(write_signature(STATED, key), "index", DIGEST) == STATED
    assert trust.signer(DIGEST) == key.public.id


def refusal(trust: Trust, signature: bytes | None, digest: str = DIGEST) -> str:
    with pytest.raises(Untrusted) as raised:
        trust.check(signature, "index", digest)
    assert raised.value.exit_code == 3 and raised.value.remedy
    assert trust.signer(digest) is None
    return raised.value.message


def test_unsigned_foreign_and_altered_files_are_refused(key: PrivateKey) -> None:
    trust, other = Trust.of([key.public]), PrivateKey.generate()
    good = write_signature(STATED, key)
    assert "not signed" in refusal(trust, None)
    assert other.public.id in refusal(trust, write_signature(STATED, other))
    assert "altered or swapped" in refusal(trust, good, blake3(b"another").hexdigest())

    forged = json.loads(write_signature(STATED, other)) | {"key": key.public.id}
    assert "altered or forged" in refusal(trust, json.dumps(forged).encode())
    moved = json.loads(good)
    moved["statement"] = moved["statement"].replace('"version":8', '"version":9')
    assert "altered or forged" in refusal(trust, json.dumps(moved).encode())


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("format", 2),
        ("format", None),
        ("key", "AB" * 8),
        ("key", 5),
        ("statement", None),
        ("statement", "x" * 9000),
        ("signature", "A"),
        ("signature", "AAAA"),
        ("signature", "é"),
        ("signature", None),
    ],
)
def test_signature_files_that_are_none(key: PrivateKey, member: str, value: object) -> None:
    members = json.loads(write_signature(STATED, key)) | {member: value}
    refusal(Trust.of([key.public]), json.dumps(members).encode())


def test_what_a_key_signed_elsewhere_is_no_statement(key: PrivateKey) -> None:
    """Without the context a key that also signs something else could be made to sign a statement."""
    members = json.loads(write_signature(STATED, key))
    bare = key.sign(members["statement"].encode())
    members["signature"] = base64.b64encode(bare).decode()
    assert "altered or forged" in refusal(Trust.of([key.public]), json.dumps(members).encode())


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    refusal(Trust.of([PrivateKey.generate().public]), data)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(at: int, bit: int) -> None:
    key = PrivateKey.generate()
    good = bytearray(write_signature(STATED, key))
    good[at % len(good)] ^= 1 << bit
    trust = Trust.of([key.public])
    try:
        stated = trust.check(bytes(good), "index", DIGEST)
    except Untrusted:
        return
    assert stated == STATED, "only base64's unused bits may differ"


@pytest.mark.parametrize("change", [{"version": 9}, {"epoch": 4}, {"run_id": "run-2"}, {"main": "cd" * 32}])
def test_a_statement_of_another_place_is_refused(change: dict[str, object]) -> None:
    found = dataclasses.replace(STATED, **change)  # type: ignore[arg-type]
    require_same(STATED, STATED, "index")
    with pytest.raises(Untrusted, match=f"{next(iter(change))} .* instead of"):
        require_same(STATED, found, "index")


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    made, path = PrivateKey.generate(), tmp_path / "own.key"
    write_private_key(path, made)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_private_key(path).public == made.public
    with pytest.raises(FileExistsError):
        write_private_key(path, PrivateKey.generate())
    assert load_private_key(path).public == made.public
    assert made.pem().decode() not in repr(made) and "PRIVATE" not in repr(made)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_private_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, PrivateKey.generate().pem(), mode)
    with pytest.raises(Refused, match="others than its owner") as raised:
        load_private_key(path)
    assert "chmod 600" in raised.value.remedy


def test_a_mounted_secret_is_a_link(tmp_path: Path) -> None:
    made = PrivateKey.generate()
    key_file(tmp_path, made.pem())
    (tmp_path / "mounted").symlink_to("key.pem")
    assert load_private_key(tmp_path / "mounted").public == made.public


def test_files_that_are_no_private_keys(tmp_path: Path) -> None:
    good = ed25519.Ed25519PrivateKey.generate()
    cases = {
        "empty": b"",
        "text": b"sesame",
        "encrypted": pem(good, b"sesame"),
        "another curve": pem(ec.generate_private_key(ec.SECP256R1())),
        "public": str(PrivateKey.generate().public).encode(),
        "huge": b"-" * (65 << 10),
    }
    for name, data in cases.items():
        with pytest.raises(Refused) as raised:
            load_private_key(key_file(tmp_path, data))
        assert raised.value.remedy and "sesame" not in str(raised.value), name
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(Refused):
            load_private_key(missing)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(Refused):
        load_private_key(tmp_path / "fifo")


def test_trusted_keys_as_text_and_in_files(tmp_path: Path) -> None:
    one, two = PrivateKey.generate().public, PrivateKey.generate().public
    file = tmp_path / "trusted"
    file.write_text(f"# the old one\n{one}\n\n  {two}  \n")
    assert trusted_keys(str(one)) == (one,)
    assert trusted_keys(file) == trusted_keys(str(file)) == (one, two)
    loaded = Trust.load([str(two), file])
    assert loaded is not None and set(loaded.keys) == {one.id, two.id}
    assert Trust.load([]) is None


def test_what_is_no_public_key_is_refused_and_not_quoted(tmp_path: Path) -> None:
    secret = base64.b64encode(os.urandom(48)).decode()
    for text in (f"ed25519:{secret}", "ed25519:", "ed25519:%%%", "", str(tmp_path / "nowhere")):
        with pytest.raises(Refused) as raised:
            trusted_keys(text)
        assert secret not in str(raised.value)
    for content in (b"", b"# nothing\n", PrivateKey.generate().pem(), b"\xff\xfe"):
        path = key_file(tmp_path, content, 0o644)
        with pytest.raises(Refused) as raised:
            trusted_keys(path)
        assert "PRIVATE" not in str(raised.value)
    with pytest.raises(Refused, match="here"):
        parse_public_key("rsa:AAAA", "here")


SMALL = ["00" * 32, "01" + "00" * 31, "01" + "00" * 30 + "80"]
SMALL += [f"{low}{'ff' * 30}7f" for low in ("ec", "ed", "ee")]
SMALL += ["26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"]
SMALL += ["c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"]


@pytest.mark.parametrize("raw", SMALL)
def test_a_key_for_which_anybody_can_sign_is_refused(raw: str) -> None:
    """With the second one of these every signature of one form fits every message."""
    anybodys = b"\x01" + bytes(63)
    assert PublicKey(bytes.fromhex(SMALL[1])).verifies(anybodys, b"a version")
    with pytest.raises(Refused, match="anybody can sign"):
        trusted_keys(f"ed25519:{base64.b64encode(bytes.fromhex(raw)).decode()}")
