"""What `weightcast status` leads with, from the status that each daemon shows."""

from __future__ import annotations

import json
from typing import Any

from weightcast.publisher.daemon.sources.watched import InboxStatus
from weightcast.publisher.daemon.status import DatedRefusal, PublisherStatus
from weightcast.publisher.publish.publish_job import Publication
from weightcast.shared.cli.output import to_json
from weightcast.shared.cli.status import Summary, summary
from weightcast.shared.daemon.status import LoopStatus
from weightcast.subscriber.gateway.daemon import GatewayStatus
from weightcast.subscriber.gateway.hosts import HostLine
from weightcast.subscriber.status import AdapterStatus, EngineStatus, HostStatus, LastError, UpdateStatus

NOW = 1_790_000_000.0
PUBLISHED = Publication(version=6, step=60, at=NOW - 200)
REFUSED = DatedRefusal(
    error="Refused", message="it is cut", remedy="save it again", at=NOW - 61, source="step_70"
)
ENGINE = EngineStatus(
    name="a", kind="vllm", url="http://e", mark="suspect", version=5, confirmed_by="digest", process=None,
    aligned=False, reachable=True, reason="reload failed 3 times", state="failed",
)  # fmt: skip


def publisher(**facts: Any) -> Summary:
    known = {"channel": "/c", "local": "/l", "encoding": "fast", "ready": True, "version": 6, "now": NOW}
    return summary(PublisherStatus.model_validate(known | facts).model_dump(mode="json"))


def host(**facts: Any) -> Summary:
    known = HostStatus(software="s", host="h", channel="/c", local="/l", target="latest", **facts)
    return summary(json.loads(to_json(known)))


def test_a_publisher_answers_with_its_version_and_age() -> None:
    found = publisher(publications=(PUBLISHED,))
    assert found.well and found.remedy == ""
    assert found.sentence == "publisher is ready: version 6 (step 60, published 3 min ago)"
    assert publisher(version=0).sentence == "publisher is ready: version 0"


def test_a_refusal_after_the_last_version_comes_first() -> None:
    inbox = InboxStatus(watch="/w", waiting_count=1, refused_count=4)
    found = publisher(publications=(PUBLISHED,), last_refused=REFUSED, inbox=inbox)
    assert not found.well and found.sentence.endswith("; step_70 was refused 61 s ago: it is cut")
    assert found.remedy == "save it again" and ("inbox", "/w: 1 waiting, 4 refused") in found.rows
    assert publisher(publications=(PUBLISHED.but(at=NOW),), last_refused=REFUSED).well


def test_a_publisher_that_is_held_or_not_ready_says_why() -> None:
    assert publisher(held="rolled back to version 2").sentence.endswith(
        ": version 6; held: rolled back to version 2"
    )
    found = publisher(ready=False, not_ready_reasons=("no space", "b", "c"), loop=LoopStatus(failures=1))
    assert found.sentence == "publisher is not ready: version 6; no space; b (and 1 more)" and not found.well


def test_what_an_engine_served_lasts_longer_than_the_engine() -> None:
    gone = ENGINE.but(reachable=False, state="silent")
    assert host(served_version=5, engines=(gone,)).sentence.startswith(
        "h is not ready: last served version 5"
    )
    assert ": serves version 5" in host(ready=True, served_version=5, engines=(gone, ENGINE)).sentence
    update = UpdateStatus(
        kind="reload", from_version=4, version=4, folded=0, bytes=0, changes=0, seconds={"total": 0.05},
        pause_seconds=None, at=NOW, taken=False,
    )  # fmt: skip
    assert ("last update", "reload 4 not taken by any engine after 0.05 s") in host(updates=(update,)).rows


def test_a_host_that_waits_for_an_engine_is_not_idle() -> None:
    found = host(state="idle", local_version=6, engines=(ENGINE,), not_ready_reasons=("engine a: failed",))
    rows = dict(found.rows)
    assert found.sentence == "h is not ready: serves no version; engine a: failed"
    assert "the engine's log" in found.remedy and "`weightcast wake URL`" in found.remedy
    assert "idle" not in rows["doing"] and rows["local copy"] == "version 6"
    assert rows["engine"] == "a (vllm) failed, version 5: reload failed 3 times"


def test_a_host_that_is_ready_or_degraded_says_at_what() -> None:
    ready = host(ready=True, state="idle", local_version=6, served_version=6, target_version=6)
    assert ready.well and ready.sentence == "h is ready: holds version 6, no engine"
    error = LastError(error="E", message="m", remedy="free it", at=NOW)
    facts = {"target_version": 7, "degraded": ("disk full",), "last_error": error}
    found = host(ready=True, local_version=6, served_version=6, **facts)
    assert found.sentence == "h is ready: holds version 6, no engine; degraded: disk full"
    assert not found.well and found.remedy == "free it" and ("target", "latest: version 7") in found.rows
    assert len(found.rows) <= 14


def test_a_host_that_is_not_ready_does_not_serve() -> None:
    facts = {"local_version": 17, "served_version": 17, "not_ready_reasons": ("engine a does not answer",)}
    found = host(state="idle", **facts)
    assert found.sentence == "h is not ready: last served version 17; engine a does not answer"
    assert ("doing", "waits: engine a does not answer") in found.rows


def test_a_host_lists_its_adapters() -> None:
    loaded = AdapterStatus(name="math", version=5, target=5, main_version=6, loaded=(5,), state="loaded")
    failed = loaded.but(name="code", version=1, target=2, loaded=(1,), state="failed", error="rank 32")
    draft = loaded.but(name="draft", version=3)
    facts = {"ready": True, "served_version": 6, "adapters": (loaded, failed), "draft": draft}
    rows = dict(host(engines=(ENGINE,), **facts).rows)
    assert rows["adapter"] == "code@1 failed, newest version 2: rank 32"
    assert rows["adapters"] == "math@5, draft@3 (loaded)"
    assert dict(host(**facts).rows)["adapters"] == "math@5, draft@3 (no engine)"


def test_a_publisher_without_a_version_says_nothing_of_its_age() -> None:
    found = publisher(ready=False, version=None, not_ready_reasons=("starting",))
    assert found.sentence == "publisher is not ready: no version; starting"


def test_a_gateway_says_which_hosts_take_requests() -> None:
    line = {"target": 3, "adapters": {}, "requests": 2}
    good = HostLine(name="a", url="http://a:1", version=3, reason="", **line)
    out = HostLine(name="b", url="http://b:1", version=None, reason="its gate refuses the token", **line)
    facts = {"ready": True, "served_version": 3, "target_version": 3, "waiting": 1}
    found = summary(json.loads(to_json(GatewayStatus(hosts=(good, out), **facts))))
    said = "gateway is ready: 1 of 2 hosts take requests, newest version 3; b: its gate refuses the token"
    assert found.sentence == said and not found.well
    rows = dict(found.rows)
    assert rows["host a"] == "http://a:1: version 3, 2 requests" and rows["waiting"] == "1 request for a host"
    assert rows["host b"] == "http://b:1: its gate refuses the token"
    none = summary(json.loads(to_json(GatewayStatus(not_ready_reasons=("no gate is known",)))))
    assert none.sentence == "gateway is not ready: 0 of 0 hosts take requests; no gate is known"


def test_an_answer_of_another_release_is_read_as_far_as_it_goes() -> None:
    assert summary({"ready": True, "role": "publisher", "queue": None, "inbox": []}).well
    assert summary({"ready": False, "engines": ["x"], "last_error": None}).sentence.endswith(
        "no reason given"
    )
