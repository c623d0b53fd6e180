"""The pointer for trainers that publish in the field's format themselves: a hook of slime and miles.

`--custom-update-weight-post-write-path weightcast.publisher.field_hook.point` writes `latest` into
the directory of `--update-weight-disk-dir`: a foreign channel (docs/FORMAT.md, Foreign channels).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import INDEX_LIMIT, INDEX_NAME, describe, parse_foreign
from weightcast.shared.channel.layout import version_of, write_pointer
from weightcast.shared.channel.store import Store, read_if_there

_SINGLE = "model.safetensors"
"""full weights may have no index"""


def point(args: Any, directory: str | Path, engines: Any = ()) -> None:
    """Every rank calls it with a version's directory when the files are written; rank 0 sets the pointer.
    Does nothing for other directories, such as the emptied channel at the start of a training.

    Args:
        args: Ignored.
        directory: Of the version.
        engines: Ignored.

    Raises:
        Refused: The version is not there.
        DamagedFile: The index is of another version.
        OSError: The pointer cannot be written; it is unchanged.
    """
    path = Path(directory)
    version = version_of(path.name)
    if version is None or _rank() != 0:
        return
    store = open_store(path.parent)
    _check(store.within(path.name), version)
    write_pointer(store, version)


def _check(files: Store, version: int) -> None:
    """Of rank 0's own files: those of other ranks may show here later than to hosts, which look for them."""
    data = read_if_there(files, INDEX_NAME, INDEX_LIMIT)
    if data is None:
        if files.stat(_SINGLE) is not None:
            return
        raise Refused(f"{files.place()} has no {INDEX_NAME}", remedy="call this when the version is written")
    if describe(data) == "foreign delta":
        index = parse_foreign(data, what=files.place(INDEX_NAME))
        if index.version != version:
            raise DamagedFile(f"{files.place()}: its index is of version {index.version}")


def _rank() -> int:
    """Of this process in the trainer's group; 0 without one."""
    try:
        import torch.distributed as group
    except ImportError:
        return 0
    return int(group.get_rank()) if group.is_available() and group.is_initialized() else 0
