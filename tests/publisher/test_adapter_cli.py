"""Adapters by command: published, listed, verified, repaired, pruned, retired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapters import CODE, MATH, adapter, bytes_of, follow, save_adapter
from daemonkit import Places, base_tensors, write
from in_process import Command

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import read_components
from weightcast.shared.channel.directory_store import open_store


@pytest.fixture
def run(places: Places, weightcast: Command) -> Places:
    code, _, err = weightcast("channel", "init", "--channel", places.channel, "--base", places.base)
    assert code == 0, err
    return places


def publish(places: Places, seed: int, *more: object) -> tuple[object, ...]:
    given = save_adapter(places.root / f"math-{seed}", adapter(seed))
    where = ("--channel", places.channel, "--local", places.local)
    return "publish", given, *where, "--component", MATH, *more


def test_an_adapter_is_published_without_main(run: Places, weightcast: Command, tmp_path: Path) -> None:
    code, out, err = weightcast(*publish(run, 1, "--step", 10, "--json"))
    assert code == 0, err
    assert json.loads(out)["version"] == 1 and json.loads(out)["carried"] == ["adapter_config.json"]
    code, _, err = weightcast(*publish(run, 2))
    assert code == 0, err
    assert follow(run.channel, MATH, tmp_path / "host")[:2] == (2, bytes_of(adapter(2)))
    # the publisher's directory is free for main
    new = write(run.root / "new", base_tensors())
    code, _, err = weightcast("publish", new, "--channel", run.channel, "--local", run.local)
    assert code == 0, err


def test_components_are_listed_added_and_retired(run: Places, weightcast: Command) -> None:
    on = ("--channel", run.channel)
    assert weightcast(*publish(run, 1, "--main-version", 0))[0] == 0
    like = save_adapter(run.root / "like", adapter(3))
    assert weightcast("channel", "component", "add", CODE, "--like", like, *on)[0] == 0
    code, out, _ = weightcast("channel", "component", "log", *on, "--json")
    rows = json.loads(out)["components"]
    assert [(row["name"], row["version"], row["main_version"]) for row in rows] == [
        (CODE, 0, None),
        (MATH, 1, 0),
    ]
    code, out, _ = weightcast("channel", "component", "log", *on)
    assert code == 0 and MATH in out and "active" in out
    assert weightcast("channel", "component", "retire", MATH, *on)[0] == 0
    code, _, err = weightcast(*publish(run, 2))
    assert code == 3 and "adapter/math is retired" in err
    code, _, err = weightcast("channel", "component", "retire", "adapter/none", *on)
    assert code == 3 and "has no component adapter/none" in err
    code, out, _ = weightcast("channel", "log", *on)
    assert f"components (--component NAME): {CODE}" in out


def test_other_commands_take_a_component(run: Places, weightcast: Command) -> None:
    on = ("--channel", run.channel, "--component", MATH)
    for seed in (1, 2, 3):
        assert weightcast(*publish(run, seed, "--anchor"))[0] == 0
    code, out, _ = weightcast("channel", "log", *on, "--json")
    assert [row["version"] for row in json.loads(out)["versions"]] == [1, 2, 3]
    assert weightcast("channel", "tag", "best", 2, *on)[0] == 0
    assert (run.channel / "components" / MATH / "tags" / "best").read_text() == "000002"
    assert weightcast("channel", "prune", "--keep-versions", 1, *on)[0] == 0
    assert not (run.channel / "components" / MATH / "weight_v000001").exists()
    code, out, _ = weightcast("channel", "prune", "--keep-versions", 1, "--channel", run.channel, "--json")
    assert code == 0 and json.loads(out)["not_pruned"] == [MATH]
    code, _, err = weightcast("channel", "log", "--channel", run.channel, "--component", "adapter/none")
    assert code == 3 and "has no component adapter/none" in err


def test_damage_of_an_adapter_is_found_and_repaired_with_main(run: Places, weightcast: Command) -> None:
    on = ("--channel", run.channel)
    for seed in (1, 2):
        assert weightcast(*publish(run, seed))[0] == 0
    assert weightcast("channel", "verify", *on)[0] == 0
    latest = run.channel / "components" / MATH / "latest"
    latest.write_text("garbage")
    code, out, _ = weightcast("channel", "verify", *on)
    assert code == 3 and "adapter/math: " in out
    code, out, err = weightcast("channel", "repair", *on, "--local", run.local, "--json")
    assert code == 0 and json.loads(out)["done"][0].startswith("adapter/math: "), err
    assert weightcast("channel", "verify", *on)[0] == 0
    registry = run.channel / "components.json"
    registry.write_bytes(registry.read_bytes()[:-5])
    code, out, _ = weightcast("channel", "verify", *on)
    assert code == 3 and "components.json" in out


def test_a_signed_run_has_a_signed_list(places: Places, weightcast: Command) -> None:
    key, on = places.root / "run.key", ("--channel", places.channel)
    registry = places.channel / "components.json"
    trusted = ("--trusted-key", f"{key}.pub")
    assert weightcast("keygen", "--out", key)[0] == 0
    assert weightcast("channel", "init", *on, "--base", places.base, "--sign-key", key)[0] == 0
    assert weightcast(*publish(places, 1, "--sign-key", key))[0] == 0
    code, out, err = weightcast("channel", "verify", *on, *trusted)
    assert code == 0, out + err
    code, _, err = weightcast("channel", "component", "retire", MATH, *on)
    assert code == 3 and "no signing key is given" in err
    data = json.loads(registry.read_bytes())
    del data["signature"]
    registry.write_text(json.dumps(data))
    code, out, _ = weightcast("channel", "verify", *on, *trusted)
    assert code == 3 and "components.json is not signed" in out
    code, _, err = weightcast("channel", "component", "retire", MATH, *on, "--sign-key", key)
    assert code != 0 and "is not signed" in err
    assert weightcast(*publish(places, 2, "--sign-key", key))[0] != 0
    assert weightcast("channel", "sign", *on, "--sign-key", key)[0] == 0
    code, _, err = weightcast("channel", "component", "retire", MATH, *on, "--sign-key", key)
    assert code == 0, err
    assert weightcast("channel", "verify", *on, *trusted)[0] == 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--component", "draft"), "is a LoRA adapter"),
        (("--component", "math"), "is not the name of a component"),
        (("--component", MATH, "--cast"), "--cast, --rename and --drop are for main"),
        (("--component", MATH, "--layout", "stitch"), "a channel with --layout stitch has no components"),
        (("--component", MATH, "--main-version", 3), "version 3 of main is not in"),
    ],
)
def test_what_cannot_be_is_refused(
    run: Places, weightcast: Command, more: tuple[object, ...], problem: str
) -> None:
    given = save_adapter(run.root / "given", adapter(1))
    code, _, err = weightcast("publish", given, "--channel", run.channel, "--local", run.local, *more)
    assert code in (2, 3) and problem in err
    assert read_components(Channel.open(open_store(run.channel))) == ()


def test_a_name_that_no_component_has_is_not_waited_for(run: Places, weightcast: Command) -> None:
    on = ("--channel", run.channel, "--version", 1, "--component", "math")
    code, _, err = weightcast("wait", *on)
    assert code == 3 and "did you mean adapter/math?" in err
