"""The standard streams of the command. What is said on stderr is for people: where it cannot be said, the
work goes on all the same. A result on stdout that nobody reads changes nothing of the work either; one that
cannot be written, to a full disk say, is an error."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDOUT, _STDERR = 1, 2


class _MayFail(io.FileIO):
    """A full disk and a pipe without a reader take lines away, nothing else."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            # None: a pipe that does not block and is full
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


class _MayBeLeft(io.FileIO):
    """A pipe whose reader has gone takes everything from then on, and so does a full disk, which is told at
    the end."""

    is_left = False
    trouble: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        while not self.is_left:
            try:
                written = super().write(data)
            except BrokenPipeError:
                self.is_left = True
            except OSError as error:
                self.is_left, self.trouble = True, error
            else:
                if written is not None:
                    return written
                # a pipe that does not block and is full
                select.select((), (self,), ())
        return memoryview(data).nbytes


def is_unread() -> bool:
    """Whether nobody gets what is written to stdout, as far as that was noticed: who writes for ever asks."""
    raw = _raw_stdout()
    return raw is not None and raw.is_left


def leave() -> None:
    """What is still to be written to stdout is not waited for."""
    raw = _raw_stdout()
    if raw is not None:
        raw.is_left = True


def unwritten() -> OSError | None:
    """What kept a part of the result from being written."""
    raw = _raw_stdout()
    if raw is not None:
        sys.stdout.flush()
    return None if raw is None else raw.trouble


def _raw_stdout() -> _MayBeLeft | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _MayBeLeft) else None


def steady_streams() -> None:
    """Errors of stderr are nobody's errors from here on, nor is a missing reader of stdout. A standard stream
    that is closed becomes the null device: its number would be given to the next file that is opened, and be
    written to."""
    _fill_closed()
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    else:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_MayBeLeft(_STDOUT, "w", closefd=False)),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.isatty(),
        )
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
