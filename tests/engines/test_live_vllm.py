"""Live patches of a real, unmodified vLLM: it says and holds what a fresh load does, or what before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from live_world import (
    KEY,
    LiveServer,
    LiveWorld,
    Tensors,
    lanes,
    make_live_models,
    root,
    strongly_changed,
    write_patch,
)
from patch_writer import name_of
from safetensors.torch import save_file
from vllm_world import (
    FULL,
    LONG,
    SHORT,
    STEP_SECONDS,
    Answer,
    FreshLoad,
    copy_checkpoint,
    engine_python,
    wait_until,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
VERSIONS = 20 if FULL else 8
IN_FLIGHT_TOKENS = 160


@pytest.fixture(scope="module")
def live_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_live_models(tmp_path_factory.mktemp("live-models"))


class Faulty(LiveServer):
    def __init__(self, model: Path, room: Path, site: Path, *arguments: str, dev_mode: bool) -> None:
        self.faults = room / "faults"
        self.faults.mkdir()
        super().__init__(model, room, site, *arguments, dev_mode=dev_mode)

    def _environment(self) -> dict[str, str]:
        return {
            **super()._environment(),
            "VLLM_PLUGINS": "weightcast,live_faults",
            "WEIGHTCAST_TEST_FAULTS": str(self.faults),
        }


def started(model: Path, room: Path, site: Path, *arguments: str, dev_mode: bool = False) -> Faulty:
    """On a copy of the model, which a reload reads."""
    room.mkdir(exist_ok=True)
    model = copy_checkpoint(model, room / "model", lambda tensors: tensors)
    return Faulty(model, room, site, *arguments, dev_mode=dev_mode)


@pytest.fixture(scope="module")
def world(
    models: Path, judge: FreshLoad, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveWorld]:
    """Tied, fused projections, float32, one rank."""
    room = tmp_path_factory.mktemp("live")
    with started(models / "llama-tied-single-fp32", room, site) as server:
        yield LiveWorld(server, judge, room)


def test_the_routes_are_guarded_by_the_api_key_and_dev_mode_is_off(world: LiveWorld) -> None:
    server = world.server
    assert server.status("/is_paused") == 404 and server.status("/collective_rpc") in (404, 405)
    with httpx.Client(base_url=server.url, timeout=STEP_SECONDS, trust_env=False) as bare:
        assert bare.get("/v1/weightcast").status_code == 401
        assert bare.post("/v1/weightcast/pause", json={"policy": "wait"}).status_code == 401
    assert server.routes.post("/check", content=b"x" * 70_000).status_code == 413
    state = server.state()
    assert state["patchable"] and state["refused"] == {} and state["ranks"] == 1


def test_consecutive_live_versions_under_traffic_are_fresh_loads(world: LiveWorld) -> None:
    """What was in flight goes on with the new weights, its blocks computed anew; what comes after knows only
    them, also where a long prompt was cached."""
    caught = 0
    for _ in range(VERSIONS):
        before = world.checkpoint()
        running = [world.server.begin(prompt, IN_FLIGHT_TOKENS) for prompt in (SHORT, LONG)]
        done = world.update(world.next_tensors())
        assert (done["version"], done["label"]) == (world.version, str(world.version))
        for prompt in (SHORT, LONG, LONG):
            assert world.errors(world.server.ask(prompt)) == []
        world.require_resident()
        for answer in (future.result(STEP_SECONDS) for future in running):
            assert (answer.status, len(answer.tokens)) == (200, IN_FLIGHT_TOKENS), answer.text
            [old] = world.judge.judge(before, [(answer.prompt, answer.tokens)])
            [new] = world.judge.judge(world.checkpoint(), [(answer.prompt, answer.tokens)])
            cuts = [
                at for at in range(len(answer.tokens) + 1) if answer.fits(old, 0, at) and answer.fits(new, at)
            ]
            assert cuts, "neither weights said this, nor one after the other"
            caught += 0 < cuts[0] < len(answer.tokens)
    # how many depends on how busy the machine is
    assert caught >= 2, "too few requests were in flight at the pauses"


def test_a_reload_from_disk_says_the_same_to_the_last_bit(world: LiveWorld) -> None:
    world.update(world.next_tensors())
    patched = [world.server.ask(prompt) for prompt in (SHORT, LONG)]
    reload_from_disk(world)
    world.require_resident()
    for prompt, before in zip((SHORT, LONG), patched, strict=True):
        require_same(world.server.ask(prompt), before)


def test_folded_versions_and_abort(world: LiveWorld) -> None:
    folded = world.next_tensors()
    for _ in range(2):
        folded = strongly_changed(folded, 1000 + world.version, 0.02)
    file, label = world.write(folded), str(world.version + 1)
    world.server.must("check", file=file)
    require_aborted_by_a_pause(world.server)
    world.server.must("apply", file=file, label=label)
    world.server.must("resume")
    world.moved_to(folded)
    assert world.errors(world.server.ask(LONG)) == []


def require_aborted_by_a_pause(server: Faulty, tries: int = 8) -> None:
    """Leaves the engine paused. On a busy machine an answer may be whole before its client sees a token."""
    for _ in range(tries):
        running = server.begin(LONG, 600)
        server.must("pause", policy="abort")
        answer = running.result(STEP_SECONDS)
        if answer.finish == "abort":
            assert answer.status == 200 and len(answer.tokens) < 600
            return
        assert (answer.finish, len(answer.tokens)) == ("length", 600), answer.text
        server.must("resume")
    pytest.fail(f"no pause of {tries} met a request in flight")


def test_what_is_refused_changes_nothing_and_is_named(world: LiveWorld) -> None:
    server, target = world.server, world.next_tensors()
    name = next(name for name in target if "down_proj" in name)
    bad: Tensors = {**target, name: target[name].clone()}
    bad[name].view(-1)[5] = float("nan")
    status, told = server.post("check", file=world.write(bad))
    assert status == 422 and "finite" in told["error"] and name in told["error"]
    unknown = {**target, "model.extra.weight": torch.ones(4)}
    file = write_patch(
        server.patches, {**world.tensors, "model.extra.weight": torch.zeros(4)}, unknown, world.version + 1
    )
    status, told = server.post("check", file=file)
    assert (status, told["tensor"]) == (422, "model.extra.weight")
    file = write_patch(server.patches, world.tensors, target, world.version + 7)
    status, told = server.post("check", file=file)
    assert status == 409 and told["holds"] == {"version": world.version, "root": root(world.version)}
    path = server.patches / world.write(target)
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    status, told = server.post("check", file=path.name)
    assert status == 422 and "digest" in told["error"]
    assert server.post("check", file=name_of(999_999))[0] == 422
    assert not server.paused
    world.require_resident()
    world.update(world.next_tensors())
    assert world.errors(server.ask(LONG)) == []


def test_a_flipped_bit_in_live_memory_is_found(world: LiveWorld) -> None:
    (world.server.faults / "flip-0").touch()
    told = world.server.must("digest", tensors=None, **{"from": 0, "count": 10_000})
    wrong = [name for name, found in told["lanes"].items() if found != lanes(world.tensors[name])]
    assert len(wrong) == 1 and "down_proj" in wrong[0]
    (world.server.faults / "flip-0").touch()
    world.require_resident()


def test_an_error_in_a_worker_is_undone_and_the_next_update_goes_through(world: LiveWorld) -> None:
    target = world.next_tensors()
    file = world.write(target)
    world.server.must("check", file=file)
    world.server.must("pause", policy="recompute")
    (world.server.faults / "fail-0").touch()
    status, told = world.server.post("apply", file=file, label="x")
    assert (status, told["state"]) == (500, "rolled-back")
    world.server.must("resume")
    world.require_resident()
    assert world.errors(world.server.ask(LONG)) == []
    (world.server.faults / "fail-0").touch()
    world.server.must("check", file=file)
    status, told = world.server.post("update", file=file, label="x", policy="recompute")
    assert (status, told["state"], world.server.paused) == (500, "rolled-back", False)
    world.require_resident()
    world.update(target)
    assert world.errors(world.server.ask(LONG)) == []


def test_an_update_goes_on_to_its_end_when_its_sender_is_gone(world: LiveWorld) -> None:
    """Nobody is left to resume the engine, and nobody has to."""
    target = world.next_tensors()
    file, label = world.write(target), str(world.version + 1)
    world.server.must("check", file=file)
    running = world.server.begin(LONG, IN_FLIGHT_TOKENS)
    body = json.dumps({"file": file, "label": label, "policy": "recompute"}).encode()
    head = (
        f"POST /v1/weightcast/update HTTP/1.1\r\nHost: engine\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    url = urlsplit(world.server.url)
    with socket.create_connection((url.hostname, url.port)) as gone:
        gone.sendall(head.encode() + body)
    wait_until(lambda: world.server.state()["label"] == label, "the update's end")
    wait_until(lambda: not world.server.paused, "the engine's going on")
    world.moved_to(target)
    world.require_resident()
    answer = running.result(STEP_SECONDS)
    assert (answer.status, len(answer.tokens)) == (200, IN_FLIGHT_TOKENS)
    assert world.errors(world.server.ask(LONG)) == []


def test_a_worker_that_dies_takes_the_engine_along_and_a_new_process_says_so(world: LiveWorld) -> None:
    before = world.server.state()["process"]
    file = world.write(world.next_tensors())
    world.server.must("check", file=file)
    world.server.must("pause", policy="recompute")
    (world.server.faults / "die-0").touch()
    with suppress(httpx.TransportError):
        assert world.server.post("apply", file=file, label="x")[0] >= 500
    wait_until(lambda: not world.server.process.running, "the engine's end")
    save_file(world.tensors, world.server.model / "model.safetensors", {"format": "pt"})
    world.server.restart()
    state = world.server.state()
    assert state["process"] != before and state["version"] is None
    world.server.must("holds", version=world.version, root=root(world.version), label="0")
    world.require_resident()
    world.update(world.next_tensors())
    assert world.errors(world.server.ask(LONG)) == []


def test_two_tensor_parallel_ranks(models: Path, judge: FreshLoad, site: Path, tmp_path: Path) -> None:
    """Slices, and a rank whose failure takes both back."""
    with started(
        models / "qwen2-tied-single-fp32", tmp_path / "room", site, "--tensor-parallel-size", "2"
    ) as server:
        world = LiveWorld(server, judge, tmp_path)
        assert server.state()["ranks"] == 2 and server.state()["refused"] == {}
        for _ in range(3):
            world.update(world.next_tensors())
            world.require_resident()
            assert world.errors(server.ask(LONG)) == []
        for rank in (0, 1):
            file = world.write(world.next_tensors())
            server.must("check", file=file)
            server.must("pause", policy="recompute")
            (server.faults / f"fail-{rank}").touch()
            status, told = server.post("apply", file=file, label="x")
            assert (status, told["state"]) == (500, "rolled-back")
            server.must("resume")
            world.require_resident()
        world.update(world.next_tensors())
        assert world.errors(server.ask(LONG)) == []
        (server.faults / "flip-1").touch()
        told = server.must("digest", tensors=None, **{"from": 0, "count": 10_000})
        assert [found == lanes(world.tensors[name]) for name, found in told["lanes"].items()].count(
            False
        ) == 1


@pytest.mark.skipif(not FULL, reason="one more start: make test-engines-full")
def test_what_others_make_vllm_load_is_known_by_nobody(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path
) -> None:
    with started(models / "llama-untied-single-fp32", tmp_path / "room", site, dev_mode=True) as server:
        world = LiveWorld(server, judge, tmp_path)
        world.update(world.next_tensors())
        assert server.state()["version"] == 1
        reply = server.routes.post(f"{server.url}/collective_rpc", json={"method": "reload_weights"})
        assert reply.status_code == 200, reply.text
        state = server.state()
        assert (state["version"], state["label"], state["in_doubt"]) == (None, None, False)
        status, _ = server.post("check", file=world.write(world.next_tensors()))
        assert status == 409


def test_installing_the_plugin_adds_one_line_to_pip_freeze(site: Path) -> None:
    def frozen(path: str) -> set[str]:
        code = (
            "from importlib.metadata import distributions\n"
            "for d in distributions(): print(d.metadata['Name'], d.version)"
        )
        environment = {**os.environ, "PYTHONPATH": path}
        command = [engine_python(), "-c", code]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return set(done.stdout.splitlines())

    with_it, without = frozen(str(site)), frozen("")
    assert with_it - without == {"weightcast-engine 0.1.0", "live-faults 1"}
    assert without <= with_it


@pytest.mark.parametrize(("model", "dtype"), [("experts-fp32", "float32"), ("moe", "bfloat16")])
def test_packed_experts_are_patched(
    site: Path, judge: FreshLoad, live_models: Path, tmp_path: Path, model: str, dtype: str
) -> None:
    """Mixtures of experts (Qwen3's and Qwen2's), packed by vLLM for a CPU's kernels: tokens and memory are
    those of a fresh load, a start, and a reload, which packs anew."""
    with started(live_models / model, tmp_path / "room", site, "--dtype", dtype) as server:
        world = LiveWorld(server, judge, tmp_path)
        assert server.state()["refused"] == {} and any(".experts." in name for name in world.tensors)
        for _ in range(3):
            patched = patched_otherwise(world, [])
            # the judge computes in float32, and near ties other experts than in bfloat16 are chosen
            assert dtype == "bfloat16" or world.errors(patched) == []
        reload_from_disk(world)
        require_same(server.ask(LONG), patched)
        assert server.state()["refused"] == {}
        if FULL or dtype == "float32":
            patched = patched_otherwise(world, [])
            save_file(world.tensors, server.model / "model.safetensors", {"format": "pt"})
            server.restart()
            require_same(server.ask(LONG), patched)


def test_latent_attention_is_patched_where_its_parts_are_views(
    site: Path, judge: FreshLoad, live_models: Path, tmp_path: Path
) -> None:
    """Without packed layers the parts of kv_b_proj lie in its own memory. A processor with AMX is told not to
    pack them."""
    more = ("--dtype", "bfloat16", "--attention-backend", "CPU_MLA")
    with started(live_models / "mla", tmp_path / "room", site, *more) as server:
        world = LiveWorld(server, judge, tmp_path)
        assert server.state()["refused"] == {} and any("kv_b_proj" in name for name in world.tensors)
        patched = patched_otherwise(world, [])
        require_same_from_disk(world, patched)


@pytest.mark.skipif(
    "amx_bf16" not in Path("/proc/cpuinfo").read_text(), reason="packed only by a processor with AMX"
)
def test_latent_attention_that_amx_packs_is_refused_by_name(
    site: Path, judge: FreshLoad, live_models: Path, tmp_path: Path
) -> None:
    with started(live_models / "mla", tmp_path / "room", site, "--dtype", "bfloat16") as server:
        world = LiveWorld(server, judge, tmp_path)
        refused = [name for name in world.tensors if "kv_b_proj" in name]
        assert sorted(server.state()["refused"]) == sorted(refused)
        patched_otherwise(world, refused)
        # vLLM 0.32 itself cannot load such a model again
        server.must("pause", policy="wait")
        status, told = server.post("reload", label="again")
        assert (status, told["state"]) == (500, "in-doubt") and server.state()["in_doubt"] and server.paused


def patched_otherwise(world: LiveWorld, refused: list[str]) -> Answer:
    """What a patched engine says, which is not what it said before."""
    before = world.server.ask(LONG)
    world.update(world.next_tensors(but=refused))
    world.require_resident(refused=refused)
    patched = world.server.ask(LONG)
    assert patched.logprobs != before.logprobs
    return patched


def require_same(one: Answer, other: Answer) -> None:
    """To the last bit."""
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def reload_from_disk(world: LiveWorld) -> None:
    save_file(world.tensors, world.server.model / "model.safetensors", {"format": "pt"})
    world.server.must("pause", policy="wait")
    world.server.must("reload", label="again")
    world.server.must("resume")
    world.server.must("holds", version=world.version, root=root(world.version), label="again")


def require_same_from_disk(world: LiveWorld, patched: Answer) -> None:
    """What was patched is what a reload brings, and a start."""
    reload_from_disk(world)
    require_same(world.server.ask(LONG), patched)
    if FULL:
        world.server.restart()
        require_same(world.server.ask(LONG), patched)


def test_8_bit_floats_are_refused_as_a_whole_and_loaded_from_disk(
    site: Path, judge: FreshLoad, live_models: Path, tmp_path: Path
) -> None:
    with started(live_models / "fp8", tmp_path / "room", site, "--dtype", "bfloat16") as server:
        world = LiveWorld(server, judge, tmp_path)
        state = server.state()
        assert (state["patchable"], state["reason"]) == (False, "the model is quantised: compressed-tensors")
        first, target = server.ask(LONG), {name: turned(tensor) for name, tensor in world.tensors.items()}
        status, told = server.post("check", file=world.write(target))
        assert status == 422 and "quantised" in told["error"]
        require_same(server.ask(LONG), first)
        world.moved_to(target)
        reload_from_disk(world)
        reloaded = server.ask(LONG)
        assert reloaded.logprobs != first.logprobs
        require_same_from_disk(world, reloaded)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Its rows in the other order: the same values of any dtype, in other places."""
    words = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return words.flip(0).contiguous().view(tensor.dtype)
