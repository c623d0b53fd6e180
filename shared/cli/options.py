"""Options that several commands take. Light to import: `publish` and `sync` are called for every version."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from weightcast.shared.files.paths import ChannelAddress, NotAnAddress, at_home, channel_address

F = TypeVar("F", bound=Callable[..., object])


def path(text: str) -> Path:
    """A type of options: it may begin with ~/, which shells leave alone after `--flag=`."""
    return at_home(Path(text))


def channel_place(text: str) -> ChannelAddress:
    """A type of options."""
    try:
        return channel_address(text)
    except NotAnAddress as error:
        raise click.BadParameter(str(error)) from None


class Number(click.FloatRange):
    """A type of options: a float in a range, not NaN, which is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


_METAVARS = {"CHANNEL_PLACE": "CHANNEL", "INTEGER RANGE": "INTEGER", "FLOAT RANGE": "NUMBER"}


class Option(click.Option):
    """Help has type, variable and default as those of the daemons' settings have."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **{"show_envvar": True, "show_default": True} | attributes)

    def make_metavar(self, ctx: click.Context) -> str:
        name = super().make_metavar(ctx)
        return (
            "|".join(self.type.choices) if isinstance(self.type, click.Choice) else _METAVARS.get(name, name)
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].replace("[env var: ", "[").replace("  [", " ["))


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """A decorator, as `click.option`."""
    return click.option(*names, cls=Option, **attributes)


_CHANNEL: dict[str, Any] = {
    "type": channel_place,
    "envvar": "WEIGHTCAST_CHANNEL",
    "help": "The channel: a directory, or a URL (s3://, gs://, az://; to read it also http[s]://).",
}
_COMPONENT = "weightcast.component"


def _keep_component(context: click.Context, parameter: click.Parameter, name: str | None) -> None:
    context.meta[_COMPONENT] = name


def _of_component(context: click.Context, parameter: click.Parameter, channel: Any) -> Any:
    """The channel itself, or the store of the component's."""
    name = context.meta.get(_COMPONENT)
    if name is None or channel is None:
        return channel
    from weightcast.shared.channel.channel import Channel
    from weightcast.shared.channel.components import open_component, require_listed
    from weightcast.shared.channel.directory_store import open_store

    run = Channel.open(open_store(channel))
    return open_component(run, require_listed(run, name).name).store


channel_option = option("--channel", required=True, callback=_of_component, **_CHANNEL)
component_option = option(
    "--component",
    callback=_keep_component,
    is_eager=True,
    expose_value=False,
    help="Component whose channel is meant: adapter/NAME or draft; unset: main.",
)
any_channel_option = option("--channel", **_CHANNEL)
local_option = option(
    "--local",
    type=path,
    required=True,
    envvar="WEIGHTCAST_LOCAL",
    help="Local checkpoint: the directory that engines load from.",
)
trusted_key_option = option(
    "--trusted-key",
    multiple=True,
    envvar="WEIGHTCAST_TRUSTED_KEY",
    help="Public key (ed25519:...), or file of them; repeatable. Unsigned versions are refused.",
)
sign_key_option = option(
    "--sign-key", type=path, envvar="WEIGHTCAST_SIGN_KEY", help="File with the key that signs."
)
threads_option = option(
    "--threads",
    type=click.IntRange(min=1),
    envvar="WEIGHTCAST_THREADS",
    help="Worker threads; unset: all usable cores.",
)
unfenced_option = option(
    "--unfenced",
    is_flag=True,
    help="Write also to a store that ignores conditions of writes: nothing keeps a second publisher out.",
)
token_option = option("--token", envvar="WEIGHTCAST_TOKEN", help="Bearer token of the daemon.")


ca_option = option(
    "--ca",
    type=path,
    envvar="WEIGHTCAST_CA",
    help="PEM file with the authorities of https; unset: the system's.",
)
cert_option = option(
    "--tls-cert",
    type=path,
    envvar="WEIGHTCAST_TLS_CERT",
    help="PEM file with a certificate for daemons that require one.",
)
key_option = option(
    "--tls-key",
    type=path,
    envvar="WEIGHTCAST_TLS_KEY",
    help="PEM file with the private key of --tls-cert; unset: in the same file.",
)


def daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --token, --ca, --tls-cert, --tls-key. The command takes `token` and `trust_for`, as Daemon."""

    @wraps(command)
    def run(*given: Any, ca: Path | None, tls_cert: Path | None, tls_key: Path | None, **named: Any) -> None:
        from weightcast.shared.daemon.tls import client_context

        command(*given, trust_for=partial(client_context, ca=ca, cert=tls_cert, key=tls_key), **named)

    for each in (key_option, cert_option, ca_option, token_option):
        run = each(run)
    return run


json_option = option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
