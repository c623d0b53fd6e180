"""Readers of what publishers, ranks, operators and engines leave: example and reader by name."""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from test_fuzz_parsers import INDEX, SAFETENSORS, TABLE

from weightcast.publisher.daemon.sources.inbox import InboxMemory
from weightcast.publisher.daemon.sources.queue import Queue
from weightcast.publisher.daemon.sources.source import Memory
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.rendezvous import (
    Attempt,
    Rank,
    SegmentSums,
    Sent,
    Share,
    collect_parts,
    find_attempt,
    leave_failure,
)
from weightcast.publisher.ranks.shard_assignment import ShardAssignment
from weightcast.publisher.weights.shard_spec import Box
from weightcast.shared.base.elements import ChunkKey, Part
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused
from weightcast.shared.channel import pins
from weightcast.shared.channel.directory_store import DirectoryStore, open_store
from weightcast.shared.channel.index import parse_index, write_index
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.signing import (
    Statement,
    Trust,
    load_private_key,
    trusted_keys,
    write_signature,
)
from weightcast.shared.digest.checksums import Lanes
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.engines.wire import Reply
from weightcast.subscriber.sync.options import parse_target

_ROOM = tempfile.TemporaryDirectory(prefix="fuzz-records-")
ROOT = Path(_ROOM.name)
_ED25519 = bytes.fromhex("302e020100300506032b657004220420")
"""PKCS#8 (RFC 8410) in front of the 32 bytes of a key"""
_SECRET = base64.b64encode(_ED25519 + b"\x01" * 32)
PRIVATE = b"-----BEGIN " + b"PRIVATE KEY-----\n" + _SECRET + b"\n-----END " + b"PRIVATE KEY-----\n"
DIGEST = "ab" * 32
STATEMENT = Statement("run", "delta", 2, 1, 1, 1.5, "3" * 64, "", DIGEST)
ATTEMPT = Attempt(2, 1, "3" * 64, 5, 2, "fast", 1.5)


def placed(name: str, data: bytes) -> Path:
    path = ROOT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)
    return path


KEY = load_private_key(placed("good.pem", PRIVATE))
TRUST = Trust.of([KEY.public])
TRUSTED = f"# of the trainer\n{KEY.public}\n".encode()


def _private_key(data: bytes) -> object:
    try:
        return load_private_key(placed("key.pem", data))
    except Refused as error:
        assert _SECRET.decode()[-24:] not in f"{error.message} {error.remedy}", "a key must not reach a log"
        raise


def _signature(data: bytes) -> object:
    """Whatever is accepted states what was signed."""
    stated = TRUST.check(data, "index", DIGEST)
    assert stated == STATEMENT
    return stated


def _tags(data: bytes) -> object:
    """What hosts follow is what the publisher keeps."""
    placed("tagged/tags/stable", data)
    try:
        followed: object = parse_target("stable").resolve(open_store(ROOT / "tagged"), Pointer(0))
    except DamagedFile as error:
        followed = error.message
    try:
        found = pins.tags(open_store(ROOT / "tagged"))["stable"]
    except DamagedFile as error:
        assert followed == error.message
        raise
    assert followed == found
    return found


def _order(data: bytes) -> object:
    placed("ordered/orders/rollback.json", data)
    return pins.read_rollback(open_store(ROOT / "ordered"))


def _inbox(data: bytes) -> object:
    return Memory(placed("inbox.json", data), InboxMemory(), 1 << 20, "").value


def _queue(data: bytes) -> object:
    return Queue(placed("publications.json", data)).open()


def _attempt(data: bytes) -> object:
    placed("meeting/weight_v000002.parts/1-aa/open.json", data)
    return find_attempt(DirectoryStore(ROOT / "meeting"), 5, Rank(1, 2), 1, time.monotonic(), set())


def _draft(data: bytes) -> object:
    path = placed("drafts/part-00001.json", data)
    placed("drafts/sums-00001.json", _SUMS)
    placed("drafts/sent-00001.json", _SENT)
    return collect_parts(DirectoryStore(path.parent), ATTEMPT, DIVISION, TABLE, time.monotonic(), {})


def _failure(data: bytes) -> object:
    path = placed("failures/part-00001.failed.json", data)
    return collect_parts(DirectoryStore(path.parent), ATTEMPT, DIVISION, TABLE, time.monotonic(), {})


def _checkpoint(data: bytes) -> object:
    placed("checkpoint/model-00001-of-00001.safetensors", SAFETENSORS + bytes(6))
    path = placed("checkpoint/model.safetensors.index.json", data)
    return open_checkpoint(path.parent, follow_links=False)


def _failure_example() -> bytes:
    directory = placed("example/.keep", b"").parent
    leave_failure(DirectoryStore(directory), 1, NeedsReseed("no room"))
    return next(directory.glob("*.failed.json")).read_bytes()


_VERSION = parse_index(INDEX.replace(b'"s"', b'"part-00001.safetensors"'), TABLE)
_PART = Part(0, _VERSION.parts[1].segments)
_CHUNK = _VERSION.chunks[0]._replace(key=ChunkKey(0, "BF16", 0))
_DRAFT = write_index(replace(_VERSION, parts=(_PART,), chunks=(_CHUNK,)), TABLE)
DIVISION = ShardAssignment((Part(0, ()), _PART), ({}, {}), {})
_HOLDS = {0: Box.whole(TABLE[0].shape), 1: Box((0,) * len(TABLE[1].shape), TABLE[1].shape)}
_SENT = rendezvous.write_sent(
    Sent({ChunkKey(0, TABLE[0].dtype, 0): Share(0, 24, Lanes(1, 2), Lanes(3, 4))}, {0: "ab" * 16})
)
_SUMS = rendezvous.write_sums({0: SegmentSums(Lanes(1, 2), Lanes(3, 4), Lanes(5, 6))}, {1: 3})
_INBOX = {
    "format": 1,
    "entries": [
        {
            "name": "step_1",
            "outcome": "publishing",
            "files": [["model.safetensors", 7, 600, 1_500_000_000]],
            "version": 3,
            "behind": "",
            "failure": {"error": "Refused", "message": "no", "remedy": "yes"},
        }
    ],
}
_QUEUE = {"format": 1, "jobs": [{"id": "ab", "checkpoint": "/c", "step": 1, "key": "k", "state": "running"}]}
_ORDER = {"format": 1, "run_id": "run", "to": 3, "root": "1" * 64, "ordered": 1.5}
_REPLY = {"success": True, "message": "loaded", "weight_version": "3"}
_WEIGHT_MAP = {"metadata": {"total_size": 6}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}


def packed(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


Target = tuple[bytes, Callable[[bytes], object]]
RECORDS: dict[str, Target] = {
    "signature": (write_signature(STATEMENT, KEY), _signature),
    "private key": (PRIVATE, _private_key),
    "trusted keys": (TRUSTED, lambda data: trusted_keys(placed("trusted", data))),
    "tag": (b"000003", _tags),
    "order": (packed(_ORDER), _order),
    "inbox": (packed(_INBOX), _inbox),
    "queue": (packed(_QUEUE), _queue),
    "attempt": (packed(asdict(ATTEMPT)), _attempt),
    "draft": (_DRAFT, _draft),
    "holds": (
        rendezvous.write_holds(_HOLDS),
        lambda data: rendezvous.parse_holds(data, "holds", TABLE),
    ),
    "plan": (
        rendezvous.write_plan([_HOLDS, {}]),
        lambda data: rendezvous.parse_plan(data, "plan", TABLE),
    ),
    "sent": (_SENT, lambda data: rendezvous.parse_sent(data, "sent")),
    "sums": (_SUMS, lambda data: rendezvous.parse_sums(data, "sums", TABLE)),
    "failed part": (_failure_example(), _failure),
    "checkpoint index": (packed(_WEIGHT_MAP), _checkpoint),
    "engine reply": (packed(_REPLY), lambda data: _reply(Reply("http://engine", 200, data))),
}
MEANT_TO_FAIL = ("failed part",)
"""whose example is itself refused: a rank that says so"""


def _reply(reply: Reply) -> object:
    assert reply.describe().isprintable()
    return reply.fields(), reply.text_field("weight_version")
