"""The `weightcast` command. Its verbs come from entry points, so that a side that cannot be imported on
this machine (a rollout host has no torch) takes only its own verbs away.

What is imported here is imported by every command: `publish` and `sync` bring a version in less time than
typer takes to start (`plain`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from weightcast.shared.base.errors import USAGE, NotInTime, WeightcastError
from weightcast.shared.cli.output import Output, leave, steady_streams, unwritten
from weightcast.shared.daemon.environment import unknown_variables
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.paths import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from weightcast.shared.cli.app import MissingSide
    from weightcast.shared.cli.plain import Verb

VERBS = "weightcast.verbs"
_PLAIN = {"publish": "weightcast.publisher.commands_publish", "sync": "weightcast.subscriber.commands_sync"}
"""whose verbs are called for every version, each with a module of its own"""
_SHORT = [[verb] for verb in _PLAIN]
_COLLECTED = (50_000, 20, 100)
"""objects made before the collector looks for cycles, and how often it looks further: several 100,000 tensors
are millions of tuples, no cycles, and would be gone through many times per version"""

_MOST_FILES = 1 << 20
"""where the hard limit is higher or infinite: some programs close all files up to their limit"""


class Interrupted(WeightcastError):
    """Ctrl-C."""

    exit_code = 130


def _raise_limit() -> None:
    """Sets this process's soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Console entry point. Exit codes: docs of `weightcast.shared.base.errors`, and 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(*_COLLECTED)
    _raise_limit()
    if os.getpid() == 1:
        # the first process of a container gets no signal that it does not handle; some verbs will
        signal.signal(signal.SIGTERM, _terminated)
    steady_streams()
    _tell_unknown_variables()
    code = _all_said(run(words))
    if code == NotInTime.exit_code or words[:1] in _SHORT:
        # the first: threads that hang in a mount would be waited for
        _end_at_once(code)
    sys.exit(code)


def _all_said(code: int) -> int:
    try:
        lost = unwritten()
    except KeyboardInterrupt:
        leave()
        return Interrupted.exit_code
    if lost is None:
        return code
    error = disk_error(lost, "standard output")
    Output().error(error)
    return code or error.exit_code


def _terminated(number: int, _: object) -> NoReturn:
    os._exit(128 + number)


def _tell_unknown_variables() -> None:
    """No error: the environment is not ours alone. Values are not said, as some are secrets."""
    for name, nearest in unknown_variables(os.environ).items():
        meant = f"; did you mean {nearest}?" if nearest else ""
        print(f"warning: nothing reads the variable {printable(name)}{meant}", file=sys.stderr, flush=True)


def _end_at_once(code: int) -> NoReturn:
    """Without taking the interpreter down piece by piece."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the interpreter reports it
        sys.exit(code)
    os._exit(code)


def run(arguments: list[str], sides: Sequence[EntryPoint] | None = None) -> int:
    missing: list[MissingSide] = []
    output = Output(json=_wants_json(arguments))
    try:
        # a part of a second goes by before a verb is imported
        _command(arguments, sides, missing, output)()
    except WeightcastError as error:
        output.error(error)
        return error.exit_code
    except OSError as error:
        failure = disk_error(error, "a file")
        output.error(failure)
        return failure.exit_code
    except KeyboardInterrupt:
        return _interrupted(output)
    except SystemExit as end:
        # typer takes the interrupt of a verb itself
        code = _end(end, arguments, missing)
        return _interrupted(output) if code == Interrupted.exit_code else code
    return 0


def _interrupted(output: Output) -> int:
    output.error(Interrupted("interrupted"))
    return Interrupted.exit_code


def _command(
    arguments: list[str], sides: Sequence[EntryPoint] | None, missing: list[MissingSide], output: Output
) -> Callable[[], None]:
    """Adds sides that cannot be imported to `missing`."""
    verb = _plain_verb(arguments) if sides is None else None
    given = None if verb is None else verb.read(arguments[1:], os.environ)
    if verb is not None and given is not None:
        return partial(verb.body, **given)
    return _by_typer(arguments, verb, sides, missing, output)


def _plain_verb(arguments: Sequence[str]) -> Verb | None:
    module = _PLAIN.get(arguments[0]) if arguments else None
    if module is None:
        return None
    try:
        verb: Verb = import_module(module).VERB
    except (ImportError, AttributeError, OSError):  # typer's path reports a missing side
        return None
    return verb


def _by_typer(
    arguments: list[str],
    verb: Verb | None,
    sides: Sequence[EntryPoint] | None,
    missing: list[MissingSide],
    output: Output,
) -> Callable[[], None]:
    """`verb`: all that is asked for. Adds sides that cannot be imported to `missing`."""
    from importlib.metadata import entry_points

    from weightcast.shared.cli.app import call, new_app, register_sides

    app = new_app()
    if verb is not None:
        verb.register(app)
    else:
        missing += register_sides(app, entry_points(group=VERBS) if sides is None else sides)
    return partial(call, app, arguments, output)


def _end(end: SystemExit, arguments: Sequence[str], missing: Sequence[MissingSide]) -> int:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == USAGE and arguments:
        for side in missing:
            print(f"note: no verbs of {side.name} on this machine: {printable(side.reason)}", file=sys.stderr)
    return code


def _wants_json(arguments: Sequence[str]) -> bool:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:end]


if __name__ == "__main__":
    main()
