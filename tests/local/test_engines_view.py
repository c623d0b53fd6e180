"""While a host follows, what engines would load is what was checked: headers, index, nothing beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from core_cases import bytes_of, read_checkpoint
from local_cases import Run, catch_up, following, make_run, state_of, step_to

from weightcast.shared.base.errors import NeedsReseed, RetryLater


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 2, files=2)


def shard(local: Path) -> Path:
    return sorted(local.glob("model-*.safetensors"))[0]


def edit_header(local: Path, edit: Callable[[dict[str, object]], None]) -> None:
    """In place, with the length kept: nothing but reading the header tells."""
    with shard(local).open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length
        file.seek(8)
        file.write(text.ljust(length))


def other_name(local: Path) -> None:
    def rename(header: dict[str, object]) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[name[:-1] + "?"] = header.pop(name)

    edit_header(local, rename)


def other_shape(local: Path) -> None:
    def turn(header: dict[str, object]) -> None:
        entry = next(e for e in header.values() if isinstance(e, dict) and len(set(e.get("shape", ()))) > 1)
        entry["shape"] = entry["shape"][::-1]

    edit_header(local, turn)


def other_index(local: Path) -> None:
    index = local / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"].popitem()
    index.write_text(json.dumps(known))


def no_index(local: Path) -> None:
    (local / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("damage", [other_name, other_shape, other_index, no_index])
def test_changed_under_a_host_it_is_found_before_the_next_version(
    run: Run, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    local = tmp_path / "local"
    with following(run, local) as updater:
        step_to(updater, 1)
        damage(local)
        with pytest.raises(NeedsReseed):
            catch_up(updater)
        assert state_of(local)["phase"] == "dirty"
    with following(run, local) as updater:
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.latest)


def test_weights_beside_the_checkpoint_keep_it_as_it_is(run: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with following(run, local) as updater:
        step_to(updater, 1)
        before = read_checkpoint(local)
        shutil.copy(shard(local), tmp_path / "extra.safetensors")
        shutil.copy(shard(local), local / "extra.safetensors")
        with pytest.raises(RetryLater, match="extra"):
            catch_up(updater)
        assert state_of(local)["phase"] == "clean"
        (local / "extra.safetensors").unlink()
        assert read_checkpoint(local) == before
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.latest)
