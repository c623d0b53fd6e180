from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import (
    REPORT_LIMIT,
    AdapterReport,
    Report,
    ReportReader,
    Update,
    pack_report,
    parse_report,
    read_reports,
    write_report,
)

REPORT = Report(
    host="node-1",
    local="/local/a",
    run_id="run",
    state="serving",
    local_version=7,
    served_version=None,
    target="latest",
    lag=0,
    last_error="",
    engines=({"name": "sglang", "served": 7, "paused": None},),
    counter=3,
    software="weightcast 0.1.0",
    adapters=(AdapterReport("adapter/math", 17, 18, 3, "loading"),),
)


def test_reports_come_back(tmp_path: Path) -> None:
    without_version = replace(REPORT, local="/local/b", lag=None, local_version=None)
    with_gate = {"gate": "http://node-0:8350", "requests": {"answered": 3}, "tokens": {"7": 40}}
    others = [without_version, replace(REPORT, host="node-0", engines=(), **with_gate)]
    for report in (REPORT, *others, replace(REPORT, counter=4)):
        write_report(open_store(tmp_path), report)
    found = read_reports(open_store(tmp_path))
    assert found[0].host == "node-0"
    assert {name: getattr(found[0], name) for name in with_gate} == with_gate
    assert sorted(report.counter for report in found) == [3, 3, 4]
    assert replace(REPORT, counter=4) in found


def test_a_channel_without_reports(tmp_path: Path) -> None:
    assert read_reports(open_store(tmp_path)) == []


def test_errors_of_any_text_are_reported(tmp_path: Path) -> None:
    write_report(open_store(tmp_path), replace(REPORT, last_error="line\nline\x1b[31m" + "x" * 10_000))
    (found,) = read_reports(open_store(tmp_path))
    assert found.last_error.startswith("line line [31mxx") and len(found.last_error) == 4096


def test_bad_reports_do_not_hide_good_ones(tmp_path: Path) -> None:
    write_report(open_store(tmp_path), REPORT)
    hosts = tmp_path / "hosts"
    (hosts / "a-damaged.json").write_bytes(b"{")
    (hosts / "b-later.json").write_bytes(pack_report(REPORT).replace(b'"format":1', b'"format":2'))
    (hosts / "c-large.json").write_bytes(pack_report(REPORT).ljust(REPORT_LIMIT + 1))
    (hosts / "d-link.json").symlink_to(next(hosts.glob("node-1-*.json")))
    (hosts / "e-directory.json").mkdir()
    (hosts / "notes.txt").write_text("x")
    assert read_reports(open_store(tmp_path)) == [REPORT]


def test_of_too_many_reports_the_youngest_count(tmp_path: Path) -> None:
    for number in range(5):
        write_report(open_store(tmp_path), replace(REPORT, host=f"node-{number}"))
    for file, age in zip(sorted((tmp_path / "hosts").iterdir()), [9, 0, 8, 1, 7], strict=True):
        os.utime(file, (1e9 - age, 1e9 - age))
    assert [report.host for report in read_reports(open_store(tmp_path), limit=2)] == ["node-1", "node-3"]


@pytest.mark.parametrize(
    "change",
    [
        {"host": 1},
        {"host": "a\nb"},
        {"local_version": -1},
        {"served_version": "7"},
        {"engines": {}},
        {"engines": [1]},
        {"engines": [{}] * 65},
        {"adapters": {}},
        {"adapters": [{"name": "adapter/math"}]},
        {"adapters": [{}] * 129},
        {"counter": None},
        {"lag": 1.5},
        {"last_error": "x" * 4097},
        {"requests": {"answered": 1.5}},
        {"requests": {"a\nb": 1}},
        {"tokens": {str(version): 1 for version in range(17)}},
        {"tokens": []},
    ],
)
def test_damaged_reports(change: dict[str, object]) -> None:
    data = json.dumps(json.loads(pack_report(REPORT)) | change).encode()
    with pytest.raises(DamagedFile, match=r"node\.json"):
        parse_report(data, "node.json")
    with pytest.raises(UnknownFormat):
        parse_report(pack_report(REPORT).replace(b'"format":1', b'"format":2'), "node.json")


def test_so_many_updates_are_read_as_are_wanted(tmp_path: Path) -> None:
    updates = tuple(Update(n, "patch", 1.5, {"fetch": 0.25, "total": 2}, 3, "done") for n in range(20))
    report = replace(REPORT, updates=updates)
    write_report(open_store(tmp_path), report)
    assert read_reports(open_store(tmp_path)) == [report]
    for most in (0, 1, 20):
        (sighting,) = ReportReader(open_store(tmp_path), updates=most).read()
        assert sighting.report == replace(report, updates=updates[:most])


@pytest.mark.parametrize("seconds", [{"fetch": "1"}, {"fetch": True}, {"a\nb": 1.0}, {"x" * 33: 1.0}, [1.0]])
def test_damaged_updates(seconds: object) -> None:
    row = {"version": 1, "kind": "patch", "began": 1.0, "seconds": seconds, "bytes": 1, "outcome": "done"}
    data = json.dumps(json.loads(pack_report(REPORT)) | {"updates": [row]}).encode()
    with pytest.raises(DamagedFile, match="seconds"):
        parse_report(data, "node.json")
    assert parse_report(data, "node.json", updates=0).updates == ()
    with pytest.raises(DamagedFile, match="not valid JSON"):
        parse_report(data.replace(b'"kind"', b'"bytes": 1e999, "kind"'), "node.json", updates=0)
