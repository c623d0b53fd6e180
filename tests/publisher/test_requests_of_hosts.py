"""What a host asks of an object store, counted: in an idle poll, and per version."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from core_cases import all_changed
from forked import weightcast
from http_faults import HttpFaults, http_faults
from ports import free_port
from publisher_cases import StorePlace, numpy_model
from s3_gateway import Gateway
from sharded_world import along, cut_model, published, world_of
from waiting import wait_until

from weightcast.shared.channel.object_store import open_object_store

pytestmark = pytest.mark.s3
SHARDS = 4
"""of a version: one per rank"""
MOST_PER_VERSION = 12
POLLS = 5


def test_an_idle_poll_is_one_conditional_get_and_a_version_few_requests(
    bucket: str, s3: Gateway, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    place = StorePlace.made(tmp_path, numpy_model(rng), open_object_store(f"{bucket}/run"))
    with http_faults(s3.endpoint) as proxy, world_of(place, SHARDS) as world:
        model, url = place.model, f"http://127.0.0.1:{free_port()}"

        def versions() -> tuple[object, object]:
            status = httpx.get(f"{url}/v1/status", timeout=10).json()
            return status["local_version"], status["state"]

        def poll() -> None:
            """The poll itself, and another after a version."""
            httpx.post(f"{url}/v1/wake", timeout=10).raise_for_status()

        words = ["--channel", f"{bucket}/run", "--local", place.host, "--base", place.base]
        pauses = ["--poll-seconds", 3600, "--report-seconds", 3600]
        command = ["subscriber", "run", *words, "--port", url.rpartition(":")[2], *pauses]
        with weightcast(*command, env={**os.environ, "AWS_ENDPOINT_URL": proxy.endpoint}) as host:
            wait_until(lambda: versions() == (0, "idle"), passing=(httpx.TransportError,))
            _settle(proxy)
            for step in (1, 2):
                model = all_changed(model, rng)
                assert published(world.publish(cut_model(model, along(0), SHARDS), step)) == step
                before = len(proxy.requests)
                poll()
                wait_until(lambda step=step: versions() == (step, "idle"))  # type: ignore[misc]
                _settle(proxy)
                took = proxy.requests[before:]
                assert len([path for _, path in took if ".safetensors" in path]) == SHARDS + 1
                assert len(took) <= MOST_PER_VERSION, took
            before = len(proxy.requests)
            for number in range(1, POLLS + 1):
                poll()
                wait_until(lambda number=number: len(proxy.requests) >= before + number)  # type: ignore[misc]
            _settle(proxy)
            asked = list(zip(proxy.requests[before:], proxy.answers[before:], strict=True))
            # adapters of the run are looked for at times, not at each poll
            polls = [
                (method, path.rpartition("/")[2], answer)
                for (method, path), answer in asked
                if not path.endswith("/components.json")
            ]
            assert polls == [("GET", "latest", 304)] * POLLS
            assert len(asked) - len(polls) < POLLS
            host.send_signal(signal.SIGTERM)
            assert host.wait(60) == 0


def _settle(proxy: HttpFaults) -> None:
    """Until nothing was asked for as long as a report may be late."""
    counts = [-1]

    def is_quiet() -> bool:
        counts.append(len(proxy.requests))
        return len(counts) > 16 and len(set(counts[-16:])) == 1

    wait_until(is_quiet, every=0.1)
