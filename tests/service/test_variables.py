"""Variables of the environment that weightcast does not read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
import pytest
from command_tree import commands_of
from forked import run_weightcast

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.mirror.settings import MirrorSettings
from weightcast.shared.daemon.environment import SETTINGS, unknown_variables
from weightcast.shared.daemon.settings import describe_settings
from weightcast.shared.kernels.loader import CACHE_VARIABLE
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.gateway.settings import GatewaySettings


def test_all_settings_are_known() -> None:
    sides = (PublisherSettings, SubscriberSettings, MirrorSettings, GatewaySettings)
    assert {setting.env for side in sides for setting in describe_settings(side)} == SETTINGS


def test_what_the_commands_read_is_known() -> None:
    read = {name for _, command in commands_of() for name in variables(command)} | {CACHE_VARIABLE}
    assert len(read) > 5 and unknown_variables(dict.fromkeys(read, "")) == {}


def variables(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        named = parameter.envvar or ()
        yield from [named] if isinstance(named, str) else named


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("WEIGHTCAST_TRUSTED_KEYS", "WEIGHTCAST_TRUSTED_KEY"),
        ("weightcast_trusted_keys", "WEIGHTCAST_TRUSTED_KEY"),
        ("WEIGHTCAST_ENGINES", "WEIGHTCAST_ENGINE"),
        ("WEIGHTCAST_CHANEL", "WEIGHTCAST_CHANNEL"),
        ("WEIGHTCAST_XYZZY", ""),
        ("WEIGHTCAST_", ""),
    ],
)
def test_the_nearest_name_is_told(name: str, nearest: str) -> None:
    assert unknown_variables({name: "x", "HOME": "/"}) == {name: nearest}


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "MY_WEIGHTCAST_TOKENS",
        "weightcast_token",
        "WEIGHTCAST_CACHE",
        "WEIGHTCAST_PATCH_DIR",
        "WEIGHTCAST_PHASE",
        "WEIGHTCAST_ENGINES_FULL",
        "WEIGHTCAST_TEST_FAULTS",
        "WEIGHTCAST_SERVICE_HOST",
        "WEIGHTCAST_PUBLISHER_SERVICE_PORT_HTTP",
        "WEIGHTCAST_PUBLISHER_PORT",
        "WEIGHTCAST_PORT_8340_TCP_ADDR",
    ],
)
def test_others_are_left_alone(name: str) -> None:
    assert unknown_variables({name: "x"}) == {}


@pytest.mark.parametrize("command", [("--version",), ("channel", "log", "--channel", "/nowhere", "--json")])
def test_a_command_warns_once_on_stderr_and_does_its_work(command: tuple[str, ...]) -> None:
    bare = run_weightcast(*command)
    told = run_weightcast(*command, env=os.environ | {"WEIGHTCAST_TOKENS": "s3cret"})
    assert (told.returncode, told.stdout) == (bare.returncode, bare.stdout)
    warning = "warning: nothing reads the variable WEIGHTCAST_TOKENS; did you mean WEIGHTCAST_TOKEN?\n"
    assert told.stderr == warning + bare.stderr
