"""Commands that maintain a channel: prune, keep, unkeep, tag, rollback, resume."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.prune import GRACE_SECONDS, ActiveHosts, empty_trash, is_due, situation
from weightcast.publisher.maintenance.prune import prune as carry_out
from weightcast.publisher.maintenance.retention import Retention, Verdict, decide
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.reports import read_reports
from weightcast.shared.cli.app import ChannelOption, JsonOption, group
from weightcast.shared.cli.output import Output
from weightcast.shared.files.paths import exists

VersionArgument = Annotated[int, typer.Argument(min=0, help="A version's number.")]


def register_maintenance(app: typer.Typer) -> None:
    channel = group(app, "channel", "Make and inspect channels.")
    for verb in (prune, keep, unkeep, tag, rollback, resume):
        channel.command(verb.__name__)(verb)


def prune(
    channel: ChannelOption,
    keep_versions: Annotated[
        int | None, typer.Option("--keep-versions", min=1, help="Keep this many of the newest versions.")
    ] = None,
    keep_hours: Annotated[
        float | None, typer.Option("--keep-hours", min=0.0, help="Keep versions younger than this.")
    ] = None,
    host_versions: Annotated[
        int,
        typer.Option(
            "--host-versions",
            min=0,
            help="Maximum number of additional versions kept for hosts that are behind.",
        ),
    ] = 64,
    grace_seconds: Annotated[
        float,
        typer.Option("--grace-seconds", min=0.0, help="Seconds that pruned versions stay in the trash."),
    ] = GRACE_SECONDS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed, and why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Move versions that nobody needs to the trash, and empty it. A running publisher does this itself with
    --keep-versions or --keep-hours."""
    retention = Retention(keep_versions, keep_hours, host_versions)
    if not retention.bounded:
        raise typer.BadParameter("give --keep-versions, --keep-hours or both")
    opened, pointer = _opened(channel)
    hosts = ActiveHosts().versions(read_reports(channel))
    verdict = decide(situation(opened, pointer, hosts, time.time()), retention)
    deleted = 0
    if not dry_run and (verdict.removals or is_due(opened.layout, grace_seconds)):
        deleted = _prune(opened, verdict, grace_seconds)
    facts = {
        "channel": str(channel),
        "dry_run": dry_run,
        "horizon": verdict.horizon,
        "why_not": verdict.why_not,
        "removals": [vars(removal) for removal in verdict.removals],
        "deleted": deleted,
    }
    Output(json=as_json).result(facts, lambda console: _show(console, verdict, dry_run, deleted))


def _opened(channel: ChannelOption) -> tuple[Channel, Pointer]:
    opened = Channel.open(channel)
    opened.require_ours()
    return opened, opened.pointer() or Pointer(0)


def _prune(channel: Channel, verdict: Verdict, grace_seconds: float) -> int:
    """Returns how many were deleted."""
    try:
        claimed = claim(channel.directory, this_process(), take_over=False)
    except Refused as error:
        if not verdict.removals:
            return 0  # its owner empties the trash
        raise Refused(
            error.message, remedy="the running publisher prunes when it is started with --keep-versions"
        ) from error
    try:
        carry_out(channel, verdict, claimed)
        return empty_trash(channel.layout, grace_seconds)
    finally:
        claimed.release()


def _show(console: Console, verdict: Verdict, dry_run: bool, deleted: int) -> None:
    for removal in verdict.removals:
        console.print(f"version {removal.version}, {removal.nbytes:,} bytes: {removal.why}")
    nbytes = sum(removal.nbytes for removal in verdict.removals)
    if verdict.why_not:
        console.print(f"nothing to prune: {verdict.why_not}")
    else:
        console.print(f"{nbytes:,} bytes {'would be pruned' if dry_run else 'pruned'}")
    if deleted:
        console.print(f"deleted {deleted} earlier pruned version{'' if deleted == 1 else 's'} from the trash")


def keep(version: VersionArgument, channel: ChannelOption, as_json: JsonOption = False) -> None:
    """Keep a version when older ones are pruned."""
    _require_published(channel, version)
    pins.keep(channel, version)
    _say(f"version {version} is kept", {"kept": pins.kept(channel)}, as_json)


def unkeep(version: VersionArgument, channel: ChannelOption, as_json: JsonOption = False) -> None:
    """Allow a kept version to be pruned."""
    if not pins.unkeep(channel, version):
        raise Refused(f"version {version} was not kept", remedy=f"kept are {pins.kept(channel) or 'none'}")
    _say(f"version {version} may be pruned", {"kept": pins.kept(channel)}, as_json)


def tag(
    name: Annotated[str, typer.Argument(help="Name that hosts can follow with --target NAME.")],
    channel: ChannelOption,
    version: Annotated[int | None, typer.Argument(min=0, help="Version that the tag points to.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the tag.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Point a tag at a version; hosts that follow the tag move there. Tagged versions are kept."""
    if delete == (version is not None):
        raise typer.BadParameter("give a version, or --delete")
    if version is not None:
        _require_published(channel, version)
        pins.set_tag(channel, name, version)
    elif not pins.delete_tag(channel, name):
        raise Refused(
            f"there is no tag {name[:80]!r}", remedy="list the files in the channel's tags/ directory"
        )
    _say(f"{name} is {'gone' if delete else version}", {"tags": pins.tags(channel)}, as_json)


def _require_published(channel: ChannelOption, version: int) -> None:
    opened, pointer = _opened(channel)
    there = version == 0 or (version <= pointer.version and exists(opened.layout.index(version)))
    if not there:
        raise Refused(
            f"version {version} is not in the channel", remedy="list versions with `weightcast channel log`"
        )


def rollback(
    channel: ChannelOption,
    to: Annotated[int, typer.Option("--to", min=0, help="Version to publish again.")],
    as_json: JsonOption = False,
) -> None:
    """Publish an older version's bytes again and hold publishing until `resume`."""
    order = order_rollback(channel, to)
    _say(
        f"rollback to version {to} ordered; publishing is held until `weightcast channel resume`",
        {"to": order.to, "root": order.root, "held": True},
        as_json,
    )


def resume(channel: ChannelOption, as_json: JsonOption = False) -> None:
    """Resume publishing after a rollback, or cancel a pending rollback."""
    _opened(channel)
    if not pins.resume(channel):
        raise Refused("publishing is not held", remedy="nothing to do")
    _say("publishing resumes", {"held": False}, as_json)


def _say(text: str, facts: dict[str, object], as_json: bool) -> None:
    Output(json=as_json).result(facts, lambda console: console.print(text))
