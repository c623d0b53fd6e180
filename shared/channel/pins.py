"""What operators leave in a channel: versions to be kept (`keep/<version>`), tags (`tags/<name>`), orders
to its owner (`orders/rollback.json`, `orders/repair`). docs/FORMAT.md, Pins, tags and orders."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.channel.index_records import FORMAT, check_format
from weightcast.shared.channel.layout import Layout, digits
from weightcast.shared.files import durable
from weightcast.shared.files.paths import exists, file_name, is_directory
from weightcast.shared.files.strict_json import Members, parse_object, write_object

_NUMBER = re.compile(r"\d{6,15}", re.ASCII)
_TAGGED = re.compile(rb"\d{6,15}\s*")
_TAG_LIMIT = 64
_ORDER_LIMIT = 64 << 10
_REPAIR = "repair"


def keep(channel: Path, version: int) -> None:
    directory = channel / "keep"
    directory.mkdir(exist_ok=True)
    durable.replace(directory / digits(version), digits(version).encode())


def unkeep(channel: Path, version: int) -> bool:
    """False when it was not kept."""
    return _removed(channel / "keep" / digits(version))


def kept(channel: Path) -> list[int]:
    return sorted(int(name) for name in _names(channel / "keep") if _NUMBER.fullmatch(name))


def set_tag(channel: Path, name: str, version: int) -> None:
    """Raises Refused for a name that cannot be a target."""
    directory = channel / "tags"
    path = directory / _tag_name(name)
    directory.mkdir(exist_ok=True)
    durable.replace(path, digits(version).encode())


def delete_tag(channel: Path, name: str) -> bool:
    """False when there is none."""
    return _removed(channel / "tags" / _tag_name(name))


def tags(channel: Path) -> dict[str, int]:
    """Raises DamagedFile for one that names no version: what it was to keep is not known then."""
    found = {}
    for name in sorted(_names(channel / "tags")):
        if durable.is_temporary(name):
            continue
        found[name] = tagged(channel, name)
    return found


def tagged(channel: Path, name: str) -> int:
    """The version that `tags/<name>` names. Raises FileNotFoundError and DamagedFile."""
    path = channel / "tags" / file_name(name)
    data = durable.read_file(path, _TAG_LIMIT)
    if not _TAGGED.fullmatch(data):
        raise DamagedFile(f"{path} does not hold a version of six digits", remedy="set the tag again")
    return int(data)


def _tag_name(name: str) -> str:
    refusal = Refused(
        f"{name[:80]!r} cannot be a tag", remedy="give a name without /, not a number and not latest"
    )
    try:
        plain = file_name(name)
    except DamagedFile:
        raise refusal from None
    if plain.startswith(".") or plain == "latest" or plain.isdecimal():
        raise refusal
    return plain


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if is_directory(directory) else []


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    durable.sync_directory(path.parent)
    return True


@dataclass(frozen=True)
class Rollback:
    """An order to publish the bytes of version `to` (`root`) again, and nothing else until it is withdrawn.
    `ordered`: unix time on the clock of who ordered it."""

    run_id: str
    to: int
    root: str
    ordered: float


def order_rollback(channel: Path, order: Rollback) -> None:
    """Raises Refused while another order stands."""
    path = _order_path(channel)
    path.parent.mkdir(exist_ok=True)
    data = write_object(
        {
            "format": FORMAT,
            "run_id": order.run_id,
            "to": order.to,
            "root": order.root,
            "ordered": order.ordered,
        }
    )
    try:
        durable.create(path, data)
    except FileExistsError as error:
        standing = read_rollback(channel)
        number = "another version" if standing is None else f"version {standing.to}"
        raise Refused(
            f"a rollback to {number} is ordered already", remedy="`weightcast channel resume` withdraws it"
        ) from error


def read_rollback(channel: Path) -> Rollback | None:
    """None when publishing is not held. Raises DamagedFile and UnknownFormat."""
    path = _order_path(channel)
    try:
        data = durable.read_file(path, _ORDER_LIMIT)
    except FileNotFoundError:
        return None
    members = Members(parse_object(data, str(path)), str(path))
    check_format(members, str(path))
    return Rollback(
        members.text("run_id", 128),
        members.integer("to"),
        members.hex("root", 64),
        members.number("ordered"),
    )


def resume(channel: Path) -> bool:
    """Withdraws the order. False when there was none."""
    return _removed(_order_path(channel))


def order_repair(channel: Path) -> None:
    """Orders the owner to repair the channel. An order that is already there stays."""
    path = _order_path(channel, _REPAIR)
    path.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        durable.create(path, b"")


def repair_ordered(channel: Path) -> bool:
    return exists(_order_path(channel, _REPAIR))


def end_repair(channel: Path) -> bool:
    """Removes the order. False when there was none."""
    return _removed(_order_path(channel, _REPAIR))


def _order_path(channel: Path, name: str = "rollback.json") -> Path:
    return Layout(channel).channel / "orders" / name
