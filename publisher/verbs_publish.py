"""The verb `publish`, in a module of its own: that command imports no more than it needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from weightcast.publisher.finite import NonFinite
from weightcast.publisher.publisher import Publisher
from weightcast.publisher.upkeep import UpkeepOptions
from weightcast.shared.channel.index import Encoding
from weightcast.shared.channel.store import Channel
from weightcast.shared.service.output import (
    ChannelOption,
    JsonOption,
    Output,
    SignKeyOption,
    TrustedKeyOption,
)
from weightcast.shared.service.threads import working_threads

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.publisher.queue import Publication

ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="Working threads; unset: every core allowed.")
]


def register(app: typer.Typer) -> None:
    app.command("publish")(publish)


def publish(
    checkpoint: Annotated[Path, typer.Argument(help="HF checkpoint directory with the new weights.")],
    channel: ChannelOption,
    local: Annotated[Path, typer.Option("--local", help="The publisher's own local checkpoint.")],
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The run's base; needed the first time. The channel must be there."),
    ] = None,
    encoding: Annotated[
        str, typer.Option("--encoding", metavar="fast|small|xor|overwrite", help="Of the delta.")
    ] = "fast",
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
    from weightcast.publisher.queue import publication, total_seconds

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
    output.result(done, lambda console: _show(console, done, total_seconds(done.seconds)))


def _one_of(choices: Any, text: str, flag: str) -> Any:
    """`choices`: a Literal."""
    if text in get_args(choices):
        return text
    raise typer.BadParameter(f"{text} is not one of {', '.join(get_args(choices))}", param_hint=flag)


def _show(console: Console, done: Publication, seconds: float) -> None:
    ratio = done.full_bytes / done.delta_bytes if done.delta_bytes else 0.0
    show_facts(
        console,
        {
            "version": done.version,
            "step": "-" if done.step is None else done.step,
            "changed elements": f"{done.changed_elements:,} ({done.density_elements:.4%})",
            "changed bytes": f"{done.density_bytes:.4%}",
            "delta": f"{done.delta_bytes:,} bytes",
            "full": f"{done.full_bytes:,} bytes (ratio {ratio:,.1f})",
            "bits per change": f"{done.bits_per_change:.2f}",
            "seconds": f"{seconds:.3f}",
            **(
                {"became NaN or infinite": f"{done.non_finite_elements:,} elements"}
                if done.non_finite_elements
                else {}
            ),
            **({"names": ", ".join(f"{r}: {n}" for r, n in done.mapped.items())} if done.mapped else {}),
        },
    )


def show_facts(console: Console, facts: dict[str, object]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
