from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.checkpoint.state.state import (
    UNKNOWN_BOOT,
    Blocked,
    Boot,
    EngineState,
    LocalState,
    Mark,
    Phase,
    Position,
    Step,
    lanes_list,
    pack_lanes,
    read_state,
    unpack_lanes,
    write_state,
)
from weightcast.shared.checkpoint.update.patch import repairable
from weightcast.shared.digest.checksums import Lanes

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
POSITIONS = st.builds(
    Position,
    version=st.integers(0, 10**9),
    digest=TEXT,
    root=TEXT,
    epoch=st.integers(0, 99),
    lanes=st.integers(0, 5).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n)),
)
STEPS = st.builds(Step, st.text("0123456789abcdef", min_size=1, max_size=16), POSITIONS, POSITIONS)
ENGINES = st.builds(
    EngineState, st.sampled_from(Mark), st.none() | st.integers(0, 99), TEXT, st.none() | TEXT, TEXT
)
STATES = st.builds(
    LocalState,
    run_id=TEXT,
    position=POSITIONS,
    phase=st.sampled_from(Phase),
    active=st.none() | STEPS,
    undo=st.lists(STEPS, max_size=2).map(tuple),
    generation=st.integers(0, 10**6),
    host=st.builds(Boot, TEXT, TEXT),
    foreign=st.booleans(),
    engines=st.dictionaries(TEXT, ENGINES, max_size=2),
    blocked=st.lists(st.builds(Blocked, st.integers(0, 9), TEXT, TEXT, st.integers(1, 9)), max_size=2).map(
        tuple
    ),
    last_full_hash=st.none() | st.floats(0, 2e9),
)
PLAIN = LocalState("run-1", Position(3, "d", "r", 1, bytes(32)), Phase.PATCHING, host=Boot("boot", "machine"))


@settings(max_examples=60, deadline=None)
@given(STATES)
def test_a_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: LocalState) -> None:
    path = tmp_path_factory.mktemp("state") / "state.json"
    write_state(path, state)
    assert read_state(path) == state
    assert list(path.parent.iterdir()) == [path]


def test_repair_leads_to_no_version_that_engines_refused() -> None:
    old, new = Position(2, "old", "r2", 1), Position(3, "new", "r3", 1)
    state = PLAIN.but(active=Step("journal", old, new))
    assert repairable(state) == (new, old)
    refused = state.but(blocked=(Blocked(3, "new", "it said no", 1),))
    assert repairable(refused) == (old,)
    both = refused.but(blocked=(*refused.blocked, Blocked(2, "old", "it said no", 1)))
    assert repairable(both) == (new, old)


def test_no_state_is_none(tmp_path: Path) -> None:
    assert read_state(tmp_path / "state.json") is None


def damaged(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "state.json"
    path.write_bytes(data)
    return path


def test_every_cut_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_state(tmp_path / "whole", PLAIN)
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        with pytest.raises(DamagedFile, match=r"state\.json"):
            read_state(damaged(tmp_path, whole[:length]))


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("phase", "asleep"),
        ("position", None),
        ("position", {}),
        ("engines", []),
        ("engines", {"a": {"mark": "unknown"}}),
        ("generation", "many"),
        ("undo", [{"journal": "../../x", "base": None, "target": None}]),
        ("blocked", [1]),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, member: str, value: object) -> None:
    write_state(tmp_path / "whole", PLAIN)
    data = {**json.loads((tmp_path / "whole").read_bytes()), member: value}
    with pytest.raises(DamagedFile):
        read_state(damaged(tmp_path, json.dumps(data).encode()))


def test_journals_are_names_not_paths(tmp_path: Path) -> None:
    step = Step("../../etc/x", PLAIN.position, PLAIN.position)
    write_state(tmp_path / "state.json", PLAIN.but(active=step))
    with pytest.raises(DamagedFile, match="journal id"):
        read_state(tmp_path / "state.json")


@pytest.mark.parametrize("lanes", ["AAAA", "!", "AAAAAAAAAAAAAAAAAAAAAA"])
def test_lanes_of_no_tensor_are_refused(tmp_path: Path, lanes: str) -> None:
    write_state(tmp_path / "whole", PLAIN)
    data = json.loads((tmp_path / "whole").read_bytes())
    data["position"]["lanes"] = lanes
    with pytest.raises(DamagedFile):
        read_state(damaged(tmp_path, json.dumps(data).encode()))


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "whole", PLAIN)
    data = {**json.loads((tmp_path / "whole").read_bytes()), "format": 2}
    with pytest.raises(UnknownFormat):
        read_state(damaged(tmp_path, json.dumps(data).encode()))


def test_duplicate_members_are_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "whole", PLAIN)
    data = (tmp_path / "whole").read_bytes().replace(b"{", b'{"phase":"clean",', 1)
    with pytest.raises(DamagedFile):
        read_state(damaged(tmp_path, data))


def test_an_unknown_boot_is_never_the_same() -> None:
    here = Boot.here()
    assert here.same_boot(Boot.here())
    assert not UNKNOWN_BOOT.same_boot(UNKNOWN_BOOT)
    assert not Boot("other", here.machine_id).same_boot(here)
    assert not Boot(here.boot_id, "other").same_boot(here)


def test_packed_lanes() -> None:
    lanes = [Lanes(1, 2), Lanes((1 << 64) - 1, 1 << 63)]
    packed = pack_lanes(np.array(lanes, np.uint64))
    assert packed.hex() == "01000000000000000200000000000000ffffffffffffffff0000000000000080"
    assert lanes_list(packed) == lanes
    assert pack_lanes(unpack_lanes(packed)) == packed
    assert pack_lanes(np.zeros((0, 2), np.uint64)) == b""
