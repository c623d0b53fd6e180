"""Reckoned bytes beside those of real publications and syncs."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from core_cases import pack
from http_faults import http_faults
from hypothesis import given
from hypothesis import strategies as st
from s3_gateway import Gateway

from benchmarks.chunks import Masters
from weightcast.publisher.api import Publisher, PublisherOptions
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.publish.publish_job import PublishReport
from weightcast.publisher.trainer.handover import HandOver
from weightcast.publisher.weights.given import RawTensor
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import version_name
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.cli.main import run
from weightcast.shared.doctor.sizing import (
    HOST_POLL,
    HOST_VERSION,
    RoleBytes,
    Weights,
    Workload,
    change_bits,
    journal_bytes,
    missed_bytes,
    per_version,
    position_bits,
    roles,
    sizing,
    skip_share,
)
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.sync.options import SyncOptions
from weightcast.subscriber.sync.sync import Sync

ROOT = Path(__file__).parents[2]
LAYERS, ROWS, COLUMNS = 6, 512, 1024
DENSITIES = (0.01, 0.05, 0.2)
TOLERANCE = 0.08


@dataclass(frozen=True)
class World:
    root: Path
    weights: Weights
    reports: dict[float, PublishReport]
    journals: dict[float, int]


def tensors(layers: list[Masters]) -> dict[str, RawTensor]:
    named = {
        f"model.layers.{n}.mlp.weight": RawTensor("BF16", (ROWS, COLUMNS), one.words)
        for n, one in enumerate(layers)
    }
    norm = np.ones(COLUMNS, np.uint16)
    return {**named, **{f"model.layers.{n}.norm": RawTensor("BF16", (COLUMNS,), norm) for n in range(LAYERS)}}


def write(directory: Path, named: dict[str, RawTensor]) -> None:
    directory.mkdir()
    raw = {name: np.ascontiguousarray(one.data).tobytes() for name, one in named.items()}
    packed = pack({name: ("BF16", one.shape, raw[name]) for name, one in named.items()})
    (directory / "model.safetensors").write_bytes(packed)
    (directory / "config.json").write_text("{}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A version at each density; journals as the publisher keeps them."""
    root = tmp_path_factory.mktemp("sizing")
    layers = [Masters(ROWS * COLUMNS, seed) for seed in range(LAYERS)]
    write(root / "base", tensors(layers))
    init_channel(root / "channel", root / "base")
    reports: dict[float, PublishReport] = {}
    with Publisher.open(
        root / "channel",
        local=root / "publisher",
        base=root / "base",
        options=PublisherOptions(upkeep_thread=False, upkeep=UpkeepOptions(skip_span=2)),
    ) as publisher:
        for density in DENSITIES:
            for layer in layers:
                layer.step(density)
            reports[density] = publisher.publish(tensors(layers))
    kept = {int(path.stem): path.stat().st_size for path in root.glob("publisher/**/history/*.journal")}
    journals = {density: kept[report.version] for density, report in reports.items()}
    weights = Weights.of(open_checkpoint(root / "base", follow_links=True).table)
    return World(root, weights, reports, journals)


def role_of(weights: Weights, name: str, density: float) -> RoleBytes:
    (found,) = (role for role in roles(weights, per_version(weights, density)) if name in role.name)
    return found


@pytest.mark.parametrize("density", DENSITIES)
def test_bytes_of_a_version(world: World, density: float) -> None:
    report = world.reports[density]
    real = report.changed_elements / report.elements
    assert real == pytest.approx(density, rel=0.2), "the world is as asked"
    reckoned = per_version(world.weights, real)
    assert reckoned.changed == pytest.approx(report.changed_elements, rel=1e-6)
    assert reckoned.delta_bytes == pytest.approx(report.delta_bytes, rel=TOLERANCE)
    assert reckoned.journal_bytes == pytest.approx(world.journals[density], rel=0.02)
    index = world.root / "channel" / f"weight_v{report.version:06d}" / "model.safetensors.index.json"
    real_index = index.stat().st_size
    assert real_index <= reckoned.index_bytes <= 1.8 * real_index, "norms did not change"


def test_bytes_of_a_host(world: World) -> None:
    updater = LocalUpdater(open_store(world.root / "channel"), world.root / "host", world.root / "base")
    try:
        updater.update_to(Channel.open(open_store(world.root / "channel")))
    finally:
        updater.close()
    host = role_of(world.weights, "on disk", 0.2)
    # the undo journal of the last step stays until an engine confirmed the version
    lying = sum(path.stat().st_size for path in (world.root / "host").rglob("*") if path.is_file())
    assert world.weights.nbytes <= lying <= 1.1 * host.disk_bytes


def test_bytes_that_are_handed_over(world: World, tmp_path: Path) -> None:
    with HandOver(tmp_path / "shm") as hand_over:
        for _ in range(2):
            hand_over.put(tensors([Masters(ROWS * COLUMNS, n) for n in range(LAYERS)]))
        lying = sum(path.stat().st_size for path in (tmp_path / "shm").rglob("*") if path.is_file())
    role = next(
        role for role in roles(world.weights, per_version(world.weights, 0.01)) if "hand" in role.name
    )
    assert lying == pytest.approx(role.memory_bytes, rel=0.01)


def test_the_plan_of_a_checkpoint(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--plan", str(world.root / "base"), "--density", "0.05", "--interval", "30"]
    assert run([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["findings"] == []
    plan = facts["plan"]
    assert plan["full_bytes"] == world.weights.nbytes
    report = world.reports[0.05]
    assert plan["per_version"]["delta_bytes"] == pytest.approx(report.delta_bytes, rel=2 * TOLERANCE)
    hourly = plan["per_version"]["delta_bytes"] * 120
    assert hourly < plan["channel_bytes_per_hour"] < 5 * hourly
    assert plan["catch_up"]["versions"] == 20
    assert set(plan["journals"]) == {"0.01", "0.05", "0.2"}
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert "a version" in text and "host, --local on disk" in text
    assert "hosts poll" in text and "$0.0004" in text and plan["dollars"] > 0


def test_plans_that_cannot_be(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--plan", str(tmp_path)]) == 3
    assert "error" in capsys.readouterr().err
    assert run(["doctor", "--plan", str(world.root / "base"), "--density", "1.5"]) == 2
    assert run(["doctor", "--plan", str(tmp_path / "missing")]) == 3


@pytest.mark.parametrize("wrong", ["inf", "nan", "1e308", "-1"])
@pytest.mark.parametrize(
    "option", ["--density", "--interval", "--hosts", "--away", "--link", "--threads", "--poll"]
)
def test_plans_are_made_of_numbers(
    world: World, capsys: pytest.CaptureFixture[str], option: str, wrong: str
) -> None:
    assert run(["doctor", "--plan", str(world.root / "base"), option, wrong, "--json"]) == 2
    assert option in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize("density", ["0", "1e-300", "1"])
def test_plans_at_the_limits_are_json(
    world: World, capsys: pytest.CaptureFixture[str], density: str, encoding: str
) -> None:
    limits = ("--interval", "1e9", "--away", "1e9", "--link", "1000000", "--hosts", "1000000")
    words = ["doctor", "--plan", str(world.root / "base"), "--density", density, "--encoding", encoding]
    assert run([*words, *limits, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["plan"]
    assert plan["per_version"]["delta_bytes"] > 0 and plan["catch_up"]["versions"] == 1
    assert run([*words, *limits]) == 0
    assert ("no less than the weights" in capsys.readouterr().out) == (plan["ratio"] < 1.5)


def test_the_page_has_the_code_s_tables() -> None:
    made = subprocess.run(
        [sys.executable, "docs/make_sizing.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "sizing.md").read_text()
    for table in made.strip().split("\n\n"):
        assert table in page, "run python docs/make_sizing.py and paste its output"


# rules

LLAMA = Weights(16 * 10**9, {2: 8 * 10**9}, 291, 291 * 40)


def test_a_version_is_small_beside_the_weights() -> None:
    found = sizing(LLAMA, Workload(0.01, 30))
    assert 150 < found.ratio < 180 and not found.behind
    assert found.host_link == pytest.approx(8 * found.per_version.delta_bytes / 30)
    assert sizing(LLAMA, Workload(0.01, 30, hosts=100)).server_link == pytest.approx(100 * found.host_link)
    assert sizing(LLAMA, Workload(0.2, 5, link=1e9)).behind


def test_requests_cost_by_hosts_and_polls() -> None:
    one, many = (sizing(LLAMA, Workload(0.01, 30, hosts=hosts)) for hosts in (1, 100))
    assert many.requests["hosts poll"].gets == pytest.approx(100 * one.requests["hosts poll"].gets)
    assert many.requests["the publisher polls"] == one.requests["the publisher polls"]
    slow = sizing(LLAMA, Workload(0.01, 30, hosts=100, poll=10))
    assert slow.requests["hosts poll"].gets == pytest.approx(many.requests["hosts poll"].gets / 10)
    only_puts = Workload(0.01, 30, hosts=100, get_price=0, put_price=1)
    puts = sum(each.puts for each in many.requests.values())
    assert sizing(LLAMA, only_puts).dollars == pytest.approx(puts / 1000)


def test_nothing_changes() -> None:
    found = sizing(LLAMA, Workload(0.0, 30))
    assert found.per_version.changed == 0 and found.per_version.delta_bytes < 10_000
    assert sizing(Weights(0, {}, 0, 0), Workload(0.01, 30)).per_version.changed == 0


def test_a_new_host_reads_the_weights_too() -> None:
    found = sizing(LLAMA, Workload(0.01, 30, away=3600)).catch_up
    assert found.versions == 120
    assert found.new_host_bytes == LLAMA.nbytes + found.bytes
    assert found.new_host_seconds > found.seconds


def test_missed_versions_are_read_the_cheapest_way() -> None:
    assert missed_bytes(100, 1, 10**6, True) == 100
    assert missed_bytes(100, 3, 10**6, True) == 300, "single deltas"
    thirty = missed_bytes(100, 33, 10**6, True)
    assert 14 * 100 <= thirty <= 17 * 100, "docs/adr/0004"
    assert missed_bytes(100, 33, 10**6, False) == 3300
    assert missed_bytes(100, 10**6, 5000, True) == 5100, "full weights"


def test_deltas_over_many_versions_cost_about_three() -> None:
    """docs/channel.md, Hosts far behind."""
    assert 2 < skip_share(10**6, 10**9) < 3.5


@given(st.floats(1e-6, 1.0), st.sampled_from([1, 2, 4]))
def test_no_change_costs_more_than_its_raw_word_and_place(density: float, width: int) -> None:
    for encoding in ("fast", "small"):
        bits = change_bits(density, width, encoding)
        assert 0 < bits <= 8 * width / density + 1e-9
    assert change_bits(density, width, "small") <= change_bits(density, width) + 1e-9


@given(st.floats(1e-4, 0.99))
def test_more_changes_are_more_bytes(density: float) -> None:
    few, many = (journal_bytes(LLAMA, each) for each in (density, min(1.0, density * 1.01)))
    assert few < many or density >= 0.74, "then all words are kept"
    assert many <= 2 * LLAMA.nbytes + journal_bytes(LLAMA, 0.0) or density < 0.75
    assert per_version(LLAMA, density).delta_bytes <= per_version(LLAMA, min(1.0, density * 1.01)).delta_bytes


def test_entropy_of_positions() -> None:
    assert position_bits(0.5) == 2.0 and position_bits(0.0) == position_bits(1.0) == 0.0
    assert position_bits(0.0143) == pytest.approx(7.561, abs=0.003)


HOSTS, VERSIONS, POLLS = 10, 3, 4


@pytest.mark.s3
def test_each_host_of_a_fleet_costs_what_one_does(
    bucket: str, s3: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, seeds = f"{bucket}/run", [Masters(ROWS * COLUMNS, seed) for seed in range(LAYERS)]
    base, written = tmp_path / "base", 0
    write(base, tensors(seeds))
    init_channel(channel, base)
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher.open(channel, local=tmp_path / "publisher", base=base))
        proxy = stack.enter_context(http_faults(s3.endpoint))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        hosts = [
            Sync(SyncOptions(channel=channel, local=tmp_path / f"host{n}", base=base)) for n in range(HOSTS)
        ]
        for host in hosts:
            stack.callback(host.close)
            host.sync_once()
        read, counts = hosts[0].status.bytes_read, []
        for _ in range(VERSIONS):
            for layer in seeds:
                layer.step(DENSITIES[0])
            version = publisher.publish(tensors(seeds)).version
            listed = open_store(channel).list(version_name(version))
            written += sum(one.stat.size for one in listed if one.stat and one.name.endswith(".safetensors"))
            for host in hosts:
                before = len(proxy.requests)
                host.sync_once()
                counts.append(len(proxy.requests) - before)
        assert set(counts) == {counts[0]} and counts[0] <= HOST_VERSION.gets + HOST_VERSION.puts
        assert {host.status.bytes_read - read for host in hosts} == {written}
        before = len(proxy.requests)
        for host in hosts * POLLS:
            host.sync_once()
        # the list of adapters is looked at every ten seconds, whatever the number of polls
        polls = [path for _, path in proxy.requests[before:] if not path.endswith("/components.json")]
        assert len(polls) <= HOSTS * POLLS * (HOST_POLL.gets + HOST_POLL.puts)
