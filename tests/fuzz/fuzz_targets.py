"""Everything that reads bytes of others: name to an example and the reader."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
from fuzz_api import Api
from fuzz_records import RECORDS, Target
from test_fuzz_parsers import PARSERS, STATE

from weightcast.shared.base.elements import TensorSpec, TensorTable, grid
from weightcast.shared.checkpoint.state.state import read_state, write_state
from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.container import decode_step, encode_chunk
from weightcast.shared.codec.slime import PayloadWriter, open_payload
from weightcast.shared.daemon.settings import load_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings

WORDS = 3000
TABLE = TensorTable.of([TensorSpec("a", "BF16", (WORDS,), 2 * WORDS)])
CHUNK = next(iter(grid(TABLE, TABLE.whole)))
OLD = np.random.default_rng(1).integers(0, 1 << 16, CHUNK.words, np.uint16)
OLD[WORDS:] = 0
NEW = OLD.copy()
NEW[5:2900:7] += 1
SETTINGS = b'channel = "/c"\nlocal = "/l"\nengine = ["webhook=http://127.0.0.1:1"]\nverify-rate = "1MiB"\n'
_ROOM = tempfile.TemporaryDirectory(prefix="fuzz-")


def _on_disk(name: str, data: bytes) -> Path:
    path = Path(_ROOM.name) / name
    path.write_bytes(data)
    return path


def _state() -> bytes:
    path = Path(_ROOM.name) / "good-state.json"
    write_state(path, STATE)
    return path.read_bytes()


def _payload(encoding: str) -> bytes:
    parts: list[bytes] = []
    with closing(PayloadWriter(encoding, 2 * WORDS, parts.append)) as writer:  # type: ignore[arg-type]
        writer.step(OLD[:WORDS].view(np.uint8), NEW[:WORDS].view(np.uint8))
        writer.finish()
    return b"".join(parts)


def _read_payload(encoding: str, data: bytes) -> object:
    reader = open_payload(
        encoding,  # type: ignore[arg-type]
        lambda offset, length: data[offset : offset + length],
        len(data),
        2 * WORDS,
    )
    new = reader.step(OLD[:WORDS].view(np.uint8))
    reader.finish()
    return new


def _read_chunk(data: bytes) -> object:
    changes = decode_step(data, CHUNK, OLD)[0]
    assert (np.diff(changes.index.astype(np.int64)) > 0).all()
    assert not len(changes) or int(changes.index[-1]) < WORDS
    return changes


API = Api()

TARGETS: dict[str, Target] = {
    **PARSERS,
    **RECORDS,
    "publish request": (API.example(), API.try_body),
    "state": (_state(), lambda data: read_state(_on_disk("state.json", data))),
    "settings": (SETTINGS, lambda d: load_settings(SubscriberSettings, {}, _on_disk("s.toml", d))),
    "blob-fast": (encode_chunk(CHUNK, OLD, NEW, compare(OLD, NEW), "fast"), _read_chunk),
    "blob-small": (encode_chunk(CHUNK, OLD, NEW, compare(OLD, NEW), "small"), _read_chunk),
    "xor": (_payload("xor"), lambda data: _read_payload("xor", data)),
    "overwrite": (_payload("overwrite"), lambda data: _read_payload("overwrite", data)),
    "xor-sparse": (_payload("xor"), lambda data: _read_payload("xor_sparse", data)),
}
