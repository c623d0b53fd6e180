"""The routes' rules: what a request may say, and what it is answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_writer import name_of, root, some_changed, write_patch
from plugin_models import Llama, ToyHost, checkpoint
from weightcast_engine.update import routes
from weightcast_engine.update.elements import misplaced


class Site:
    def __init__(self, room: Path, ranks: int = 1) -> None:
        models = [Llama(torch.float32, rank, ranks) for rank in range(ranks)]
        self.base = checkpoint()
        self.host = ToyHost(models, self.base, room)

    def post(self, route: str, body: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = asyncio.run(routes.order(self.host.front, route, data))
        return status, json.loads(json.dumps(answer))

    def get(self) -> dict[str, Any]:
        status, answer = asyncio.run(routes.look(self.host.front))
        assert status == 200
        return answer

    def patch(self, version: int = 1) -> str:
        return write_patch(self.host.patches, self.base, some_changed(self.base, version), version)

    def holds(self) -> None:
        assert self.post("holds", {"version": 0, "root": root(0), "label": "0"}) == (200, {})


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_an_update_through_the_routes(site: Site) -> None:
    fresh = site.get()
    assert fresh == {
        "plugin": "0.1.0", "format": 1, "process": fresh["process"],
        "version": None, "root": None, "label": None, "ranks": 1, "paused": False,
        "patchable": True, "reason": "", "refused": {}, "refused_count": 0, "in_doubt": False,
        "misplaced": "", "drafter": "none", "draft": "",
    }  # fmt: skip
    site.holds()
    status, checked = site.post("check", {"file": site.patch()})
    assert status == 200 and checked.keys() == {"tensors", "changes", "bytes", "seconds"}
    assert site.post("pause", {"policy": "recompute"}) == (200, {})
    status, done = site.post("apply", {"file": name_of(1), "label": "1"})
    assert status == 200 and done["seconds"].keys() == {"write", "label"}
    assert (done["version"], done["root"], done["label"]) == (1, root(1), "1")
    assert site.post("resume", {}) == (200, {})
    assert (site.get()["version"], site.get()["process"]) == (1, fresh["process"])
    status, told = site.post("digest", {"tensors": None, "from": 0, "count": 3})
    assert (status, len(told["lanes"]), told["next"], told["version"]) == (200, 3, 3, 1)


def test_a_base_that_is_another_is_told(site: Site) -> None:
    site.holds()
    status, told = site.post("check", {"file": site.patch(4)})
    assert (
        status == 409
        and told["holds"] == {"version": 0, "root": root(0)}
        and told["error"]
        and told["remedy"]
    )


def test_what_can_not_be_patched_is_named(site: Site) -> None:
    site.holds()
    status, told = site.post("check", {"file": name_of(9)})
    assert status == 422 and name_of(9) in told["error"]
    site.base["w"] = torch.zeros(3)
    status, told = site.post("check", {"file": site.patch()})
    assert (status, told["tensor"]) == (422, "w") and told["remedy"] == "reload this version from disk"


def test_not_paused_is_423(site: Site) -> None:
    site.holds()
    file = site.patch()
    site.post("check", {"file": file})
    assert site.post("apply", {"file": file, "label": "1"})[0] == 423
    assert site.post("reload", {"label": "1"})[0] == 423


def test_a_rank_that_fails_rolls_all_back_and_one_that_can_not_leaves_a_doubt(tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.holds()
    file = site.patch()
    site.post("check", {"file": file})
    site.post("pause", {"policy": "wait"})
    site.host.engines[1].failures = 1
    status, told = site.post("apply", {"file": file, "label": "1"})
    assert (status, told["state"], told["holds"]["version"]) == (500, "rolled-back", 0)
    site.post("check", {"file": file})
    site.host.engines[1].failures = 3
    status, told = site.post("apply", {"file": file, "label": "1"})
    assert (status, told["state"]) == (500, "in-doubt") and site.get()["in_doubt"]
    status, told = site.post("holds", {"version": 0, "root": root(0), "label": "0"})
    assert status == 409
    assert site.post("reload", {"label": "0"})[0] == 200
    assert not site.get()["in_doubt"] and site.get()["version"] is None


@pytest.mark.parametrize("policy", routes.POLICIES)
def test_an_update_is_one_order_with_its_pause(site: Site, policy: str) -> None:
    site.holds()
    site.post("check", {"file": site.patch()})
    status, done = site.post("update", {"file": name_of(1), "label": "1", "policy": policy})
    assert (status, done["version"], done["root"], done["label"], done["resumed"]) == (
        200,
        1,
        root(1),
        "1",
        True,
    )
    assert done["seconds"].keys() == {"write", "label", "still"}
    assert done["seconds"]["still"] >= done["seconds"]["write"] + done["seconds"]["label"]
    controls = site.host.controls
    assert (controls.is_paused, controls.pauses, controls.labels) == (False, 1, ["1"])


def test_an_update_of_an_engine_that_was_paused_leaves_it_paused(site: Site) -> None:
    site.holds()
    site.post("check", {"file": site.patch()})
    site.post("pause", {"policy": "recompute"})
    status, done = site.post("update", {**UPDATE, "file": name_of(1)})
    assert (status, done["version"], done["resumed"], site.host.controls.is_paused) == (200, 1, False, True)
    assert site.post("update", {**UPDATE, "file": name_of(9)})[0] == 409 and site.host.controls.is_paused


def test_an_update_that_is_refused_or_taken_back_lets_the_engine_go_on(tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.holds()
    before, file = site.host.live(), site.patch()
    assert site.post("update", {**UPDATE, "file": file})[0] == 409
    site.post("check", {"file": file})
    site.host.engines[1].failures = 1
    status, told = site.post("update", {**UPDATE, "file": file})
    assert (status, told["state"], told["holds"]["version"]) == (500, "rolled-back", 0)
    assert (site.host.controls.is_paused, site.host.controls.pauses) == (False, 2)
    assert site.host.live() == before


def test_an_update_that_leaves_a_doubt_leaves_the_engine_paused(tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.holds()
    site.post("check", {"file": site.patch()})
    site.host.engines[1].failures = 3
    status, told = site.post("update", {**UPDATE, "file": name_of(1)})
    assert (status, told["state"], site.host.controls.is_paused) == (500, "in-doubt", True)


@pytest.mark.parametrize(
    ("fails", "status", "paused"), [("pause", 423, False), ("relabel", 500, True), ("resume", 200, True)]
)
def test_an_update_whose_engine_does_not_obey(site: Site, fails: str, status: int, paused: bool) -> None:
    """One that does not resume holds the version, and is resumed by whoever sent the order."""
    site.holds()
    site.post("check", {"file": site.patch()})
    site.host.controls.fails = fails
    found, told = site.post("update", {**UPDATE, "file": name_of(1)})
    assert (found, site.host.controls.is_paused) == (status, paused)
    if fails == "resume":
        assert (told["version"], told["resumed"]) == (1, False)
    else:
        assert "the engine core is gone" in told["error"]


UPDATE = {"label": "1", "policy": "recompute"}
GOOD: dict[str, dict[str, Any]] = {
    "holds": {"version": 0, "root": root(0), "label": "0"},
    "check": {"file": name_of(1)},
    "update": {**UPDATE, "file": name_of(1)},
    "pause": {"policy": "wait"},
    "apply": {"file": name_of(1), "label": "1"},
    "reload": {"label": "1"},
    "resume": {},
    "digest": {"tensors": None, "from": 0, "count": 1},
}


@pytest.mark.parametrize("route", GOOD)
def test_members_are_exactly_those_of_the_route(site: Site, route: str) -> None:
    before = site.host.live()
    assert site.post(route, {**GOOD[route], "path": "/etc"})[0] == 400
    for member in GOOD[route]:
        assert site.post(route, {key: value for key, value in GOOD[route].items() if key != member})[0] == 400
        for wrong in (None, -1, True, 1.5, [], {}, "\n", "../x", "x" * 5000):
            if (member, wrong) in [("tensors", None), ("tensors", []), ("label", "../x")]:
                continue
            status, told = site.post(route, {**GOOD[route], member: wrong})
            assert status == 400 and told["remedy"], (member, wrong)
    for body in (b"", b"[]", b"{", b'{"a":1,"a":1}', b"\xff", b"[" * 9999, b'{"x":NaN}'):
        assert site.post(route, body)[0] == 400
    assert site.host.live() == before and site.host.controls.orders == []


def test_orders_are_carried_out_one_at_a_time(site: Site) -> None:
    async def both() -> list[routes.Reply]:
        data = json.dumps(GOOD["digest"]).encode()
        first = asyncio.create_task(routes.order(site.host.front, "digest", data))
        await asyncio.sleep(0)
        return [await routes.order(site.host.front, "digest", data), await first]

    site.host.controls.slow = True
    replies = asyncio.run(both())
    assert [status for status, _ in replies] == [503, 200]


def test_a_reload_that_would_bring_other_weights_is_refused_before_anything_is_touched(site: Site) -> None:
    site.holds()
    engine, before = site.host.engines[0], site.host.live()
    engine.misplaced = lambda patches: f"{patches} is another's"  # type: ignore[method-assign]
    state = site.get()
    assert state["misplaced"] and (state["patchable"], state["reason"]) == (False, state["misplaced"])
    site.post("pause", {"policy": "wait"})
    status, told = site.post("reload", {"label": "1"})
    assert (status, told["error"]) == (422, state["misplaced"]) and told["remedy"]
    assert site.post("check", {"file": site.patch()})[0] == 422
    assert site.host.live() == before and site.get()["version"] == 0


def test_patches_lie_in_the_checkpoint_that_is_loaded(tmp_path: Path) -> None:
    local, mount = tmp_path / "local", tmp_path / "mount"
    local.mkdir()
    mount.symlink_to(local)
    assert misplaced(local, local / ".weightcast" / "engine") is None
    assert misplaced(mount, local / ".weightcast" / "engine") is None
    (local / ".weightcast" / "engine").mkdir(parents=True)
    (tmp_path / "patches").symlink_to(local / ".weightcast" / "engine")
    assert misplaced(local, tmp_path / "patches") is None
    reason = misplaced(tmp_path / "base", local / ".weightcast" / "engine")
    assert reason is not None and str(tmp_path / "base") in reason
