"""Verbs of the publisher's side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightcast.publisher import commands_publish
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.channel_repair import ask_for_repair, repair_channel
from weightcast.publisher.commands_channel import register_maintenance
from weightcast.publisher.commands_publish import show_facts
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.maintenance.re_sign import sign_channel
from weightcast.publisher.maintenance.repair import Repairs
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import OwnerAlive
from weightcast.shared.channel.signing import load_private_key
from weightcast.shared.checkpoint.local_updater import open_base
from weightcast.shared.cli.app import (
    ChannelOption,
    JsonOption,
    SignKeyOption,
    ThreadsOption,
    TrustedKeyOption,
    group,
)
from weightcast.shared.cli.channel import exit_code_of, show_problems
from weightcast.shared.cli.options import settings_command, show_settings_command
from weightcast.shared.cli.output import Output, time_text
from weightcast.shared.daemon.logs import setup_logs
from weightcast.shared.daemon.threads import working_threads
from weightcast.shared.files.paths import printable
from weightcast.shared.files.side_files import left_text, side_files


def register(app: typer.Typer) -> None:
    publisher = group(app, "publisher", "The trainer's side.")
    settings_command(publisher, "run", PublisherSettings, "Publish what the trainer writes, until stopped.")(
        _run
    )
    show_settings_command(app, "publisher", PublisherSettings)
    channel = group(app, "channel", "Make and inspect channels.")
    channel.command("init")(init)
    channel.command("sign")(sign)
    channel.command("repair")(repair)
    register_maintenance(app)
    commands_publish.VERB.register(app)


def _run(settings: PublisherSettings) -> None:
    # the web framework costs a second of start-up that one-shots need not pay
    from weightcast.publisher.daemon.daemon import run_publisher

    setup_logs(settings.log_format, settings.log_level)
    run_publisher(settings)


def repair(
    channel: ChannelOption,
    local: Annotated[
        Path | None,
        typer.Option("--local", help="Local checkpoint of the stopped publisher, to restore from."),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the channel over from a publisher that seems alive.")
    ] = False,
    sign_key: SignKeyOption = None,
    trusted_key: TrustedKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Repair a channel and move unreadable versions aside (to .trash). A running publisher does the repair;
    the command waits for it."""
    output, keys = Output(json=as_json), tuple(trusted_key or ())
    with output.progress(f"reading {channel}", None) as advance:
        try:
            done = repair_channel(
                channel,
                local,
                take_over=take_over,
                advance=advance,
                sign_key=sign_key,
                trusted_keys=keys,
            )
        except OwnerAlive:
            done = ask_for_repair(channel, advance=advance, trusted_keys=keys)
    facts = {
        "channel": str(channel),
        "done": done.done,
        "left": [vars(problem) for problem in done.left],
        "notes": done.notes,
    }
    output.result(facts, lambda console: _show_repairs(console, done))
    if done.left:
        raise typer.Exit(exit_code_of(done.left))


def _show_repairs(console: Console, done: Repairs) -> None:
    for line in done.done or ["nothing was changed"]:
        console.print(printable(line))
    show_problems(done.left)
    for note in done.notes:
        console.print(printable(note))


def init(
    channel: ChannelOption,
    base: Annotated[Path, typer.Option("--base", help="HF checkpoint directory that the run starts from.")],
    frozen: Annotated[
        list[str] | None, typer.Option("--frozen", help="Glob of tensors that never change; repeatable.")
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="A=B", help="Tensor A always equals B; repeatable."),
    ] = None,
    threads: ThreadsOption = None,
    sign_key: SignKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a channel from the checkpoint that the run starts from."""
    aliases = dict(map(_alias, alias or []))
    output = Output(json=as_json)
    with output.progress("reading the base", None) as advance:
        made = init_channel(
            channel,
            base,
            frozen=frozen or (),
            aliases=aliases,
            threads=working_threads(threads),
            advance=advance,
            sign_key=sign_key,
        )
    _, described = Channel.open(channel).require_ours()
    opened = open_base(base)
    notes, left = opened.notes, side_files(opened).left
    facts = {
        "channel": str(channel),
        "run_id": made.run_id,
        "created": made.created,
        "frozen": list(made.frozen),
        "aliases": dict(made.aliases),
        "tensors": len(described.table),
        "elements": described.table.elements,
        "full_bytes": described.table.nbytes,
        "root": described.root,
        "signed_by": None if sign_key is None else load_private_key(sign_key).public.id,
        "notes": list(notes),
    }
    shown = facts | {
        "created": time_text(made.created),
        "frozen": ", ".join(made.frozen) or "-",
        "signed_by": facts["signed_by"] or "-",
        "aliases": ", ".join(f"{name}={target}" for name, target in made.aliases.items()) or "-",
        "notes": "; ".join(notes) or "-",
        **({"left behind": left_text(left, most=20)} if left else {}),
    }
    output.result(facts | {"left_behind": list(left)}, lambda console: show_facts(console, shown))


def sign(
    channel: ChannelOption,
    sign_key: Annotated[
        Path, typer.Option("--sign-key", envvar="WEIGHTCAST_SIGN_KEY", help="File with the key that signs.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Sign every version of a channel: to introduce signatures, or to replace a key."""
    output = Output(json=as_json)
    key = load_private_key(sign_key)
    with output.progress(f"reading {channel}", None) as advance:
        versions = sign_channel(channel, key, advance)
    facts = {"channel": str(channel), "versions": versions, "signed_by": key.public.id}
    output.result(facts, lambda console: show_facts(console, facts))


def _alias(text: str) -> tuple[str, str]:
    name, equals, target = text.partition("=")
    if not equals or not name or not target:
        raise typer.BadParameter(f"{text} is not A=B", param_hint="--alias")
    return name, target
