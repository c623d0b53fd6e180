from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from errno import EACCES, EIO, ENOSPC, EROFS
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from forked import run_weightcast, weightcast
from pydantic import Field
from rich.console import Console

from weightcast.shared.base.errors import (
    EngineFailed,
    NeedsReseed,
    NotInTime,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.cli import main
from weightcast.shared.cli.options import json_option
from weightcast.shared.cli.output import Output
from weightcast.shared.cli.settings_options import settings_command
from weightcast.shared.cli.status import _show
from weightcast.shared.daemon.loop import listen
from weightcast.shared.daemon.settings import ServiceSettings

Serve = Callable[..., Any]
COMMANDS = main.COMMANDS | {
    "channel fail": (f"{__name__}:fail", "Fails."),
    "channel facts": (f"{__name__}:facts", "Shows facts."),
    "subscriber run": (f"{__name__}:run_host", "Runs."),
    "publish": ("no_such_torch.commands:publish", "Publishes."),
    "sync": ("weightcast.shared.base.errors:no_such_name", "Syncs."),
}

ERRORS: dict[str, type[BaseException]] = {
    "refused": Refused,
    "reseed": NeedsReseed,
    "time": NotInTime,
    "engine": EngineFailed,
    "later": RetryLater,
    "other": WeightcastError,
    "interrupt": KeyboardInterrupt,
    "denied": PermissionError,
    "read-only": OSError,
    "disk": OSError,
    "full": OSError,
    "full at": OSError,
    "odd": ZeroDivisionError,
}


class DaemonSettings(ServiceSettings):
    local: Path = Field(description="Local checkpoint.")
    engine: list[str] = Field(default_factory=list, description="Engines.")
    signed: bool = Field(False, description="Only signed versions.")


@dataclass(frozen=True)
class Facts:
    path: str
    names: tuple[str, ...]


@click.command
@click.argument("kind")
@json_option
def fail(kind: str, as_json: bool) -> None:
    error = ERRORS[kind]
    if issubclass(error, WeightcastError):
        raise error("latest\x1b[2J is torn", remedy="wait a little")
    if kind == "full at":
        raise OSError(ENOSPC, os.strerror(ENOSPC), "/data/policy")
    number = {"full": ENOSPC, "read-only": EROFS, "disk": EIO, "denied": EACCES}.get(kind)
    raise error("by design") if number is None else error(number, os.strerror(number))


def show_settings(settings: DaemonSettings) -> None:
    print(settings.model_dump_json())


run_host = settings_command(DaemonSettings, "Runs.", show_settings)


@click.command
@json_option
def facts(as_json: bool) -> None:
    data = Facts("/x", ("a", "b"))
    Output(json=as_json).result(data, lambda console: console.print(f"[bold]{data.path} :smile: {'w' * 150}"))


def run(*arguments: str) -> int:
    return main.run(list(arguments), COMMANDS)


@pytest.mark.parametrize(
    ("kind", "code"), [("refused", 3), ("reseed", 3), ("time", 4), ("engine", 5), ("later", 75), ("other", 1)]
)
def test_errors_are_one_message_and_an_exit_code(
    kind: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("channel", "fail", kind) == code
    text = capsys.readouterr()
    assert text.err == "error: latest\\x1b[2J is torn\nremedy: wait a little\n"
    assert text.out == ""


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "fail", "later", "--json") == 75
    text = capsys.readouterr()
    assert json.loads(text.out) == {
        "error": "RetryLater",
        "message": "latest\x1b[2J is torn",
        "remedy": "wait a little",
        "exit_code": 75,
    }
    assert text.err == ""


def test_an_interrupt_is_one_line_or_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "fail", "interrupt") == 130
    text = capsys.readouterr()
    assert (text.out, text.err) == ("", "error: interrupted\n")
    assert run("channel", "fail", "interrupt", "--json") == 130
    text = capsys.readouterr()
    answer = json.loads(text.out)
    assert (answer["error"], answer["message"], answer["exit_code"]) == ("Interrupted", "interrupted", 130)
    assert text.err == ""


@pytest.mark.parametrize("words", [["channel", "log"], ["sync", "--channel=c", "--local=l"]])
def test_an_interrupt_while_a_verb_is_imported(words: list[str], tmp_path: Path) -> None:
    """numpy is the first library that both need: the first for its options, the second to run."""
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", "weightcast.shared.cli.main", *words, "--json"]
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130 and json.loads(done.stdout)["error"] == "Interrupted"
    assert done.stderr == ""


def test_a_full_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "fail", "full at") == 75
    told = "/data/policy: No space left on device\nremedy: free space on its file system"
    assert told in capsys.readouterr().err


def test_interrupts_disks_and_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "fail", "interrupt") == 130
    assert run("channel", "fail", "disk") == 75
    assert "Input/output error" in capsys.readouterr().err
    for kind, message in (
        ("denied", f"Permission denied\nremedy: grant user {os.geteuid()} access"),
        ("read-only", "Read-only file system\nremedy: mount the file system read-write"),
    ):
        assert run("channel", "fail", kind) == 3
        assert message in capsys.readouterr().err
    assert run("channel", "fail", "full") == 75
    assert "No space left on device\nremedy: free space" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        run("channel", "fail", "odd")


def test_help_names_the_commands_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "--help") == 0
    text = capsys.readouterr().out
    assert "fail" in text and "facts" in text
    assert run("channel", "facts", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"path": "/x", "names": ["a", "b"]}


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "facts") == 0
    assert capsys.readouterr().out == f"[bold]/x :smile: {'w' * 150}\n"


def test_a_group_with_one_command_stays_a_group() -> None:
    assert run("subscriber", "run", "--local", "/x") == 0
    assert run("run", "--local", "/x") == 2


def test_commands_that_cannot_be_imported_take_no_others_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("channel", "facts") == run("--help") == 0
    assert capsys.readouterr().err == ""
    for command, missing in (("publish", "no_such_torch"), ("sync", "no_such_name")):
        assert run(command) == 2
        text = capsys.readouterr().err
        assert f"{command} (" in text and missing in text and "cannot be imported on this machine" in text


def test_misspelled_commands_are_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    for words, meant in ((["chanel"], "channel"), (["channel", "lgo"], "log"), (["sync", "--jsn"], "--json")):
        assert main.run(words) == 2
        assert f"Did you mean '{meant}'" in capsys.readouterr().err
    assert main.run(["publisher", "run", "--wacth", "x"]) == 2
    assert "Did you mean '--watch'?" in capsys.readouterr().err
    assert main.run(["wait", "--seconds", "5"]) == 2
    assert "No such option" in (said := capsys.readouterr().err) and "mean" not in said


@pytest.mark.parametrize(
    ("shell", "file", "line"),
    [
        ("/bin/bash", ".bashrc", 'eval "$(_WEIGHTCAST_COMPLETE=bash_source weightcast)"'),
        ("zsh", ".zshrc", 'eval "$(_WEIGHTCAST_COMPLETE=zsh_source weightcast)"'),
        (
            "/usr/bin/fish",
            ".config/fish/completions/weightcast.fish",
            "_WEIGHTCAST_COMPLETE=fish_source weightcast | source",
        ),
    ],
)
def test_completion_is_shown_and_installed_once(
    shell: str, file: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", shell)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "_WEIGHTCAST_COMPLETE=" in run_weightcast("--show-completion").stdout
    for _ in range(2):
        assert run_weightcast("--install-completion").returncode == 0
    assert (tmp_path / file).read_text().splitlines().count(line) == 1
    monkeypatch.setenv("SHELL", "/bin/dash")
    refused = run_weightcast("--show-completion")
    assert refused.returncode == 2 and "bash, zsh, fish" in refused.stderr


def test_commands_and_options_are_completed() -> None:
    def completed(*words: str) -> list[str]:
        line = {
            "_WEIGHTCAST_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["weightcast", *words]),
            "COMP_CWORD": str(len(words)),
        }
        done = run_weightcast(env=os.environ | line)
        return [row.partition(",")[2] for row in done.stdout.splitlines()]

    assert completed("chan") == ["channel"]
    assert {"log", "init"} <= {*completed("channel", "")}
    assert "--channel" in completed("channel", "log", "--ch")
    assert completed("subscriber", "run", "--log-format", "") == ["console", "json"]
    assert completed("subscriber", "run", "--reload", "r") == ["rolling"]


def test_settings_are_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("port = 5\nthreads = 3\n")
    options = ["--port", "0", "--engine", "a=b", "--engine", "c=d", "--signed", "--memory-budget", "1GiB"]
    assert run("subscriber", "run", "--config", str(config), "--local", "/x", *options) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["port"], seen["threads"], seen["engine"], seen["signed"]) == (0, 3, ["a=b", "c=d"], True)
    assert seen["memory_budget"] == 1 << 30


def test_wrong_settings_are_one_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("subscriber", "run", "--port", "x", "--threads", "0") == 2
    text = capsys.readouterr().err
    assert "--port" in text and "--threads" in text and "local: required" in text
    assert run("subscriber", "run", "--token", "x", "--local", "/x") == 2


def test_help_names_environment_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("subscriber", "run", "--help") == 0
    text = capsys.readouterr().out
    assert "WEIGHTCAST_POLL_SECONDS" in text and "256MiB" in text and "--no-signed" in text
    assert "--token" not in text


def test_status_of_a_running_daemon_as_a_process(serve: Serve) -> None:
    served = serve(token="t0ken")
    shown = run_weightcast(
        *("status", served.url.removeprefix("http://"), "--verbose"),
        env=os.environ | {"WEIGHTCAST_TOKEN": "t0ken"},
    )
    assert shown.returncode == 0, shown.stderr
    assert "loop.failures" in shown.stdout
    refused = run_weightcast("status", served.url, "--token", "other", "--json")
    assert refused.returncode == 3
    assert json.loads(refused.stdout)["error"] == "Refused"


def test_the_installed_command_is_the_same() -> None:
    script = Path(sys.executable).with_name("weightcast")
    shown = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stdout) == (0, version("weightcast") + "\n")


def test_status_in_json(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", serve().url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["version"] == 7


@pytest.mark.parametrize("verb", ["status", "wake"])
def test_a_port_alone_is_one_of_this_machine(
    serve: Serve, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = serve().url.rpartition(":")[2]
    assert run(verb, port) == 0
    assert run(verb, "0") == 2
    assert run(verb, "99999") == 2
    assert "give PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "challenge", "says"),
    [
        (401, {}, "needs a token (401)"),
        (403, {"WWW-Authenticate": "Bearer"}, "needs a token (403)"),
        (401, {"WWW-Authenticate": "Basic realm=x"}, "a proxy at"),
        (407, {"Proxy-Authenticate": "Basic"}, "a proxy at"),
    ],
)
def test_refusals_are_about_the_token_or_a_proxy(
    serve: Serve, status: int, challenge: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(app: FastAPI) -> None:
        @app.post("/other/v1/wake")
        def answer() -> Response:
            return Response(status_code=status, headers=challenge)

    url = serve(prepare=refuse).url + "/other"
    assert run("wake", url) == 3
    assert says in capsys.readouterr().err
    assert run("wake", url, "--token", "wrong") == 3
    assert says.replace("needs a", "refused the") in capsys.readouterr().err


def test_status_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        assert run("status", url, "--timeout", "0.2") == 4
    assert run("status", url) == 4
    assert "remedy: " in capsys.readouterr().err


def test_an_endless_answer_is_cut(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def endless(app: FastAPI) -> None:
        @app.get("/other/v1/status")
        def stream() -> StreamingResponse:
            return StreamingResponse(iter(lambda: b"x" * 65536, b""))

    assert run("status", serve(prepare=endless).url + "/other") == 3
    assert "exceeds the" in capsys.readouterr().err


def test_an_answer_that_comes_bit_by_bit_has_one_deadline(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = threading.Event()

    def slow(app: FastAPI) -> None:
        @app.get("/other/v1/status")
        def stream() -> StreamingResponse:
            return StreamingResponse(b" " for _ in range(400) if not gone.wait(0.02))

    url = serve(prepare=slow).url + "/other"
    assert run("status", url, "--timeout", "0.5") == 4
    assert "incomplete after 0.5 s" in capsys.readouterr().err
    gone.set()


@pytest.mark.parametrize("place", ["http:x", "data:,x", "http://a:b/"])
def test_a_redirect_to_nowhere_is_no_answer(
    serve: Serve, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def redirect(app: FastAPI) -> None:
        @app.get("/other/v1/status")
        def answer() -> Response:
            return Response(status_code=307, headers={"Location": place})

    assert run("status", serve(prepare=redirect).url + "/other") == 4
    assert "no answer from" in capsys.readouterr().err


def test_status_of_something_else(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", serve().url + "/v1/wake") == 3
    assert "404" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x:y", "http://[", ""])
def test_an_address_that_is_none_is_a_usage_error(url: str) -> None:
    assert run("status", url) == 2


@pytest.mark.parametrize("token", ["a b", "é", "a\n"])
def test_a_token_that_is_none_is_a_usage_error(token: str) -> None:
    assert run("status", "127.0.0.1:1", "--token", token) == 2


def test_no_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("fetch", 100) as advance:
        advance(50)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal() -> None:
    script = (
        "from weightcast.shared.cli.output import Output\n"
        "with Output(json=True).progress('fetch [x]', 100) as advance: advance(100)\n"
        "print('{}')"
    )
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=slave,
        stdout=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(slave)
    seen = b""
    try:
        while piece := os.read(master, 4096):
            seen += piece
    except OSError:
        pass
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert out == b"{}\n"
    assert b"fetch [x]" in seen


def test_status_is_short_and_has_dates(capsys: pytest.CaptureFixture[str]) -> None:
    updates = [{"kind": "patch", "seconds": {"total": 0.123456789}, "at": 0.0}, {"kind": "seed", "at": 1.5}]
    loop = {"steps": 3, "step_began": 60.0}
    verify = {"full_pass": 60.0, "last_fault_at": None}
    facts = {"last_full_hash": 60.0, "lag": None, "updates": updates, "verify": verify, "loop": loop}
    _show(Console(width=200), facts)
    shown = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [(name, text.rstrip()) for name, text in shown] == [
        ("last_full_hash", "1970-01-01 00:01:00+00:00"),
        ("lag", "-"),
        ("updates[0]", "kind patch, seconds.total 0.1235, at 1970-01-01 00:00:00+00:00"),
        ("updates[1]", "kind seed, at 1970-01-01 00:00:01+00:00"),
        ("verify.full_pass", "1970-01-01 00:01:00+00:00"),
        ("verify.last_fault_at", "-"),
        ("loop.steps", "3"),
        ("loop.step_began", "1970-01-01 00:01:00+00:00"),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("status",), "URL"),
        (("nope",), "nope"),
        (("wait", "--version", "soon", "--channel", "/c"), "--version"),
        (("fleet",), "--channel or --url"),
        (("local", "verify"), "--local"),
        (("local", "verify", "--local", "/", "--name", "w"), "--engine"),
    ],
)
def test_usage_errors_are_json_where_that_is_asked_for(arguments: tuple[str, ...], says: str) -> None:
    plain, told = run_weightcast(*arguments), run_weightcast(*arguments, "--json")
    error = json.loads(told.stdout)
    assert (plain.returncode, told.returncode, error["exit_code"]) == (2, 2, 2)
    assert says in error["message"] and error.keys() == {"error", "message", "remedy", "exit_code"}
    assert says in plain.stderr and not plain.stdout


GOLDEN = Path(__file__).parents[1] / "golden" / "channels" / "fast"
STREAMS = {
    "full": 'exec "$@" 2>/dev/full',
    "closed": 'exec "$@" 2>&-',
    "all closed": 'exec "$@" <&- >&- 2>&-',
}


@pytest.mark.parametrize("streams", STREAMS)
def test_an_error_that_cannot_be_said_keeps_its_exit_code(streams: str) -> None:
    arguments = ("channel", "log", "--channel", "/nowhere")
    told = run_weightcast(*arguments)
    line = ["sh", "-c", STREAMS[streams], "sh", sys.executable, "-m", "weightcast.shared.cli.main"]
    silent = subprocess.run([*line, *arguments], stdout=subprocess.PIPE, timeout=60, check=False)
    assert (silent.returncode, silent.stdout) == (told.returncode, b"") and told.stderr
    assert told.returncode not in (0, 1)


@pytest.mark.parametrize("verb", ["log", "verify", "log --json"])
def test_a_result_that_cannot_be_written_is_one_error(verb: str) -> None:
    assert told_beside("channel", *verb.split(), "--channel", GOLDEN) == [
        "error: standard output: No space left on device",
        "remedy: free space on its file system",
    ]


def test_a_result_waits_for_a_reader_that_is_slow() -> None:
    """A pipe that does not block and is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    words = ("channel", "log", "--json", "--channel", GOLDEN)
    child = weightcast(*words, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    assert (child.wait(60), child.communicate()[1]) == (0, b"")
    assert json.loads(said.lstrip(b"x"))["run_id"] == "golden-run"


def test_a_lost_error_is_told_beside() -> None:
    told = told_beside("channel", "log", "--json", "--channel", "/nowhere")
    assert any(line.startswith("error: /nowhere is not a directory") for line in told)


def told_beside(*words: object) -> list[str]:
    """On stderr, where stdout is full."""
    with (
        Path("/dev/full").open("wb") as full,
        weightcast(*words, stdout=full, stderr=subprocess.PIPE, text=True) as child,
    ):
        _, err = child.communicate(timeout=60)
    assert child.returncode == 75
    lines: list[str] = err.splitlines()
    return lines


def test_a_file_never_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    script = (
        "import os, sys; from weightcast.shared.cli.output import steady_streams; steady_streams();"
        f"file = open({str(opened)!r}, 'w'); print(file.fileno(), file=file); file.flush();"
        "os.write(2, b'of a library'); print('said', file=sys.stderr); print('said')"
    )
    line = ["sh", "-c", STREAMS["all closed"], "sh", sys.executable, "-c", script]
    assert subprocess.run(line, timeout=60, check=False).returncode == 0
    assert int(opened.read_text()) > 2


def test_the_first_process_of_a_container_ends_by_sigterm_before_its_verb_handles_it() -> None:
    program = (
        "import os; own = os.getpid(); os.getpid = lambda: 1; from weightcast.shared.cli import main as cli;"
        "cli.run = lambda words: os.kill(own, 15); cli.main([])"
    )
    # outside a container, SIGTERM that nobody handles ends by the signal: -15
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 143
