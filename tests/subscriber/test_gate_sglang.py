"""SGLang behind the gate, asked as its own callers ask it: slime's rollouts, trainers written for Stitch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from gate_kit import Engine, Host, events
from hosts import Run, Site
from waiting import wait_until

ENDLESS = {"tokens": 10**6, "seconds": 0.05}


@pytest.fixture
def host(site: Site, run: Run) -> Host:
    return Host(site, run, Engine(site, kind="sglang"))


def test_an_answer_says_its_version_and_keeps_the_engines_own(host: Host) -> None:
    version = host.publish()
    answer = host.generate().json()
    assert answer["weightcast"] == {"version": version, "last_version": version}
    assert answer["meta_info"]["weight_version"] == str(version)
    assert host.version_of(answer["text"]) == [version] * 3
    asked = {"text": "p", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    with host.client.stream("POST", "/generate", json=asked) as response:
        text, label = events(response.iter_lines())
    assert host.version_of(text) == [version] * 3
    assert label == {"version": version, "last_version": version}
    assert host.mislabeled() == 0


def test_weights_that_the_engine_names_otherwise_are_counted(host: Host) -> None:
    version = host.publish()
    httpx.post(f"{host.engines[0].url}/double", json={"said": "99"}, trust_env=False)
    answer = host.generate().json()
    assert answer["meta_info"]["weight_version"] == "99"
    assert answer["weightcast"]["version"] == version
    wait_until(lambda: host.mislabeled() == 1)
    assert "engine names other weights" in host.log()


def test_no_cached_prefix_of_another_version_is_used(host: Host) -> None:
    for _ in range(3):
        version = host.publish()
        for salt in ({}, {"extra_key": "mine"}):
            answer = host.generate(**salt).json()
            assert host.version_of(answer["meta_info"]["cached_by"]) == [version]


def test_a_caller_aborts_by_his_own_rid(host: Host) -> None:
    host.publish()
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(host.generate, rid="mine", **ENDLESS)
        other = pool.submit(host.generate, **ENDLESS)
        wait_until(lambda: host.engines[0].get("/under_way") == 2)
        assert host.client.post("/abort_request", json={"rid": "min"}).json() == {"aborted": 0}
        assert host.client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        answer = mine.result().json()
        assert answer["meta_info"]["id"] == "mine"
        assert answer["meta_info"]["finish_reason"] == {"type": "abort"}
        assert answer["weightcast"]["ended_by"] == "abort"
        assert not other.done()
        assert host.client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 1}
        assert other.result().json()["weightcast"]["partial"] is True
    assert host.engines[0].get("/under_way") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_whole_before_its_abort_is_not_partial(host: Host, stream: bool) -> None:
    host.publish()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(host.generate, rid="mine", whole=True, stream=stream, **ENDLESS)
        wait_until(lambda: host.engines[0].get("/under_way") == 1)
        assert host.client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        answer = asked.result()
    label = events(answer.text.splitlines())[1] if stream else answer.json()["weightcast"]
    assert label.keys() == {"version", "last_version"}


def test_an_update_ends_answers_with_the_tokens_that_they_have(site: Site, run: Run) -> None:
    host = Host(site, run, Engine(site, kind="sglang"), options=("--gate-updates", "partial"))
    version = host.publish()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(host.generate, **ENDLESS)
        wait_until(lambda: host.engines[0].get("/streamed") > 1)
        host.publish()
        found = answer.result().json()
    assert found["weightcast"]["ended_by"] == "update"
    assert len(found["output_ids"]) > 1
    assert set(host.version_of(found["text"])) == {version}


@dataclass
class Sample:
    """A trajectory, filled as slime fills it from answers of `/generate`."""

    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    response: str = ""
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[str] = field(default_factory=list)
    status: str = "pending"

    def generate(self, url: str, most: int, **extra: Any) -> Sample:
        body = {
            "input_ids": self.tokens, "return_logprob": True, **extra,
            "sampling_params": {"max_new_tokens": most, "temperature": 1.0, "no_stop_trim": True},
        }  # fmt: skip
        reply = httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=60)
        output = reply.raise_for_status().json()
        meta = output["meta_info"]
        new = meta.get("output_token_logprobs", [])
        self.tokens = self.tokens + [each[1] for each in new]
        self.log_probs += [each[0] for each in new]
        self.response += output["text"]
        if "weight_version" in meta:
            self.weight_versions.append(meta["weight_version"])
        kinds = {"length": "truncated", "abort": "aborted", "stop": "completed"}
        self.status = kinds[meta["finish_reason"]["type"]]
        return self


def test_slimes_partial_rollouts_go_on_with_the_next_version(host: Host) -> None:
    """Surplus of a rollout is aborted, kept as it is, and continued in the next."""
    url, first = str(host.client.base_url), host.publish()
    with ThreadPoolExecutor(6) as pool:
        surplus = [pool.submit(Sample().generate, url, 10**6, seconds=0.05) for _ in range(4)]
        whole = [pool.submit(Sample().generate, url, 3) for _ in range(2)]
        assert [each.result().status for each in whole] == ["truncated"] * 2
        wait_until(lambda: host.engines[0].get("/under_way") == 4)
        wait_until(lambda: host.engines[0].get("/streamed") > 12)
        httpx.post(f"{url}/abort_request", json={"abort_all": True}, trust_env=False).raise_for_status()
        partial = [each.result() for each in surplus]
        assert {each.status for each in partial} == {"aborted"}
        second = host.publish()
        for sample in [each.result() for each in [pool.submit(one.generate, url, 4) for one in partial]]:
            assert sample.status == "truncated"
            assert sample.weight_versions == [str(first), str(second)]
            assert len(sample.log_probs) == len(sample.tokens) - 3
            made_by = host.version_of(sample.response)
            assert made_by[-4:] == [second] * 4 and set(made_by[:-4]) <= {first}


@pytest.mark.parametrize("by", ["/abort_request", "/abort"])
def test_surplus_that_no_engine_took_yet_is_aborted_too(site: Site, run: Run, by: str) -> None:
    host = Host(site, run, Engine(site, kind="sglang"), options=("--gate-hold", "600"))
    host.publish()
    host.engines[0].kill()
    wait_until(lambda: host.client.get("/readyz").status_code == 503)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(Sample().generate, str(host.client.base_url), 3)
        wait_until(lambda: host.client.get("/readyz").json()["waiting"] == 1)
        host.client.post(by, json={"abort_all": True}).raise_for_status()
        assert held.result().status == "aborted"
        assert held.result().response == ""
    assert host.client.get("/readyz").json()["waiting"] == 0


def test_a_trainer_written_for_stitch(host: Host) -> None:
    version = host.publish()
    for accepted in (
        {"min_version": version, "exact_version": None},
        {"exact_version": version},
        {"min_version": "new"},
        {},
    ):
        answer = host.generate(weight_version=accepted).json()
        assert answer["meta_info"]["weight_version"] == str(version)
        assert answer["meta_info"]["weight_version_start"] == version
        assert answer["meta_info"]["weight_version_end"] == version
    assert host.generate(weight_version=None).status_code == 200
    for unmet in ({"min_version": version + 1}, {"exact_version": version - 1}):
        refused = host.generate(weight_version=unmet)
        assert refused.status_code == 409
        assert refused.json().keys() == {"type", "target_version", "applied", "message"}
        assert refused.json()["type"] == "WeightVersionNotReady"
        assert (refused.json()["applied"], refused.json()["target_version"]) == (version, version)
    engine_saw = host.engines[0].get("/requests")
    assert [request.get("weight_version") for request in engine_saw] == [None] * 5


def test_a_router_written_for_stitch(host: Host) -> None:
    version = host.publish()
    assert host.client.get("/health").json() == {"ready": True}
    reads: list[Callable[[], httpx.Response]] = [
        lambda: host.client.get("/server_info"), lambda: host.client.post("/wake")
    ]  # fmt: skip
    for read in reads:
        told = read().json()
        assert told["ready"] is True
        assert told["applied"] == f"{host.status()['run_id']}/weight_v{version:06d}"
        assert told["sync_state"] == "IDLE"
        assert (told["active_requests"], told["terminal_error"]) == (0, None)
    assert "speculative_algorithm" in host.client.get("/server_info").json()
    host.engines[0].kill()
    wait_until(lambda: host.client.get("/health").status_code == 503)
    assert host.client.get("/health").json()["ready"] is False
    wait_until(lambda: host.client.get("/server_info").json()["applied"] is None)
