"""Adapters that the publisher's daemon finds in the watched directory, or is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import MATH, adapter, bytes_of, follow, save_adapter
from daemonkit import Daemon, Places, base_tensors, changed, files_of, write
from structlog.testing import capture_logs
from test_publish_loop import Office, interrupted_at
from waiting import wait_until

from weightcast.publisher import Publisher
from weightcast.publisher.daemon.sources.watched import component_of
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import component_store, open_component, retire_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import read_pointer
from weightcast.shared.cli.status import summary

DEFAULT = "adapter/default"


@pytest.fixture
def office(places: Places) -> Iterator[Office]:
    made = Office(places)
    made.publish_loop.start()
    yield made
    made.publish_loop.close()


def version_of(places: Places, name: str) -> int:
    pointer = read_pointer(component_store(open_store(places.channel), name))
    return 0 if pointer is None else pointer.version


def main_version_of(places: Places, name: str, version: int) -> int:
    nested = open_component(Channel.open(open_store(places.channel)), name)
    index = nested.own_index(version)
    assert index is not None
    return index.main_version


def save_in(directory: Path, seed: int) -> Path:
    """Complete at once, under its own name."""
    made = save_adapter(directory.with_name(f".{directory.name}.unfinished"), adapter(seed))
    directory.parent.mkdir(parents=True, exist_ok=True)
    return made.rename(directory)


def stepped(office: Office, name: str, version: int) -> None:
    def arrived() -> bool:
        office.step()
        return version_of(office.places, name) == version

    wait_until(arrived)


@pytest.mark.parametrize(
    ("directory", "component"),
    [
        (".", DEFAULT),
        ("checkpoint-500", DEFAULT),
        ("run/checkpoint-500", DEFAULT),
        ("run/global_step_20", DEFAULT),
        ("checkpoint-500/math", MATH),
        ("step_3/actor/lora_2", "adapter/lora_2"),
    ],
)
def test_whose_adapter_a_directory_is(directory: str, component: str) -> None:
    assert component_of(directory) == component


def test_a_name_that_no_component_has() -> None:
    with pytest.raises(Refused, match="is not the name of a component"):
        component_of("checkpoint-5/a@b")


def test_saves_of_peft_are_versions_of_their_adapters(places: Places, office: Office, tmp_path: Path) -> None:
    for step in (1, 2):
        save_in(places.watch / f"checkpoint-{step}", step)
        save_in(places.watch / f"checkpoint-{step}" / "math", 10 + step)
        stepped(office, DEFAULT, step)
        stepped(office, MATH, step)
    assert follow(places.channel, DEFAULT, tmp_path / "host")[:2] == (2, bytes_of(adapter(2)))
    assert follow(places.channel, MATH, tmp_path / "other")[:2] == (2, bytes_of(adapter(12)))
    status = office.publish_loop.status()
    assert {(each.component, each.version, each.step) for each in status.publications} == {
        (DEFAULT, 1, 1),
        (MATH, 1, 1),
        (DEFAULT, 2, 2),
        (MATH, 2, 2),
    }
    assert status.version == 0 and places.latest() == ""
    office.step()
    shown = {each.name: each for each in office.publish_loop.status().components}
    assert shown.keys() == {DEFAULT, MATH} and shown[MATH].state == "active"
    assert shown[MATH].bytes and not shown[MATH].problem and shown[MATH].main_version == 0


def test_an_adapter_next_to_full_weights_belongs_to_them(places: Places, office: Office) -> None:
    save = places.watch / "step_1"
    unfinished = save_adapter(places.watch / ".unfinished", adapter(1))
    for name, data in files_of(changed(base_tensors(), 1), 2).items():
        (unfinished / name).write_bytes(data)
    unfinished.rename(save)
    stepped(office, DEFAULT, 1)
    assert places.latest() == "000001" and main_version_of(places, DEFAULT, 1) == 1


def test_a_save_with_an_adapter_is_not_consumed(places: Places) -> None:
    office = Office(places, consume=True)
    office.publish_loop.start()
    try:
        save = save_adapter(places.watch / ".unfinished", adapter(1))
        for name, data in files_of(changed(base_tensors(), 1), 2).items():
            (save / name).write_bytes(data)
        save.rename(places.watch / "step_1")
        stepped(office, DEFAULT, 1)
        office.step()
        assert (places.watch / "step_1" / "adapter_model.safetensors").exists()
    finally:
        office.publish_loop.close()


@pytest.mark.parametrize("failpoint", ["", "inbox.published", "inbox.aside", "inbox.buried"])
def test_saves_of_adapters_are_consumed(places: Places, failpoint: str) -> None:
    office = Office(places, consume=True)
    office.publish_loop.start()
    save = save_adapter(places.watch / ".unfinished", adapter(1))
    save_adapter(save / "math", adapter(11))
    save.rename(places.watch / "checkpoint-1")
    if failpoint:
        with interrupted_at(failpoint):
            stepped(office, DEFAULT, 1)
        office.publish_loop.close()
        office = Office(places, consume=True)
        office.publish_loop.start()
    try:
        wait_until(lambda: [office.step(), list(places.watch.iterdir())][1] == [])
        assert (version_of(places, DEFAULT), version_of(places, MATH)) == (1, 1)
    finally:
        office.publish_loop.close()


def test_what_was_there_before_is_left_alone(places: Places, office: Office) -> None:
    office.publish_loop.close()
    save_in(places.watch / "checkpoint-1", 1)
    first = Office(Places(places.root / "first"), watch=places.watch, base=places.base)
    first.publish_loop.start()
    try:
        first.step()
        first.step()
        assert version_of(first.places, DEFAULT) == 0
        save_in(places.watch / "checkpoint-2", 2)
        stepped(first, DEFAULT, 1)
    finally:
        first.publish_loop.close()


def test_the_directories_around_adapters_are_not_reported(places: Places, office: Office) -> None:
    """peft saves named adapters below a directory that has a README alone."""
    for step in (1, 2):
        save = save_adapter(places.watch / ".unfinished" / "math", adapter(step)).parent
        (save / "README.md").write_text("model card")
        (save / "math" / "runs").mkdir()
        (save / "math" / "runs" / "config.json").write_text("{}")
        save.rename(places.watch / f"step_{step}")
        stepped(office, MATH, step)
    office.step()
    shown = office.publish_loop.status()
    assert shown.inbox is not None and shown.inbox.waiting == () and shown.line(time.time()).notes == ()
    # weights in another format are still named
    (places.watch / "step_2" / "pytorch_model.bin").write_bytes(b"x")
    office.step()
    inbox = office.publish_loop.status().inbox
    assert inbox is not None and [each.name for each in inbox.waiting] == ["step_2"]


def test_what_a_save_says_of_its_main_version_counts(places: Places, office: Office) -> None:
    save_in(places.watch / "step_1" / "math", 1)
    stepped(office, MATH, 1)
    write(places.watch / ".main", changed(base_tensors(), 3)).rename(places.watch / "main_1")
    wait_until(lambda: [office.step(), places.latest()][1] == "000001")
    for step, (where, text) in enumerate([("", "0"), ("math", "0\n"), ("math", "")], 2):
        save = save_adapter(places.watch / ".unfinished" / "math", adapter(step)).parent
        if text:
            (save / where / "main_version").write_text(text)
        save.rename(places.watch / f"step_{step}")
        with capture_logs() as logs:
            stepped(office, MATH, step)
        assert any("main has moved" in each["event"] for each in logs) == (not text)
    assert [main_version_of(places, MATH, version) for version in (1, 2, 3, 4)] == [0, 0, 0, 1]
    wrong = save_adapter(places.watch / ".unfinished", adapter(9))
    (wrong / "main_version").write_text("newest")
    wrong.rename(places.watch / "checkpoint-9")

    def refused() -> bool:
        office.step()
        inbox = office.publish_loop.status().inbox
        return inbox is not None and any("is not a number" in each.error.message for each in inbox.refused)

    wait_until(refused)


def test_an_incomplete_adapter_waits(places: Places, office: Office) -> None:
    save = save_adapter(places.watch / "checkpoint-1", adapter(1))
    config = (save / "adapter_config.json").read_bytes()
    (save / "adapter_config.json").unlink()
    for _ in range(3):
        office.step()
    assert version_of(places, DEFAULT) == 0
    (save / "adapter_config.json").write_bytes(config)
    stepped(office, DEFAULT, 1)


def test_a_refused_adapter_keeps_nothing_else_from_being_published(places: Places, office: Office) -> None:
    save_in(places.watch / "checkpoint-1", 1)
    stepped(office, DEFAULT, 1)
    other = save_adapter(places.watch / ".unfinished", adapter(2, rank=8))
    other.rename(places.watch / "checkpoint-2")
    write(places.watch / ".other", changed(base_tensors(), 3)).rename(places.watch / "step_3")
    wait_until(lambda: [office.step(), places.latest()][1] == "000001")

    def refused() -> Any:
        office.step()
        shown = office.publish_loop.status().components
        return shown and shown[0].refused

    (found,) = wait_until(refused)
    shown = office.publish_loop.status()
    assert shown.inbox is not None and shown.inbox.refused_count == 1 and found in shown.inbox.refused
    assert summary(shown.model_dump(mode="json")).remedy == found.error.remedy
    assert shown.line(time.time()).refused_since_version
    assert found.name == "checkpoint-2" and "retire adapter/default" in found.error.remedy
    assert version_of(places, DEFAULT) == 1


@pytest.mark.parametrize("failpoint", ["inbox.chosen", "inbox.published"])
def test_a_kill_leaves_no_checkpoint_out_and_publishes_none_twice(
    places: Places, office: Office, failpoint: str
) -> None:
    # main has more versions than the adapter
    for step in (1, 2, 3):
        write(places.watch / ".main", changed(base_tensors(), step)).rename(places.watch / f"step_{step}")
        wait_until(lambda step=step: [office.step(), places.latest()][1] == f"{step:06d}")  # type: ignore[misc]
    save_in(places.watch / "checkpoint-1", 1)
    stepped(office, DEFAULT, 1)
    save_in(places.watch / "checkpoint-2", 2)
    with interrupted_at(failpoint):
        stepped(office, DEFAULT, 9)
    office.publish_loop.close()
    again = Office(places)
    again.publish_loop.start()
    try:
        stepped(again, DEFAULT, 2)
        for _ in range(3):
            again.step()
        assert version_of(places, DEFAULT) == 2
    finally:
        again.publish_loop.close()


@pytest.mark.parametrize("failpoint", ["component.described", "component.made", "component.listed"])
def test_a_kill_while_an_adapter_is_added(places: Places, office: Office, failpoint: str) -> None:
    save_in(places.watch / "checkpoint-1", 1)
    with interrupted_at(failpoint):
        stepped(office, DEFAULT, 1)
    office.publish_loop.close()
    again = Office(places)
    again.publish_loop.start()
    try:
        stepped(again, DEFAULT, 1)
    finally:
        again.publish_loop.close()


def test_an_order_for_an_adapter_is_carried_out(places: Places, office: Office) -> None:
    for step in (1, 2):
        save_in(places.watch / f"checkpoint-{step}", step)
        stepped(office, DEFAULT, step)
    latest = places.channel / "components" / DEFAULT / "latest"
    orders = places.channel / "components" / DEFAULT / "orders"
    latest.write_text("garbage")
    orders.mkdir(exist_ok=True)
    (orders / "repair").write_bytes(b"")
    wait_until(lambda: [office.step(), not (orders / "repair").exists()][1])
    assert version_of(places, DEFAULT) == 2


def test_adapters_over_http(places: Places, tmp_path: Path) -> None:
    save = save_adapter(places.watch / ".kept", adapter(1))
    daemon = Daemon.start(places).ready()
    try:
        asked = {"checkpoint": str(save), "component": MATH, "step": 5, "key": "one"}
        job = daemon.post("/v1/publish", asked).json()
        url = f"/v1/publications/{job['id']}"
        wait_until(lambda: daemon.get(url).json()["state"] in ("done", "failed"))
        report = daemon.get(url).json()["report"]
        assert (report["component"], report["version"], report["main_version"]) == (MATH, 1, 0)
        assert follow(places.channel, MATH, tmp_path / "host")[1] == bytes_of(adapter(1))
        # the same content under the same key
        daemon.post("/v1/publish", asked)
        wait_until(lambda: daemon.get(url).json()["state"] == "done")
        assert daemon.get(url).json()["report"]["version"] == 1
        assert daemon.post("/v1/publish", {**asked, "component": "adapter/other"}).status_code == 409
        assert daemon.post("/v1/publish", {**asked, "main_version": 0}).status_code == 409
        of_main = {"checkpoint": str(save), "main_version": 0}
        assert "not for main" in daemon.post("/v1/publish", of_main).json()["message"]
        told = {"checkpoint": str(save), "component": MATH, "main_version": 7}
        job = daemon.post("/v1/publish", told).json()
        wait_until(lambda: daemon.get(f"/v1/publications/{job['id']}").json()["state"] == "failed")
        failed = daemon.get(f"/v1/publications/{job['id']}").json()["error"]
        assert "version 7 of main is not in" in failed["message"]
        assert daemon.post("/v1/publish", {"checkpoint": str(save), "component": "lora"}).status_code >= 400
        drafter = write(places.watch / ".drafter", base_tensors())
        job = daemon.post("/v1/publish", {"checkpoint": str(drafter), "component": "draft"}).json()
        wait_until(lambda: daemon.get(f"/v1/publications/{job['id']}").json()["state"] == "done")
        wait_until(lambda: [each["name"] for each in daemon.status()["components"]] == [MATH, "draft"])
        retire_component(Channel.open(open_store(places.channel)), MATH)
        job = daemon.post("/v1/publish", {"checkpoint": str(save), "component": MATH}).json()
        url = f"/v1/publications/{job['id']}"
        wait_until(lambda: daemon.get(url).json()["state"] == "failed")
        assert "adapter/math is retired" in daemon.get(url).json()["error"]["message"]
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def test_another_publisher_of_an_adapter_does_not_end_the_daemon(
    places: Places, office: Office, tmp_path: Path
) -> None:
    save_in(places.watch / "checkpoint-1", 1)
    stepped(office, DEFAULT, 1)
    office.publish_loop.close()
    with Publisher.open(places.channel, local=tmp_path / "own", component=DEFAULT) as alone:
        alone.publish(adapter(2))
        again = Office(places)
        again.publish_loop.start()
        try:
            again.step()
            write(places.watch / ".other", changed(base_tensors(), 3)).rename(places.watch / "step_3")
            wait_until(lambda: [again.step(), places.latest()][1] == "000001")
        finally:
            again.publish_loop.close()


def test_hooks_and_checks_are_for_adapters_too(places: Places, tmp_path: Path) -> None:
    calls, hook = tmp_path / "calls", tmp_path / "hook.sh"
    said = '"$WEIGHTCAST_COMPONENT $WEIGHTCAST_PHASE $WEIGHTCAST_VERSION $WEIGHTCAST_DIR"'
    hook.write_text(f"#!/bin/sh\necho {said} >> {calls}\n")
    hook.chmod(0o755)
    office = Office(places, post_write=str(hook))
    office.publish_loop.start()
    try:
        save_in(places.watch / "checkpoint-1" / "math", 1)
        stepped(office, MATH, 1)
        write(places.watch / ".other", changed(base_tensors(), 3)).rename(places.watch / "step_3")
        wait_until(lambda: [office.step(), places.latest()][1] == "000001")
        nested = places.channel / "components" / MATH
        assert calls.read_text().splitlines() == [
            f"{MATH} version 1 {nested}/weight_v000001",
            f"{MATH} pointer 1 {nested}",
            f"main version 1 {places.channel}/weight_v000001",
            f"main pointer 1 {places.channel}",
        ]
        # a flipped bit in the publisher's own copy
        [local] = (places.local / ".weightcast" / "components" / MATH).glob("*.safetensors")
        data = local.read_bytes()
        local.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        wait_until(lambda: [office.step(), local.read_bytes() == data][1])
    finally:
        office.publish_loop.close()


def test_a_damaged_registry_keeps_main_published(places: Places, office: Office) -> None:
    save_in(places.watch / "checkpoint-1", 1)
    stepped(office, DEFAULT, 1)
    office.publish_loop.close()
    registry = places.channel / "components.json"
    registry.write_bytes(registry.read_bytes()[:-5])
    again = Office(places)
    again.publish_loop.start()
    try:
        write(places.watch / ".other", changed(base_tensors(), 3)).rename(places.watch / "step_3")
        wait_until(lambda: [again.step(), places.latest()][1] == "000001")
        (shown,) = again.publish_loop.status().components
        assert shown.name == "components.json" and shown.problem
    finally:
        again.publish_loop.close()


def test_a_retired_adapter_is_given_up(places: Places, office: Office, tmp_path: Path) -> None:
    save_in(places.watch / "checkpoint-1", 1)
    stepped(office, DEFAULT, 1)
    retire_component(Channel.open(open_store(places.channel)), DEFAULT)
    claims = places.channel / "components" / DEFAULT / "publishers"

    def released() -> bool:
        office.step()
        return b'"released":true' in max(claims.iterdir(), key=lambda path: path.name).read_bytes()

    wait_until(released)
