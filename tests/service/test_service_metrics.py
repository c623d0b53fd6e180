from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from weightcast.publisher.daemon.record import PublisherMetrics
from weightcast.publisher.daemon.sources.layouts import Unpublished
from weightcast.publisher.daemon.sources.watched import InboxStatus
from weightcast.publisher.daemon.status import PublisherStatus
from weightcast.publisher.publish.publish_job import Publication
from weightcast.shared.base import errors
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, Untrusted
from weightcast.shared.checkpoint.update.stage import BadDelta
from weightcast.shared.daemon import metrics
from weightcast.shared.daemon.loop import begun, next_status
from weightcast.shared.daemon.metrics import DiskMetrics, Metrics
from weightcast.shared.daemon.status import LoopStatus, Snapshot
from weightcast.subscriber.daemon.metrics import SubscriberMetrics
from weightcast.subscriber.status import EngineStatus, HostStatus, LiveStatus, UpdateStatus

DOCS = Path(__file__).resolve().parents[2] / "docs"


def lines(registry: Metrics) -> list[str]:
    return generate_latest(registry).decode().splitlines()


def series(registry: Metrics) -> dict[str, float]:
    """By name and labels, as `name{a="b"}`."""
    found = {}
    for line in lines(registry):
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_names_carry_units_and_registries_are_apart() -> None:
    one, two = Metrics(), metrics.new_registry()
    one.count("versions_applied", "h", {"kind": ("delta", "anchor")}).labels("delta").inc()
    one.count("fetched_bytes", "h").inc(10)
    one.number("version", "h").set(8)
    one.number("journal_bytes", "h").set(5)
    one.number("full_hash_age_seconds", "h").set(3)
    one.number("created_timestamp_seconds", "h").set(7)
    one.number("done_ratio", "h").set(0.5)
    one.duration("patch", "h").observe(0.2)
    one.facts("run", "h").info({"run_id": "r"})
    two.count("versions_applied", "h")
    shown = lines(one)
    for line in [
        'weightcast_versions_applied_total{kind="delta"} 1.0',
        'weightcast_versions_applied_total{kind="anchor"} 0.0',
        "weightcast_fetched_bytes_total 10.0",
        "weightcast_version 8.0",
        "weightcast_journal_bytes 5.0",
        "weightcast_full_hash_age_seconds 3.0",
        "weightcast_created_timestamp_seconds 7.0",
        "weightcast_done_ratio 0.5",
        'weightcast_patch_seconds_bucket{le="0.25"} 1.0',
        'weightcast_run_info{run_id="r"} 1.0',
    ]:
        assert line in shown
    assert "process_resident_memory_bytes" in generate_latest(two).decode()


def test_series_of_open_sets_come_with_their_first_value() -> None:
    registry = Metrics()
    pauses = registry.number("pauses", "h", {"engine": "as named", "state": ("a", "b")})
    assert not [line for line in lines(registry) if line.startswith("weightcast_pauses{")]
    pauses.labels("e", "a").set(1)
    assert 'weightcast_pauses{engine="e",state="a"} 1.0' in lines(registry)


def test_the_loop_is_shown_as_it_is_now() -> None:
    registry, loop = Metrics(), Snapshot(LoopStatus())
    metrics.watch_loop(registry, loop)
    for error in [None, Refused("x"), BadDelta(DamagedFile("x"), 3), OSError("x"), RetryLater("x")]:
        loop.set(begun(loop.get(), 1000.0))
        assert series(registry)["weightcast_step_began_timestamp_seconds"] == 1000.0
        loop.set(next_status(loop.get(), error, 1.0))
    found = series(registry)
    assert found['weightcast_steps_total{outcome="ok"}'] == 1
    assert found['weightcast_steps_total{outcome="failed"}'] == 3
    assert found['weightcast_steps_total{outcome="crashed"}'] == 1
    assert found["weightcast_failures_in_a_row"] == 4
    assert found["weightcast_retries_total"] == 3
    assert found["weightcast_step_began_timestamp_seconds"] == 0
    assert found['weightcast_errors_total{kind="Refused"}'] == 1
    assert found['weightcast_errors_total{kind="DamagedFile"}'] == 1
    assert found['weightcast_errors_total{kind="crash"}'] == 1
    assert found['weightcast_errors_total{kind="Untrusted"}'] == 0


def test_every_error_of_the_tree_is_a_kind() -> None:
    known = metrics.error_kinds()
    tree = [
        name
        for name, each in vars(errors).items()
        if getattr(each, "__module__", "") == errors.__name__ and isinstance(each, type)
    ]
    assert set(tree) <= set(known) and len(known) == len(set(known))
    assert metrics.error_kind(ValueError("x")) == "crash"
    assert metrics.error_kind(Untrusted("x")) == "Untrusted"


def test_labels_outside_a_closed_set_are_other() -> None:
    assert metrics.one_of("x", ("a", metrics.OTHER)) == "other"
    assert metrics.one_of("a", ("a", metrics.OTHER)) == "a"


def engine(state: str, name: str = "vllm@h:1", version: int | None = 3) -> EngineStatus:
    facts: Any = {
        "name": name,
        "kind": "vllm",
        "url": "http://h:1",
        "mark": "served",
        "version": version,
        "confirmed_by": "label",
        "process": None,
        "aligned": state == "serving",
        "reachable": True,
        "reason": "",
        "state": state,
        "failures": 2,
        "live": LiveStatus(patches=5, reloads=1),
    }
    return EngineStatus(**facts)


def update(**facts: object) -> UpdateStatus:
    values: Any = {
        "kind": "patch",
        "from_version": 2,
        "version": 3,
        "folded": 1,
        "bytes": 10,
        "changes": 5,
        "seconds": {"patch": 0.5, "total": 2.0, "of a later release": 1.0},
        "pause_seconds": 0.3,
        "at": 1.0,
    }
    return UpdateStatus(**(values | facts))


def host(**facts: object) -> HostStatus:
    values: Any = {
        "software": "weightcast 0",
        "host": "h",
        "channel": "/c",
        "local": "/l",
        "target": "latest",
    }
    return HostStatus(**(values | facts))


def test_a_host_is_shown() -> None:
    registry = Metrics()
    figures = SubscriberMetrics(registry)
    figures.show(host())
    found = series(registry)
    assert found["weightcast_local_version"] == -1 and found["weightcast_follows_latest"] == 1
    assert str(found["weightcast_lag_versions"]) == "nan"

    first, second = update(), update(kind="repair", around=("version 2 is damaged",), pause_seconds=None)
    shown = host(
        bytes_by_cause={"step": 40, "anchor": 7},
        run_id="r", local_version=3, target_version=7, served_version=3, lag_versions=4, ready=True,
        engines=(engine("serving"), engine("silent", "b", None)), updates=(first,), degraded=("slow",),
    )  # fmt: skip
    figures.show(shown)
    figures.count(first)
    later: Any = {"updates": (first, second), "target": "7", "bytes_by_cause": {"step": 45, "anchor": 7}}
    figures.show(shown.but(**later))
    figures.count(second)
    found = series(registry)
    assert found['weightcast_run_info{role="subscriber",run_id="r",software="weightcast 0"}'] == 1
    assert found["weightcast_lag_versions"] == 4 and found["weightcast_served_version"] == 3
    assert found["weightcast_follows_latest"] == 0 and found["weightcast_degraded"] == 1
    assert found['weightcast_updates_total{kind="patch"}'] == 1
    assert found['weightcast_updates_total{kind="repair"}'] == 1
    assert found['weightcast_update_seconds_sum{kind="patch"}'] == 2.0
    assert found['weightcast_update_phase_seconds_sum{phase="patch"}'] == 1.0
    assert found['weightcast_update_phase_seconds_sum{phase="other"}'] == 2.0
    assert 'weightcast_update_phase_seconds_count{phase="total"}' not in found
    assert found["weightcast_engine_pause_seconds_count"] == 1
    assert found["weightcast_changed_words_total"] == 10
    assert found['weightcast_channel_bytes_total{cause="step",direction="read"}'] == 45
    assert found['weightcast_channel_bytes_total{cause="anchor",direction="read"}'] == 7
    assert found['weightcast_channel_bytes_total{cause="skip",direction="read"}'] == 0
    assert found['weightcast_engine_updates_total{engine="vllm@h:1",way="live"}'] == 5
    assert found['weightcast_engine_updates_total{engine="vllm@h:1",way="reload"}'] == 1
    assert found['weightcast_digest_mismatches_total{place="channel"}'] == 1
    assert found['weightcast_digest_mismatches_total{place="local"}'] == 1
    assert found['weightcast_engine_state{engine="vllm@h:1",state="serving"}'] == 1
    assert found['weightcast_engine_state{engine="b",state="serving"}'] == 0
    assert found['weightcast_engine_state{engine="b",state="silent"}'] == 1
    assert found['weightcast_engine_version{engine="b"}'] == -1
    assert found['weightcast_engine_failures{engine="b"}'] == 2


def test_a_publisher_is_shown() -> None:
    registry = Metrics()
    figures = PublisherMetrics(registry)
    inbox = InboxStatus(watch="/w", waiting=(Unpublished("step_1", "grows"),), waiting_count=1)
    status = PublisherStatus(
        channel="/c", local="/l", encoding="fast", run_id="r", version=4, epoch=2, inbox=inbox
    )
    figures.show(status.model_copy(update={"held": "rolled back"}))
    figures.show_channel(created=123.0, claimed=3)
    figures.published(
        Publication(
            version=4, kind="delta", changed_elements=7, density_elements=0.1, density_bytes=0.2,
            delta_bytes=50, full_bytes=1000, seconds={"diff": 1.5, "stage": 0.5, "new": 1.0},
        )
    )  # fmt: skip
    figures.published(Publication(version=5, kind="anchor", delta_bytes=1000, full_bytes=1000))
    figures.failed("DamagedFile")
    figures.show_written({"skip": 60, "anchor": 0})
    figures.show_written({"skip": 90, "anchor": 0})
    found = series(registry)
    assert found["weightcast_version"] == 4 and found["weightcast_held"] == 1
    assert (found["weightcast_epoch"], found["weightcast_channel_epoch"]) == (2, 3)
    assert found["weightcast_version_created_timestamp_seconds"] == 123
    assert found["weightcast_inbox_waiting"] == 1 and found["weightcast_inbox_refused"] == 0
    assert found['weightcast_publications_total{outcome="done"}'] == 2
    assert found['weightcast_publications_total{outcome="failed"}'] == 1
    assert found['weightcast_publication_errors_total{kind="DamagedFile"}'] == 1
    assert found['weightcast_channel_bytes_total{cause="step",direction="written"}'] == 50
    assert found['weightcast_channel_bytes_total{cause="anchor",direction="written"}'] == 1000
    assert found['weightcast_channel_bytes_total{cause="skip",direction="written"}'] == 90
    assert found["weightcast_full_bytes_total"] == 2000 and found["weightcast_changed_elements_total"] == 7
    assert found["weightcast_publish_seconds_sum"] == 3.0
    assert found['weightcast_publish_phase_seconds_sum{phase="diff"}'] == 1.5
    assert found['weightcast_publish_phase_seconds_sum{phase="other"}'] == 1.0
    assert found["weightcast_compression_ratio"] == 1.0 and found["weightcast_density_bytes_ratio"] == 0.0


def test_disks_are_looked_at_now_and_then(tmp_path: Path) -> None:
    registry, now = Metrics(), [0.0]
    figures = DiskMetrics(
        registry, {"channel": tmp_path, "local": tmp_path / "not" / "there"}, clock=lambda: now[0]
    )
    figures.show()
    found = series(registry)
    for place in ("channel", "local"):
        assert found[f'weightcast_disk_free_bytes{{place="{place}"}}'] > 0
        assert (
            found[f'weightcast_disk_free_bytes{{place="{place}"}}']
            <= found[f'weightcast_disk_size_bytes{{place="{place}"}}']
        )


def test_a_bucket_has_no_disk(tmp_path: Path) -> None:
    registry = Metrics()
    figures = DiskMetrics(registry, {"channel": "s3://weights/run7", "local": tmp_path})
    figures.show()
    shown = [name for name in series(registry) if name.startswith("weightcast_disk_")]
    assert len(shown) == 2 and all('place="local"' in name for name in shown)


def test_the_document_is_the_codes() -> None:
    made = runpy.run_path(str(DOCS / "make_metrics.py"))["document"]()
    message = "run: python docs/make_metrics.py > docs/metrics.md"
    assert (DOCS / "metrics.md").read_text() == f"{made}\n", message


@pytest.mark.parametrize("side", [PublisherMetrics, SubscriberMetrics])
def test_what_is_shown_is_documented(side: type[PublisherMetrics] | type[SubscriberMetrics]) -> None:
    registry = Metrics()
    side(registry)
    metrics.watch_loop(registry, Snapshot(LoopStatus()))
    text = generate_latest(registry).decode()
    shown = {family.name for family in text_string_to_metric_families(text)}
    shown = {name for name in shown if not name.endswith("_created")}
    documented = {doc.name.removesuffix("_total") for doc in registry.docs}
    assert shown == documented
    assert len(registry.docs) == len({doc.name for doc in registry.docs})
