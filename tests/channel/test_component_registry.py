"""The registry of a run's components, and the channels that it lists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.base.elements import TensorSpec, TensorTable
from weightcast.shared.base.errors import (
    DamagedFile,
    Refused,
    UnknownFormat,
    Untrusted,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import (
    REGISTRY,
    Component,
    add_component,
    check_name,
    component_store,
    open_component,
    parse_registry,
    read_components,
    read_registry,
    retire_component,
    sign_registry,
    write_registry,
    zero_base,
)
from weightcast.shared.channel.directory_store import DirectoryStore, directory_of
from weightcast.shared.channel.layout import BASE_JSON, CHANNEL_JSON
from weightcast.shared.channel.run_files import Base, ChannelFile, write_base, write_channel_file
from weightcast.shared.channel.signing import PrivateKey, Trust
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.digest.checksums import hash_bytes, root

NAMES = st.from_regex(r"adapter/[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
TIMES = st.floats(0, 1e12, allow_nan=False)
ROWS = st.tuples(NAMES, TIMES, st.none() | TIMES)
TABLE = TensorTable.of(
    [TensorSpec("l.lora_A.weight", "F32", (2, 3), 24), TensorSpec("l.lora_B.weight", "BF16", (3,), 6)]
)
MATH = Component("adapter/math", "active", 1.5)


def row(name: str, added: float, retired: float | None) -> Component:
    return Component(name, "active" if retired is None else "retired", added, retired)


def made(store: Store, base: Base) -> Channel:
    directory_of(store).mkdir(parents=True)
    store.create(BASE_JSON, write_base(base))
    store.create(CHANNEL_JSON, write_channel_file(ChannelFile(base.run_id, 0.0)))
    return Channel.open(store)


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    empty, lanes = TensorTable(()), np.zeros((0, 2), np.uint64)
    return made(DirectoryStore(tmp_path / "channel"), Base("run", empty, lanes, root(empty, []), ()))


@given(st.lists(ROWS, unique_by=lambda each: each[0], max_size=8))
def test_a_registry_comes_back(rows: list[tuple[str, float, float | None]]) -> None:
    listed = tuple(row(*each) for each in rows)
    expected = tuple(sorted(listed, key=lambda each: each.name))
    assert parse_registry(write_registry("run", listed), "run") == expected


@given(st.binary(max_size=200), st.integers(0, 1000), st.integers(0, 20))
def test_damaged_registries_are_refused_or_read(patch: bytes, at: int, removed: int) -> None:
    data = write_registry("run", (MATH, row("adapter/zoo", 1.0, 2.0)))
    at %= len(data)
    try:
        parse_registry(data[:at] + patch + data[at + removed :], "run")
    except WeightcastError as error:
        assert REGISTRY in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "main"},
        {"name": "adapter/a@3"},
        {"state": "gone"},
        {"state": "retired"},
        {"retired": 3.0},
        {"added": "now"},
    ],
)
def test_bad_rows_are_refused(changes: dict[str, object]) -> None:
    top = json.loads(write_registry("run", (MATH,)))
    top["components"][0].update(changes)
    with pytest.raises(DamagedFile, match=REGISTRY):
        parse_registry(json.dumps(top).encode(), "run")


def test_order_repetition_run_and_format_are_checked() -> None:
    top = json.loads(write_registry("run", (MATH,)))
    twice = json.dumps({**top, "components": 2 * top["components"]}).encode()
    with pytest.raises(DamagedFile, match="listed twice"):
        parse_registry(twice, "run")
    with pytest.raises(DamagedFile, match="of run 'run'"):
        parse_registry(write_registry("run", ()), "other")
    with pytest.raises(UnknownFormat):
        parse_registry(json.dumps({**top, "format": 2}).encode(), "run")


@pytest.mark.parametrize(
    "name", ["math", "adapter/", "adapter/a/b", "adapter/.a", "adapter/a@1", "adapter/" + "a" * 65, "main"]
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(Refused, match="is not the name of a component"):
        check_name(name)


def test_drafts_are_refused_by_name() -> None:
    with pytest.raises(Refused, match="drafts as a component of their own are not supported yet"):
        check_name("draft")


def test_components_are_added_and_retired_once(channel: Channel) -> None:
    assert read_components(channel) == ()
    math, code = add_component(channel, "adapter/math"), add_component(channel, "adapter/code")
    assert add_component(channel, "adapter/math") == math
    assert read_components(channel) == (code, math)
    ended = retire_component(channel, "adapter/code")
    assert not ended.active and retire_component(channel, "adapter/code") == ended
    assert read_components(channel) == (ended, math)
    with pytest.raises(Refused, match="adapter/code is retired"):
        add_component(channel, "adapter/code")
    with pytest.raises(Refused, match="no component adapter/other"):
        retire_component(channel, "adapter/other")


def test_a_signed_registry_is_what_was_signed(channel: Channel) -> None:
    key = PrivateKey.generate()
    signed = replace(channel, trust=Trust.of([key.public]))
    add_component(channel, "adapter/math")
    unsigned = channel.store.read(REGISTRY, 1 << 20)
    for reads in (read_components, lambda at: add_component(at, "adapter/code", key)):
        with pytest.raises(Untrusted, match="is not signed"):
            reads(signed)
    sign_registry(channel, key)
    first = channel.store.read(REGISTRY, 1 << 20)
    ended = retire_component(signed, "adapter/math", key)
    assert read_registry(signed) == ((ended,), 2) and read_components(channel) == (ended,)
    for data in (
        first.replace(b'"active"', b'"retired"').replace(b"null", b"7.5", 1),
        first.replace(b"adapter/math", b"adapter/moth"),
        write_registry("run", (MATH,), PrivateKey.generate(), 9),
        unsigned,
        unsigned[:-1] + b"," + first[first.index(b'"signature"') :].replace(b'"', b"'"),
        first[:-1] + b',"components":[]}',
        first[:-1] + b',"signature":""}',
    ):
        channel.store.replace(REGISTRY, data)
        with pytest.raises((Untrusted, DamagedFile)):
            read_components(signed)
    channel.store.replace(REGISTRY, first)
    assert [each.active for each in read_registry(signed)[0]] == [True] and read_registry(signed)[1] == 1


def test_the_same_tensors_have_another_root_in_every_component() -> None:
    zeros = [hash_bytes(np.zeros(spec.nbytes, np.uint8)) for spec in TABLE]
    math, code = zero_base("run", "adapter/math", TABLE), zero_base("run", "adapter/code", TABLE)
    assert len({math.root, code.root, root(TABLE, zeros)}) == 3
    assert math.component == "adapter/math" and math.files == ()


def test_a_nested_channel_is_opened_by_its_name_alone(channel: Channel) -> None:
    store = component_store(channel.store, "adapter/math")
    made(store, zero_base("run", "adapter/math", TABLE))
    opened = open_component(channel, "adapter/math")
    assert opened.base is not None and opened.base.component == "adapter/math"
    with pytest.raises(Refused, match="expected component 'main', found 'adapter/math'"):
        Channel.open(channel.store.within("components/adapter/math"))
    other = component_store(channel.store, "adapter/other")
    made(other, zero_base("another", "adapter/other", TABLE))
    with pytest.raises(WrongRun, match="is of run another"):
        open_component(channel, "adapter/other")


def test_a_local_checkpoint_begins_with_zeros_and_needs_no_base(channel: Channel, tmp_path: Path) -> None:
    store = component_store(channel.store, "adapter/math")
    nested = made(store, zero_base("run", "adapter/math", TABLE))
    updater = LocalUpdater(store, tmp_path / "local", None)
    updater.update_to(nested)
    assert updater.local is not None
    assert all(not updater.local.words(tensor).any() for tensor in range(len(TABLE)))
    assert (tmp_path / "local" / "adapter_model.safetensors").stat().st_size > TABLE.nbytes
    updater.close()
