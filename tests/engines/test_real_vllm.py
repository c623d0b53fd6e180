"""An unmodified vLLM that hears of new weights from the subscriber alone, judged by fresh loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import torch
from ports import free_port
from safetensors.torch import load_file, save_file
from vllm_world import (
    FULL,
    IN_FLIGHT_TOKENS,
    KEY,
    KEYED,
    LONG,
    SHORT,
    STEP_SECONDS,
    Answer,
    Starts,
    Tensors,
    World,
    answers_name_their_versions,
    copy_checkpoint,
    running,
    wait_until,
    was_caught,
)

from weightcast.shared.base.errors import WeightcastError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

THREE = ("llama-tied-sharded-bf16", "llama-untied-single-fp32", "qwen2-untied-sharded-bf16")
SIXTEEN = tuple(
    f"{family}-{tie}-{files}-{dtype}"
    for family in ("llama", "qwen2")
    for tie in ("tied", "untied")
    for files in ("single", "sharded")
    for dtype in ("bf16", "fp32")
)
TIED, UNTIED = (
    [variant for variant in (SIXTEEN if FULL else THREE) if f"-{tie}-" in variant]
    for tie in ("tied", "untied")
)
POLICIES = ("recompute", "wait", "abort")
LEFT_OUT = [(UNTIED[1], "wait"), (UNTIED[1], "abort")]
"""a policy knows nothing of the model's files"""
VERSIONS = 10
"""of a start, all its policies together, or a few more; later tests add theirs"""
MORE_VERSIONS = 60
"""at most, for as long as no request met a pause"""


def in_the_pause(world: World, version: int) -> Answer | None:
    """Sends a request as soon as the engine is paused; None: no pause was seen."""
    seen: list[Future[Answer]] = []

    def served() -> bool:
        if not seen and world.server.paused:
            seen.append(world.server.send(LONG, 8))
        return world.host.served == version

    wait_until(served, f"version {version} served")
    return seen[0].result(STEP_SECONDS) if seen else None


@pytest.mark.parametrize(
    ("variant", "policy"),
    [(each, policy) for each in UNTIED for policy in POLICIES if FULL or (each, policy) not in LEFT_OUT],
)
def test_every_version_is_a_fresh_load_and_no_request_fails(world: World, variant: str, policy: str) -> None:
    world.host.with_engine(world.option(f",policy={policy}"))
    world.host.wait_served(world.run.newest)
    world.require(world.run.newest)
    met, versions = Met(), -(-VERSIONS // len(POLICIES))
    for number in range(versions + MORE_VERSIONS):
        if number >= versions and met.both:
            break
        one_version(world, policy, met)
    assert met.in_flight, "no request was in flight at any pause"
    assert met.sent_into, "no request came during any pause"


@dataclass
class Met:
    """Requests that had to do with a pause."""

    in_flight: int = 0
    sent_into: int = 0

    @property
    def both(self) -> bool:
        return bool(self.in_flight and self.sent_into)


def one_version(world: World, policy: str, met: Met) -> None:
    old = world.run.newest
    running = [world.server.begin(prompt, IN_FLIGHT_TOKENS) for prompt in (SHORT, LONG)]
    version = world.run.publish()
    new = in_the_pause(world, version)
    answers = [future.result(STEP_SECONDS) for future in running]
    met.in_flight += sum(was_caught(world, policy, answer, old) for answer in answers)
    if new is not None:
        assert new.status == 200, new.text
        assert len(new.tokens) == 8 and world.judged(new, version)
        met.sent_into += 1
    world.require(version)
    world.note_times(policy)


@pytest.mark.parametrize("updates", ["pass", "partial"])
@pytest.mark.parametrize("variant", UNTIED[:1])
def test_the_gate_names_the_versions_of_every_answer(world: World, variant: str, updates: str) -> None:
    """The long prompt is in the prefix cache of each version that answered before."""
    port = free_port()
    world.start_host("--gate", str(port), "--gate-updates", updates)
    answers_name_their_versions(world, world.server.through(f"http://127.0.0.1:{port}"), updates)


@contextmanager
def without_a_flush(server: str) -> Iterator[str]:
    """Another address of the server, at which a pause leaves its prefix cache as it is."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.replace("clear_cache=true", "clear_cache=false")
            kind = {"content-type": self.headers.get("content-type", "")}
            answer = httpx.request(
                self.command, server + path, content=body, headers=kind, timeout=STEP_SECONDS, trust_env=False
            )
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", ""))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, format: str, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads, proxy.block_on_close = True, False
        Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()


@pytest.mark.parametrize("variant", UNTIED[:1])
def test_a_cached_prefix_of_another_version_is_used_without_the_gate_alone(
    world: World, variant: str
) -> None:
    """The engine keeps its prefix cache over updates here: what the gate adds to a request keeps versions
    apart."""
    port = free_port()
    gate = world.server.through(f"http://127.0.0.1:{port}")
    with without_a_flush(world.server.url) as url:
        world.host.extra = ("--gate", str(port))
        world.host.with_engine(f"vllm={url}")
        for _ in range(3):
            version = world.run.newest
            world.host.wait_served(version)
            for asked in (gate, world.server):
                answers = [asked.ask(LONG) for _ in range(2)]
                assert [answer.status for answer in answers] == [200] * 2, answers[0].text
            new = world.run.publish()
            world.host.wait_served(new)
            through, past = gate.ask(LONG), world.server.ask(LONG)
            assert through.label["version"] == new
            assert world.misfits(through, new) == []
            assert not world.judged(past, new), "the engine flushed its prefix cache: the test shows nothing"
        world.host.stop()
    httpx.post(f"{world.server.url}/reset_prefix_cache", timeout=STEP_SECONDS).raise_for_status()


@pytest.mark.parametrize("variant", [KEYED])
def test_an_api_key_is_asked_of_users_and_told_to_nobody(world: World, variant: str) -> None:
    """All other tests of this start run with the key too."""
    world.start_host()
    world.host.wait_served(world.run.publish())
    assert world.server.status_without_key("/v1/models") == 401
    assert world.server.status("/v1/models") == 200
    assert world.host.process is not None
    assert KEY not in json.dumps(world.host.status) + world.host.process.log.read_text()


@pytest.mark.parametrize("variant", TIED)
def test_tied_embeddings_on_a_cpu_are_refused_by_name(world: World, variant: str) -> None:
    """Its reload would say success and keep the output layer that it packed at its start."""
    world.host.with_engine(world.option())
    for _ in range(2):
        version = world.run.publish()
        wait_until(lambda: "tied embeddings" in json.dumps(world.host.status), "the refusal")
        assert world.host.served != version and not world.server.paused
    for prompt in (SHORT, LONG, LONG):
        answer = world.server.ask(prompt)
        assert answer.status == 200 and world.judged(answer, 0), "not what it was started with"


@pytest.mark.parametrize("variant", UNTIED)
def test_another_run_takes_the_engine_over(world: World, starts: Starts, variant: str) -> None:
    """Its label means nothing: it is reloaded once before the host is ready."""
    world.host.stop()
    other = starts.other_world(variant)
    with running(other.host):
        other.host.wait_served(0)
        other.require(0)
        other.host.wait_served(other.run.publish())
        other.require(1)


# What vLLM does not survive, or survives wrongly, when it has to load it: it never comes to that. A reload
# that fails leaves it alive until its next token, one that lacks a tensor is answered with success.

SHARDED, SINGLE = "qwen2-untied-sharded-bf16", "llama-untied-single-fp32"
NORM = "model.norm.weight"


def without_norm(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != NORM}


def with_unknown(tensors: Tensors) -> Tensors:
    return {("model.nrom.weight" if name == NORM else name): tensor for name, tensor in tensors.items()}


def with_wrong_shape(tensors: Tensors) -> Tensors:
    return {name: tensor[:-1].clone() if name == NORM else tensor for name, tensor in tensors.items()}


def rewritten(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Each file where its tensors change: another file, as a copy from elsewhere would be."""
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if NORM in tensors:
            aside = path.with_suffix(".new")
            save_file(change({name: tensor.clone() for name, tensor in tensors.items()}), aside)
            aside.rename(path)


def lacks_tensor(directory: Path) -> None:
    rewritten(directory, without_norm)


def has_unknown_name(directory: Path) -> None:
    rewritten(directory, with_unknown)


def has_wrong_shape(directory: Path) -> None:
    rewritten(directory, with_wrong_shape)


def is_truncated(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def is_missing(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()


def header_in_place(directory: Path) -> None:
    """The same file, size and bytes but for one name in the header."""
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        at = data.find(NORM.encode())
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"model.nrom.weight")


DAMAGES = (is_missing, is_truncated, has_unknown_name, has_wrong_shape, lacks_tensor)


@pytest.mark.parametrize("variant", [SHARDED])
def test_bad_exports_become_no_version(world: World, variant: str) -> None:
    world.start_host()
    newest = world.run.newest
    for number, damage in enumerate(DAMAGES):
        export = copy_checkpoint(world.run.versions[-1], world.root / f"bad-export{number}", dict)
        damage(export)
        with pytest.raises((WeightcastError, OSError)):
            world.run.publisher.publish_checkpoint(export, step=99)
    world.host.wait_served(newest)
    world.require(newest)


@pytest.mark.parametrize("damage", [*DAMAGES, header_in_place])
@pytest.mark.parametrize("variant", [SHARDED])
def test_damaged_local_files_are_found_before_the_engine_reads_them(
    world: World, variant: str, damage: Callable[[Path], None]
) -> None:
    world.start_host()
    assert world.host.process is not None
    with world.host.process.suspended():
        version = world.run.publish()
        damage(world.host.local)
    world.require_honest_until(lambda: world.host.served == version, "the host healed")
    world.require(version)


@pytest.mark.parametrize("variant", [SINGLE])
def test_weights_lying_beside_the_checkpoint_stop_the_host(world: World, variant: str) -> None:
    """vLLM loads every safetensors file of a directory without an index."""
    world.start_host()
    stray = world.host.local / "extra.safetensors"
    old = world.run.newest
    save_file({"model.unknown.weight": torch.zeros(4)}, stray)
    version = world.run.publish()
    world.require_honest_until(
        lambda: "extra.safetensors" in json.dumps(world.host.status["last_error"]), "the stray file found"
    )
    assert world.host.served == old
    stray.unlink()
    world.host.wait_served(version)
    world.require(version)


@pytest.mark.parametrize("damage", ["directory", "shard", "index"])
@pytest.mark.parametrize("variant", [SHARDED])
def test_a_damaged_version_leaves_the_engine_where_it_is(world: World, variant: str, damage: str) -> None:
    world.start_host("--visible-deadline", "1")
    assert world.host.process is not None
    old = world.run.newest
    with world.host.process.suspended():
        version = world.run.publish()
        directory = world.run.channel / f"weight_v{version:06d}"
        whole = world.root / f"whole-{version}"
        shutil.copytree(directory, whole)
        damage_version(directory, damage)
    world.require_honest_until(lambda: world.host.status["last_error"] is not None, "the damage noticed")
    assert world.host.served == old
    shutil.rmtree(directory, ignore_errors=True)
    whole.rename(directory)
    world.host.wait_served(version)
    world.require(version)


def damage_version(directory: Path, damage: str) -> None:
    if damage == "directory":
        shutil.rmtree(directory)
    elif damage == "shard":
        is_truncated(directory)
    else:
        index = directory / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(NORM, "model.nrom.weight"))


@pytest.mark.parametrize("damage", [is_missing, is_truncated, has_unknown_name, has_wrong_shape])
@pytest.mark.parametrize("variant", [SINGLE])
def test_a_failed_reload_keeps_the_engine_paused_until_a_good_one(
    world: World, variant: str, damage: Callable[[Path], None]
) -> None:
    """The engine's own view of the files is wrong, which the host cannot see: another mount point. After a
    wrong shape vLLM must be restarted, as a supervisor of an engine that stays `failed` does."""
    view = world.root / f"view-{damage.__name__}"
    shutil.copytree(world.host.local, view)
    world.start_host(path=view)
    damage(view)
    version = world.run.publish()
    wait_until(lambda: world.host.mark == "suspect" and not world.host.ready, "the failure noticed")
    waiting = world.server.send(LONG, 8)
    assert world.server.paused and world.server.status("/health") == 200
    shutil.rmtree(view)
    shutil.copytree(world.host.local, view)
    if damage is has_wrong_shape:
        world.server.restart()
    world.require_honest_until(lambda: world.host.served == version, "the engine reloaded")
    answer = waiting.result(STEP_SECONDS)
    if damage is not has_wrong_shape:
        assert answer.status == 200 and world.judged(answer, version), answer.text
    world.require(version)
