"""Where the bases of runs are on this machine: `bases.json` in this user's cache directory.

A record is a hint. Whoever seeds from the base compares its files and every byte with the channel.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.checkpoint.update.sources import open_base
from weightcast.shared.checkpoint.verify.seed import check_table
from weightcast.shared.files import durable
from weightcast.shared.files.paths import is_directory
from weightcast.shared.files.strict_json import parse_object, write_object
from weightcast.shared.kernels.loader import private_directory

_DIRECTORY, _FILE = "bases", "bases.json"
_LIMIT = 4 << 20
_KEPT = 256
"""runs, the newest"""


def remember_base(run_id: str, base: Path) -> None:
    """Does nothing where no directory is writable: then the base must be given."""
    directory = private_directory(os.environ, _DIRECTORY)
    if directory is None:
        return
    known = _read(directory)
    known.pop(run_id, None)
    known[run_id] = str(base.absolute())
    with contextlib.suppress(OSError, UnicodeError):
        newest = dict(list(known.items())[-_KEPT:])
        durable.replace(directory / _FILE, write_object(newest), sync=False)


def recorded_base(channel: Channel) -> Path | None:
    """The base from which this user made `channel` on this machine, not looked at. None: no record, or it is
    gone."""
    path = _path_of(channel)
    return path if path is not None and is_directory(path) else None


def _path_of(channel: Channel) -> Path | None:
    directory = private_directory(os.environ, _DIRECTORY)
    found = None if directory is None else _read(directory).get(channel.require_ours()[0].run_id)
    return Path(found) if isinstance(found, str) else None


def find_base(channel: Channel) -> Path:
    """As `recorded_base`, with its tensors compared. Raises Refused, with what was tried."""
    file, described = channel.require_ours()
    base = recorded_base(channel)
    if base is None:
        gone = _path_of(channel)
        why = "this user has no record of it on this machine" if gone is None else f"{gone} is gone"
        raise Refused(
            f"unknown base of run {file.run_id}: {why}",
            remedy="give --base with the checkpoint that the run starts from",
        )
    check_table(base, open_base(base).table, described.table)
    return base


def _read(directory: Path) -> dict[str, object]:
    try:
        return parse_object(durable.read_file(directory / _FILE, _LIMIT), _FILE)
    except (OSError, DamagedFile):
        return {}
