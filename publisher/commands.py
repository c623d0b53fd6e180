"""Commands of the publisher's side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from weightcast.publisher.maintenance.retention import GRACE_SECONDS, Retention, Verdict
from weightcast.shared.base.choices import MAIN, SchemeName
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import OwnerAlive, claim, require_fences, this_process
from weightcast.shared.channel.components import (
    Component,
    add_component,
    component_store,
    read_components,
    retire_component,
)
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import Pointer, index_key
from weightcast.shared.channel.signing import load_private_key
from weightcast.shared.cli.channel import base_facts, exit_code_of, show_problems
from weightcast.shared.cli.options import (
    Number,
    channel_option,
    component_option,
    json_option,
    option,
    path,
    sign_key_option,
    threads_option,
    trusted_key_option,
    unfenced_option,
)
from weightcast.shared.cli.output import Output, facts_table, or_dash, time_text
from weightcast.shared.daemon.environment import working_threads
from weightcast.shared.files.hf_checkpoint import left_text, side_files
from weightcast.shared.files.paths import ChannelAddress, printable

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.publisher.maintenance.repair import Repairs
    from weightcast.publisher.publish.commit import Signer

_MADE = ("run_id", "created", "frozen", "aliases", "tensors", "elements", "full_bytes", "root")


@click.command
@channel_option
@component_option
@option("--local", type=path, help="Local checkpoint of the stopped publisher, to restore from.")
@option("--take-over", is_flag=True, help="Take the channel over from a publisher that seems alive.")
@unfenced_option
@sign_key_option
@trusted_key_option
@json_option
def repair(
    channel: ChannelAddress, local: Path | None, trusted_key: tuple[str, ...], as_json: bool, **others: Any
) -> None:
    """Repair a channel with its components, and move unreadable versions aside (to .trash). A running
    publisher does the repair; the command waits for it."""
    from weightcast.publisher.api import PublisherOptions
    from weightcast.publisher.channel_repair import ask_for_repair, repair_channel
    from weightcast.publisher.components import component_local
    from weightcast.publisher.maintenance.repair import Repairs

    output = Output(json=as_json)
    options = PublisherOptions(trusted_keys=trusted_key, **others)
    run, done = open_store(channel), Repairs()
    stores = [run]
    with output.progress(f"reading {channel}", None) as advance:
        for store in stores:
            name = store.component
            own = local if name == MAIN or local is None else component_local(local, name)
            try:
                found = repair_channel(store, own, options, advance)
            except OwnerAlive:
                found = ask_for_repair(store, options, advance)
            if store is run and name == MAIN:
                listed = read_components(Channel.open(run))
                stores += [component_store(run, each.name) for each in listed]
            done = done.plus(found, "" if name == MAIN else f"{name}: ")
    facts = {
        "channel": str(channel),
        "done": done.done,
        "left": [vars(problem) for problem in done.left],
        "notes": done.notes,
    }
    output.result(facts, lambda console: _show_repairs(console, done))
    if done.left:
        raise click.exceptions.Exit(exit_code_of(done.left))


def _show_repairs(console: Console, done: Repairs) -> None:
    for line in done.done or ["nothing was changed"]:
        console.print(printable(line))
    show_problems(done.left)
    for note in done.notes:
        console.print(printable(note))


@click.command
@channel_option
@component_option
@json_option
def anchor(channel: ChannelAddress, as_json: bool) -> None:
    """Have the running publisher write full weights of the newest version: hosts can join without a base."""
    from weightcast.publisher.channel_repair import ask_for_anchor

    version = ask_for_anchor(open_store(channel))
    done = "ordered: the next publisher writes it" if version is None else f"version {version} has an anchor"
    _say(done, {"version": version}, as_json)


@click.command
@click.argument("source", type=path, help="HF checkpoint directory in bf16 or fp32.")
@click.argument("target", type=path, help="New directory, the base of a quantised run.")
@option("--scheme", type=click.Choice(get_args(SchemeName)), required=True, help="Format of the weights.")
@json_option
def quantise(source: Path, target: Path, scheme: SchemeName, as_json: bool) -> None:
    """Quantise a checkpoint, with the quantization_config that engines need. Requires torch."""
    from weightcast.publisher.weights.quantise import quantise_checkpoint
    from weightcast.shared.checkpoint.update.sources import open_base

    quantise_checkpoint(source, target, scheme)
    before, after = (open_base(each).table.nbytes for each in (source, target))
    facts = {"target": str(target), "scheme": scheme, "source_bytes": before, "bytes": after}
    sizes = {"source": f"{before:,} bytes", "weights": f"{after:,} bytes ({after / max(before, 1):.1%})"}
    shown = {"target": str(target), "scheme": scheme, **sizes}
    Output(json=as_json).result(facts, lambda console: console.print(facts_table(shown.items())))


@click.command
@channel_option
@option("--base", type=path, required=True, help="HF checkpoint directory that the run starts from.")
@option("--frozen", multiple=True, help="Glob of tensors that never change; repeatable.")
@option("--alias", multiple=True, metavar="A=B", help="Tensor A always equals B; repeatable.")
@threads_option
@unfenced_option
@sign_key_option
@json_option
def init(
    channel: ChannelAddress,
    base: Path,
    frozen: Sequence[str],
    alias: Sequence[str],
    threads: int | None,
    unfenced: bool,
    sign_key: Path | None,
    as_json: bool,
) -> None:
    """Create a channel from the checkpoint that the run starts from."""
    from weightcast.publisher.channel_init import init_channel
    from weightcast.shared.checkpoint.update.sources import open_base

    aliases = dict(map(_alias, alias))
    output, began = Output(json=as_json), time.time()
    with output.progress("reading the base", None) as advance:
        init_channel(
            channel,
            base,
            frozen=frozen,
            aliases=aliases,
            threads=working_threads(threads),
            advance=advance,
            unfenced=unfenced,
            sign_key=sign_key,
        )
    made, opened = base_facts(Channel.open(open_store(channel))), open_base(base)
    existed = made["created"] < began
    notes = ["the channel exists already, made from this base", *opened.notes] if existed else opened.notes
    left = side_files(opened).left
    facts = {
        "channel": str(channel),
        **{name: made[name] for name in _MADE},
        "signed_by": None if sign_key is None else load_private_key(sign_key).public.id,
        "notes": list(notes),
    }
    shown = facts | {
        "created": time_text(made["created"]),
        "frozen": ", ".join(made["frozen"]) or "-",
        "signed_by": facts["signed_by"] or "-",
        "aliases": ", ".join(f"{name}={target}" for name, target in made["aliases"].items()) or "-",
        "notes": "; ".join(notes) or "-",
        **({"left behind": left_text(left, most=20)} if left else {}),
    }
    output.result(
        facts | {"left_behind": list(left)}, lambda console: console.print(facts_table(shown.items()))
    )


@click.command
@channel_option
@component_option
@option(
    "--sign-key",
    type=path,
    required=True,
    envvar="WEIGHTCAST_SIGN_KEY",
    help="File with the key that signs.",
)
@json_option
def sign(channel: ChannelAddress, sign_key: Path, as_json: bool) -> None:
    """Sign every version of a channel: to introduce signatures, or to replace a key."""
    from weightcast.publisher.channel_repair import sign_channel

    output = Output(json=as_json)
    key = load_private_key(sign_key)
    with output.progress(f"reading {channel}", None) as advance:
        versions = sign_channel(open_store(channel), key, advance)
    facts = {"channel": str(channel), "versions": versions, "signed_by": key.public.id}
    output.result(facts, lambda console: console.print(facts_table(facts.items())))


def _alias(text: str) -> tuple[str, str]:
    name, equals, target = text.partition("=")
    if not equals or not name or not target:
        raise click.BadParameter(f"{text} is not A=B", param_hint="--alias")
    return name, target


version_argument = click.argument("version", type=click.IntRange(min=0), help="A version's number.")


@click.command
@channel_option
@component_option
@option("--keep-versions", type=click.IntRange(min=1), help="Keep this many of the newest versions.")
@option("--keep-hours", type=Number(min=0.0), help="Keep versions younger than this.")
@option(
    "--host-versions",
    type=click.IntRange(min=0),
    default=64,
    help="Maximum number of additional versions kept for hosts that are behind.",
)
@option(
    "--grace-seconds",
    type=Number(min=0.0),
    default=GRACE_SECONDS,
    help="Seconds that pruned versions stay in the trash.",
)
@option("--dry-run", is_flag=True, help="Only list what would be removed, and why.")
@unfenced_option
@json_option
def prune(
    channel: ChannelAddress,
    keep_versions: int | None,
    keep_hours: float | None,
    host_versions: int,
    grace_seconds: float,
    dry_run: bool,
    unfenced: bool,
    as_json: bool,
) -> None:
    """Move versions that nobody needs to the trash, and empty it. A running publisher does this itself with
    --keep-versions or --keep-hours."""
    from weightcast.publisher.maintenance.prune import ActiveHosts, is_due, what_to_prune

    retention = Retention(keep_versions, keep_hours, host_versions)
    if not retention.bounded:
        raise click.BadParameter("give --keep-versions, --keep-hours or both")
    opened, pointer = _opened(channel)
    verdict = what_to_prune(opened, pointer, ActiveHosts(), retention)
    deleted = 0
    if not dry_run and (verdict.removals or is_due(opened.store, grace_seconds)):
        require_fences(opened.store, unfenced=unfenced)
        deleted = _prune(opened, verdict, grace_seconds)
    not_pruned = [each.name for each in read_components(opened)]
    facts = {
        "channel": str(channel),
        "dry_run": dry_run,
        "horizon": verdict.horizon,
        "why_not": verdict.why_not,
        "removals": [vars(removal) for removal in verdict.removals],
        "deleted": deleted,
        "not_pruned": not_pruned,
    }
    Output(json=as_json).result(facts, lambda console: _show(console, verdict, dry_run, deleted, not_pruned))


def _opened(channel: ChannelAddress) -> tuple[Channel, Pointer]:
    opened = Channel.open(open_store(channel))
    opened.require_ours()
    return opened, opened.pointer() or Pointer(0)


def _prune(channel: Channel, verdict: Verdict, grace_seconds: float) -> int:
    """Returns how many were deleted."""
    from weightcast.publisher.maintenance.prune import empty_trash
    from weightcast.publisher.maintenance.prune import prune as carry_out

    try:
        claimed = claim(channel.store, this_process(), take_over=False)
    except Refused as error:
        if not verdict.removals:
            return 0  # its owner empties the trash
        raise Refused(
            error.message, remedy="the running publisher prunes when it is started with --keep-versions"
        ) from error
    try:
        carry_out(verdict, claimed)
        return empty_trash(channel.store, grace_seconds)
    finally:
        claimed.release()


def _show(console: Console, verdict: Verdict, dry_run: bool, deleted: int, others: list[str]) -> None:
    for removal in verdict.removals:
        console.print(f"version {removal.version}, {removal.nbytes:,} bytes: {removal.why}")
    nbytes = sum(removal.nbytes for removal in verdict.removals)
    if verdict.why_not:
        console.print(f"nothing to prune: {verdict.why_not}")
    else:
        console.print(f"{nbytes:,} bytes {'would be pruned' if dry_run else 'pruned'}")
    if deleted:
        console.print(f"deleted {deleted} earlier pruned version{'' if deleted == 1 else 's'} from the trash")
    if others:
        console.print(f"not pruned, each with --component: {', '.join(others)}")


@click.command
@version_argument
@channel_option
@component_option
@json_option
def keep(version: int, channel: ChannelAddress, as_json: bool) -> None:
    """Keep a version when older ones are pruned."""
    _require_published(channel, version)
    store = open_store(channel)
    pins.keep(store, version)
    _say(f"version {version} is kept", {"kept": pins.kept(store)}, as_json)


@click.command
@version_argument
@channel_option
@component_option
@json_option
def unkeep(version: int, channel: ChannelAddress, as_json: bool) -> None:
    """Allow a kept version to be pruned."""
    store = open_store(channel)
    if not pins.unkeep(store, version):
        raise Refused(f"version {version} was not kept", remedy=f"kept are {pins.kept(store) or 'none'}")
    _say(f"version {version} may be pruned", {"kept": pins.kept(store)}, as_json)


@click.command
@click.argument("name", required=False, help="Name that hosts can follow with --target NAME; none: list all.")
@click.argument("version", type=click.IntRange(min=0), required=False, help="Version that the tag points to.")
@channel_option
@component_option
@option("--delete", is_flag=True, help="Delete the tag.")
@json_option
def tag(name: str | None, version: int | None, channel: ChannelAddress, delete: bool, as_json: bool) -> None:
    """List tags, or point one at a version: hosts that follow it move there. Tagged versions are kept."""
    store = open_store(channel)
    if name is None and not delete:
        known = pins.tags(store)
        rows = [f"{each} is {known[each]}" for each in known] or ["no tags"]
        _say("\n".join(map(printable, rows)), {"tags": known}, as_json)
        return
    if name is None or delete == (version is not None):
        raise click.BadParameter("give a name and a version, or a name and --delete")
    if version is not None:
        _require_published(channel, version)
        pins.set_tag(store, name, version)
    elif not pins.delete_tag(store, name):
        raise Refused(f"there is no tag {name[:80]!r}", remedy="list tags with `weightcast channel tag`")
    _say(f"{name} is {'gone' if delete else version}", {"tags": pins.tags(store)}, as_json)


def _require_published(channel: ChannelAddress, version: int) -> None:
    opened, pointer = _opened(channel)
    there = version == 0 or (version <= pointer.version and opened.store.stat(index_key(version)) is not None)
    if not there:
        raise Refused(
            f"version {version} is not in the channel", remedy="list versions with `weightcast channel log`"
        )


@click.command
@channel_option
@component_option
@option("--to", type=click.IntRange(min=0), required=True, help="Version to publish again.")
@json_option
def rollback(channel: ChannelAddress, to: int, as_json: bool) -> None:
    """Publish an older version's bytes again and hold publishing until `resume`."""
    from weightcast.publisher.maintenance.orders import order_rollback

    order = order_rollback(open_store(channel), to)
    _say(
        f"rollback to version {to} ordered: its weights are published under a new number, and nothing else "
        "until `weightcast channel resume`",
        {"to": order.to, "root": order.root, "held": True},
        as_json,
    )


@click.command
@channel_option
@component_option
@json_option
def resume(channel: ChannelAddress, as_json: bool) -> None:
    """Resume publishing after a rollback, or cancel a pending rollback."""
    _opened(channel)
    store = open_store(channel)
    waiting = pins.waiting(store)
    if not pins.resume(store):
        raise Refused("publishing is not held", remedy="nothing to do")
    next_ = f"; published next: {printable(', '.join(waiting))}" if waiting else ""
    _say(f"publishing resumes{next_}", {"held": False, "waiting": waiting}, as_json)


def _say(text: str, facts: dict[str, object], as_json: bool) -> None:
    Output(json=as_json).result(facts, lambda console: console.print(text))


name_argument = click.argument("name", help="adapter/NAME or draft.")


@click.command
@name_argument
@channel_option
@option("--like", type=path, required=True, help="Directory of an adapter or draft with the same tensors.")
@sign_key_option
@json_option
def add_to_run(name: str, channel: ChannelAddress, like: Path, sign_key: Path | None, as_json: bool) -> None:
    """Add an adapter or draft model to a run by its tensors. Its first publication does this too."""
    from weightcast.publisher.components import init_component, tensors_in

    opened, signer = _signed(channel, sign_key)
    init_component(opened, name, partial(tensors_in, like, name), signer.key)
    _say_state(add_component(opened, name), as_json)


@click.command
@name_argument
@channel_option
@sign_key_option
@json_option
def retire_from_run(name: str, channel: ChannelAddress, sign_key: Path | None, as_json: bool) -> None:
    """End an adapter or draft model: nothing more is published, and hosts unload adapters. Versions stay."""
    opened, signer = _signed(channel, sign_key)
    _say_state(retire_component(opened, name, signer.key), as_json)


def _signed(channel: ChannelAddress, sign_key: Path | None) -> tuple[Channel, Signer]:
    from weightcast.publisher.publish.commit import Signer

    store, signer = open_store(channel), Signer.load(sign_key)
    signer.check_owner(store)
    return Channel.open(store), signer


def _say_state(component: Component, as_json: bool) -> None:
    _say(f"{component.name} is {component.state}", vars(component), as_json)


@click.command
@channel_option
@json_option
def log_components(channel: ChannelAddress, as_json: bool) -> None:
    """List adapters and draft model of a run with their newest versions."""
    from weightcast.publisher.components import facts_of

    opened = Channel.open(open_store(channel))
    rows = [facts_of(opened, each) for each in read_components(opened)]
    facts = {"channel": str(channel), "components": rows}
    Output(json=as_json).result(facts, lambda console: _table(console, rows))


def _table(console: Console, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("component", "state", "version", "trained on", "step", "bytes", "full", "added"):
        table.add_column(title, justify="left" if title in ("component", "state") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            row["state"],
            str(row["version"]),
            or_dash(row["main_version"]),
            or_dash(row["step"]),
            or_dash(row["bytes"], "{:,}"),
            f"{row['full_bytes']:,}",
            time_text(row["added"]),
        )
    console.print(table)
