"""What the command `local verify` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from weightcast.shared.base.errors import DamagedFile, Refused, counted
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import ADAPTER, open_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.signing import Trust
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.side_files import repair_files
from weightcast.shared.checkpoint.update.sources import repair_sources
from weightcast.shared.checkpoint.verify.inspect import Inspection, inspect, restore_base
from weightcast.shared.checkpoint.verify.repair import Repaired
from weightcast.shared.cli.output import Output
from weightcast.shared.daemon.environment import working_threads
from weightcast.shared.daemon.settings import BadSettings
from weightcast.shared.files.paths import ChannelAddress, is_directory, printable

LOCK_SECONDS = 60.0
_WRONG_MEMORY = "it answers with wrong weights; restart it, or let the daemon's own verify reload it"


@dataclass(frozen=True)
class EngineFound:
    """What an engine holds in its memory. `root`: over all tensors; None where it does not tell all."""

    engine: str
    version: int
    root: str | None
    tensors: int
    differing: tuple[str, ...]
    refused: Mapping[str, str]


def verify_local(
    local: Path,
    repair: bool,
    channel: ChannelAddress | None,
    base: Path | None,
    threads: int | None,
    engine: Sequence[str],
    name: Sequence[str],
    trusted_key: Sequence[str],
    as_json: bool,
) -> None:
    output, count = Output(json=as_json), working_threads(threads)
    if name and not engine:
        raise BadSettings("--name needs --engine", remedy="the files of a local checkpoint are read whole")
    if repair and channel is None:
        raise BadSettings("--repair needs --channel", remedy="give the channel that the checkpoint follows")
    with output.progress(f"reading {local}", None) as advance:
        found = inspect_local(local, count, advance)
        done: Repaired | None = None
        if repair and channel is not None and found.faults:
            done = repair_local(local, channel, base, count, advance, Trust.load(trusted_key))
            found = inspect_local(local, count, advance)
        engines = [_look(each, local, name, advance) for each in engine]
    report = found.report
    facts = {
        "local": str(local),
        "version": None if found.state is None else found.state.position.version,
        "root": None if report is None else report.root,
        "expected_root": None if found.state is None else found.state.position.root,
        "intact": not found.faults,
        "differing": [] if report is None else list(report.differing),
        "faults": [vars(fault) for fault in found.faults],
        "repaired": None if done is None else {**vars(done), "position": done.position.version},
        "engines": [asdict(each) for each in engines],
    }
    output.result(facts, lambda console: _show(console, local, found, done, engines))
    if found.faults or any(each.differing for each in engines):
        raise click.exceptions.Exit(DamagedFile.exit_code)


def _look(engine: str, local: Path, names: Sequence[str], advance: Advance | None) -> EngineFound:
    # by name, as commands are: it is of the side that speaks to engines
    inspect_engine = import_module("weightcast.subscriber.engines.inspect")
    found: EngineFound = inspect_engine.look(engine, local, names, advance)
    return found


def inspect_local(local: Path, threads: int, advance: Advance | None = None) -> Inspection:
    """While nothing changes the checkpoint. Raises Refused when there is none, RetryLater while it is being
    patched."""
    paths = LocalPaths(local)
    if not is_directory(paths.room):
        raise Refused(f"{local} is not a local checkpoint", remedy="give the --local of a daemon")
    with FileLock(paths.patch).holding(shared=True, seconds=LOCK_SECONDS):
        found = inspect(local, threads=threads, advance=advance)
    found.faults += _adapters(local).faults(threads, advance)
    return found


def _adapters(local: Path) -> Any:
    """By name: of the side that loads them into engines."""
    return import_module("weightcast.subscriber.sync.exported").ExportedAdapters(local / "adapters")


def repair_local(
    local: Path,
    channel: ChannelAddress,
    base: Path | None,
    threads: int,
    advance: Advance | None = None,
    trust: Trust | None = None,
) -> Repaired | None:
    """Engines are marked as in doubt and reloaded by the next sync. Raises RetryLater
    while a daemon owns the checkpoint."""
    opened, adapters = Channel.open(open_store(channel), trust), _adapters(local)
    options = UpdaterOptions(threads, visible_seconds=0.0)
    with closing(LocalUpdater(opened.store, local, base, options)) as updater:
        updater.recover_state(opened, advance)
        if opened.base is not None:
            restore_base(LocalPaths(local), opened.base)
        updater.load(opened, advance)
        updater.rehash(advance)
        done = updater.repair(opened, advance)
        now = updater.local
        if now is not None:
            ways = repair_sources(opened, now.state.position.version, now.table, base)
            repair_files(now, [way.weights for way in ways])
        for name in adapters.left():
            component = open_component(opened, ADAPTER + name)
            with closing(LocalUpdater(component.store, adapters.followed(name), None, options)) as follower:
                follower.load(component, advance)
                follower.rehash(advance)
                follower.update_to(component, advance=advance)
        list(adapters.scan())  # deletes what differs; the next sync exports it again
        adapters.forget_missing()
    return done


def _show(
    console: Console,
    local: Path,
    found: Inspection,
    done: Repaired | None,
    engines: Sequence[EngineFound],
) -> None:
    for each in engines:
        _show_engine(console, each)
    if done is not None:
        console.print(
            f"repaired {counted(done.words, 'word')} in {counted(len(done.tensors), 'tensor')}"
            f" from {printable(done.source) or '-'}"
        )
    for fault in found.faults:
        console.print(f"{printable(fault.file)}: {printable(fault.problem)}\n  {fault.meaning}")
    if not found.faults and found.report is not None:
        version = found.report.position.version
        console.print(f"{local}: every byte is that of version {version}, root {found.report.root}")


def _show_engine(console: Console, found: EngineFound) -> None:
    name = printable(found.engine)
    for tensor in found.differing:
        console.print(f"{name}: {printable(tensor)} differs in its memory\n  {_WRONG_MEMORY}")
    for tensor, reason in found.refused.items():
        console.print(f"{name}: {printable(tensor)} cannot be read back: {printable(reason)}")
    if not found.differing:
        read = found.tensors - len(found.refused)
        root = "" if found.root is None else f", root {found.root}"
        console.print(f"{name}: {read} of {found.tensors} tensors are those of version {found.version}{root}")
