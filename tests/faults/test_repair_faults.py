"""`channel repair` over a mount that fails: what cannot be read now is not taken for what is wrong."""

from __future__ import annotations

import errno
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from core_cases import snapshot
from faultkit import Place
from hosts import Run

from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

UNREAD = ["*/anchor", "*/anchor/*.safetensors", "*/anchor/*.json", "*/from_v*/*.safetensors", "hosts/*.json"]
RETRY_LATER, DAMAGED = 75, 3


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three versions with anchors and deltas from older versions beside them; a report of a host."""
    with ExitStack() as stack:
        made = Run(tmp_path, stack, upkeep=UpkeepOptions(skip_span=2, anchor_every=1))
        for _ in range(3):
            made.publish()
            made.make_due()
    assert list(made.channel.glob("*/from_v*")) and list(made.channel.glob("*/anchor"))
    (made.channel / "hosts").mkdir()
    (made.channel / "hosts" / "h.json").write_text("{")
    return made


def contents(channel: Path) -> dict[str, str]:
    return snapshot(channel, ("publishers", ".trash"))


@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
def test_what_cannot_be_read_stays_where_it_is(place: Place, run: Run, unread: str, number: int) -> None:
    if not unread.startswith("hosts"):
        (run.channel / "hosts" / "h.json").unlink()
    view, before = place.faulty(run.channel, place.root / "view"), contents(run.channel)
    view.rules(
        *({"path": unread, "action": "error", "op": op, "errno": number} for op in ("OPEN", "OPENDIR"))
    )
    code, told = place.verb("channel", "repair", "--channel", view.mount, "--json")
    assert code == RETRY_LATER, told
    assert contents(run.channel) == before
    facts = json.loads(told)
    assert facts["done"] == [] and facts["left"]
    assert all(problem["unread"] and "fix access" in problem["meaning"] for problem in facts["left"])
    assert place.verb("channel", "verify", "--channel", view.mount)[0] == RETRY_LATER


def test_what_is_wrong_is_moved_beside_what_cannot_be_read(place: Place, run: Run) -> None:
    shard = next((run.channel / "weight_v000002" / "anchor").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    view = place.faulty(run.channel, place.root / "view")
    view.rules({"path": "weight_v000003/anchor/*", "action": "error", "op": "READ"})
    code, told = place.verb("channel", "repair", "--channel", view.mount, "--json")
    assert code == RETRY_LATER, told
    moved = ["hosts/h.json moved to .trash", "weight_v000002/anchor moved to .trash"]
    assert sorted(json.loads(told)["done"]) == moved
    assert (run.channel / "weight_v000003" / "anchor").is_dir()
    view.rules()
    assert place.verb("channel", "repair", "--channel", view.mount)[0] == 0
    assert verify(Channel.open(open_store(run.channel))) == []


def test_a_pointer_is_not_put_below_what_cannot_be_read(place: Place, run: Run) -> None:
    (run.channel / "latest").unlink()
    view = place.faulty(run.channel, place.root / "view")
    view.rules({"path": "weight_v000003/*.safetensors", "action": "error", "op": "READ"})
    code, told = place.verb("channel", "repair", "--channel", view.mount, "--json")
    assert code == DAMAGED and not (run.channel / "latest").exists(), told
    view.rules()
    assert place.verb("channel", "repair", "--channel", view.mount)[0] == 0
    assert (run.channel / "latest").read_text() == "000003"
