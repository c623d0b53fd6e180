"""A base with faults that safetensors and engines tolerate reaches the host as it is, and is named there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core_cases import header_of, some_changed, write_checkpoint
from in_process import Command
from numpy import zeros
from numpy.random import default_rng
from publisher_cases import Place, numpy_model
from safetensors import safe_open
from safetensors.numpy import save_file

from weightcast.shared.base.errors import Refused

INDEX = "model.safetensors.index.json"


def null_metadata(path: Path) -> None:
    data = path.read_bytes()
    header, start = header_of(data)
    text = json.dumps({"__metadata__": None, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def test_a_host_of_a_base_with_small_faults(tmp_path: Path, weightcast: Command) -> None:
    place = Place(tmp_path, numpy_model(default_rng(3)))
    write_checkpoint(place.base, place.model, files=2)
    for shard in place.base.glob("*.safetensors"):
        null_metadata(shard)
    index = json.loads((place.base / INDEX).read_text())
    absent = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    changed = {"metadata": None, "weight_map": index["weight_map"] | absent}
    (place.base / INDEX).write_text(json.dumps(changed))
    save_file({"left over": zeros(3)}, place.base / "model-00003-of-00003.safetensors")

    code, out, err = weightcast("channel", "init", "--channel", place.channel, "--base", place.base, "--json")
    notes = json.loads(out)["notes"]
    assert code == 0 and len(notes) == 5, err
    model = some_changed(place.model, default_rng(4))
    assert place.publish(model) == 1
    where = ("--channel", place.channel, "--base", place.base, "--local", place.host)
    code, out, err = weightcast("sync", *where, "--json")
    assert code == 0 and json.loads(out)["base_notes"] == notes, err
    place.arrives(model, 1)
    assert not (place.host / "model-00003-of-00003.safetensors").exists()
    for shard in place.host.glob("*.safetensors"):
        with safe_open(shard, "np") as opened:
            assert opened.keys()


def test_shards_without_an_index_are_a_base_and_not_an_export(tmp_path: Path, weightcast: Command) -> None:
    place = Place(tmp_path, numpy_model(default_rng(3)))
    (write_checkpoint(place.base, place.model, files=2) / INDEX).unlink()
    where = ("--channel", place.channel, "--base", place.base)
    code, out, err = weightcast("channel", "init", *where, "--json")
    assert code == 0 and json.loads(out)["notes"] == [
        f"{INDEX} is missing; all 2 numbered shards are there"
    ], err
    model = some_changed(place.model, default_rng(4))
    assert place.publish(model) == 1
    place.arrives(model, 1)
    copied = json.loads((place.host / INDEX).read_text())["weight_map"]
    assert copied.keys() == place.model.keys()
    # opened again, damaged and repaired from the base
    shard = place.host / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, _, err = weightcast("local", "verify", "--local", place.host, "--repair", *where)
    assert code == 0, err
    place.arrives(model, 1)

    export = write_checkpoint(tmp_path / "export", model, files=2)
    (export / INDEX).unlink()
    with place.publisher() as publisher, pytest.raises(Refused, match=f"no {INDEX}"):
        publisher.publish_checkpoint(export)
