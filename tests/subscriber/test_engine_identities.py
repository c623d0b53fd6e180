"""Several processes behind one address, told from one that restarts."""

from __future__ import annotations

import json
import random

import pytest
from doubles import Answer, Balancer, Call, Double, WebhookDouble
from hosts import VLLM, SGLang, Site
from in_process import Command
from plugin_double import PluginDouble

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.adapter import ASKED, STEADY, Identities
from weightcast.subscriber.engines.base import Misconfigured

SAYS = "two or more processes answer at http://127.0.0.1"
KINDS: dict[str, type[Double]] = {"sglang": SGLang, "vllm": VLLM, "webhook": WebhookDouble}


class Unnamed(SGLang):
    """Started without --enable-metrics."""

    def metrics(self) -> Answer:
        return Answer(404)


class UnnamedVLLM(VLLM):
    def metrics(self) -> Answer:
        return Answer(404)


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_replicas_are_refused_before_the_first_reload(
    site: Site, kind: str, number: int, weightcast: Command
) -> None:
    replicas = [KINDS[kind]() for _ in range(number)]
    option = f"{kind}={site.serve(Balancer(*replicas))},name=e"
    run = site.run()
    host = site.host(run, option)
    for _ in range(3):
        assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert SAYS in reason and "give each replica its own --engine" in reason
    assert [engine.state for engine in host.status.engines] == ["failed"]
    assert all(replica.paths() == [] for replica in replicas) and host.state.engines == {}
    code, out, _ = weightcast("doctor", "--engine", option, "--json")
    [found] = [f for f in json.loads(out)["findings"] if f["place"] == "e"]
    assert code == 5 and SAYS in found["says"] and "its own --engine" in found["remedy"]


def test_a_balancer_that_picks_at_random(site: Site, kind: str) -> None:
    seed = 20260
    pick = random.Random(seed).randrange
    replicas = [KINDS[kind](), KINDS[kind]()]
    host = site.host(site.run(), f"{kind}={site.serve(Balancer(*replicas, pick=pick))}")
    assert not host.step().ready, f"seed {seed}"
    assert SAYS in host.status.not_ready_reasons[0]
    assert all(replica.paths() == [] for replica in replicas)


def test_a_replica_that_joins_and_leaves(site: Site, kind: str) -> None:
    run, first = site.run(), KINDS[kind]()
    balancer = Balancer(first)
    copies = ",copies=true" if kind == "webhook" else ""
    host = site.host(run, f"{kind}={site.serve(balancer)}{copies}")
    assert host.step().ready
    balancer.replicas.append(KINDS[kind]())
    run.publish()
    for _ in range(2):
        host.step()
    assert not host.status.ready and SAYS in host.status.not_ready_reasons[0]
    balancer.replicas.pop()
    for _ in range(STEADY + 2):
        host.retry()
    assert host.status.ready and first.label == "1"


def test_an_engine_that_restarts_again_and_again_is_one_process(site: Site, kind: str) -> None:
    run, engine = site.run(), KINDS[kind]()
    host = site.host(run, f"{kind}={site.serve(Balancer(engine))}")
    for _ in range(4):
        host.step()
        assert host.step().ready
        engine.restart()


class Labelled(WebhookDouble):
    def behave(self, call: Call) -> Answer:
        return Answer(200, {"label": self.label}) if call.method == "GET" else super().behave(call)


def test_receivers_whose_labels_alternate(site: Site) -> None:
    replicas = [Labelled(), Labelled()]
    replicas[0].label = "7"
    host = site.host(site.run(), f"webhook={site.serve(Balancer(*replicas))}")
    assert not host.step().ready and SAYS in host.status.not_ready_reasons[0]
    assert all(replica.paths() == [] for replica in replicas)


@pytest.mark.parametrize("double", [Unnamed, UnnamedVLLM])
def test_replicas_that_tell_no_process_are_never_confirmed(site: Site, double: type[Double]) -> None:
    """Their labels are all that differs, once one of them has loaded."""
    replicas = [double(), double()]
    run = site.run()
    kind = "vllm" if double is UnnamedVLLM else "sglang"
    host = site.host(run, f"{kind}={site.serve(Balancer(*replicas))}")
    run.publish()
    for _ in range(6):
        assert not host.retry().ready
        assert host.status.served_version is None
    assert SAYS in host.status.not_ready_reasons[0]


class Seeded(Unnamed):
    def behave(self, call: Call) -> Answer:
        told = {"version": "0.5.23", "random_seed": self.started, "speculative_algorithm": None}
        return Answer(200, told) if call.path == "/server_info" else super().behave(call)


class Instance(UnnamedVLLM):
    def behave(self, call: Call) -> Answer:
        told = {"instance_id": self.started, "speculative_config": None}
        return Answer(200, {"vllm_config": told}) if call.path == "/server_info" else super().behave(call)


@pytest.mark.parametrize("double", [Seeded, Instance])
def test_replicas_without_metrics_are_told_by_how_they_were_started(site: Site, double: type[Double]) -> None:
    replicas = [double(), double(), double()]
    kind = "vllm" if double is Instance else "sglang"
    host = site.host(site.run(), f"{kind}={site.serve(Balancer(*replicas))}")
    assert not host.step().ready and SAYS in host.status.not_ready_reasons[0]
    assert all(replica.paths() == [] for replica in replicas)
    alone = site.host(site.run("other"), f"{kind}={site.serve(Balancer(replicas[0]))}", name="alone")
    assert alone.step().ready


def test_plugins_behind_one_address(site: Site) -> None:
    replicas = [PluginDouble(site.root / "host"), PluginDouble(site.root / "host")]
    host = site.host(site.run(), f"vllm={site.serve(Balancer(*replicas))},via=live")
    assert not host.step().ready and SAYS in host.status.not_ready_reasons[0]
    assert all(replica.routes() == [] for replica in replicas)


def test_an_engine_that_maps_files_is_not_patched_under_by_way_of_a_balancer(site: Site) -> None:
    run = site.run()
    host = site.host(run, f"webhook={site.serve(Balancer(WebhookDouble(), WebhookDouble()))}")
    host.step()
    run.publish()
    with pytest.raises(EngineFailed, match=SAYS):
        host.step()
    assert host.at(run, 0) and not host.status.ready


def answers(*names: str | None) -> str | None:
    return Identities("http://e").read(iter([*names, *[names[-1]] * ASKED]).__next__, lambda name: name)


def test_rules() -> None:
    assert answers("a", "a") == "a"
    assert answers("a", "b", "b") == "b", "a restart"
    assert answers(None) is None
    for several in (("a", "b", "a"), ("a", "b", "c", "a"), ("a", "a", "b", "b", "a")):
        with pytest.raises(Misconfigured):
            answers(*several)


def test_it_is_asked_once_more_than_needed_and_no_longer(site: Site) -> None:
    """A look costs an engine that is well one request more."""
    engine = VLLM()
    host = site.host(site.run(), site.option(engine))
    host.step()
    engine.calls.clear()
    host.step()
    asked = [call.path for call in engine.calls]
    assert sorted(asked) == ["/is_paused", "/metrics", "/metrics", "/version", "/weight_info"]


def test_labels_that_come_back_between_two_looks_are_no_sign(site: Site) -> None:
    """As where two subscribers bring one engine to their versions in turn."""
    engine = Unnamed()
    host = site.host(site.run(), f"{site.option(engine)},name=e")
    for label in ("0", "7", "0", "7", "0"):
        engine.label = label
        host.sync.engines.look()
        assert host.sync.engines["e"].facts.reachable
