"""Options of commands whose modules import more than help needs: `fleet`, `wait` and `local verify`."""

from __future__ import annotations

from typing import Any

import click

from weightcast.shared.base.choices import MAIN
from weightcast.shared.cli.balancers import FORMATS
from weightcast.shared.cli.options import (
    Number,
    any_channel_option,
    channel_place,
    daemon_options,
    json_option,
    local_option,
    option,
    path,
    threads_option,
    trusted_key_option,
)

MOST = 50
"""hosts, unless all are wanted: a thousand take seconds to lay out, and nobody reads them"""

url_option = option("--url", help="Address of the publisher, e.g. 127.0.0.1:8340, instead of --channel.")


@click.command
@any_channel_option
@url_option
@daemon_options
@option("--watch", is_flag=True, help="Refresh once a second until Ctrl-C.")
@option("--all", "whole", is_flag=True, help=f"Show all hosts, not only the {MOST} worst.")
@option("--forget", multiple=True, help="Delete the report of this stopped or lost host. Repeatable.")
@option(
    "--format",
    "balancer",
    type=click.Choice(FORMATS),
    help="Print the hosts' gates as servers of a load balancer instead.",
)
@json_option
def fleet(**given: Any) -> None:
    """Show the hosts of a run: which are behind, which are gone, and why (self-reported)."""
    from weightcast.shared.cli.fleet import show_fleet

    show_fleet(**given)


@click.command
@option("--version", type=click.IntRange(min=0), required=True, help="Version to wait for, or a later one.")
@option(
    "--fraction",
    type=Number(min=0.0, max=1.0, min_open=True),
    help="Fraction of the hosts. Stopped hosts, lost hosts and stale hosts without a version are "
    "not counted.",
)
@option("--min-hosts", type=int, help="Minimum number of hosts.")
@option("--timeout", type=Number(min=0.0), default=600.0, help="Timeout in seconds.")
@option(
    "--component",
    default=MAIN,
    help="adapter/NAME or draft: wait until engines have loaded this version of it.",
)
@any_channel_option
@url_option
@daemon_options
@json_option
def wait(**given: Any) -> None:
    """Wait until hosts are ready with a version: one, or as many as requested. Exit code 4 on timeout."""
    from weightcast.shared.cli.fleet import wait_for_hosts

    wait_for_hosts(**given)


@click.command
@local_option
@option("--repair", is_flag=True, help="Repair differing bytes; needs --channel.")
@option("--channel", type=channel_place, envvar="WEIGHTCAST_CHANNEL", help="Channel to repair from.")
@option("--base", type=path, envvar="WEIGHTCAST_BASE", help="HF checkpoint to repair from.")
@threads_option
@option(
    "--engine",
    multiple=True,
    help="Also read back the memory of this engine (needs weightcast-engine): URL or kind=URL[,...]; "
    "repeatable.",
)
@option("--name", multiple=True, help="Only this tensor of the engine's memory; repeatable.")
@trusted_key_option
@json_option
def verify_local(**given: Any) -> None:
    """Compare every byte of a local checkpoint, its adapters, and optionally of engines, with its version."""
    from weightcast.shared.cli import local

    local.verify_local(**given)
