"""Answers that an engine finished just before an update or an abort: whole, and not called partial."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from gate_kit import Engine, Host, events
from hosts import Run, Site
from waiting import wait_until

from weightcast.subscriber.gate.conditions import answers_of

ROUTES = {
    "vllm": ("/v1/completions", "/v1/chat/completions"),
    "sglang": ("/v1/completions", "/v1/chat/completions", "/generate"),
}


@pytest.fixture(params=["vllm", "sglang"])
def host(site: Site, run: Run, request: pytest.FixtureRequest) -> Host:
    host = Host(site, run, Engine(site, kind=request.param), options=("--gate-updates", "partial"))
    host.publish()
    return host


def begin(pool: ThreadPoolExecutor, host: Host, path: str, **more: Any) -> Future[httpx.Response]:
    """A request whose answer is finished on its engine, but for its last bytes, when this returns."""
    body = {"prompt": "p", "text": "p", "messages": [], "linger": True, "rid": "mine", **more}
    asked = pool.submit(host.client.post, path, json=body)
    wait_until(lambda: host.engines[0].get("/lingering") == 1)
    return asked


def release(host: Host) -> None:
    httpx.post(f"{host.engines[0].url}/release", trust_env=False).raise_for_status()


def of_answer(answer: httpx.Response, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """Its text and its label."""
    assert answer.status_code == 200, answer.text
    if stream:
        return events(answer.text.splitlines())
    found = answer.json()
    if "text" in found:
        return found["text"], found["weightcast"]
    [choice] = found["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"], found["weightcast"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_finished_before_an_update_is_whole(host: Host, stream: bool) -> None:
    for path in ROUTES[host.engines[0].kind]:
        version = host.status()["gate"]["version"]
        with ThreadPoolExecutor(2) as pool:
            asked = begin(pool, host, path, stream=stream)
            publishing = pool.submit(host.publish)
            # the update waits for it
            wait_until(lambda: host.client.get("/readyz").status_code == 503)
            release(host)
            text, label = of_answer(asked.result(), stream=stream)
            assert host.version_of(text) == [version] * 3
            assert label == {"version": version, "last_version": version}
            publishing.result()


def test_a_finished_stream_whose_end_does_not_come_is_completed(host: Host) -> None:
    path = ROUTES[host.engines[0].kind][-1]
    with ThreadPoolExecutor(2) as pool:
        asked = begin(pool, host, path, stream=True)
        publishing = pool.submit(host.publish)
        answer = asked.result()
        text, label = of_answer(answer, stream=True)
        assert (host.version_of(text), label) == ([1] * 3, {"version": 1, "last_version": 1})
        assert answer.text.count("data: [DONE]\n\n") == 1
        publishing.result()
    release(host)


def test_a_stream_with_one_of_two_answers_is_partial(host: Host) -> None:
    path = ROUTES[host.engines[0].kind][0]
    with ThreadPoolExecutor(2) as pool:
        asked = begin(pool, host, path, stream=True, n=2)
        publishing = pool.submit(host.publish)
        assert of_answer(asked.result(), stream=True)[1]["partial"] is True
        publishing.result()
    release(host)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "p"}, 1),
        ({"prompt": [1, 2, 3], "n": 4}, 4),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
        ({"input_ids": [[1], [2]], "sampling_params": [{}, {}]}, 1),
        ({"messages": []}, 1),
        ({"prompt": []}, 1),
        ([], 1),
    ],
)
def test_how_many_answers_a_request_asks_for(body: object, count: int) -> None:
    assert answers_of(json.dumps(body).encode()) == count
