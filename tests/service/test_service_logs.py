from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path

import pytest
from pydantic import SecretStr

from weightcast.shared.daemon.logs import forget_setup, get_log, setup_logs, size_text


def test_json_is_one_object_per_event() -> None:
    stream = io.StringIO()
    setup_logs("json", "info", stream)
    log = get_log("sync")
    log.debug("unseen")
    log.info("applied\nversion", version=8, path=Path("/x"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("crashed")
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["event"], first["level"], first["room"], first["version"]) == (
        "applied\nversion",
        "info",
        "sync",
        8,
    )
    assert first["timestamp"].endswith("Z")
    assert second["exception"][0]["exc_value"] == "two\nlines"


def test_console_events_stay_on_their_line() -> None:
    stream = io.StringIO()
    setup_logs("console", "info", stream)
    get_log("sync").warning("odd name", name="a\nb\x1b[31m")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "odd name" in stream.getvalue()


def test_a_sentence_stands_for_an_event_on_the_console_alone() -> None:
    shown, kept = io.StringIO(), io.StringIO()
    for form, stream in (("console", shown), ("json", kept)):
        setup_logs(form, "info", stream)  # type: ignore[arg-type]
        get_log("sync").info("version", sentence="serving version 3: 577 kB", version=3, bytes=577_123)
    assert shown.getvalue().rstrip().endswith("serving version 3: 577 kB")
    assert "577123" not in shown.getvalue() and "sync" not in shown.getvalue()
    event = json.loads(kept.getvalue())
    assert (event["event"], event["version"], event["bytes"]) == ("version", 3, 577_123)
    assert event["room"] == "sync" and "sentence" not in event


def test_the_console_shows_what_is_wrong_first_and_the_remedy_on_its_own_line() -> None:
    stream = io.StringIO()
    setup_logs("console", "info", stream)
    log = get_log("daemon")
    log.warning("step failed", error="DamagedFile", message="x: 3 bytes", remedy="fetch x again", tries=2)
    log.warning("not ready", version=4, reasons=["engine a failed", "engine\nb failed"])
    first, remedy, second = stream.getvalue().splitlines()
    assert "step failed: x: 3 bytes" in first and first.endswith("tries=2") and "DamagedFile" not in first
    assert remedy == "    remedy: fetch x again"
    assert "not ready: engine a failed; engine\\nb failed" in second


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (577_123, "577 kB"),
        (1_234_567, "1.23 MB"),
        (20e9, "20 GB"),
        (1.5e12, "1.5 TB"),
        (5e15, "5,000 TB"),
    ],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def test_events_follow_a_stderr_that_was_replaced() -> None:
    closed, later, last = io.StringIO(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(closed):
        setup_logs("json", "info")
    closed.close()
    for stream in (later, last):
        with contextlib.redirect_stderr(stream):
            get_log("sync").info("applied")
        assert json.loads(stream.getvalue())["event"] == "applied"
        stream.close()


@pytest.mark.parametrize("form", ["console", "json"])
def test_secrets_are_masked(form: str) -> None:
    stream = io.StringIO()
    setup_logs(form, "info", stream)  # type: ignore[arg-type]
    get_log("x").info(
        "start",
        token="abc123",
        api_key="abc123",
        Authorization="Bearer abc123",
        note=SecretStr("abc123"),
        tokenizer="kept",
    )
    assert "abc123" not in stream.getvalue()
    assert "note" in stream.getvalue()
    assert "kept" in stream.getvalue()


def test_a_traceback_shows_no_local_values() -> None:
    stream = io.StringIO()
    setup_logs("json", "info", stream)

    def fail() -> None:
        hidden = "abc" + "123"
        raise ValueError(len(hidden))

    try:
        fail()
    except ValueError:
        get_log("x").exception("crashed")
    assert "abc123" not in stream.getvalue()


def test_records_of_libraries_come_along() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn").propagate = False  # as uvicorn's own set-up leaves it
    setup_logs("json", "info", stream)
    setup_logs("json", "info", stream)
    logging.getLogger("uvicorn.error").error("bad %s", "request")
    logging.getLogger("httpx").info("unseen")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "bad request"


def test_a_record_that_a_library_repeats_is_written_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    setup_logs("json", "info", stream)
    library = logging.getLogger("asyncio")
    for number in range(1000):
        library.error(f"no files left\nsocket: {number}")
    library.error("something else")
    library.error("no files left", exc_info=OSError("of another kind"))
    events = [json.loads(line)["event"].partition("\n")[0] for line in stream.getvalue().splitlines()]
    assert events == ["no files left", "something else", "no files left"]
    monkeypatch.setattr("weightcast.shared.daemon.logs.REPEAT_SECONDS", 0)
    library.error("no files left\nsocket: 1000")
    assert json.loads(stream.getvalue().splitlines()[-1])["left_out"] == 999


def test_forgotten_logs_leave_no_handler_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler would print later warnings to standard output, in the middle of a command's JSON."""
    setup_logs("console", "info", io.StringIO())
    forget_setup()
    logging.getLogger("weightcast.claims").warning("waiting for a sign of life")
    assert capsys.readouterr().out == ""
