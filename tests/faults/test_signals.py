"""SIGTERM at every failpoint that a daemon passes: it ends well, and the next start goes on."""

from __future__ import annotations

from pathlib import Path

from faultkit import Daemon, Place, until
from hosts import Run, SGLang, Site, on_disk


def rows_of(rows: dict[str, int], before: dict[str, int]) -> list[str]:
    """One row of every failpoint passed since, but for locks and directories: they come all the time."""
    since = [row for row, count in rows.items() if count > before.get(row, 0)]
    first = {row.split()[0]: row for row in sorted(since, reverse=True)}
    return sorted(row for name, row in first.items() if not name.startswith(("lock.", "directory.")))


def passed(daemon: Daemon) -> dict[str, int]:
    return daemon.namespace.tell("rows", pid=daemon.pid)


def idle(daemon: Daemon) -> bool:
    return daemon.status["loop"]["step_began"] is None


def arm(daemon: Daemon, row: str) -> None:
    until(lambda: idle(daemon), "between two steps")
    daemon.namespace.tell("order", pid=daemon.pid, key=row, action="term")


def test_a_host_ends_well_wherever_it_is_told_to(place: Place, site: Site) -> None:
    run, engine, local = site.run(), SGLang(), place.root / "host"
    daemon = place.daemon(
        *("subscriber", "run", "--channel", run.channel, "--base", run.base_dir, "--local", local),
        *("--engine", site.option(engine), "--threads", "1", "--poll-seconds", "0.05"),
        *("--verify-rate", "0", "--no-report"),
    )
    until(lambda: daemon.status["served_version"] == 0, "seeded")
    before = passed(daemon)
    version = run.publish()
    until(lambda: daemon.status["served_version"] == version, "followed")
    rows = rows_of(passed(daemon), before)
    assert "engine.paused" in rows and "journal.record" in rows
    for row in rows:
        arm(daemon, row)
        version = run.publish()
        assert daemon.wait() == 0, (row, daemon.words())
        assert not engine.paused, row
        assert engine.held in (run.digest(version - 1), run.digest(version)), row
        daemon.start()
        until(lambda: daemon.status["served_version"] == version, f"{row}: {daemon.words()}")  # noqa: B023
        assert on_disk(local) == engine.held == run.digest(version), row
    assert "crashed" not in daemon.words()


def test_a_publisher_ends_well_wherever_it_is_told_to(place: Place, site: Site) -> None:
    run, local, inbox = site.run(), place.root / "own", place.root / "inbox"
    run.close()
    inbox.mkdir()
    daemon = place.daemon(
        *("publisher", "run", "--channel", run.channel, "--base", run.base_dir, "--local", local),
        *("--watch", inbox, "--marker", "complete", "--every", "--existing", "--consume"),
        *("--poll-seconds", "0.05", "--threads", "1", "--verify-rate", "0", "--anchor-every", "4"),
    )
    until(lambda: daemon.status["ready"], "ready")
    before = passed(daemon)
    hand_over(run, inbox)
    until(lambda: published(daemon, run, inbox), "published")
    rows = rows_of(passed(daemon), before)
    assert "shard.written" in rows and "inbox.published" in rows
    for row in rows:
        arm(daemon, row)
        hand_over(run, inbox)
        assert daemon.wait() == 0, (row, daemon.words())
        daemon.start()
        until(lambda: published(daemon, run, inbox), f"{row}: {daemon.words()}")
        assert on_disk(local) == run.versions[-1].digest(), row
    assert "crashed" not in daemon.words()
    assert int((run.channel / "latest").read_text()) == len(run.versions) - 1, "each was published once"


def hand_over(run: Run, inbox: Path) -> None:
    new = run.versions[-1].changed(len(run.versions))
    unfinished = new.write(inbox.parent / "unfinished")
    (unfinished / "complete").touch()
    unfinished.rename(inbox / f"step_{len(run.versions)}")
    run.versions.append(new)


def published(daemon: Daemon, run: Run, inbox: Path) -> bool:
    return daemon.status["version"] == len(run.versions) - 1 and not list(inbox.iterdir())
