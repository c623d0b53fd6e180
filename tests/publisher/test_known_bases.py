"""The base of a channel that this user made on this machine need not be given again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from core_cases import bytes_of, read_checkpoint
from daemonkit import Daemon, Places, base_tensors, changed, rename_in, write
from in_process import Command

from weightcast.shared.checkpoint.update import sources


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setenv("WEIGHTCAST_CACHE", str(tmp_path / "cache"))
    return Places.made(tmp_path)


def init(places: Places, weightcast: Command) -> None:
    assert weightcast("channel", "init", "--channel", places.channel, "--base", places.base)[0] == 0


def publish(places: Places, seed: int) -> tuple[object, ...]:
    new = write(places.root / f"new-{seed}", changed(base_tensors(), seed))
    return "publish", new, "--channel", places.channel, "--local", places.local, "--json"


def test_publish_finds_the_base(places: Places, weightcast: Command) -> None:
    init(places, weightcast)
    code, out, err = weightcast(*publish(places, 1))
    assert (code, json.loads(out)["kind"]) == (0, "delta"), err
    new = changed(base_tensors(), 1)
    assert read_checkpoint(places.local) == bytes_of(new)
    shutil.rmtree(places.base)
    assert weightcast(*publish(places, 2))[0] == 0


@pytest.mark.parametrize(
    "case", ["gone", "other tensors", "other bytes", "another machine", "damaged record"]
)
def test_what_was_tried_is_said(places: Places, weightcast: Command, tmp_path: Path, case: str) -> None:
    init(places, weightcast)
    if case == "gone":
        shutil.rmtree(places.base)
    elif case == "other tensors":
        write(places.base, {**base_tensors(), "more": base_tensors()["layer.0.scale"]})
    elif case == "other bytes":
        write(places.base, changed(base_tensors(), 9))
    elif case == "another machine":
        shutil.rmtree(tmp_path / "cache")
    else:
        (tmp_path / "cache" / "bases" / "bases.json").write_bytes(b"{")
    code, out, _ = weightcast(*publish(places, 1))
    facts = json.loads(out)
    assert code == 3 and not (places.channel / "latest").exists()
    if case in ("gone", "another machine", "damaged record"):
        why = f"{places.base} is gone" if case == "gone" else "this user has no record of it on this machine"
        assert why in facts["message"] and "--base" in facts["remedy"]
    else:
        assert str(places.base) in facts["message"] and "the channel was made from" in facts["remedy"]


def test_records_are_the_newest(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BASES_KEPT", 2)
    for run in ("a", "b", "a", "c"):
        sources.remember_base(run, tmp_path / run)
    record = json.loads((tmp_path / "cache" / "bases" / "bases.json").read_text())
    assert record == {"a": str(tmp_path / "a"), "c": str(tmp_path / "c")}


def test_the_daemon_finds_the_base(
    places: Places, weightcast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the user's own cache, where kernels need not be compiled
    monkeypatch.delenv("WEIGHTCAST_CACHE")
    where = ("--channel", places.channel, "--local", places.local)
    code, _, err = weightcast("publisher", "run", *where)
    assert code == 2 and "base: required to make the channel" in err
    init(places, weightcast)
    daemon = Daemon.start(places, base=False).ready()
    try:
        rename_in(places.watch / "step_1", changed(base_tensors(), 1))
        daemon.wait_for_version(1)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    shutil.rmtree(places.base)
    daemon = Daemon.start(places, base=False).ready()
    try:
        rename_in(places.watch / "step_2", changed(base_tensors(), 2))
        daemon.wait_for_version(2)
    finally:
        daemon.kill()
