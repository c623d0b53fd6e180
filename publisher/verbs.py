"""Verbs of the publisher's side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.channel_repair import Repairs, repair_channel
from weightcast.publisher.finite import NonFinite
from weightcast.publisher.publisher import Publisher
from weightcast.publisher.queue import Publication
from weightcast.publisher.resign import sign_channel
from weightcast.publisher.settings import PublisherSettings
from weightcast.publisher.status import publication, total_seconds
from weightcast.publisher.upkeep import UpkeepOptions
from weightcast.publisher.verbs_care import register_care
from weightcast.shared.channel.index import Encoding
from weightcast.shared.channel.keys import load_private_key
from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import DamagedFile
from weightcast.shared.service.cli import group
from weightcast.shared.service.logs import setup_logs
from weightcast.shared.service.options import settings_command
from weightcast.shared.service.output import (
    ChannelOption,
    JsonOption,
    Output,
    SignKeyOption,
    TrustedKeyOption,
    printable,
    time_text,
)
from weightcast.shared.service.settings import working_threads
from weightcast.shared.service.verbs_channel import show_problems

ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Working threads; unset: every core allowed.")
]


def register(app: typer.Typer) -> None:
    publisher = group(app, "publisher", "The trainer's side.")
    settings_command(publisher, "run", PublisherSettings, "Publish what the trainer writes, until stopped.")(
        _run
    )
    channel = group(app, "channel", "Make and inspect channels.")
    channel.command("init")(init)
    channel.command("sign")(sign)
    channel.command("repair")(repair)
    register_care(app)
    app.command("publish")(publish)


def _run(settings: PublisherSettings) -> None:
    # the web framework costs a second of start-up that one-shots need not pay
    from weightcast.publisher.daemon import run_publisher

    setup_logs(settings.log_format, settings.log_level)
    run_publisher(settings)


def repair(
    channel: ChannelOption,
    local: Annotated[
        Path | None, typer.Option("--local", help="The publisher's local checkpoint, to restore from.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the channel from a publisher that seems alive.")
    ] = False,
    sign_key: SignKeyOption = None,
    trusted_key: TrustedKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring right what can be in a channel; move what no host can use to .trash; say what is lost."""
    output = Output(json=as_json)
    with output.progress(f"reading {channel}", None) as advance:
        done = repair_channel(
            channel,
            local,
            take_over=take_over,
            advance=advance,
            sign_key=sign_key,
            trusted_keys=tuple(trusted_key or ()),
        )
    facts = {
        "channel": str(channel),
        "done": done.done,
        "left": [vars(problem) for problem in done.left],
        "notes": done.notes,
    }
    output.result(facts, lambda console: _show_repairs(console, done))
    if done.left:
        raise typer.Exit(DamagedFile.exit_code)


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
        typer.Option("--alias", metavar="A=B", help="Tensor A is always the same as B; repeatable."),
    ] = None,
    threads: ThreadsOption = None,
    sign_key: SignKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a channel from the checkpoint that the run starts from."""
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
    }
    shown = facts | {
        "created": time_text(made.created),
        "frozen": ", ".join(made.frozen) or "-",
        "signed_by": facts["signed_by"] or "-",
        "aliases": ", ".join(f"{name}={target}" for name, target in made.aliases.items()) or "-",
    }
    output.result(facts, lambda console: _show_facts(console, shown))


def sign(
    channel: ChannelOption,
    sign_key: Annotated[
        Path, typer.Option("--sign-key", envvar="WEIGHTCAST_SIGN_KEY", help="File with the key that signs.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Sign all that a channel holds, whoever wrote it: to begin with signatures, or to replace a key."""
    output = Output(json=as_json)
    key = load_private_key(sign_key)
    with output.progress(f"reading {channel}", None) as advance:
        versions = sign_channel(channel, key, advance)
    facts = {"channel": str(channel), "versions": versions, "signed_by": key.public.id}
    output.result(facts, lambda console: _show_facts(console, facts))


def publish(
    checkpoint: Annotated[Path, typer.Argument(help="HF checkpoint directory with the new weights.")],
    channel: ChannelOption,
    local: Annotated[Path, typer.Option("--local", help="The publisher's own local checkpoint.")],
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The run's base; needed the first time. The channel must be there."),
    ] = None,
    encoding: Annotated[str, typer.Option("--encoding", metavar="fast|small|xor|overwrite")] = "fast",
    step: Annotated[int | None, typer.Option("--step", min=0, help="The trainer's step.")] = None,
    threads: ThreadsOption = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the channel from a publisher that seems alive.")
    ] = False,
    sign_key: SignKeyOption = None,
    trusted_key: TrustedKeyOption = None,
    skip_span: Annotated[
        int,
        typer.Option("--skip-span", min=0, help="Make deltas from up to so many versions back; 0: none."),
    ] = 0,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Write full weights beside the version, for new hosts.")
    ] = False,
    non_finite: Annotated[
        str,
        typer.Option("--non-finite", metavar="refuse|allow", help="Elements that become NaN or infinite."),
    ] = "allow",
    as_json: JsonOption = False,
) -> None:
    """Publish one checkpoint as the channel's next version."""
    output = Output(json=as_json)
    _, described = Channel.open(channel).require_ours()
    with (
        Publisher.open(
            channel,
            local=local,
            base=base,
            encoding=_one_of(Encoding, encoding, "--encoding"),
            threads=working_threads(threads),
            take_over=take_over,
            sign_key=sign_key,
            trusted_keys=trusted_key or (),
            non_finite=_one_of(NonFinite, non_finite, "--non-finite"),
            upkeep=UpkeepOptions(skip_span=skip_span) if skip_span else None,
        ) as publisher,
        output.progress(f"publishing {checkpoint.name}", described.table.nbytes) as advance,
    ):
        report = publisher.publish_checkpoint(checkpoint, step=step, advance=advance)
        publisher.make_due()
        if anchor:
            publisher.write_anchor()
    done = publication(report, str(checkpoint))
    output.result(done, lambda console: _show(console, done))


def _one_of(choices: Any, text: str, flag: str) -> Any:
    """`choices`: a Literal."""
    if text in get_args(choices):
        return text
    raise typer.BadParameter(f"{text} is not one of {', '.join(get_args(choices))}", param_hint=flag)


def _alias(text: str) -> tuple[str, str]:
    name, equals, target = text.partition("=")
    if not equals or not name or not target:
        raise typer.BadParameter(f"{text} is not A=B", param_hint="--alias")
    return name, target


def _show(console: Console, done: Publication) -> None:
    ratio = done.full_bytes / done.delta_bytes if done.delta_bytes else 0.0
    _show_facts(
        console,
        {
            "version": done.version,
            "step": "-" if done.step is None else done.step,
            "changed elements": f"{done.changed_elements:,} ({done.density_elements:.4%})",
            "changed bytes": f"{done.density_bytes:.4%}",
            "delta": f"{done.delta_bytes:,} bytes",
            "full": f"{done.full_bytes:,} bytes (ratio {ratio:,.1f})",
            "bits per change": f"{done.bits_per_change:.2f}",
            "seconds": f"{total_seconds(done.seconds):.3f}",
            **({"names": ", ".join(f"{r}: {n}" for r, n in done.mapped.items())} if done.mapped else {}),
        },
    )


def _show_facts(console: Console, facts: dict[str, object]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
