"""The model of legal states, on states made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crash_model import (
    ChannelSeen,
    EngineSeen,
    LocalSeen,
    Settled,
    Truth,
    VersionSeen,
    channel_violations,
    engine_violations,
    local_violations,
    settled_violations,
)

TRUTH = Truth([{"a": bytes([n, n]), "b": b"same"} for n in range(4)])


def version(number: int, **facts: object) -> VersionSeen:
    made = VersionSeen(
        digest=f"v{number}",
        parent=f"v{number - 1}" if number > 1 else "base",
        base_version=number - 1,
        kind="delta",
        epoch=1,
        step=number,
        whole=True,
        content=f"bytes of {number}",
    )
    return replace(made, **facts)  # type: ignore[arg-type]


def channel(pointer: int, *versions: VersionSeen, epoch: int = 1) -> ChannelSeen:
    return ChannelSeen("base", pointer, {n + 1: each for n, each in enumerate(versions)}, epoch)


THREE = channel(3, version(1), version(2), version(3))


def local(phase: str, number: int, tensors: object, **facts: object) -> LocalSeen:
    made = LocalSeen(phase, number, f"v{number}" if number else "base", tensors)  # type: ignore[arg-type]
    return replace(made, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seen",
    [
        THREE,
        channel(2, version(1), version(2), version(3)),
        channel(0),
        channel(0, version(1)),
        channel(2, version(1), version(2, kind="anchor", parent="", base_version=-1)),
        channel(2, version(1), version(2, epoch=2), epoch=2),
    ],
)
def test_legal_channels(seen: ChannelSeen) -> None:
    assert channel_violations(seen) == []


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (channel(4, *THREE.versions.values()), "has no index"),
        (channel(1, *THREE.versions.values()), "above the pointer"),
        (channel(2, version(1), version(2, whole=False)), "not whole"),
        (channel(2, version(1), version(2, parent="other")), "does not continue"),
        (channel(2, version(1), version(2, base_version=0)), "starts from"),
        (channel(2, version(1, epoch=2), version(2), epoch=2), "after 2"),
        (channel(2, version(1), version(2, epoch=2)), "nobody claimed"),
        (ChannelSeen("base", 2, {2: version(2)}, 1), "without version 1"),
    ],
)
def test_illegal_channels(seen: ChannelSeen, word: str) -> None:
    assert [text for text in channel_violations(seen) if word in text]


def test_history_only_grows() -> None:
    assert channel_violations(THREE, channel(2, version(1), version(2))) == []
    back = channel(2, version(1), version(2), version(3))
    assert channel_violations(back, THREE) == ["the pointer went back from 3 to 2"]
    assert channel_violations(back, THREE, stale_pointer=True) == []
    assert channel_violations(channel(2, version(1), version(2)), THREE, stale_pointer=True)
    changed = channel(3, version(1), version(2, content="others"), version(3))
    assert channel_violations(changed, THREE) == ["version 2 was changed after it was committed"]


@pytest.mark.parametrize(
    "seen",
    [
        None,
        local("clean", 0, TRUTH.steps[0]),
        local("clean", 2, TRUTH.steps[2]),
        local("seeding", 2, {}),
        local("patching", 2, {"a": bytes([2, 3]), "b": b"same"}, between=(2, 3)),
        local("undoing", 3, {"a": bytes([3, 2]), "b": b"same"}, between=(2, 3)),
    ],
)
def test_legal_local_checkpoints(seen: LocalSeen | None) -> None:
    assert local_violations(TRUTH, THREE, seen) == []


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (local("clean", 2, TRUTH.steps[3]), "step 3"),
        (local("clean", 2, {"a": bytes([2, 3]), "b": b"same"}), "step None"),
        (local("clean", 2, TRUTH.steps[2], digest="other"), "does not have"),
        (local("clean", 4, TRUTH.steps[3]), "does not have"),
        (local("patching", 2, {"a": bytes([1, 3]), "b": b"same"}, between=(2, 3)), "neither"),
        (local("patching", 2, TRUTH.steps[2]), "without a step"),
        (
            local("patching", 2, TRUTH.steps[2], between=(2, 3), named=frozenset({"j"})),
            "journals that are gone",
        ),
    ],
)
def test_illegal_local_checkpoints(seen: LocalSeen, word: str) -> None:
    assert [text for text in local_violations(TRUTH, THREE, seen) if word in text]


COPY = EngineSeen("copy", maps=False, loaded=True, held=2, paused=False, spoiled=False)
MAP = EngineSeen("map", maps=True, loaded=True, held=2, paused=False, spoiled=False)


def test_legal_engines() -> None:
    at_two = local("clean", 2, TRUTH.steps[2], marks={"copy": ("served", 2), "map": ("pausing", None)})
    assert engine_violations(TRUTH, THREE, at_two, [COPY, replace(MAP, paused=True)]) == []
    behind = local("clean", 3, TRUTH.steps[3], marks={"copy": ("served", 2)})
    assert engine_violations(TRUTH, THREE, behind, [COPY]) == []
    torn = local("patching", 2, TRUTH.steps[2], between=(2, 3), marks={"map": ("pausing", 2)})
    assert engine_violations(TRUTH, THREE, torn, [replace(MAP, held=None, paused=True)]) == []


@pytest.mark.parametrize(
    ("engine", "word"),
    [
        (replace(COPY, spoiled=True), "not whole"),
        (replace(COPY, paused=True), "is paused"),
        (replace(COPY, held=None), "no version"),
        (replace(COPY, held=1), "holds step 1"),
        (replace(MAP, held=None), "maps files"),
    ],
)
def test_illegal_engines(engine: EngineSeen, word: str) -> None:
    torn = local("patching", 2, TRUTH.steps[2], between=(2, 3), marks={"copy": ("served", 2)})
    assert [text for text in engine_violations(TRUTH, THREE, torn, [engine]) if word in text]


def test_an_engine_newer_than_the_disk() -> None:
    at_one = local("clean", 1, TRUTH.steps[1], marks={"copy": ("served", 2)})
    assert "newer" in engine_violations(TRUTH, THREE, at_one, [COPY])[0]


def test_settled() -> None:
    wanted = Settled(pointer=3, step=3, version=3)
    host = local("clean", 3, TRUTH.steps[3])
    engine = replace(COPY, held=3, label="3")
    locals_ = {"publisher": host, "host": host}
    assert settled_violations(TRUTH, THREE, locals_, [engine], wanted, 0) == []
    assert "seeded" in settled_violations(TRUTH, THREE, locals_, [engine], wanted, 1)[0]
    for bad in (replace(engine, paused=True), replace(engine, held=2), replace(engine, label="2")):
        assert settled_violations(TRUTH, THREE, locals_, [bad], wanted, 0)
    left = replace(host, journals=frozenset({"j"}))
    for bad_host in (None, local("clean", 2, TRUTH.steps[2]), left, replace(host, spool=1)):
        assert settled_violations(TRUTH, THREE, {"host": bad_host}, [engine], wanted, 0)
