from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path

import pytest
from pydantic import SecretStr

from weightcast.shared.service.logs import get_log, setup_logs


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
    monkeypatch.setattr("weightcast.shared.service.logs.REPEAT_SECONDS", 0)
    library.error("no files left\nsocket: 1000")
    assert json.loads(stream.getvalue().splitlines()[-1])["left_out"] == 999
