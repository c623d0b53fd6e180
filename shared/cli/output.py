"""What a command prints: one result on stdout (text or JSON), progress and errors on stderr.

Where stderr cannot be written the work continues. A result on stdout that nobody reads changes nothing of the
work either; a failed write, to a full disk for example, is an error.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeGuard

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.files.paths import printable

# pydantic and rich cost a part of a second that commands without them need not pay
if TYPE_CHECKING:
    from _typeshed import DataclassInstance, ReadableBuffer
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

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
    """A pipe whose reader has gone takes everything from then on, and so does a full disk, reported at the
    end."""

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
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    out = sys.stdout
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_MayBeLeft(_STDOUT, "w", closefd=False)),
        encoding=None if out is None else out.encoding,
        errors=None if out is None else out.errors,
        line_buffering=os.isatty(_STDOUT),
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_MayFail(_STDERR, "w", closefd=False)),
        encoding=None if sys.stderr is None else sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


_PIPE_COLUMNS = 200
"""rich cuts tables at 80 columns where there is no terminal: digests would be lost in pipes and logs"""


_PADDING = re.compile(r" +$", re.MULTILINE)


@dataclass(frozen=True)
class Output:
    json: bool = False

    def result(
        self, data: BaseModel | Mapping[str, Any] | DataclassInstance, human: Callable[[Console], None]
    ) -> None:
        """Prints `data` as one line of JSON, or calls `human` with a console on stdout."""
        if self.json:
            print(to_json(data), flush=True)
        else:
            human(console(sys.stdout.isatty()))

    def error(self, error: WeightcastError) -> None:
        if self.json:
            said = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
            print(json.dumps(said | {"exit_code": error.exit_code}), flush=True)
            if unwritten() is None:
                return
        print(f"error: {printable(error.message)}", file=sys.stderr)
        if error.remedy:
            print(f"remedy: {printable(error.remedy)}", file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, title: str, total_bytes: int | None) -> Iterator[Advance]:
        """A bar on stderr while the block runs, if stderr is a terminal. The yielded function counts bytes
        done and may be called from any thread."""
        if not sys.stderr.isatty():
            yield lambda nbytes: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(printable(title), total=total_bytes)
            yield lambda nbytes: bar.advance(task, nbytes)

    @contextmanager
    def waiting(self, title: str) -> Iterator[Callable[[str], None]]:
        """A line on stderr with the text that the yielded function was called with: on a terminal always the
        last one, else one, after a second."""
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            with Console(stderr=True).status(Text(printable(title))) as shown:
                yield lambda text: shown.update(Text(printable(f"{title}; {text}")))
            return
        began, said = time.monotonic(), self.json

        def tell(text: str) -> None:
            nonlocal said
            if not said and time.monotonic() - began >= 1.0:
                said = True
                print(printable(f"{title}; {text}"), file=sys.stderr, flush=True)

        yield tell


class _Trimmed(io.StringIO):
    """stdout without the spaces with which tables are filled up."""

    def write(self, text: str) -> int:
        sys.stdout.write(_PADDING.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def console(is_terminal: bool) -> Console:
    """A console on stdout that prints text as it is: names from channels and engines are not markup."""
    from rich.console import Console

    width = None if is_terminal or "COLUMNS" in os.environ else _PIPE_COLUMNS
    file = None if is_terminal else _Trimmed()
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False)


def facts_table(rows: Iterable[tuple[str, object]]) -> Table:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def or_dash(value: float | None, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def time_text(unix: float) -> str:
    """Seconds since 1970 as a date and time in UTC."""
    try:
        return datetime.fromtimestamp(unix, UTC).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "-"


def to_json(data: BaseModel | Mapping[str, Any] | DataclassInstance) -> str:
    return data.model_dump_json() if _is_model(data) else json.dumps(data, default=_plain)


def _is_model(value: object) -> TypeGuard[BaseModel]:
    """Without importing pydantic, which is there if there is a model of it."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(value, pydantic.BaseModel)


def _plain(value: Any) -> dict[str, Any]:
    """Of a dataclass, or a mapping other than a dict."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(value)
