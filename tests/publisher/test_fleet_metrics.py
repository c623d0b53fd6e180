"""The fleet as metrics: closed sets of series, whatever hosts say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from prometheus_client import generate_latest

from weightcast.publisher.fleet.lag_history import MOST_SAMPLES, LagHistory, lag_label
from weightcast.publisher.fleet.metrics import FleetMetrics
from weightcast.publisher.fleet.versions import CatchUp, CatchUpRow, Joiner, VersionRow, Versions
from weightcast.publisher.fleet.view import ChannelPage
from weightcast.shared.daemon.fleet import Fleet, Host, PublisherLine
from weightcast.shared.daemon.metrics import Metrics


def host(name: str, **facts: object) -> Host:
    values = {
        "key": name, "host": name, "local": "/l", "run_id": "r", "presence": "live", "heard_seconds_ago": 1.0,
        "state": "ready", "ready": True, "standing": "ready", "phase": "idle", "local_version": 3,
        "served_version": 3, "target": "latest", "target_version": 3, "lag": 0, "last_error": "",
        "remedy": "",
        "retries": 0, "bytes": {}, "engines": (), "software": "", "clock_offset_seconds": None, "updates": (),
    }  # fmt: skip
    return Host.model_validate(values | facts)


def version(number: int, nbytes: int, *, anchor: bool = False) -> VersionRow:
    return VersionRow(
        version=number, step=None, created=1.0, bytes=nbytes, changed=1, elements=10, density=0.1, ratio=2.0,
        publish_seconds=None, kept=False, tags=(), anchor=anchor, skips=(),
    )  # fmt: skip


def shown(hosts: Sequence[Host] = (), page: ChannelPage | None = None) -> dict[str, float]:
    registry = Metrics()
    fleet = Fleet(now=1.0, channel="/c", run_id="r", latest=3, hosts=tuple(hosts))
    FleetMetrics(registry, lambda: (fleet, ChannelPage() if page is None else page))
    found = {}
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_hosts_are_counted_by_where_they_stand_and_how_far_behind_they_are() -> None:
    found = shown(
        [
            host("a"),
            host("b", standing="behind", lag=3),
            host("c", standing="behind", lag=2),
            host("d", standing="failed", lag=None),
            host("e", standing="lost", presence="lost", lag=100),
            host("f", standing="behind", lag=200),
        ]
    )
    hosts = {
        name: found[f'weightcast_hosts{{standing="{name}"}}'] for name in ("ready", "behind", "lost", "stale")
    }
    assert hosts == {"ready": 1, "behind": 3, "lost": 1, "stale": 0}
    behind = {
        label: found[f'weightcast_hosts_behind{{behind="{label}"}}']
        for label in ("0", "1", "2-3", "4-15", "16-63", "64+", "unknown")
    }
    assert behind == {"0": 1, "1": 0, "2-3": 2, "4-15": 0, "16-63": 0, "64+": 1, "unknown": 1}


def test_what_hosts_say_makes_no_series() -> None:
    strange = host(
        "x" * 200, host='"\n', state="?", phase="?", software="?", target="tag", bytes={"?": 1}, lag=-7
    )
    assert set(shown([strange])) == set(shown())


@pytest.mark.parametrize(
    ("lag", "label"), [(None, "unknown"), (-5, "0"), (15, "4-15"), (16, "16-63"), (64, "64+")]
)
def test_lags_are_labels_of_a_closed_set(lag: int | None, label: str) -> None:
    assert lag_label(lag) == label


def test_lag_is_remembered_by_half_minutes_for_an_hour() -> None:
    ghost = host("g", standing="lost", presence="lost", local_version=None, served_version=None)
    hosts = (host("a"), host("b", standing="behind", lag=20), host("c", standing="lost"), ghost)
    history = LagHistory()
    for look in range(2 * MOST_SAMPLES + 1):
        line = PublisherLine(ready=True, held="rolled back to version 1" if look == 200 else "")
        now = 3000.0 + 15 * look
        fleet = Fleet(now=now, channel="/c", run_id="r", latest=3, hosts=hosts, publisher=line)
        history = history.after(fleet)
    samples = history.samples
    assert [one.at for one in samples[:-1]] == [3045.0 + 30 * n for n in range(MOST_SAMPLES - 1)]
    assert [(one.at, one.held) for one in samples if one.held] == [(6015.0, "rolled back to version 1")]
    assert (samples[-1].behind, samples[-1].lost) == ({"0": 1, "16-63": 1}, 1)
    behind = fleet.model_copy(update={"now": fleet.now + 15, "hosts": (host("a", lag=1), *hosts[1:])})
    assert history.after(behind) == history, "a host that takes a new version"
    later = behind.model_copy(update={"now": fleet.now + 30})
    assert history.after(later).samples[-1].behind == {"1": 1, "16-63": 1}


def test_catching_up_and_the_chain() -> None:
    page = ChannelPage(
        versions=Versions(
            versions=(version(4, 40), version(3, 30), version(2, 20, anchor=True), version(1, 10))
        ),
        catch_up=CatchUp(
            rows=(
                CatchUpRow(lag=1, bytes=40, steps=(), seconds=2.0),
                CatchUpRow(lag=5, bytes=99, steps=(), seconds=3.0),
                CatchUpRow(lag=8, bytes=100, steps=(), seconds=None),
            ),
            joiner=Joiner(bytes=90, seconds=4.0),
        ),
    )
    found = shown(page=page)
    assert found["weightcast_chain_versions"] == 2 and found["weightcast_chain_bytes"] == 70
    assert found['weightcast_catch_up_bytes{behind="1"}'] == 40
    assert found['weightcast_catch_up_bytes{behind="8"}'] == 100
    assert found['weightcast_catch_up_bytes{behind="new"}'] == 90
    assert found['weightcast_catch_up_seconds{behind="1"}'] == 2.0
    assert math.isnan(found['weightcast_catch_up_seconds{behind="8"}'])
    assert math.isnan(found['weightcast_catch_up_bytes{behind="64"}'])
    assert 'weightcast_catch_up_bytes{behind="5"}' not in found
