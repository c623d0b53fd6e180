"""Who may read a local checkpoint: engines in containers and under supervisors run as other users."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.update.engine_patch import directory_of

Readers = Literal["owner", "group", "all"]
_FILES: dict[Readers, int] = {"owner": 0o600, "group": 0o640, "all": 0o644}
_DIRECTORIES: dict[Readers, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}
_SET_GROUP = 0o2000


def let_read(local: LocalCheckpoint, readers: Readers) -> None:
    """Sets the modes of what an engine reads, whatever the umask. Raises OSError."""
    checkpoint = local.checkpoint
    index = () if checkpoint.index_file is None else (checkpoint.index_file,)
    beside = (*checkpoint.other_files, *local.files_beside.values())
    for path in {*checkpoint.weight_files, *beside, *index, local.paths.base}:
        _set(path, _FILES[readers])
    within = {each for path in beside for each in path.parents if each.is_relative_to(local.directory)}
    for path in {local.directory, local.paths.room, *within}:
        _set(path, _DIRECTORIES[readers] | path.stat().st_mode & _SET_GROUP)


def let_read_patches(local: LocalCheckpoint, readers: Readers) -> None:
    """The same for patches of engines' memory. Raises OSError."""
    directory = directory_of(local.paths)
    _set(directory, _DIRECTORIES[readers] | directory.stat().st_mode & _SET_GROUP)
    for path in directory.iterdir():
        _set(path, _FILES[readers])


def _set(path: Path, mode: int) -> None:
    if path.stat().st_mode & 0o7777 != mode:
        path.chmod(mode)
