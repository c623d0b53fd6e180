"""Journals of versions that change much on a disk that writes part of what it is given, and then nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, bytes_of, much_changed, read_checkpoint, snapshot, tensor
from local_cases import Run, following, run_of, staged, step_to

from weightcast.shared.base.errors import RetryLater
from weightcast.shared.checkpoint.update.journal import JournalReader
from weightcast.shared.files.disk_errors import NoRoom


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(17)
    base: Model = {"half": tensor(rng, "BF16", 5_003), "most": tensor(rng, "F32", 4_100)}
    base |= {"odd": tensor(rng, "I8", 3), "few": tensor(rng, "F16", 60)}
    return run_of(tmp_path_factory.mktemp("torn"), [base, much_changed(base, rng)])


class Torn:
    """At most `share` bytes of what a call is given; an error once `room` bytes are written."""

    def __init__(self, share: int, room: int, code: int) -> None:
        self.share, self.room, self.code = share, room, code
        self._write = os.writev

    def __call__(self, fd: int, buffers: Sequence[memoryview]) -> int:
        data = b"".join(buffers)[: min(self.share, self.room)]
        if not data and self.room <= 0:
            raise OSError(self.code, os.strerror(self.code))
        done = self._write(fd, [data])
        self.room -= done
        return done


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, NoRoom), (errno.EIO, RetryLater)])
def test_an_error_in_the_midst(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[RetryLater]
) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        before = snapshot(updater.paths.journals), read_checkpoint(updater.paths.directory)
        for room in (0, 1, 31, 32, 33, 700, 10_000, 30_000):
            with monkeypatch.context() as patched, pytest.raises(kind):
                patched.setattr(os, "writev", Torn(4_000, room, code))
                staged(updater, 1)
            assert (snapshot(updater.paths.journals), read_checkpoint(updater.paths.directory)) == before
        step_to(updater, 1)
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.models[1])


@pytest.mark.parametrize("share", [1_000, 4_096, 33])
def test_short_writes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        monkeypatch.setattr(os, "writev", Torn(share, 1 << 30, errno.EIO))
        step, local = staged(updater, 1).step, updater.local
        assert local is not None
        with JournalReader(updater.paths.journal(step.journal), local.table) as journal:
            assert {bool(one.masked) for one in journal.packed()} == {True, False}
            assert any(one.whole for one in journal.packed())
        step_to(updater, 1)
    assert read_checkpoint(tmp_path / "host") == bytes_of(run.models[1])
