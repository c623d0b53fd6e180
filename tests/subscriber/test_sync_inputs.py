"""What a host refuses or waits for, and what is left on disk then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import Host, Run, SGLang, Site, Weights, on_disk

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError, WrongRun
from weightcast.shared.channel.layout import TornPointer


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("owner", "patch")
    }


def at_one(site: Site) -> tuple[Run, Host, SGLang]:
    run, engine = site.run(), SGLang()
    host = site.host(run, engine)
    run.publish()
    host.step()
    engine.calls.clear()
    return run, host, engine


def test_a_local_directory_of_another_run_is_left_alone(site: Site) -> None:
    _, host, _ = at_one(site)
    host.sync.close()
    before = files(host.local)
    other = site.run("other")
    other.publish()
    stranger = site.host(other, name="host")
    with pytest.raises(WrongRun, match="belongs to run"):
        stranger.step()
    assert files(host.local) == before and not stranger.status.ready


def test_a_directory_with_somebody_elses_files_is_refused(site: Site) -> None:
    run = site.run()
    (site.root / "host").mkdir()
    (site.root / "host" / "thesis.txt").write_text("precious")
    host = site.host(run)
    with pytest.raises(Refused, match="not empty"):
        host.step()
    assert [path.name for path in host.local.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda base: Weights.make(9).write(base), "with other bytes than"),
        (lambda base: (base / "config.json").write_text("{}"), "different"),
        (lambda base: (base / "config.json").unlink(), "missing"),
        (lambda base: (base / "model-00001-of-00002.safetensors").write_bytes(b"short"), "."),
    ],
)
def test_a_base_that_is_not_the_runs_seeds_nothing(site: Site, change: object, told: str) -> None:
    run = site.run()
    wrong = run.base.write(site.root / "wrong")
    change(wrong)  # type: ignore[operator]
    host = site.host(run, base=wrong)
    with pytest.raises(Refused, match=told):
        host.step()
    assert list(host.local.glob("*.safetensors")) == [] and not host.status.ready
    assert not (host.local / ".weightcast" / "state.json").exists()


def test_no_base_and_no_anchor(site: Site) -> None:
    run = site.run()
    run.publish()
    host = site.host(run, base=None)
    with pytest.raises(Refused, match="give --base"):
        host.step()


@pytest.mark.parametrize("text", ["weights", "-1", "../../etc", "run/../weight_v000002", "1 2", "x" * 300])
def test_a_pointer_that_is_none_changes_nothing(site: Site, text: str) -> None:
    run, host, engine = at_one(site)
    before = files(host.local)
    (run.channel / "latest").write_text(text)
    with pytest.raises(DamagedFile):
        host.step()
    assert files(host.local) == before and engine.paths() == []
    assert host.status.ready, "the engines serve what they served"


@pytest.mark.parametrize("text", ["", "0000", "00001"])
def test_a_torn_pointer_is_read_again(site: Site, text: str) -> None:
    run, host, engine = at_one(site)
    run.publish()
    (run.channel / "latest").write_text(text)
    with pytest.raises(TornPointer):
        host.step()
    assert host.at(run, 1) and engine.paths() == []
    (run.channel / "latest").write_text("000002")
    assert host.step().ready and host.at(run, 2)


def test_a_pointer_that_vanished_is_no_reason_to_start_over(site: Site) -> None:
    run, host, _ = at_one(site)
    (run.channel / "latest").unlink()
    with pytest.raises(RetryLater, match="is gone"):
        host.step()
    host.restart()
    with pytest.raises(RetryLater, match="is gone"):
        host.step()
    assert host.at(run, 1) and host.status.ready


def test_a_pointer_that_goes_back_is_kept_out(site: Site) -> None:
    run, host, engine = at_one(site)
    run.publish()
    host.step()
    (run.channel / "latest").write_text("000001")
    outcome = host.step()
    assert outcome.ready and "latest names version 1" in outcome.degraded[0]
    assert host.at(run, 2) and engine.held == run.digest(2)


def test_an_index_may_be_visible_later_than_its_pointer(site: Site) -> None:
    run, host, _ = at_one(site)
    run.publish()
    index = run.channel / "weight_v000002" / "model.safetensors.index.json"
    data = index.read_bytes()
    index.unlink()
    with pytest.raises(RetryLater, match="the pointer names 2"):
        host.step()
    assert host.at(run, 1) and host.status.ready
    index.write_bytes(data)
    assert host.step().ready and host.at(run, 2)


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "link"])
def test_a_damaged_shard_is_never_staged(site: Site, how: str) -> None:
    run, host, engine = at_one(site)
    run.publish()
    [shard] = (run.channel / "weight_v000002").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    shard.unlink()
    if how == "link":
        (site.root / "aside").write_bytes(data)
        shard.symlink_to(site.root / "aside")
    elif how != "missing":
        data[-1] ^= 1
        shard.write_bytes(data if how == "flipped" else data[:-1])
    with pytest.raises(WeightcastError):
        host.step()
    assert host.state.position.version == 1 and on_disk(host.local) == run.digest(1)
    assert engine.paths() == [] and host.journals == [] and host.status.ready
    assert host.status.last_error is not None and host.status.last_error.remedy
    data = bytearray(data)
    if how == "flipped":
        data[-1] ^= 1
        shard.write_bytes(data)
        assert host.step().ready and host.at(run, 2)


def test_a_bad_version_in_the_channel_does_not_keep_engines_from_being_aligned(site: Site) -> None:
    run, host, engine = at_one(site)
    run.publish()
    for shard in (run.channel / "weight_v000002").glob("*.safetensors"):
        shard.unlink()
    engine.restart()
    with pytest.raises(RetryLater):
        host.step()
    assert (engine.held, engine.label) == (run.digest(1), "1")


def test_an_older_publisher_is_not_followed(site: Site) -> None:
    run, host, _ = at_one(site)
    host.sync.close()
    path = host.local / ".weightcast" / "state.json"
    state = json.loads(path.read_text())
    state["position"]["epoch"] = 7
    path.write_text(json.dumps(state))
    run.publish()
    host.restart()
    with pytest.raises(Refused, match="epoch 7"):
        host.step()
    assert on_disk(host.local) == run.digest(1) and host.status.ready


def test_the_channel_may_come_later(site: Site) -> None:
    run = site.run()
    host = site.host(run)
    run.channel.rename(run.root / "later")
    with pytest.raises(RetryLater, match="not a directory"):
        host.step()
    run.channel.mkdir()
    with pytest.raises(RetryLater, match="neither"):
        host.step()
    run.channel.rmdir()
    (run.root / "later").rename(run.channel)
    assert host.step().ready and host.at(run, 0)


def test_one_writer_per_local_checkpoint(site: Site) -> None:
    run, host, _ = at_one(site)
    other = site.host(run, name="host")
    with pytest.raises(RetryLater, match="already has a writer"):
        other.step()
    assert host.step().ready


def test_an_unreadable_state_is_told(site: Site) -> None:
    _, host, _ = at_one(site)
    host.sync.close()
    path = host.local / ".weightcast" / "state.json"
    path.write_text("{")
    before = files(host.local)
    host.start()
    with pytest.raises(DamagedFile, match=r"state\.json"):
        host.step()
    assert files(host.local) == before
