from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from weightcast.shared.errors import Refused
from weightcast.shared.service import metrics
from weightcast.shared.service.daemon import next_status
from weightcast.shared.service.snapshot import LoopStatus, Snapshot


def test_names_carry_units_and_registries_are_apart() -> None:
    one, two = CollectorRegistry(), metrics.new_registry()
    metrics.count(one, "versions_applied", "h", ("kind",)).labels("delta").inc()
    metrics.byte_count(one, "fetched", "h").inc(10)
    metrics.number(one, "version", "h").set(8)
    metrics.byte_size(one, "journal", "h").set(5)
    metrics.age(one, "full_hash_age", "h").set(3)
    metrics.duration(one, "patch", "h").observe(0.2)
    metrics.facts(one, "run", "h").info({"run_id": "r"})
    metrics.count(two, "versions_applied", "h")
    text = generate_latest(one).decode()
    for line in [
        'weightcast_versions_applied_total{kind="delta"} 1.0',
        "weightcast_fetched_bytes_total 10.0",
        "weightcast_version 8.0",
        "weightcast_journal_bytes 5.0",
        "weightcast_full_hash_age_seconds 3.0",
        'weightcast_patch_seconds_bucket{le="0.25"} 1.0',
        'weightcast_run_info{run_id="r"} 1.0',
    ]:
        assert line in text
    assert "process_resident_memory_bytes" in generate_latest(two).decode()


def test_the_loop_is_shown_as_it_is_now() -> None:
    registry, loop = CollectorRegistry(), Snapshot(LoopStatus())
    metrics.watch_loop(registry, loop)
    for error in [None, Refused("x"), Refused("x"), OSError("x")]:
        loop.set(next_status(loop.get(), error, 1.0))
    text = generate_latest(registry).decode()
    assert 'weightcast_steps_total{outcome="ok"} 1.0' in text
    assert 'weightcast_steps_total{outcome="failed"} 2.0' in text
    assert 'weightcast_steps_total{outcome="crashed"} 1.0' in text
    assert "weightcast_failures_in_a_row 3.0" in text
