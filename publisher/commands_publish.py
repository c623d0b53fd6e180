"""The command `publish`, in a module of its own: it imports no more than it needs, for help only options."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from weightcast.shared.base.choices import CARRY_CONFIG, MAIN, Encoding, Layout, NonFinite, SchemeName, size
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.cli.options import (
    channel_option,
    json_option,
    option,
    path,
    sign_key_option,
    threads_option,
    trusted_key_option,
    unfenced_option,
)
from weightcast.shared.cli.output import Output, facts_table, or_dash
from weightcast.shared.daemon.environment import working_threads
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.paths import ChannelAddress, exists, printable

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.publisher.api import PublisherOptions
    from weightcast.publisher.publish.publish_job import Publication
    from weightcast.publisher.weights.export_rules import ExportRules
    from weightcast.shared.channel.channel import Channel
    from weightcast.shared.channel.run_files import Base


@click.command
@click.argument("checkpoint", type=path, help="HF checkpoint directory with the new weights.")
@channel_option
@option("--component", default=MAIN, help="What it is: adapter/NAME (as peft saves it), draft, or main.")
@option("--main-version", type=click.IntRange(min=0), help="Version of main that it was trained on.")
@option(
    "--local",
    type=path,
    required=True,
    envvar="WEIGHTCAST_LOCAL",
    help="The publisher's own local checkpoint: a separate directory.",
)
@option(
    "--base",
    type=path,
    envvar="WEIGHTCAST_BASE",
    help="HF checkpoint that the run starts from; remembered for the user and machine that made the channel.",
)
@option(
    "--encoding",
    type=click.Choice(get_args(Encoding)),
    default="fast",
    envvar="WEIGHTCAST_ENCODING",
    help="Delta encoding.",
)
@option(
    "--layout",
    type=click.Choice(get_args(Layout)),
    default="plain",
    envvar="WEIGHTCAST_LAYOUT",
    help="Layout of the channel: plain, or as Stitch's replicas read it.",
)
@option("--step", type=click.IntRange(min=0), help="The trainer's step.")
@threads_option
@option("--take-over", is_flag=True, help="Take the channel over from a publisher that seems alive.")
@sign_key_option
@trusted_key_option
@option(
    "--skip-span",
    type=click.IntRange(min=0),
    default=0,
    help="Maximum span of multi-step deltas, in versions; 0: none.",
)
@option("--anchor", is_flag=True, help="Also write full weights for new hosts.")
@unfenced_option
@option("--publish-rate", type=size, help="Bytes per second to write, e.g. 50MB; 0: no limit.")
@option(
    "--non-finite",
    type=click.Choice(get_args(NonFinite)),
    default="allow",
    help="What to do with elements that become NaN or infinite.",
)
@option("--carry-config", is_flag=True, help=CARRY_CONFIG)
@option(
    "--quantise",
    type=click.Choice(get_args(SchemeName)),
    help="Format of the base; the checkpoint is quantised to it.",
)
@option("--cast", is_flag=True, help="Round floating-point tensors to the base's dtypes.")
@option(
    "--rename",
    multiple=True,
    help="A=B: replace prefix A of tensor names by B (A may contain *); repeatable.",
)
@option("--drop", multiple=True, help="Glob of tensors of the checkpoint to leave out; repeatable.")
@json_option
def publish(
    checkpoint: Path,
    channel: ChannelAddress,
    local: Path,
    base: Path | None,
    encoding: Encoding,
    step: int | None,
    threads: int | None,
    component: str,
    main_version: int | None,
    skip_span: int,
    anchor: bool,
    publish_rate: int | None,
    quantise: SchemeName | None,
    cast: bool,
    rename: tuple[str, ...],
    drop: tuple[str, ...],
    as_json: bool,
    **others: Any,
) -> None:
    """Publish one checkpoint as the channel's next version."""
    from weightcast.publisher.api import PublisherOptions
    from weightcast.publisher.maintenance.upkeep import UpkeepOptions
    from weightcast.publisher.run_publisher import RunPublisher
    from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules
    from weightcast.shared.channel.channel import Channel
    from weightcast.shared.channel.directory_store import open_store
    from weightcast.shared.channel.rate import NO_RATE, Rate

    output = Output(json=as_json)
    rules = ExportRules.of(cast, rename, drop, quantise or "")
    options = PublisherOptions(
        threads=working_threads(threads),
        trusted_keys=others.pop("trusted_key"),
        publish_rate=NO_RATE if publish_rate is None else Rate(publish_rate),
        upkeep=UpkeepOptions(skip_span=skip_span) if skip_span else None,
        upkeep_thread=False,
        **others,
    )
    run = Channel.open(open_store(channel))
    if component == MAIN:
        nbytes = _look(run, checkpoint, local, base, options.take_over, rules).table.nbytes
    elif rules != NO_RULES:
        raise click.BadParameter("--quantise, --cast, --rename and --drop are for main")
    else:
        nbytes = _add(run, component, checkpoint, options, main_version)
    with (
        RunPublisher.open(
            channel, local=local, base=base, encoding=encoding, options=options, component=component
        ) as publisher,
        output.progress(f"publishing {checkpoint.name}", nbytes) as advance,
    ):
        read = partial(publisher.open_checkpoint, checkpoint, rules)
        belongs = None if component == MAIN else publisher.trained_on(main_version)
        report = publisher.publish_weights(read, step=step, advance=advance, trained_on=belongs)
        if anchor:
            _beside(publisher.write_anchor)
        _beside(publisher.make_due)
    done = report.shown(str(checkpoint))
    output.result(done, lambda console: _show(console, done))


def _add(
    run: Channel, component: str, checkpoint: Path, options: PublisherOptions, main_version: int | None
) -> int:
    """Lists the adapter, if it is new. Returns the bytes of its tensors."""
    from weightcast.publisher.components import init_component, tensors_in, trained_on
    from weightcast.publisher.publish.commit import Signer
    from weightcast.shared.channel.components import check_name

    if options.layout == "stitch":
        raise click.BadParameter("a channel with --layout stitch has no components")
    signer = Signer.load(options.sign_key, options.trusted_keys)
    signer.check_owner(run.store)
    tensors = tensors_in(checkpoint, check_name(component))
    trained_on(run, main_version)
    init_component(run, component, lambda: tensors, signer.key)
    return tensors.nbytes


def _look(
    channel: Channel,
    checkpoint: Path,
    local: Path,
    base: Path | None,
    take_over: bool,
    rules: ExportRules,
) -> Base:
    """Before anything is claimed: what will be refused must not take the channel from a publisher."""
    from weightcast.publisher.maintenance.orders import Held, is_carried_out, standing
    from weightcast.publisher.weights.config import CONFIG, check_config
    from weightcast.publisher.weights.export_rules import adapt
    from weightcast.publisher.weights.match import match
    from weightcast.publisher.weights.tensors import CheckpointWeights, refuse_local

    file, described = channel.require_ours()
    order = standing(channel)
    # a pending order is the next owner's to carry out, but a living owner is left to do it
    if order is not None and (take_over or is_carried_out(channel)):
        raise Held.by(order)
    refuse_local(checkpoint, local)
    with contextlib.closing(CheckpointWeights(checkpoint)) as weights:
        if not rules.quantise:  # which takes long, and is done once
            adapted = adapt(weights, rules, file, described.table)
            match(adapted.table, described.table, file, partial=False, by_flags=True)
        own = next((known for known in (local, base) if known is not None and exists(known / CONFIG)), None)
        if own is not None:
            check_config(checkpoint / CONFIG, own, described.files)
    return described


def _beside(make: Callable[[], object]) -> None:
    """The version is published: a failure of maintenance must not look like a failed publication."""
    try:
        make()
    except (WeightcastError, OSError) as error:
        print(f"warning: maintenance failed: {printable(error_text(error))}", file=sys.stderr)


def _show(console: Console, done: Publication) -> None:
    from weightcast.publisher.weights.config import config_text

    adapted = ", ".join(f"{count:,} tensors {what}" for what, count in done.adapted.items() if count)
    finite = not done.non_finite_elements
    facts = {
        "version": done.version,
        "step": or_dash(done.step),
        "previous step": "" if done.resumed_from_step is None else done.resumed_from_step,
        "changed elements": f"{done.changed_elements:,} ({done.density_elements:.4%})",
        "changed bytes": f"{done.density_bytes:.4%}",
        "delta": f"{done.delta_bytes:,} bytes",
        "full": f"{done.full_bytes:,} bytes (ratio {done.ratio:,.1f})",
        "bits per change": f"{done.bits_per_change:.2f}",
        "seconds": f"{done.total_seconds:.3f}",
        "became NaN or infinite": "" if finite else f"{done.non_finite_elements:,} elements",
        "names": ", ".join(f"{rule}: {count}" for rule, count in done.mapped.items()),
        "adapted": adapted,
        "notes": "; ".join(done.notes),
        "config changed": config_text(done.not_carried) if done.not_carried else "",
        "config carried": ", ".join(done.carried),
    }
    console.print(facts_table((name, value) for name, value in facts.items() if value != ""))
