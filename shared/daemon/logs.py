"""Logs: one event with fields per line on stderr, as JSON or for people; secrets are masked by field name.

An event may have a field `sentence`: what the console shows in place of event and fields.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Literal, TextIO

from weightcast.shared.daemon.environment import is_secret_name
from weightcast.shared.files.paths import printable

_MASK = "********"
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
REPEAT_SECONDS = 10.0
"""before a library's record is written again: whoever reaches a port can cause them, as many as they like"""
_MOST_KINDS = 1000

Event = MutableMapping[str, Any]
_ALWAYS_SHOWN = ("timestamp", "level", "exception", "exc_info", "stack")


def setup_logs(
    form: Literal["console", "json"] = "console",
    level: Literal["debug", "info", "warning", "error"] = "info",
    stream: TextIO | None = None,
) -> None:
    """Configures structlog for this process and sends the standard library's records (uvicorn's, from level
    warning) the same way. `stream`: None for the stderr at the time of each event."""
    _Log.configure = partial(_configure, form, level, stream)
    _adopt_standard_logging(max(_LEVELS[level], logging.WARNING))


def _configure(form: Literal["console", "json"], level: str, stream: TextIO | None) -> None:
    import structlog

    def target() -> TextIO:
        return sys.stderr if stream is None else stream

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(form, colors=target().isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *arguments: structlog.PrintLogger(target()),
        cache_logger_on_first_use=False,
    )


class _Log:
    """structlog is imported and configured when the first event comes: commands that say nothing start
    without it."""

    _lock = threading.Lock()
    configure: Callable[[], None] | None = None

    def __init__(self, room: str) -> None:
        self._room = room

    def __getattr__(self, method: str) -> Any:
        import structlog

        with _Log._lock:
            configure, _Log.configure = _Log.configure, None
            if configure is not None:
                configure()
        return getattr(structlog.get_logger(room=self._room), method)


def get_log(room: str) -> Any:
    """A logger: `get_log("sync").info("version applied", version=8)`."""
    return _Log(room)


def forget_setup() -> None:
    """Undoes `setup_logs`."""
    _remove_handler()
    _Log.configure = None
    if "structlog" in sys.modules:
        sys.modules["structlog"].reset_defaults()


def _renderers(form: Literal["console", "json"], colors: bool) -> list[Any]:
    import structlog
    import structlog.tracebacks

    if form == "json":
        # local variables may hold tokens
        transformed = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        tracebacks = structlog.processors.ExceptionRenderer(transformed)
        return [tracebacks, _mask, _drop_sentence, structlog.processors.JSONRenderer(default=str)]
    plain = structlog.dev.plain_traceback
    console = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0, exception_formatter=plain)
    return [_mask, _one_line, partial(_for_people, console)]


def size_text(amount: float, unit: str = "B") -> str:
    """For people: three digits and a decimal prefix, 1.23 GB."""
    for prefix in ("", "k", "M", "G"):
        if amount < 999.5:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} T{unit}" if amount < 999.5 else f"{amount:,.0f} T{unit}"


def _drop_sentence(logger: Any, method: str, event: Event) -> Event:
    event.pop("sentence", None)
    return event


def _for_people(console: Callable[..., str], logger: Any, method: str, event: Event) -> str:
    """What happened and why first, then the other fields; a remedy on a line of its own."""
    event.pop("room", None)
    remedy, sentence = event.pop("remedy", ""), event.pop("sentence", "")
    kept = {name: event[name] for name in _ALWAYS_SHOWN if name in event}
    if sentence:
        event = {**kept, "event": sentence}
    else:
        reasons = [event.pop(name) for name in ("message", "reason", "reasons") if event.get(name)]
        why = [text for each in reasons for text in (each if isinstance(each, list) else [each])]
        if why:
            event.pop("error", None)
            event["event"] = f"{event['event']}: {'; '.join(map(str, why))}"
    line = console(logger, method, event)
    return f"{line}\n    remedy: {remedy}" if remedy else line


def _mask(logger: Any, method: str, event: Event) -> Event:
    for name in event:
        if is_secret_name(name) and event[name] is not None:
            event[name] = _MASK
    return event


def _one_line(logger: Any, method: str, event: Event) -> Event:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = _plain(value)
        elif isinstance(value, list):
            event[name] = [_plain(each) if isinstance(each, str) else each for each in value]
    return event


def _plain(text: str) -> str:
    return printable(text).replace("\n", "\\n")


class _ToStructlog(logging.Handler):
    """Records of one kind are written once in REPEAT_SECONDS, then with the number that were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[object, float] = {}
        self._left_out: Counter[object] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        # asyncio names sockets and tasks from the second line on
        error = record.exc_info[0] if record.exc_info else None
        kind, now = (record.name, record.levelno, str(record.msg).partition("\n")[0], error), time.monotonic()
        if now - self._written.get(kind, -REPEAT_SECONDS) < REPEAT_SECONDS:
            self._left_out[kind] += 1
            return
        if len(self._written) >= _MOST_KINDS:
            self._written.clear()
            self._left_out.clear()
        self._written[kind] = now
        left_out = self._left_out.pop(kind, 0)
        more = {"left_out": left_out} if left_out else {}
        get_log(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info, **more)


def _remove_handler() -> None:
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _ToStructlog):
            root.removeHandler(handler)


def _adopt_standard_logging(level: int) -> None:
    root = logging.getLogger()
    _remove_handler()
    root.addHandler(_ToStructlog())
    for name in ("uvicorn", "uvicorn.error"):
        # a server that was set up elsewhere in this process keeps its records to itself
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    root.setLevel(level)
    logging.getLogger("filelock").setLevel(max(level, logging.INFO))  # it logs every attempt
