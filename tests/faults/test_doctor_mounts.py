"""`weightcast doctor` on mounts that are read-only, small, full, odd or hanging."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from faultkit import Place
from hosts import Site


def doctor(place: Place, *arguments: object) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    code, text = place.verb("doctor", *arguments, "--json")
    findings = json.loads(text.splitlines()[-1])["findings"]
    return code, {(finding["place"], finding["check"]): finding for finding in findings}


def levels(found: dict[tuple[str, str], dict[str, Any]], level: str) -> set[tuple[str, str]]:
    return {key for key, finding in found.items() if finding["level"] == level}


def test_a_read_only_channel(place: Place, site: Site) -> None:
    run = site.run()
    mounted = place.root / "mounted"
    place.bind(run.channel, mounted)
    place.namespace.read_only(mounted)
    expected = {"publisher": (3, "failure"), "subscriber": (0, "note")}
    for role, (code, level) in expected.items():
        ended, found = doctor(place, "--channel", mounted, "--role", role)
        assert (ended, found["channel", "permissions"]["level"]) == (code, level)
        assert "Read-only" in found["channel", "permissions"]["says"]
        assert ("channel", "rename") not in found, "nothing could be tried"
    assert not list(run.channel.rglob("*doctor*"))


def test_a_host_that_may_write_reports_alone(place: Place, site: Site) -> None:
    run = site.run()
    (run.channel / "hosts").mkdir(exist_ok=True)
    mounted = place.root / "mounted"
    place.bind(run.channel, mounted)
    place.namespace.read_only(mounted)
    place.bind(run.channel / "hosts", mounted / "hosts")
    place.namespace.sh("mount", "-o", "remount,bind,rw", mounted / "hosts")
    code, found = doctor(place, "--channel", mounted, "--role", "subscriber")
    assert code == 0 and "enough for a host" in found["channel", "permissions"]["says"]
    assert found["channel", "rename"]["level"] == "ok"
    assert list((run.channel / "hosts").iterdir()) == []


def test_a_local_checkpoint_in_memory(place: Place, site: Site) -> None:
    run, mount = site.run(), place.root / "memory"
    seen = place.tmpfs(mount, 64)
    code, found = doctor(place, "--channel", run.channel, "--local", mount / "host")
    assert code == 0 and levels(found, "failure") == set()
    assert found["local", "file system"]["says"] == f"tmpfs, mounted at {mount}"
    assert found["local", "allocation"]["level"] == "ok"
    assert list(seen.iterdir()) == []


def test_a_tmpfs_without_room(place: Place, site: Site) -> None:
    run, mount = site.run(), place.root / "memory"
    seen = place.tmpfs(mount, 1)
    code, found = doctor(place, "--channel", run.channel, "--local", mount)
    assert code == 3 and ("local", "space") in levels(found, "failure")
    assert "--shm-size" in found["local", "space"]["remedy"]
    assert list(seen.iterdir()) == []


def test_a_file_system_without_hard_links_and_mappings(place: Place) -> None:
    """As bucket mounts are."""
    source = place.root / "bucket"
    source.mkdir()
    faulty = place.faulty(source, place.root / "mounted")
    faulty.rules({"op": "LINK", "path": "*", "action": "error", "errno": errno.EOPNOTSUPP})
    code, found = doctor(place, "--channel", faulty.mount, "--local", faulty.mount)
    assert code == 3
    assert ("channel", "exclusive create") in levels(found, "failure")
    assert "no hard links" in found["channel", "exclusive create"]["says"]
    assert ("local", "mmap") in levels(found, "failure")
    assert found["local", "file system"]["says"].startswith("fuse")
    assert list(source.iterdir()) == []


def test_files_that_are_seen_late_or_short(place: Place) -> None:
    source = place.root / "bucket"
    source.mkdir()
    faulty = place.faulty(source, place.root / "mounted")
    faulty.rules({"path": "*/late", "action": "hide"}, {"path": "*/latest", "action": "short", "bytes": 2})
    code, found = doctor(place, "--channel", faulty.mount)
    assert code == 3
    assert {("channel", "visibility"), ("channel", "rename")} <= levels(found, "failure")
    assert "Directory not empty" in found["channel", "removal"]["says"], "a file that does not show stays"
    assert ("channel", "rename, seen") in levels(found, "warning")


def test_a_mount_that_hangs(place: Place) -> None:
    source = place.root / "server"
    source.mkdir()
    faulty = place.faulty(source, place.root / "mounted")
    faulty.rules({"op": "MKDIR", "path": "*", "action": "hang"})
    code, found = doctor(place, "--channel", faulty.mount, "--timeout", "1")
    assert code == 4
    assert "did not answer within 1 s" in found["channel", "answers"]["says"]
    faulty.rules()
    assert _settled(source)


def _settled(source: Path) -> bool:
    return list(source.iterdir()) == []
