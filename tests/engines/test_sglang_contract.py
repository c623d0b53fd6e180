"""The SGLang adapter against the released package's own request and reply models, over real HTTP."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "subscriber"))

from hosts import Host, Run, Site, Weights  # noqa: E402
from waiting import wait_until  # noqa: E402

from weightcast.shared.base.errors import NeedsReseed, WeightcastError  # noqa: E402
from weightcast.subscriber.engines.base import Done, Intact, Suspect  # noqa: E402
from weightcast.subscriber.sync.adapters import GRACE_SECONDS  # noqa: E402

pytestmark = pytest.mark.engines
VENV = Path(os.environ.get("WEIGHTCAST_SGLANG_VENV", HERE.parents[1] / ".venv-sglang"))
TO_UPDATE = "/update_weights_from_disk"
PATIENCE = 300
"""seconds, for what takes less than one on an idle machine"""
RELEASES = pytest.mark.parametrize("old", [False, True], ids=["labels", "no-labels"])


class Engine:
    """The server as a process; `weights` are what it holds, by tensor."""

    def __init__(self, stack: ExitStack, room: Path, directory: Path, *options: str) -> None:
        self.room, self.directory, self.options = room, directory, options
        room.mkdir()
        self.process = self._start()
        stack.callback(self.kill)

    def _start(self) -> subprocess.Popen[bytes]:
        python = VENV / "bin" / "python"
        if not python.exists():
            pytest.fail(f"{VENV} is not there: run these tests with `make test-engines`")
        port_file = self.room / "port"
        port_file.unlink(missing_ok=True)
        command = [python, HERE / "sglang_server.py", self.directory, port_file, *self.options]
        with (self.room / "log").open("ab") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log)
        wait_until(lambda: port_file.exists() or process.poll() is not None, PATIENCE)
        assert port_file.exists(), (self.room / "log").read_text()
        self.url = f"http://127.0.0.1:{port_file.read_text()}"
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def double(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.url}/double", trust_env=False, timeout=PATIENCE).json()
        return told

    def wish(self, **wishes: Any) -> None:
        httpx.post(f"{self.url}/double", json=wishes, trust_env=False, timeout=PATIENCE).raise_for_status()

    @property
    def weights(self) -> dict[str, str]:
        held: dict[str, str] = self.double()["weights"]
        return held

    def posts(self) -> list[str]:
        return [call["path"] for call in self.double()["calls"] if call["method"] == "POST"]

    def forget_calls(self) -> None:
        self.wish(calls=[])


def held(weights: Weights) -> dict[str, str]:
    """What a fresh load of these weights holds."""
    return {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in weights.tensors.items()}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


@pytest.fixture
def run(site: Site) -> Run:
    return site.run()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    room = tmp_path_factory.mktemp("sglang")
    with ExitStack() as stack:
        yield Engine(stack, room / "engine", Weights.make().write(room / "base"))


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """A server as it is after its start; one process serves the tests that leave it alive."""
    shared.wish(
        old=False, weights=held(Weights.make()), model_path=str(shared.directory), label="default",
        draft=None, paused=None, running=0, aborted=0, stale_blocks=0, next_update="", calls=[],
        lora=True, adapters={}, using={},
    )  # fmt: skip
    return shared


def own(site: Site, run: Run) -> Engine:
    return Engine(site.stack, site.root / "engine", run.base_dir)


def host_of(site: Site, run: Run, engine: Engine, options: str = "") -> Host:
    return site.host(run, f"sglang={engine.url},name=engine{options}")


def test_versions_are_followed_with_fields_the_release_knows(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    for version in range(1, 5):
        run.publish()
        assert host.step().ready
        told = engine.double()
        assert told["weights"] == held(run.versions[version])
        assert (told["label"], told["model_path"], told["paused"]) == (str(version), str(host.local), None)
        [shown] = host.status.engines
        assert (shown.confirmed_by, shown.version) == ("label", version)
    assert {"model_path", "weight_version", "flush_cache"} <= set(told["fields"])
    unknown = {(call["path"], *call["unknown"]) for call in told["calls"] if call["unknown"]}
    assert unknown == set()


def test_a_new_number_for_the_same_bytes_aborts_nobody(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    host.step()
    engine.forget_calls()
    engine.wish(running=3)
    run.publish(run.versions[-1])
    assert host.step().ready
    told = engine.double()
    assert (told["label"], told["running"], told["aborted"]) == ("1", 3, 0)
    assert engine.posts() == ["/update_weight_version"]


@RELEASES
@pytest.mark.parametrize(("policy", "running", "aborted"), [("recompute", 3, 0), ("abort", 0, 3)])
def test_requests_in_flight_end_as_the_policy_says(
    site: Site, run: Run, engine: Engine, policy: str, running: int, aborted: int, old: bool
) -> None:
    engine.wish(old=old)
    host = host_of(site, run, engine, f",policy={policy}")
    host.step()
    engine.wish(running=3)
    run.publish()
    assert host.step().ready
    told = engine.double()
    assert (told["running"], told["aborted"], told["stale_blocks"]) == (running, aborted, 0)
    assert told["weights"] == held(run.versions[1])


@RELEASES
def test_the_policy_wait_lets_requests_finish(site: Site, run: Run, engine: Engine, old: bool) -> None:
    engine.wish(old=old)
    host = host_of(site, run, engine, ",policy=wait")
    host.step()
    engine.wish(running=2, calls=[])
    run.publish()
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(host.step)
        wait_until(lambda: TO_UPDATE in engine.posts(), PATIENCE)
        assert engine.weights == held(run.versions[0]) and engine.double()["paused"] is None
        engine.wish(running=0)
        assert step.result(PATIENCE).ready
    assert engine.weights == held(run.versions[1]) and engine.double()["aborted"] == 0


def test_a_400_although_the_weights_changed_is_no_refusal(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    host.step()
    engine.wish(next_update="race", calls=[])
    run.publish()
    assert host.step().ready, "the second attempt is good"
    assert engine.posts().count(TO_UPDATE) == 2 and "/continue_generation" in engine.posts()[3:]
    assert engine.posts().index("/continue_generation") > engine.posts().index(TO_UPDATE) + 1
    assert engine.double()["label"] == "1" and host.state.blocked == ()


def test_a_label_that_does_not_move_is_never_served(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    adapter = host.sync.engines.engines[0].adapter
    host.step()
    run.publish()
    for _ in range(2):
        engine.wish(next_update="label-stays")
        adapter.pause()
        assert adapter.reload(str(host.local), "1") == Done()
        with pytest.raises(WeightcastError, match="'0' after a reload of '1'"):
            adapter.read_back("1")
    assert host.step().ready and engine.double()["label"] == "1"


def test_a_directory_that_is_missing_leaves_the_old_weights(site: Site, run: Run, engine: Engine) -> None:
    host = site.host(run, f"sglang={engine.url},path=/no/such/directory")
    outcome = host.step()
    assert not outcome.ready and "Failed to get weights iterator" in outcome.not_ready_reasons[0]
    told = engine.double()
    assert told["weights"] == held(run.versions[0]) and told["paused"] is None


def test_with_a_draft_model_it_proves_nothing(site: Site, run: Run, engine: Engine) -> None:
    engine.wish(draft="EAGLE")
    host = site.host(run, f"sglang={engine.url},path=/no/such/directory")
    assert not host.step().ready
    assert host.status.engines[0].state == "suspect" and engine.double()["paused"] == "retract"


def test_a_server_that_dies_of_a_truncated_file_is_in_doubt_until_it_is_back(site: Site, run: Run) -> None:
    engine = own(site, run)
    host = host_of(site, run, engine)
    host.step()
    torn = site.root / "torn"
    shutil.copytree(run.base_dir, torn)
    file = next(torn.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    adapter = host.sync.engines.engines[0].adapter
    assert isinstance(adapter.reload(str(torn), "1"), Suspect)
    assert engine.process.wait(PATIENCE) == 1
    outcome = host.step()
    assert not outcome.ready and "does not answer" in outcome.not_ready_reasons[0]
    assert isinstance(adapter.reload(str(torn), "1"), Intact), "nobody is there"


def test_no_server_is_shown_a_torn_local_checkpoint(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    host.step()
    engine.forget_calls()
    run.publish()
    file = host.local / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(NeedsReseed):
        host.step()
    assert TO_UPDATE not in engine.posts() and engine.process.poll() is None
    assert host.step().ready and engine.weights == held(run.versions[1])


def test_a_restarted_server_is_reloaded_once(site: Site, run: Run) -> None:
    engine = own(site, run)
    host = host_of(site, run, engine)
    run.publish()
    host.step()
    port = engine.url.rpartition(":")[2]
    engine.kill()
    assert not host.step().ready
    engine.process = engine._start()
    if engine.url.rpartition(":")[2] != port:
        host.sync.close()
        host.urls = (f"sglang={engine.url},name=engine",)
        host.start()
    assert engine.weights == held(run.versions[0])
    assert host.step().ready and engine.weights == held(run.versions[1])
    engine.forget_calls()
    assert host.step().ready and engine.posts() == []


def test_a_server_reloaded_by_others_without_a_label_is_noticed(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    run.publish()
    host.step()
    body = {"model_path": str(run.base_dir)}
    reply = httpx.post(engine.url + TO_UPDATE, json=body, trust_env=False, timeout=PATIENCE)
    assert reply.status_code == 200 and engine.double()["label"] == "1", "the old label lies"
    assert engine.weights == held(run.versions[0])
    assert host.step().ready and engine.weights == held(run.versions[1])


def test_a_release_without_labels_is_confirmed_by_its_status(site: Site, run: Run, engine: Engine) -> None:
    engine.wish(old=True)
    host = host_of(site, run, engine)
    for version in (1, 2):
        run.publish()
        assert host.step().ready and engine.weights == held(run.versions[version])
    [shown] = host.status.engines
    assert (shown.confirmed_by, shown.version) == ("status-only", 2)


def test_a_pause_in_place_would_keep_old_blocks(site: Site, run: Run, engine: Engine) -> None:
    """Why the default policy retracts: the double tells the difference."""
    engine.wish(running=1)
    httpx.post(f"{engine.url}/pause_generation", json={"mode": "in_place"}, trust_env=False, timeout=PATIENCE)
    reply = httpx.post(
        engine.url + TO_UPDATE, json={"model_path": str(run.base_dir)}, timeout=PATIENCE, trust_env=False
    )
    assert reply.status_code == 400 and engine.double()["stale_blocks"] == 1
    reply = httpx.post(f"{engine.url}/pause_generation", content=b"", trust_env=False, timeout=PATIENCE)
    assert reply.status_code == 422, "a body is required"


def test_patches_of_its_memory_are_orders_that_it_takes(site: Site, run: Run) -> None:
    engine = Engine(site.stack, site.root / "patched", run.base_dir)
    host = site.host(run, f"sglang={engine.url},via=live")
    host.step()
    engine.forget_calls()
    run.publish()
    host.step()
    assert host.at(run, 1) and host.status.ready and engine.weights == held(run.versions[1])
    live = host.status.engines[0].live
    assert live is not None and (live.way, live.patches) == ("live", 1)
    told = engine.double()
    assert [call["unknown"] for call in told["calls"]] == [[]] * len(told["calls"])
    assert (told["applied"], told["label"], told["paused"], told["session"]) == (1, "1", None, False)
    assert engine.posts().count("/update_weights_from_tensor") == 1 and "/weights_checker" in engine.posts()
    engine.wish(next_update="refuse", calls=[])
    run.publish()
    host.step()
    assert host.at(run, 2) and engine.weights == held(run.versions[2])
    assert "w is transposed" in host.status.engines[0].live.reason
    assert TO_UPDATE in engine.posts() and engine.double()["applied"] == 1


def test_adapters_are_loaded_with_fields_the_release_knows(site: Site, run: Run, engine: Engine) -> None:
    host = host_of(site, run, engine)
    for number in range(1, 4):
        run.publish_adapter()
        assert host.step().ready
        assert host.status.adapters[0].loaded[0] == number
    host.clock.at += GRACE_SECONDS + 1
    host.step()
    told = engine.double()
    assert told["adapters"] == {f"math@{n}": str(host.local / f"adapters/math-v{n:06d}") for n in (2, 3)}
    assert {(call["path"], *call["unknown"]) for call in told["calls"] if call["unknown"]} == set()


def test_main_weights_wait_for_the_requests_of_an_adapter(site: Site, run: Run, engine: Engine) -> None:
    """SGLang answers an unload once nobody uses the adapter; the pause comes after it."""
    host = host_of(site, run, engine)
    run.publish_adapter()
    host.step()
    engine.wish(using={"math@1": 1}, calls=[])
    run.publish()
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(host.step)
        wait_until(lambda: "/unload_lora_adapter" in engine.posts(), PATIENCE)
        assert engine.double()["adapters"] == {} and engine.double()["paused"] is None
        engine.wish(using={})
        assert not step.result(PATIENCE).ready
    posts = engine.posts()
    assert posts.index("/unload_lora_adapter") < posts.index("/pause_generation") < posts.index(TO_UPDATE)
    run.publish_adapter()
    assert host.step().ready and set(engine.double()["adapters"]) == {"math@2"}


def test_a_release_without_lora_is_named(site: Site, run: Run, engine: Engine) -> None:
    engine.wish(lora=False)
    host = host_of(site, run, engine)
    run.publish_adapter()
    assert not host.step().ready
    assert "--enable-lora" in host.status.adapters[0].remedy
