from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.update import buffer_reuse
from weightcast.shared.files.disk_errors import NoRoom
from weightcast.shared.files.system import Space


def test_what_is_needed_is_told_apart_from_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_reuse, "space_of", lambda path: Space(4 << 20, 2_250_000, None))
    LocalPaths(tmp_path).room.mkdir()
    buffer_reuse.make_room(LocalPaths(tmp_path), 2_250_000, "seeding")
    with pytest.raises(NoRoom, match=r"2\.1 MiB free, seeding needs 2\.4 MiB"):
        buffer_reuse.make_room(LocalPaths(tmp_path), 2_500_000, "seeding")
