"""Commands of the publisher's side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightcast.publisher import commands_publish
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.channel_repair import ask_for_repair, repair_channel, sign_channel
from weightcast.publisher.commands_publish import show_facts
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.prune import (
    GRACE_SECONDS,
    ActiveHosts,
    empty_trash,
    is_due,
    what_to_prune,
)
from weightcast.publisher.maintenance.prune import prune as carry_out
from weightcast.publisher.maintenance.repair import Repairs
from weightcast.publisher.maintenance.retention import Retention, Verdict
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import OwnerAlive, claim, this_process
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import Pointer, index_key
from weightcast.shared.channel.signing import load_private_key
from weightcast.shared.checkpoint.update.sources import open_base
from weightcast.shared.cli.app import (
    ChannelOption,
    JsonOption,
    SignKeyOption,
    ThreadsOption,
    TrustedKeyOption,
    group,
)
from weightcast.shared.cli.channel import base_facts, exit_code_of, show_problems
from weightcast.shared.cli.options import settings_command, show_settings_command
from weightcast.shared.cli.output import Output, time_text
from weightcast.shared.daemon.logs import setup_logs
from weightcast.shared.daemon.threads import working_threads
from weightcast.shared.files.paths import printable
from weightcast.shared.files.side_files import left_text, side_files

_MADE = ("run_id", "created", "frozen", "aliases", "tensors", "elements", "full_bytes", "root")


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
    for command in (prune, keep, unkeep, tag, rollback, resume):
        channel.command(command.__name__)(command)
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
                open_store(channel),
                local,
                take_over=take_over,
                advance=advance,
                sign_key=sign_key,
                trusted_keys=keys,
            )
        except OwnerAlive:
            done = ask_for_repair(open_store(channel), advance=advance, trusted_keys=keys)
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
        init_channel(
            channel,
            base,
            frozen=frozen or (),
            aliases=aliases,
            threads=working_threads(threads),
            advance=advance,
            sign_key=sign_key,
        )
    made, opened = base_facts(Channel.open(open_store(channel))), open_base(base)
    left = side_files(opened).left
    facts = {
        "channel": str(channel),
        **{name: made[name] for name in _MADE},
        "signed_by": None if sign_key is None else load_private_key(sign_key).public.id,
        "notes": list(opened.notes),
    }
    shown = facts | {
        "created": time_text(made["created"]),
        "frozen": ", ".join(made["frozen"]) or "-",
        "signed_by": facts["signed_by"] or "-",
        "aliases": ", ".join(f"{name}={target}" for name, target in made["aliases"].items()) or "-",
        "notes": "; ".join(opened.notes) or "-",
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
        versions = sign_channel(open_store(channel), key, advance)
    facts = {"channel": str(channel), "versions": versions, "signed_by": key.public.id}
    output.result(facts, lambda console: show_facts(console, facts))


def _alias(text: str) -> tuple[str, str]:
    name, equals, target = text.partition("=")
    if not equals or not name or not target:
        raise typer.BadParameter(f"{text} is not A=B", param_hint="--alias")
    return name, target


VersionArgument = Annotated[int, typer.Argument(min=0, help="A version's number.")]


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
    verdict = what_to_prune(opened, pointer, ActiveHosts(), retention)
    deleted = 0
    if not dry_run and (verdict.removals or is_due(opened.store, grace_seconds)):
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
    opened = Channel.open(open_store(channel))
    opened.require_ours()
    return opened, opened.pointer() or Pointer(0)


def _prune(channel: Channel, verdict: Verdict, grace_seconds: float) -> int:
    """Returns how many were deleted."""
    try:
        claimed = claim(channel.store, this_process(), take_over=False)
    except Refused as error:
        if not verdict.removals:
            return 0  # its owner empties the trash
        raise Refused(
            error.message, remedy="the running publisher prunes when it is started with --keep-versions"
        ) from error
    try:
        carry_out(channel, verdict, claimed)
        return empty_trash(channel.store, grace_seconds)
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
    store = open_store(channel)
    pins.keep(store, version)
    _say(f"version {version} is kept", {"kept": pins.kept(store)}, as_json)


def unkeep(version: VersionArgument, channel: ChannelOption, as_json: JsonOption = False) -> None:
    """Allow a kept version to be pruned."""
    store = open_store(channel)
    if not pins.unkeep(store, version):
        raise Refused(f"version {version} was not kept", remedy=f"kept are {pins.kept(store) or 'none'}")
    _say(f"version {version} may be pruned", {"kept": pins.kept(store)}, as_json)


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
    store = open_store(channel)
    if version is not None:
        _require_published(channel, version)
        pins.set_tag(store, name, version)
    elif not pins.delete_tag(store, name):
        raise Refused(
            f"there is no tag {name[:80]!r}", remedy="list the files in the channel's tags/ directory"
        )
    _say(f"{name} is {'gone' if delete else version}", {"tags": pins.tags(store)}, as_json)


def _require_published(channel: ChannelOption, version: int) -> None:
    opened, pointer = _opened(channel)
    there = version == 0 or (version <= pointer.version and opened.store.stat(index_key(version)) is not None)
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
    order = order_rollback(open_store(channel), to)
    _say(
        f"rollback to version {to} ordered; publishing is held until `weightcast channel resume`",
        {"to": order.to, "root": order.root, "held": True},
        as_json,
    )


def resume(channel: ChannelOption, as_json: JsonOption = False) -> None:
    """Resume publishing after a rollback, or cancel a pending rollback."""
    _opened(channel)
    if not pins.resume(open_store(channel)):
        raise Refused("publishing is not held", remedy="nothing to do")
    _say("publishing resumes", {"held": False}, as_json)


def _say(text: str, facts: dict[str, object], as_json: bool) -> None:
    Output(json=as_json).result(facts, lambda console: console.print(text))
