"""The publisher's one-shot verbs, run in this process through the command's own entry."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from core_cases import bytes_of, read_checkpoint, snapshot
from daemonkit import Places, base_tensors, changed, files_of, write
from in_process import Command

from weightcast.publisher import Publisher
from weightcast.shared.base.errors import Refused


def init(places: Places, *more: object) -> tuple[object, ...]:
    return "channel", "init", "--channel", places.channel, "--base", places.base, *more


def publish(places: Places, checkpoint: Path, *more: object) -> tuple[object, ...]:
    return "publish", checkpoint, "--channel", places.channel, "--local", places.local, *more


def test_init_is_idempotent_and_describes_the_channel(places: Places, weightcast: Command) -> None:
    code, out, _ = weightcast(
        *init(places, "--frozen", "layer.0.*", "--alias", "lm_head.weight=embed.weight", "--json")
    )
    facts = json.loads(out)
    assert code == 0 and facts["tensors"] == 6 and facts["aliases"] == {"lm_head.weight": "embed.weight"}
    assert facts["frozen"] == ["layer.0.*"] and facts["full_bytes"] == sum(
        map(len, bytes_of(base_tensors()).values())
    )
    before = snapshot(places.channel)
    assert facts["notes"] == []
    code, out, _ = weightcast(*init(places))
    assert code == 0 and facts["run_id"] in out and facts["root"] in out and "exists already" in out
    assert snapshot(places.channel) == before


def test_init_refuses_another_base_and_foreign_channels(places: Places, weightcast: Command) -> None:
    assert weightcast(*init(places))[0] == 0
    write(places.base, changed(base_tensors(), 1))
    before = snapshot(places.channel)
    code, out, _ = weightcast(*init(places, "--json"))
    assert (code, json.loads(out)["error"]) == (3, "WrongRun")
    assert snapshot(places.channel) == before
    foreign = Places(places.root / "foreign")
    (foreign.channel / "weight_v000001").mkdir(parents=True)
    code, _, err = weightcast("channel", "init", "--channel", foreign.channel, "--base", places.base)
    assert code == 3 and "another system" in err and "remedy:" in err
    assert [path.name for path in foreign.channel.iterdir()] == ["weight_v000001"]


def test_a_channel_is_made_only_where_nothing_is(places: Places, weightcast: Command) -> None:
    write(places.root / "models" / "base", base_tensors())
    home = places.root / "home"
    home.mkdir()
    for name in ("letters", "pictures", "music", "taxes"):
        (home / name).mkdir()
    within, around = places.base / "channel", places.root / "models"
    (places.root / "link").symlink_to(places.base)
    for channel, why in (
        (places.base, "--channel {} is --base"),
        (places.root / "link", "--channel {} is --base"),
        (within, "--channel {} is inside --base"),
        (home, "{} is not empty: it holds letters, music, pictures and 1 more"),
    ):
        before = snapshot(places.root)
        code, _, err = weightcast("channel", "init", "--channel", channel, "--base", places.base)
        assert code == 3 and why.format(channel) in err and "of its own" in err
        assert snapshot(places.root) == before and not within.exists()
    code, _, err = weightcast("channel", "init", "--channel", around, "--base", around / "base")
    assert code == 3 and f"--base {around / 'base'} is inside --channel {around}" in err


def test_what_a_file_system_puts_there_is_no_reason_to_refuse(places: Places, weightcast: Command) -> None:
    for name in ("lost+found", ".snapshot", "hosts"):
        (places.channel / name).mkdir(parents=True)
    assert weightcast(*init(places))[0] == 0


def test_a_file_is_no_channel_and_no_local_checkpoint(places: Places, weightcast: Command) -> None:
    file = places.root / "file"
    file.write_bytes(b"")
    one = write(places.root / "one", changed(base_tensors(), 1))
    code, _, err = weightcast("channel", "init", "--channel", file, "--base", places.base)
    assert code == 3 and f"--channel {file} is not a directory" in err and "remedy: give another path" in err
    weightcast(*init(places))
    for channel, local in ((file, places.local), (places.channel, file)):
        code, _, err = weightcast(
            "publish", one, "--channel", channel, "--local", local, "--base", places.base
        )
        assert code == 3 and f"{file} is not a directory" in err and "remedy: give another path" in err
        run_options = ("--channel", channel, "--local", local, "--base", places.base, "--watch", places.watch)
        code, _, err = weightcast("publisher", "run", *run_options)
        assert code == (3 if channel == file else 2)
        assert f"{file} is not a directory" in err and "give another path" in err


@pytest.mark.parametrize(("channel", "local"), [("c", "c"), ("c", "c/pub"), ("l/c", "l")])
def test_channel_and_local_checkpoint_lie_apart(
    places: Places, weightcast: Command, channel: str, local: str
) -> None:
    given = ("--channel", places.root / channel, "--local", places.root / local, "--base", places.base)
    assert weightcast("channel", "init", "--channel", places.root / channel, "--base", places.base)[0] == 0
    before = snapshot(places.root)
    one = write(places.root / "one", changed(base_tensors(), 1))
    for verb in (("publish", one), ("sync",)):
        code, _, err = weightcast(*verb, *given)
        assert code == 3 and "a directory of its own" in err
    for verb in (("publisher", "run", "--watch", places.watch), ("subscriber", "run")):
        code, _, err = weightcast(*verb, *given)
        assert code == 2 and "a directory of its own" in err
    one_away = {name: data for name, data in snapshot(places.root).items() if not name.startswith("one")}
    assert one_away == before


@pytest.mark.parametrize(("channel", "local"), [("link", "c/pub"), ("c", "link/pub"), ("l/c", "link")])
def test_links_do_not_bring_channel_and_local_checkpoint_together(
    places: Places, weightcast: Command, channel: str, local: str
) -> None:
    there = "l" if channel == "l/c" else "c"
    (places.root / there).mkdir()
    (places.root / "link").symlink_to(places.root / there)
    given = ("--channel", places.root / channel, "--local", places.root / local, "--base", places.base)
    assert weightcast("channel", "init", "--channel", places.root / channel, "--base", places.base)[0] == 0
    one = write(places.root / "one", changed(base_tensors(), 1))
    before = snapshot(places.root)
    daemon = ("publisher", "run", "--watch", places.watch, "--port", "0")
    for verb in (("publish", one), ("sync",), daemon):
        code, _, err = weightcast(*verb, *given)
        assert code == 3 and "a directory of its own" in err
    assert snapshot(places.root) == before


@pytest.mark.parametrize(
    "bad", [("--alias", "only-one"), ("--alias", "=b"), ("--threads", "0")], ids=" ".join
)
def test_usage_errors_change_nothing(places: Places, weightcast: Command, bad: tuple[str, str]) -> None:
    assert weightcast(*init(places, *bad))[0] == 2
    assert not places.channel.exists()


@pytest.mark.parametrize("encoding", ["fast", "small", "xor", "overwrite"])
def test_publish_one_checkpoint(places: Places, weightcast: Command, encoding: str) -> None:
    weightcast(*init(places))
    first = write(places.root / "one", changed(base_tensors(), 1))
    code, out, _ = weightcast(
        *publish(places, first, "--base", places.base, "--step", 5, "--encoding", encoding, "--json")
    )
    report = json.loads(out)
    assert (code, report["version"], report["step"]) == (0, 1, 5)
    assert report["changed_elements"] > 0 and report["delta_bytes"] > 0
    second = write(places.root / "two", changed(base_tensors(), 2))
    code, out, _ = weightcast(*publish(places, second, "--encoding", encoding))
    shown = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0 and shown["version"].strip() == "2" and "bits per change" in out and "ratio" in out
    assert places.latest() == "000002"
    assert read_checkpoint(places.local) == bytes_of(changed(base_tensors(), 2))


def test_an_anchor_that_does_not_fit_is_told_beside_the_version(places: Places, weightcast: Command) -> None:
    weightcast(*init(places))
    weightcast(
        *publish(places, write(places.root / "one", changed(base_tensors(), 1)), "--base", places.base)
    )
    new = write(places.root / "two", changed(base_tensors(), 2, share=0.001))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(map(len, bytes_of(base_tensors()).values())), hard))
    try:
        code, out, err = weightcast(*publish(places, new, "--skip-span", 0, "--anchor", "--json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, json.loads(out)["version"], places.latest()) == (0, 2, "000002")
    assert "warning: maintenance failed" in err and "File too large" in err


def test_publish_refuses_what_does_not_fit(places: Places, weightcast: Command) -> None:
    weightcast(*init(places))
    bad = base_tensors()
    del bad["layer.0.scale"], bad["layer.1.up"]
    code, _, err = weightcast(*publish(places, write(places.root / "bad", bad), "--base", places.base))
    assert code == 3 and "layer.0.scale is missing" in err and "layer.1.up is missing" in err
    assert places.latest() == ""


def test_publish_says_what_is_missing(places: Places, weightcast: Command) -> None:
    one = write(places.root / "one", changed(base_tensors(), 1))
    assert weightcast(*publish(places, one))[0] == 75
    weightcast(*init(places))
    code, _, err = weightcast(*publish(places, one, "--encoding", "zip"))
    assert code == 2 and "zip" in err
    code, out, _ = weightcast(*publish(places, places.root / "nowhere", "--base", places.base, "--json"))
    answer = json.loads(out)
    assert code == 3 and "nowhere" in answer["message"]


@pytest.mark.parametrize("refused", ["nowhere", "misfit", "other config", "held"])
def test_nothing_is_taken_over_for_what_is_refused(places: Places, weightcast: Command, refused: str) -> None:
    (places.base / "config.json").write_text('{"hidden_size": 1}')
    weightcast(*init(places))
    with Publisher.open(places.channel, local=places.local, base=places.base) as living:
        living.publish_checkpoint(write(places.root / "one", changed(base_tensors(), 1)))
        living.publish_checkpoint(write(places.root / "two", changed(base_tensors(), 2)))
        given = places.root / "three"
        if refused == "misfit":
            write(given, dict(list(base_tensors().items())[1:]))
        elif refused != "nowhere":
            write(given, changed(base_tensors(), 3))
        if refused == "other config":
            (given / "config.json").write_text('{"hidden_size": 2}')
        if refused == "held":
            weightcast("channel", "rollback", "--channel", places.channel, "--to", 1)
        other = ("--base", places.base, "--local", places.root / "other", "--take-over")
        code, _, err = weightcast("publish", given, "--channel", places.channel, *other)
        assert code == 3 and "remedy:" in err
        if refused == "held":
            weightcast("channel", "resume", "--channel", places.channel)
        # the living publisher may have carried out the order meanwhile
        versions = (3, 4) if refused == "held" else (3,)
        four = write(places.root / "four", changed(base_tensors(), 4))
        assert living.publish_checkpoint(four).version in versions


def test_its_own_local_checkpoint_is_not_published(places: Places, weightcast: Command) -> None:
    weightcast(*init(places))
    weightcast(
        *publish(places, write(places.root / "one", changed(base_tensors(), 1)), "--base", places.base)
    )
    (places.root / "link").symlink_to(places.local)
    for own in (places.local, places.root / "link"):
        code, _, err = weightcast(*publish(places, own))
        assert code == 3 and "own local checkpoint" in err and "that the trainer wrote" in err
    api = Publisher.open(places.channel, local=places.local)
    with api as publisher, pytest.raises(Refused, match="own local checkpoint"):
        publisher.publish_checkpoint(places.local)
    assert places.latest() == "000001"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--marker", "a/b"), "marker"),
        (("--encoding", "zip"), "encoding"),
        (("--host", "0.0.0.0"), "token"),
        (("--settle-seconds", "-1"), "settle_seconds"),
    ],
)
def test_run_names_the_wrong_setting(
    places: Places, weightcast: Command, wrong: tuple[str, str], named: str
) -> None:
    directories = ("--channel", places.channel, "--base", places.base, "--local", places.local)
    code, _, err = weightcast("publisher", "run", *directories, "--watch", places.watch, *wrong)
    assert code == 2 and named in err
    assert not places.channel.exists() and not places.local.exists()


def test_run_needs_a_directory_to_watch_for_what_says_how(places: Places, weightcast: Command) -> None:
    directories = ("--channel", places.channel, "--base", places.base, "--local", places.local)
    code, _, err = weightcast("publisher", "run", *directories, "--every", "--consume")
    assert code == 2 and "every: " in err and "consume: " in err and "--watch" in err
    assert weightcast("publisher", "run", "--channel", places.channel)[0] == 2


@pytest.mark.parametrize("name", ["base", "channel", "local", "hand_over"])
def test_run_deletes_nothing_of_its_own_run(places: Places, weightcast: Command, name: str) -> None:
    write(places.watch / "step_0", base_tensors())
    link = places.root / "link"
    link.symlink_to(places.watch / "step_0", target_is_directory=True)
    own = {"base": places.base, "channel": places.channel, "local": places.local, name: link}
    flags = [word for key, path in own.items() for word in (f"--{key.replace('_', '-')}", path)]
    code, _, err = weightcast("publisher", "run", *flags, "--watch", places.watch, "--consume")
    assert code == 2 and f"{name}: {link} is inside the watched directory" in err
    left = {path.name for path in (places.watch / "step_0").iterdir()}
    assert left == set(files_of(base_tensors()))
