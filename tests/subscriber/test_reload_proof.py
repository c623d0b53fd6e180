"""What a reload proves: engines never load bytes that changed on the disk behind the host's back."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from core_cases import header_of
from doubles import Double
from hosts import VLLM, Host, Mapping_, SGLang, Site, on_disk
from in_process import Command
from plugin_double import PluginDouble

from weightcast.shared.base.errors import NeedsReseed
from weightcast.subscriber.sync import apply

ROUNDS = 12
UNTOUCHED = "model.steps"
"""a tensor that no version changes"""


def flip(local: Path, rng: random.Random, tensor: str | None = None) -> None:
    """One bit of the weights, or of one tensor's, with the file's times as before."""
    files = sorted(local.glob("model*.safetensors"))
    path = rng.choice([file for file in files if tensor is None or tensor in header_of(file.read_bytes())[0]])
    header, body = header_of(path.read_bytes())
    begin, end = (0, path.stat().st_size - body) if tensor is None else header[tensor]["data_offsets"]
    at, before = body + rng.randrange(begin, end), path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Loads:
    """What an engine loaded, every time."""

    def __init__(self, engine: Double) -> None:
        self.digests: list[str] = []
        self._load = engine.load
        engine.load = self.load  # type: ignore[method-assign]

    def load(self, directory: str) -> bool:
        self.digests.append(on_disk(Path(directory)))
        return self._load(directory)


def settle(host: Host) -> None:
    """A flip in a word that the version changes is found by the patch, which leaves it to the next step."""
    try:
        host.step()
    except NeedsReseed:
        host.step()


@pytest.mark.parametrize("kind", ["sglang", "vllm", "mapping", "rolling"])
def test_no_engine_loads_a_flipped_bit(site: Site, kind: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, run = random.Random(seed), site.run()
    engines: list[Double] = {
        "sglang": lambda: [SGLang()],
        "vllm": lambda: [VLLM()],
        "mapping": lambda: [Mapping_(site.root / "host")],
        "rolling": lambda: [SGLang(), VLLM()],
    }[kind]()
    loads = [Loads(engine) for engine in engines]
    host = site.host(run, *engines, conduct={"order": "rolling"} if kind == "rolling" else None)
    host.step()
    for number in range(1, ROUNDS):
        for loaded in loads:
            loaded.digests.clear()
        flip(host.local, rng, None if number % 2 else UNTOUCHED)
        run.publish()
        settle(host)
        assert host.at(run, number) and host.status.ready
        for engine, loaded in zip(engines, loads, strict=True):
            assert set(loaded.digests) == {run.digest(number)}, f"round {number}"
            assert not engine.paused
    proof = host.status.reload_proof
    assert proof is not None and proof.faults >= 1 and "damaged bytes in" in proof.last_fault
    assert proof.bound_seconds == 0 and proof.age_seconds is not None and proof.age_seconds < 5
    moves = host.status.updates
    repairs = [number for number, move in enumerate(moves) if move.kind == "repair"]
    assert repairs and all(moves[number].changes >= 1 for number in repairs)
    # a flip in words that a version does not touch: the version is here, is repaired, and is loaded
    untouched = [number for number in repairs if moves[number].changes == 1]
    assert any(moves[number - 1].kind == "patch" and moves[number - 1].changes > 1 for number in untouched)


def test_an_engine_that_restarted_loads_repaired_bytes(site: Site) -> None:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    loads = Loads(engine)
    flip(host.local, random.Random(1), UNTOUCHED)
    engine.restart()
    assert host.step().ready
    assert loads.digests == [run.digest(1)] and host.at(run, 1)


def test_a_patched_engine_that_falls_back_loads_repaired_bytes(site: Site) -> None:
    run, engine = site.run(), PluginDouble(site.root / "host")
    host = site.host(run, f"vllm={site.serve(engine)},via=live,name=live")
    host.step()
    flip(host.local, random.Random(2), UNTOUCHED)
    engine.restart()
    run.publish()
    settle(host)
    assert host.at(run, 1) and host.status.ready


def test_the_command_proves_before_it_reloads(site: Site, weightcast: Command) -> None:
    """After a stop: the file's times say nothing."""
    run, engine = site.run(), SGLang()
    words = (
        *("sync", "--channel", str(run.channel), "--local", str(site.root / "host"), "--base"),
        *(str(run.base_dir), "--engine", site.option(engine), "--json"),
    )
    assert weightcast(*words)[0] == 0
    flip(site.root / "host", random.Random(3), UNTOUCHED)
    run.publish()
    loads = Loads(engine)
    code, out, error = weightcast(*words)
    assert code == 0, error
    assert loads.digests == [run.digest(1)]
    assert json.loads(out)["reload_proof"]["faults"] == 1


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every model were large."""
    monkeypatch.setattr(apply, "ALWAYS_BYTES", 0)


def test_a_large_model_is_hashed_again_when_the_bound_has_passed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    large(monkeypatch)
    run, engine = site.run(), SGLang()
    host = site.host(run, engine, verified_within=3600.0)
    host.step()
    first = host.status.reload_proof
    assert first is not None and first.bound_seconds == 3600
    assert first.age_seconds is not None and 0 < first.age_seconds < 3600
    local = host.sync.updater.local
    assert local is not None
    # one hour later
    flip(host.local, random.Random(4), UNTOUCHED)
    late = local.proofs.clock() + 3601
    local.proofs.clock = lambda: late
    local.state = local.state.but(last_full_hash=None)
    run.publish()
    loads = Loads(engine)
    settle(host)
    assert loads.digests == [run.digest(1)] and host.at(run, 1)


def test_a_bound_of_zero_hashes_a_large_model_every_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    run, engine = site.run(), SGLang()
    host = site.host(run, engine, verified_within=0.0)
    host.step()
    flip(host.local, random.Random(5), UNTOUCHED)
    run.publish()
    loads = Loads(engine)
    settle(host)
    assert loads.digests == [run.digest(1)]


def test_within_the_bound_the_age_rises_and_is_shown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    run = site.run()
    host = site.host(run, SGLang(), verified_within=3600.0)
    host.step()
    ages = []
    for _ in range(2):
        run.publish()
        host.step()
        proof = host.status.reload_proof
        assert proof is not None and proof.age_seconds is not None
        ages.append(proof.age_seconds)
    assert ages[0] < ages[1] < 3600
