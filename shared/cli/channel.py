"""Commands `channel log`, `channel show`, `channel verify` and `keygen`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, Untrusted
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import ChainEntry, Problem, entries, read_entry
from weightcast.shared.channel.channel import Channel, FullVersion, require_named
from weightcast.shared.channel.components import all_faults, read_components
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import INDEX_NAME, ForeignIndex, Index
from weightcast.shared.channel.signing import PrivateKey, Trust, write_private_key
from weightcast.shared.cli.options import (
    channel_option,
    component_option,
    json_option,
    option,
    path,
    trusted_key_option,
)
from weightcast.shared.cli.output import Output, facts_table, or_dash, time_text
from weightcast.shared.files import durable
from weightcast.shared.files.paths import ChannelAddress, exists, is_directory, is_file, is_link, printable

if TYPE_CHECKING:
    from rich.console import Console

LIMIT_SHOWN_TENSORS = 50


@click.command
@channel_option
@component_option
@option("--last", type=click.IntRange(min=1), help="Show only the newest N versions.")
@trusted_key_option
@json_option
def log(channel: ChannelAddress, last: int | None, trusted_key: Sequence[str], as_json: bool) -> None:
    """List the versions of a channel and, with trusted keys, who signed them."""
    store, trust = open_store(channel), Trust.load(trusted_key)
    require_named(store)
    opened = Channel.open(store, trust)
    pointer = opened.pointer()
    anchored = frozenset() if pointer is None or opened.foreign else opened.anchored(pointer)
    found = list(entries(opened, pointer))
    found = found[-last if last is not None else 0 :]
    rollback = pins.rollback_state(opened)
    rows = [row_of(entry, entry.version in anchored, trust) for entry in found]
    roots: dict[str, int] = {}
    for row, entry in zip(rows, found, strict=True):
        if isinstance(entry.index, Index):
            row["same_as"], roots[entry.index.root] = roots.get(entry.index.root), entry.version
    facts = {
        "channel": str(channel),
        "run_id": None if opened.file is None else opened.file.run_id,
        "foreign": opened.foreign,
        "latest": None if pointer is None else pointer.version,
        "versions": rows,
        "components": [each.name for each in read_components(opened) if each.active],
        "rollback": None if rollback is None else asdict(rollback),
    }
    Output(json=as_json).result(facts, lambda console: _log_table(console, facts, rollback))
    if trust is not None and any(row["signed_by"] is None for row in rows):
        raise click.exceptions.Exit(Untrusted.exit_code)


def row_of(entry: ChainEntry, anchored: bool, trust: Trust | None = None) -> dict[str, Any]:
    """One line of the log: `density`: changed elements / elements; `ratio`: bytes of the model / bytes
    published; `created`: unix time on the publisher's clock; `signed_by`: id of the trusted key that signed
    it; `same_as`: the version before it with the same weights. None where the format does not say, or no keys
    were given."""
    index = entry.index
    kind = {ForeignIndex: "foreign delta", FullVersion: "full"}.get(type(index), "unreadable")
    row: dict[str, Any] = {
        "version": entry.version,
        "kind": kind,
        "base_version": index.base_version if isinstance(index, ForeignIndex) else None,
        **dict.fromkeys(("step", "epoch", "changed", "density", "bytes", "ratio", "created")),
        "anchor": kind == "full",
        "problem": entry.problem,
        "signed_by": None,
        "same_as": None,
    }
    if isinstance(index, Index):
        totals, nbytes = index.totals, _delta_bytes(entry, index)
        row |= {
            "kind": index.kind,
            "base_version": None if index.kind == "anchor" else index.base_version,
            "step": index.step,
            "epoch": index.epoch,
            "changed": totals.changed,
            "density": totals.changed / totals.elements if totals.elements else 0.0,
            "bytes": nbytes,
            "ratio": totals.nbytes / nbytes if totals.delta_bytes else None,
            "created": index.created,
            "anchor": anchored or index.kind == "anchor",
            "signed_by": None if trust is None else trust.signer(index.digest),
        }
    return row


def _delta_bytes(entry: ChainEntry, index: Index) -> int:
    """Of all files of the version, its index included."""
    stat = entry.files.stat(INDEX_NAME)
    return index.totals.delta_bytes + (0 if stat is None else stat.size)


def _log_table(console: Console, facts: dict[str, Any], rollback: pins.RollbackState | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("version", "kind", "step", "density", "bytes", "ratio", "created (UTC)", ""):
        table.add_column(title, justify="left" if title in ("kind", "") else "right", no_wrap=bool(title))
    of_step: dict[int, int] = {}
    for row in facts["versions"]:
        signed = f"signed by {row['signed_by']}" if row["signed_by"] is not None else ""
        same = f"weights of version {row['same_as']} " if row["same_as"] is not None else ""
        if row["step"] in of_step and not same:
            same = f"step {row['step']} again, after version {of_step[row['step']]} "
        if row["step"] is not None:
            of_step[row["step"]] = row["version"]
        table.add_row(
            str(row["version"]),
            row["kind"] + (" +anchor" if row["anchor"] and row["kind"] == "delta" else ""),
            or_dash(row["step"]),
            or_dash(row["density"], "{:.3%}"),
            or_dash(row["bytes"], "{:,}"),
            or_dash(row["ratio"], "{:.1f}x"),
            "-" if row["created"] is None else time_text(row["created"]).removesuffix("+00:00"),
            printable(row["problem"] or f"{same}{signed}"),
        )
    console.print(f"run {printable(facts['run_id'] or 'foreign')}, latest {or_dash(facts['latest'])}")
    if rollback is not None:
        console.print(rollback.dated)
    console.print(table)
    if facts["components"]:
        console.print(f"components (--component NAME): {', '.join(facts['components'])}")


@click.command
@click.argument("version", type=click.IntRange(min=0), help="Version to show; 0 is the base.")
@channel_option
@component_option
@trusted_key_option
@json_option
def show(version: int, channel: ChannelAddress, trusted_key: Sequence[str], as_json: bool) -> None:
    """Show the index of a version and, with trusted keys, who signed it."""
    trust = Trust.load(trusted_key)
    opened = Channel.open(open_store(channel), trust)
    facts = base_facts(opened) if version == 0 else version_facts(opened, version)
    if trust is not None:
        facts["signed_by"] = trust.signer(facts["digest"])
    rows = ((name, _fact_text(name, value)) for name, value in facts.items())
    Output(json=as_json).result(facts, lambda console: console.print(facts_table(rows)))


def base_facts(channel: Channel) -> dict[str, Any]:
    """Version 0. Raises Refused for a foreign channel, which has none."""
    file, base = channel.require_ours()
    return {
        "version": 0,
        "kind": "base",
        "run_id": file.run_id,
        "created": file.created,
        "root": base.root,
        "digest": base.digest,
        "tensors": len(base.table),
        "elements": base.table.elements,
        "full_bytes": base.table.nbytes,
        "files": [[record.name, record.size, record.blake3] for record in base.all_files],
        "frozen": list(file.frozen),
        "aliases": dict(file.aliases),
    }


def version_facts(channel: Channel, version: int) -> dict[str, Any]:
    """Raises Refused for a version that is not published, DamagedFile for one that cannot be read."""
    pointer = channel.pointer()
    if pointer is None or version > pointer.version:
        raise Refused(f"version {version} is not published", remedy="`weightcast channel log` lists versions")
    entry = read_entry(channel, pointer, version)
    if isinstance(entry.index, Index):
        return _index_facts(entry.index) | {"delta_bytes": _delta_bytes(entry, entry.index)}
    if isinstance(entry.index, ForeignIndex):
        found = entry.index
        return {
            "version": found.version,
            "kind": "foreign delta",
            "base_version": found.base_version,
            "encoding": found.encoding,
            "checksum_format": found.checksum_format,
            "digest": found.digest,
            "tensors_changed": len(found.weight_map),
            "files": sorted(set(found.weight_map.values())),
        }
    if entry.index is not None:
        return {"version": version, "kind": "full", "digest": entry.index.digest}
    raise DamagedFile(f"version {version}: {entry.problem}", remedy="run `weightcast channel verify`")


def _index_facts(index: Index) -> dict[str, Any]:
    return {
        "version": index.version,
        "kind": index.kind,
        "run_id": index.run_id,
        "epoch": index.epoch,
        "base_version": None if index.kind == "anchor" else index.base_version,
        "encoding": index.encoding,
        "step": index.step,
        "created": index.created,
        "root": index.root,
        "base_root": index.base_root,
        "digest": index.digest,
        "parent": index.parent,
        "parts": len(index.parts),
        "chunks_changed": len(index.chunks),
        "elements": index.totals.elements,
        "elements_changed": index.totals.changed,
        "full_bytes": index.totals.nbytes,
        "files": [[record.name, record.size, record.blake3] for record in index.all_files],
        "tensors": {name: record.changed for name, record in index.tensors.items()},
    }


def _fact_text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        rows = sorted(value.items(), key=lambda item: str(item[0]))[:LIMIT_SHOWN_TENSORS]
        more = len(value) - len(rows)
        lines = [printable(f"{key} {each}") for key, each in rows]
        return "\n".join(lines + ([f"and {more} more"] if more else [])) or "-"
    if isinstance(value, list):
        lines = [" ".join(map(str, each)) if isinstance(each, list) else str(each) for each in value]
        return "\n".join(map(printable, lines)) or "-"
    return time_text(value) if name == "created" else printable(str(value))


@click.command
@channel_option
@component_option
@trusted_key_option
@json_option
def verify(channel: ChannelAddress, trusted_key: Sequence[str], as_json: bool) -> None:
    """Check every file of every version, the chain of versions and, with trusted keys, who signed it; of all
    components."""
    output, store = Output(json=as_json), open_store(channel)
    require_named(store)
    with output.progress(f"reading {channel}", None) as advance:
        problems = all_faults(store, advance, Trust.load(trusted_key))
    if problems and not as_json:
        show_problems(problems)
        repair = f"weightcast channel repair --channel {printable(str(channel))}"
        for remedy in dict.fromkeys(problem.remedy or repair for problem in problems):
            print(f"remedy: {remedy}")
    facts = {"channel": str(channel), "problems": [vars(problem) for problem in problems]}
    if as_json or not problems:
        output.result(facts, lambda console: console.print(f"{channel}: no problem found"))
    if problems:
        raise click.exceptions.Exit(exit_code_of(problems))


def exit_code_of(problems: Sequence[Problem]) -> int:
    """What cannot be read now may be as it should."""
    kind = RetryLater if all(problem.unread for problem in problems) else DamagedFile
    return kind.exit_code


def show_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        print(printable(problem.where + problem.message))
        if problem.meaning:
            print(f"  {problem.meaning}")


_NAME = "weightcast.key"


@click.command
@option("--out", required=True, metavar="PATH", help="File for the private key, or a directory for both.")
@json_option
def keygen(out: str, as_json: bool) -> None:
    """Make a key that signs versions: the private one for the publisher, FILE.pub for the hosts."""
    place = path(out)
    file = place / _NAME if is_directory(place) or out.endswith("/") else place
    if not is_directory(file.parent):
        raise Refused(f"directory {file.parent} is missing", remedy=f"make it: mkdir -p {file.parent}")
    key = make_key(file)
    facts = {
        "key_id": key.public.id,
        "public_key": str(key.public),
        "sign_key": str(file),
        "trusted_key": str(_public_path(file)),
    }
    Output(json=as_json).result(facts, lambda console: console.print(str(key.public), soft_wrap=True))
    if not as_json:
        print(printable(f"private key in {file}, public key in {_public_path(file)}"), file=sys.stderr)


def make_key(path: Path) -> PrivateKey:
    """Writes `path`, for its owner alone, and `path`.pub. Raises Refused when one of them is there."""
    key = PrivateKey.generate()
    public = _public_path(path)
    try:
        if exists(public) or is_link(public):
            raise Refused(f"{public} is there already", remedy="choose another --out")
        write_private_key(path, key)
        line = f"{key.public}\n".encode()
        try:
            durable.create(public, line)
        except BaseException:
            # nobody has it yet, and the next try is to find neither of the two
            path.unlink()
            if is_file(public) and public.read_bytes() == line:
                public.unlink()
            raise
    except FileExistsError as error:
        raise Refused(f"{path} is there already", remedy="choose another --out") from error
    except OSError as error:
        where = error.filename or path
        raise Refused(f"{where}: {error.strerror}", remedy="check the directory and its space") from error
    return key


def _public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")
