"""Command `mirror sync`."""

from __future__ import annotations

import click

from weightcast.publisher.maintenance.retention import Retention
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.signing import Trust
from weightcast.shared.cli.options import channel_place, json_option, option, trusted_key_option
from weightcast.shared.cli.output import Output, facts_table
from weightcast.shared.files.paths import ChannelAddress

_SHOWN = ("run_id", "channel", "local", "local_version", "versions", "bytes", "mended")


@click.command
@option(
    "--from",
    "source",
    type=channel_place,
    required=True,
    envvar="WEIGHTCAST_FROM",
    help="The channel to copy.",
)
@option("--to", type=channel_place, required=True, envvar="WEIGHTCAST_TO", help="The copy.")
@option("--keep-versions", type=click.IntRange(min=1), help="Versions that --to keeps; unset: all.")
@option("--verify", is_flag=True, help="Read all files of --to, and repair damaged ones from --from.")
@option("--take-over", is_flag=True, help="Take --to from a mirror that seems alive.")
@trusted_key_option
@json_option
def sync(
    source: ChannelAddress,
    to: ChannelAddress,
    keep_versions: int | None,
    verify: bool,
    take_over: bool,
    trusted_key: tuple[str, ...],
    as_json: bool,
) -> None:
    """Copy what a channel has and another one lacks, once."""
    from weightcast.publisher.mirror.mirror import Mirror, MirrorOptions

    options = MirrorOptions(Retention(keep_versions), trust=Trust.load(trusted_key), take_over=take_over)
    output = Output(json=as_json)
    with output.progress(f"copying {source}", None) as advance:
        mirror = Mirror(open_store(source), open_store(to), options, advance)
        try:
            mirror.step(verify=verify)
        finally:
            mirror.close()
    facts = {name: getattr(mirror.status, name) for name in _SHOWN}
    output.result(facts, lambda console: console.print(facts_table((k, str(v)) for k, v in facts.items())))
