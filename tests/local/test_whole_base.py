"""A host has every file of the base: seeded, joined by an anchor, verified, repaired, completed later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from core_cases import bytes_of, read_checkpoint, write_checkpoint
from local_cases import Run, catch_up, following, make_run, phase_of, publish

from weightcast.publisher import init_channel
from weightcast.shared.base.errors import WrongRun
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.side_files import repair_files
from weightcast.shared.checkpoint.verify.inspect import inspect

SIDE = {
    "spk_dict.pt": b"\x80\x02",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "speech/tokenizer/stats.npz": b"PK",
    "empty.bin": b"",
}
LEFT = ("pytorch_model.bin",)


def add(directory: Path, files: dict[str, bytes] | None = None) -> Path:
    for name, data in (SIDE if files is None else files).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def there(directory: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name in SIDE if (path := directory / name).is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("whole")
    plain = make_run(root / "plain", versions=1)
    run = Run(root / "run", plain.models)
    write_checkpoint(add(run.base, SIDE | {LEFT[0]: b"x"}), plain.models[0])
    init_channel(run.channel, run.base)
    publish(run, anchor_every=1)
    return run


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def test_a_host_seeded_from_the_base_has_all_files(run: Run, local: Path) -> None:
    with following(run, local) as updater:
        catch_up(updater)
        assert (updater.side_files.missing, updater.side_files.left_behind) == ((), LEFT)
    assert there(local) == SIDE
    assert not (local / LEFT[0]).exists()
    assert inspect(local).faults == []


def test_a_host_that_joins_by_an_anchor_has_all_files(run: Run, local: Path) -> None:
    updater = LocalUpdater(open_store(run.channel), local, None, UpdaterOptions(visible_seconds=0.2))
    catch_up(updater)
    updater.close()
    assert there(local) == SIDE
    assert verify(Channel.open(open_store(run.channel))) == []


def test_a_damaged_side_file_of_an_anchor_is_found(run: Run, tmp_path: Path) -> None:
    channel = shutil.copytree(run.channel, tmp_path / "channel")
    (channel / "weight_v000001/anchor/speech/tokenizer/stats.npz").write_bytes(b"KP")
    assert ["stats.npz" in problem.message for problem in verify(Channel.open(open_store(channel)))] == [True]


@pytest.mark.parametrize("name", SIDE)
def test_a_base_without_one_of_the_files_is_refused_by_name(
    run: Run, local: Path, tmp_path: Path, name: str
) -> None:
    base = shutil.copytree(run.base, tmp_path / "base")
    (base / name).write_bytes(b"another")
    channel = shutil.copytree(run.channel, tmp_path / "channel", ignore=shutil.ignore_patterns("anchor"))
    updater = LocalUpdater(open_store(channel), local, base, UpdaterOptions(visible_seconds=0.2))
    with pytest.raises(WrongRun, match=f"{name} is different"):
        catch_up(updater)
    updater.close()
    assert there(local) == {}


def test_another_base_is_named_by_its_files(run: Run, tmp_path: Path) -> None:
    base = shutil.copytree(run.base, tmp_path / "base")
    (base / "spk_dict.pt").write_bytes(b"another")
    with pytest.raises(WrongRun, match=r"another base than .*: spk_dict\.pt"):
        init_channel(run.channel, base)


def test_verify_and_repair_reach_into_subdirectories(run: Run, local: Path) -> None:
    with following(run, local) as updater:
        catch_up(updater)
        (local / "additional_chat_templates/tool_use.jinja").write_bytes(b"other")
        (local / "spk_dict.pt").unlink()
        bad = {"additional_chat_templates/tool_use.jinja", "spk_dict.pt"}
        assert {fault.file for fault in inspect(local).faults} == bad
        assert updater.local is not None
        assert set(repair_files(updater.local, [run.base])) == bad
    assert there(local) == SIDE


def test_a_link_in_the_place_of_a_subdirectory_is_not_written_through(
    run: Run, local: Path, tmp_path: Path
) -> None:
    with following(run, local) as updater:
        catch_up(updater)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(local / "speech/tokenizer")
    (local / "speech/tokenizer").symlink_to(elsewhere)
    with following(run, local) as updater:
        catch_up(updater)
        assert updater.side_files.missing == ("speech/tokenizer/stats.npz",)
    assert list(elsewhere.iterdir()) == []


def test_an_anchor_lists_side_files_apart(run: Run) -> None:
    path = run.channel / "weight_v000001/anchor/model.safetensors.index.json"
    facts = json.loads(path.read_bytes())["weightcast"]
    assert {row[0] for row in facts["side_files"]} == set(SIDE)
    assert {"config.json", "tokenizer.json"} <= {row[0] for row in facts["files"]}
    assert not {row[0] for row in facts["files"]} & set(SIDE)


@pytest.mark.parametrize("number", range(1, 9, 2))
def test_a_kill_between_two_files_is_finished_by_the_next_start(run: Run, local: Path, number: int) -> None:
    child = os.fork()
    if child == 0:
        _die_at_rename(number)
        with following(run, local) as updater:
            catch_up(updater)
        os._exit(0)
    os.waitpid(child, 0)
    assert phase_of(local) in ("", "seeding") or there(local) == SIDE
    with following(run, local) as updater:
        catch_up(updater)
        assert updater.side_files.missing == ()
    assert there(local) == SIDE
    assert read_checkpoint(local) == bytes_of(run.latest)
    assert inspect(local).faults == []


def _die_at_rename(number: int) -> None:
    seen = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "os.rename":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
