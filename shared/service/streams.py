"""The standard streams of the command. What is said on stderr is for people: where it cannot be said, the
work goes on all the same."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR = 2


class _MayFail(io.FileIO):
    """A full disk and a pipe without a reader take lines away, nothing else."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            # None: a pipe that does not block and is full
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def steady_streams() -> None:
    """Errors of stderr are nobody's errors from here on. A standard stream that is closed becomes the null
    device: its number would be given to the next file that is opened, and be written to."""
    _fill_closed()
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    else:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_MayFail(_STDERR, "w", closefd=False)),
            encoding=sys.stderr.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )


def _fill_closed() -> None:
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
