"""The `weightcast` command. A command's module is imported when it is called, and what its help can do
without when it runs. `publish` and `sync`, which run for every version, import no more than they need. A
module that cannot be imported on this machine takes only its own commands away.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import shell_complete

import weightcast
from weightcast.shared.base.errors import USAGE, NotInTime, Refused, WeightcastError
from weightcast.shared.cli.examples import EXAMPLES
from weightcast.shared.cli.output import Output, leave, steady_streams, unwritten
from weightcast.shared.daemon.environment import unknown_variables
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.paths import exists, printable

_PUBLISHER, _SUBSCRIBER = "weightcast.publisher.commands", "weightcast.subscriber.commands"
_MIRROR, _CLI = "weightcast.publisher.mirror.commands", "weightcast.shared.cli"
_DAEMONS = {
    "publisher": "weightcast.publisher.daemon",
    "subscriber": "weightcast.subscriber.daemon",
    "gateway": "weightcast.subscriber.gateway",
    "mirror": "weightcast.publisher.mirror",
}
"""packages with the modules `settings` and `daemon`"""
_RUN, _SETTINGS = "run", "settings"
COMMANDS: dict[str, tuple[str, str]] = {
    "publish": (f"{_PUBLISHER}_publish:publish", "Publish one checkpoint as the channel's next version."),
    "sync": (f"{_SUBSCRIBER}_sync:sync", "Bring a local checkpoint and engines to the target once."),
    "publisher": ("", "The publisher, next to the trainer."),
    "publisher run": (_RUN, "Publish what the trainer writes, until stopped."),
    "subscriber": ("", "The subscriber, on every rollout host."),
    "subscriber run": (_RUN, "Follow a channel and reload the engines, until stopped."),
    "mirror": ("", "Channels copied into other regions."),
    "mirror run": (_RUN, "Copy a channel into another one, until stopped."),
    "mirror sync": (f"{_MIRROR}:sync", "Copy a channel into another one, once."),
    "gateway": ("", "One URL in front of all hosts' engines."),
    "gateway run": (_RUN, "One URL in front of the engines of all hosts, until stopped."),
    "run-engine": (f"{_SUBSCRIBER}:start_engine", "Start an engine while no version is patched in."),
    "status": (f"{_CLI}.status:status", "Show a daemon's state, version and problem."),
    "wake": (f"{_CLI}.status:wake", "Make a daemon poll and retry now."),
    "fleet": (f"{_CLI}.commands:fleet", "Show the hosts of a run: which are behind, and why."),
    "wait": (f"{_CLI}.commands:wait", "Wait until hosts are ready with a version."),
    "doctor": (f"{_SUBSCRIBER}:doctor", "Check machine, file systems and engines; size a run."),
    "channel": ("", "Make and inspect channels."),
    "channel init": (f"{_PUBLISHER}:init", "Create a channel from the base checkpoint."),
    "channel log": (f"{_CLI}.channel:log", "List the versions of a channel."),
    "channel show": (f"{_CLI}.channel:show", "Show the index of a version."),
    "channel verify": (f"{_CLI}.channel:verify", "Check every file of every version."),
    "channel repair": (f"{_PUBLISHER}:repair", "Repair a channel and move unreadable versions aside."),
    "channel anchor": (f"{_PUBLISHER}:anchor", "Have full weights of the newest version written."),
    "channel sign": (f"{_PUBLISHER}:sign", "Sign every version of a channel."),
    "channel prune": (f"{_PUBLISHER}:prune", "Move unneeded versions to the trash, and empty it."),
    "channel component": ("", "Adapters and draft model of a run."),
    "channel component add": (f"{_PUBLISHER}:add_to_run", "Add an adapter or draft model to a run."),
    "channel component retire": (f"{_PUBLISHER}:retire_from_run", "End an adapter or draft model."),
    "channel component log": (f"{_PUBLISHER}:log_components", "List adapters and draft model of a run."),
    "channel keep": (f"{_PUBLISHER}:keep", "Keep a version when older ones are pruned."),
    "channel unkeep": (f"{_PUBLISHER}:unkeep", "Allow a kept version to be pruned."),
    "channel tag": (f"{_PUBLISHER}:tag", "Point a tag at a version."),
    "channel rollback": (f"{_PUBLISHER}:rollback", "Publish an older version's bytes again, and hold."),
    "channel resume": (f"{_PUBLISHER}:resume", "Resume publishing after a rollback."),
    "local": ("", "Inspect local checkpoints."),
    "local verify": (f"{_CLI}.commands:verify_local", "Compare every byte with its version, and repair."),
    "quantise": (f"{_PUBLISHER}:quantise", "Quantise a checkpoint: the base of a quantised run."),
    "keygen": (f"{_CLI}.channel:keygen", "Make a key that signs versions."),
    "config": ("", "Settings of the daemons."),
    "config show": ("", "Effective settings of a daemon, and their source."),
    **{
        f"config show {side}": (_SETTINGS, f"Effective settings of `weightcast {side} run`.")
        for side in _DAEMONS
    },
}
"""By name: where it is (`_RUN`, `_SETTINGS`: of a daemon), and a line for the help of its group; a group is
nowhere, and comes before what is in it."""
_SECTIONS = {
    "Run": ("publisher", "subscriber", "gateway", "mirror", "publish", "sync"),
    "Watch": ("status", "fleet", "wait", "wake"),
    "Channel": ("channel", "keygen"),
    "Host": ("local", "run-engine"),
    "Tools": ("doctor", "quantise", "config", "bench"),
}
"""of the help: first words of commands"""
_CHECKOUT = Path(__file__).parents[2]
if exists(_CHECKOUT / "benchmarks" / "__main__.py"):  # they are not part of the wheel
    weightcast.__path__.append(str(_CHECKOUT))
    COMMANDS["bench"] = ("weightcast.benchmarks.__main__:bench", "Measure encodings, daemons and commands.")
_NAME, _COMPLETE = "weightcast", "_WEIGHTCAST_COMPLETE"
_COMPLETIONS = {
    "bash": (".bashrc", f'eval "$({_COMPLETE}=bash_source {_NAME})"'),
    "zsh": (".zshrc", f'eval "$({_COMPLETE}=zsh_source {_NAME})"'),
    "fish": (".config/fish/completions/weightcast.fish", f"{_COMPLETE}=fish_source {_NAME} | source"),
}
"""by shell: the file of the home directory that it reads, and a line of it"""
_FOR_EVERY_VERSION = (["publish"], ["sync"])
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


class BadUsage(Refused):
    exit_code = USAGE


class LazyCommand(click.Command):
    """The command at `place`, `module:name`, which is imported when it is called."""

    def __init__(self, words: str, place: str, short_help: str) -> None:
        super().__init__(words.rpartition(" ")[2], short_help=short_help)
        self._words, self._place = words, place

    def load(self) -> click.Command:
        module, _, name = self._place.partition(":")
        try:
            command: click.Command
            if self._place in (_RUN, _SETTINGS):
                # imports pydantic
                from weightcast.shared.cli.settings_options import daemon_command

                side = self._words.removeprefix("config show ").removesuffix(" run")
                module = _DAEMONS[side]
                command = daemon_command(side, module, self.short_help or "", shows=self._place == _SETTINGS)
            else:
                command = getattr(import_module(module), name)
        # missing modules, missing names, shared libraries that do not load
        except (ImportError, AttributeError, OSError) as error:
            raise click.UsageError(
                f"{self.name} ({module}) cannot be imported on this machine: {printable(str(error))}"
            ) from error
        lines = "\n".join(f"  weightcast {line}" for line in EXAMPLES.get(self._words, ()))
        # \b: as it is, without filling lines
        command.epilog = f"\b\nExamples:\n{lines}" if lines else None
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return self.load().make_context(info_name, args, parent, **extra)


class _Top(click.Group):
    """Lists all commands, by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, first_words in _SECTIONS.items():
            rows = [
                row for word in first_words if word in self.commands for row in _rows(self.commands[word])
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


def _rows(command: click.Command, before: str = "") -> list[tuple[str, str]]:
    name = f"{before}{command.name}"
    if isinstance(command, click.Group) and not before:
        return [row for each in command.commands.values() for row in _rows(each, f"{name} ")]
    return [(name, command.short_help or command.help or "")]


def program(commands: Mapping[str, tuple[str, str]] = COMMANDS) -> click.Group:
    top = _Top(
        _NAME,
        help="Keeps a rollout fleet on the trainer's newest weights. COMMAND --help has examples.",
        params=[
            _completion_option("--install-completion", "Install completion for the current shell."),
            _completion_option("--show-completion", "Print completion for the current shell."),
        ],
    )
    click.version_option(package_name=_NAME, message="%(version)s", help="Print the version.")(top)
    groups: dict[str, click.Group] = {"": top}
    for words, (place, text) in commands.items():
        group, _, name = words.rpartition(" ")
        if not place:
            groups[words] = click.Group(name, help=text)
        groups[group].add_command(LazyCommand(words, place, text) if place else groups[words])
    return top


def _completion_option(name: str, help: str) -> click.Option:
    return click.Option(
        [name], is_flag=True, is_eager=True, expose_value=False, callback=_complete, help=help
    )


def _complete(context: click.Context, option: click.Parameter, given: bool) -> None:
    if not given or context.resilient_parsing:
        return
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _COMPLETIONS:
        raise click.UsageError(f"no completion for the shell {shell!r}, only for {', '.join(_COMPLETIONS)}")
    if option.name == "show_completion":
        context.exit(shell_complete(context.command, {}, _NAME, _COMPLETE, f"{shell}_source"))
    file, line = _COMPLETIONS[shell]
    path = Path.home() / file
    before = path.read_text() if exists(path) else ""
    if line not in before:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{before}\n{line}\n")
    print(f"{shell} completion installed in {path}; it takes effect in a new shell")
    context.exit()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Console entry point. Exit codes: docs of `weightcast.shared.base.errors`, and 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    gc.set_threshold(*_COLLECTED)
    _raise_limit()
    if os.getpid() == 1:
        # the first process of a container gets no signal that it does not handle; some commands will
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    steady_streams()
    # no error: the environment is not ours alone; values are not said, as some are secrets
    for name, nearest in unknown_variables(os.environ).items():
        meant = f"; did you mean {nearest}?" if nearest else ""
        print(f"warning: nothing reads the variable {printable(name)}{meant}", file=sys.stderr, flush=True)
    if _COMPLETE in os.environ:
        sys.exit(shell_complete(program(), {}, _NAME, _COMPLETE, os.environ[_COMPLETE]))
    code = _all_said(run(words))
    if code == NotInTime.exit_code or words[:1] in _FOR_EVERY_VERSION:
        # without taking the interpreter down piece by piece; the first: threads that hang in a mount would be
        # waited for
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # the interpreter reports it
            sys.exit(code)
        os._exit(code)
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


def run(arguments: list[str], commands: Mapping[str, tuple[str, str]] = COMMANDS) -> int:
    """Returns the exit code."""
    end_of_options = arguments.index("--") if "--" in arguments else None
    output = Output(json="--json" in arguments[:end_of_options])
    try:
        # a part of a second goes by before a command is imported
        with program(commands).make_context(_NAME, arguments) as context:
            context.command.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption):
            from difflib import get_close_matches

            # click takes 0.6, and --json for --seconds
            nearest = get_close_matches(error.option_name, error.possibilities or (), 1, 0.75)
            error = click.NoSuchOption(error.option_name, possibilities=nearest, ctx=error.ctx)
        if output.json:
            output.error(BadUsage(error.format_message(), remedy="see --help"))
        else:
            error.show()
        return USAGE
    except WeightcastError as error:
        output.error(error)
        return error.exit_code
    except ImportError as error:  # of what a command imports when it runs
        output.error(BadUsage(f"a module cannot be imported on this machine: {error}"))
        return USAGE
    except OSError as error:
        failure = disk_error(error, "a file")
        output.error(failure)
        return failure.exit_code
    except KeyboardInterrupt:
        output.error(Interrupted("interrupted"))
        return Interrupted.exit_code
    return 0


if __name__ == "__main__":
    main()
