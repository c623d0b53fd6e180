"""Where the bases of runs are on this machine: `bases.json` in this user's cache directory.

A record is a hint. Whoever seeds from the base compares its files and every byte with the channel.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightcast.shared.channel.store import Channel
from weightcast.shared.digest.compiled import private_directory
from weightcast.shared.errors import DamagedFile, Refused
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import parse_object, write_object
from weightcast.shared.local.follow import open_base
from weightcast.shared.local.seed import check_table

_DIRECTORY, _FILE = "bases", "bases.json"
_LIMIT = 4 << 20
_KEPT = 256
"""runs, the newest"""


def remember_base(run_id: str, base: Path) -> None:
    """Does nothing where no directory can be written: the base must be given then."""
    directory = private_directory(os.environ, _DIRECTORY)
    if directory is None:
        return
    known = _read(directory)
    known.pop(run_id, None)
    known[run_id] = str(base.absolute())
    with contextlib.suppress(OSError, UnicodeError):
        durable.swap(directory / _FILE, write_object(dict(list(known.items())[-_KEPT:])))


def find_base(channel: Channel) -> Path:
    """The base from which this user made `channel` on this machine. Raises Refused, with what was tried,
    where there is no record of it, or its tensors are no longer the run's."""
    file, described = channel.require_ours()
    directory = private_directory(os.environ, _DIRECTORY)
    recorded = None if directory is None else _read(directory).get(file.run_id)
    if not isinstance(recorded, str):
        raise Refused(
            f"the base of run {file.run_id} is not known: this user did not make its channel on this machine",
            remedy="give --base with the checkpoint that the run starts from",
        )
    base = Path(recorded)
    try:
        check_table(base, open_base(base).table, described.table)
    except (Refused, OSError) as error:
        raise Refused(
            f"the base that {channel.directory} was made from cannot be used any more: {error}",
            remedy="restore it, or give --base",
        ) from error
    return base


def _read(directory: Path) -> dict[str, object]:
    try:
        return parse_object(durable.read_file(directory / _FILE, _LIMIT), _FILE)
    except (OSError, DamagedFile):
        return {}
