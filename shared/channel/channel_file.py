"""channel.json: what holds for all versions of a channel. docs/FORMAT.md, channel.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.shared.channel.records import FORMAT, check_format, run_id
from weightcast.shared.errors import DamagedFile
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.strict_json import Members, parse_object, write_object

_WHAT = "channel.json"
_LIMIT = 16 << 20


@dataclass(frozen=True)
class ChannelFile:
    run_id: str
    created: float
    """unix time on the creator's clock"""
    frozen: tuple[str, ...] = ()
    """globs of tensor names that never change"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """names of tied tensors to the name that is published"""
    horizon: int = 0
    """lowest version whose delta is kept"""


def write_channel_file(channel: ChannelFile) -> bytes:
    return write_object(
        {
            "format": FORMAT,
            "run_id": channel.run_id,
            "created": channel.created,
            "frozen": list(channel.frozen),
            "aliases": dict(channel.aliases),
            "horizon": channel.horizon,
        }
    )


def parse_channel_file(data: bytes) -> ChannelFile:
    """Raises UnknownFormat and DamagedFile."""
    members = Members(parse_object(data, _WHAT), _WHAT)
    check_format(members, _WHAT)
    aliases = members.text_map("aliases")
    if any(name in aliases for name in aliases.values()):
        raise DamagedFile(f"{_WHAT}: an alias of an alias")
    return ChannelFile(
        run_id(members),
        members.number("created"),
        members.texts("frozen"),
        aliases,
        members.integer("horizon"),
    )


def read_channel_file(path: Path) -> ChannelFile:
    """Raises DamagedFile, UnknownFormat and OSError."""
    return parse_channel_file(read_file(path, _LIMIT))
