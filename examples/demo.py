"""A whole RL run on this machine: one trainer, two hosts with an engine each, weightcast between them.

`python -m examples.demo` starts every part as a process of its own, kills the publisher half way, and ends
with a summary and a proof that both engines hold the trainer's last weights bit for bit. `--off-policy` runs
it for several bounds of the age of rollouts, and compares them. Exit status: 0 it holds, 1 it does not, 2
wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from examples import checkpoint, observe, vllm
from examples.observe import Daemon, HostView
from examples.processes import Children, ProcessDied
from examples.screen import Screen, View
from examples.summary import EngineEvent, Facts, Summary, compare, render, summarise
from examples.trainer import ADAPTERS
from examples.waiting import POLL_SECONDS, write_whole

REPOSITORY = Path(__file__).resolve().parent.parent
MARKER = ".weightcast-demo"
DIRECTORY, OWN_SERVER = "channel", "s3"
"""channels in the run's directory, and in an S3 server of the demo's own"""
BUCKET = "s3://weightcast"
"""of that server"""
HOSTS = ("a", "b")
MAX_LAG, MAX_LAGS = 4, (0, 1, 4)
"""versions by which a rollout may be older than the weights that it trains; those of --off-policy"""
ENDING = ("prepare", "trainer")
START_SECONDS = 180.0
VLLM_START_SECONDS = 900.0
VLLM_PATIENCE = 5
"""times the seconds below: two vLLMs share the cores with all else"""
LEAST_LAG = 1
"""what a busy machine makes vLLM skip, or a host of an adapter's versions, would not be served"""
TRAIN_SECONDS = 600.0
END_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    steps: int
    seed: int
    freeze: bool
    max_lag: int = MAX_LAG
    engine_python: Path | None = None
    """of an environment with vLLM; None: the example's own engine"""
    trainer_python: Path | None = None
    """of an environment with peft, which trains adapters over a frozen base; None: all weights are trained"""

    @property
    def adapters(self) -> tuple[str, ...]:
        return () if self.trainer_python is None else tuple(ADAPTERS)

    @property
    def kind(self) -> str:
        return "sglang" if self.engine_python is None else "vllm"

    @property
    def start_seconds(self) -> float:
        return START_SECONDS if self.engine_python is None else VLLM_START_SECONDS

    @property
    def patience(self) -> int:
        return 1 if self.engine_python is None else VLLM_PATIENCE


@dataclass(frozen=True)
class Paths:
    """Everything lies in one directory, the channel perhaps in a bucket; in a real fleet only that is
    shared."""

    run: Path
    channel: str

    @property
    def trainer(self) -> Path:
        return self.run / "trainer"

    @property
    def base(self) -> Path:
        return self.trainer / "base"

    @property
    def watch(self) -> Path:
        return self.run / "exports"

    def metrics(self, adapter: str = "") -> Path:
        return self.trainer / (f"metrics-{adapter}.jsonl" if adapter else "metrics.jsonl")

    @property
    def last(self) -> Path:
        return self.trainer / "last"

    def exported(self, host: str, adapter: str, version: int) -> Path:
        return self.local(host) / "adapters" / f"{adapter}-v{version:06}"

    def local(self, owner: str) -> Path:
        return self.run / f"local-{owner}"

    def port(self, name: str) -> Path:
        return self.run / "ports" / name

    def events(self, host: str) -> Path:
        return self.run / f"engine-{host}.events"


NO_SERVER = (
    "radosgw is not installed: apt-get install radosgw ceph-mon ceph-osd ceph-mgr ceph-common, or give "
    "--channel s3://BUCKET and AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION"
)


class RefusedDirectory(RuntimeError):
    pass


@contextmanager
def serving(run: Path, console: Console) -> Iterator[None]:
    """An S3 server, the one of the tests, whose address and credentials are in the environment. It ends after
    all that writes to it. Raises ProcessDied and TimeoutError."""
    children = Children(run / "logs", REPOSITORY)
    environment, deadline = run / "s3" / "environment", time.monotonic() + START_SECONDS
    try:
        children.start("s3", [sys.executable, "tests/s3_gateway.py", environment.parent])
        while not environment.exists():
            children.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"an S3 server: not within {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        lines = environment.read_text().splitlines()
        os.environ.update(line.removeprefix("export ").split("=", 1) for line in lines)
        yield
    except (ProcessDied, TimeoutError):
        console.print(children.tails(), markup=False, highlight=False)
        raise
    finally:
        children.stop()


def claim_directory(run: Path, channel: str = DIRECTORY) -> Paths:
    """Wipes only what an earlier demo left behind. Raises RefusedDirectory for anything else in there."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        if not (run / MARKER).is_file():
            raise RefusedDirectory(f"{run} was not made by the demo: name another --run-dir")
        shutil.rmtree(run)
    for directory in ("logs", "ports", "exports", "trainer", DIRECTORY):
        (run / directory).mkdir(parents=True, exist_ok=True)
    (run / MARKER).write_text("")
    run = run.resolve()
    bucket = BUCKET if channel == OWN_SERVER else channel
    # a bucket keeps what earlier demos published
    return Paths(
        run, str(run / DIRECTORY) if channel == DIRECTORY else f"{bucket}/demo-{secrets.token_hex(4)}"
    )


def vllm_command(
    paths: Paths, host: str, seed: int, python: Path, adapters: Sequence[str]
) -> list[str | Path]:
    """Its port is chosen here: vLLM writes none to a file."""
    port = vllm.free_port()
    write_whole(paths.port(f"engine-{host}"), str(port))
    return [
        *(Path(sys.executable).with_name("weightcast"), "run-engine", "--local", paths.local(host)),
        *("--engine", f"vllm=http://127.0.0.1:{port}", "--load-deadline", str(VLLM_START_SECONDS), "--"),
        *vllm.command(python, paths.local(host), port, seed, len(adapters)),
    ]


def engine_command(paths: Paths, host: str, seed: int) -> list[str | Path]:
    return [
        *(sys.executable, "-m", "examples.engine", "--model", paths.local(host)),
        *("--port-file", paths.port(f"engine-{host}"), "--events", paths.events(host), "--seed", str(seed)),
        *("--deadline", str(START_SECONDS)),
    ]


def publisher_command(paths: Paths) -> list[str | Path]:
    return [
        *(Path(sys.executable).with_name("weightcast"), "publisher", "run"),
        *("--channel", paths.channel, "--base", paths.base, "--local", paths.local("publisher")),
        *("--watch", paths.watch, "--every", "--consume", "--poll-seconds", "0.2", "--threads", "1"),
        *("--port", "0", "--port-file", paths.port("publisher")),
    ]


def subscriber_command(paths: Paths, host: str, engine: str) -> list[str | Path]:
    return [
        *(Path(sys.executable).with_name("weightcast"), "subscriber", "run"),
        *("--channel", paths.channel, "--base", paths.base, "--local", paths.local(host)),
        *("--engine", engine, "--gate", "0", "--poll-seconds", "0.2", "--threads", "1"),
        *("--port", "0", "--port-file", paths.port(f"subscriber-{host}")),
    ]


def gateway_command(paths: Paths) -> list[str | Path]:
    return [
        *(Path(sys.executable).with_name("weightcast"), "gateway", "run", "--channel", paths.channel),
        *("--poll-seconds", "0.2", "--port", "0", "--port-file", paths.port("gateway")),
    ]


def prepare_command(paths: Paths, seed: int) -> list[str | Path]:
    return [sys.executable, "-m", "examples.trainer", "prepare", "--dir", paths.trainer, "--seed", str(seed)]


def trainer_command(paths: Paths, gateway: str, options: Options) -> list[str | Path]:
    return [
        *(options.trainer_python or sys.executable, "-m", "examples.trainer", "run"),
        *("--dir", paths.trainer, "--watch", paths.watch, *(["--lora"] if options.adapters else [])),
        *("--url", gateway, "--dialect", options.kind, "--max-lag", str(options.max_lag)),
        *("--steps", str(options.steps), "--seed", str(options.seed)),
        *(["--freeze"] if options.freeze else []),
    ]


class Demo:
    """The run, phase by phase. Every wait watches all processes and fails as soon as one of them ended."""

    def __init__(self, paths: Paths, children: Children, screen: Screen, options: Options) -> None:
        self._paths = paths
        self._channel = observe.open_channel(paths.channel)
        self._children = children
        self._screen = screen
        self._options = options
        self._shown = next(iter(options.adapters), "")
        """the adapter in the live table; empty: the model"""
        self._began = time.monotonic()
        self._kills = 0
        self._phase = ""
        self._updates: dict[str, dict[float, Mapping[str, Any]]] = {host: {} for host in HOSTS}
        self._loads: dict[str, dict[str, float]] = {host: {} for host in HOSTS}
        """when a version of an adapter was first seen loaded in vLLM, by its name"""
        self._publisher, self._gateway = Daemon(paths.port("publisher")), Daemon(paths.port("gateway"))
        self._engines = {host: Daemon(paths.port(f"engine-{host}")) for host in HOSTS}
        self._subscribers = {host: Daemon(paths.port(f"subscriber-{host}")) for host in HOSTS}

    def run(self) -> dict[str, Summary]:
        """By adapter; of the model itself under an empty name."""
        self._warm_start()
        self._start_services()
        self._train()
        self._settle()
        self._phase = "comparing bits"
        if self._options.adapters:
            return {name: summarise(self._adapter_facts(name)) for name in self._options.adapters}
        return {"": summarise(self._facts())}

    def _warm_start(self) -> None:
        self._phase = "warm start of the model"
        prepared = self._children.start("prepare", prepare_command(self._paths, self._options.seed))
        self._wait(lambda: not prepared.running, "the base checkpoint", START_SECONDS)

    def _start_services(self) -> None:
        self._phase = "starting publisher, subscribers, engines, gateway"
        self._children.start("publisher", publisher_command(self._paths))
        for number, host in enumerate(HOSTS):
            self._children.start(f"engine-{host}", self._engine_command(host, number))
        for host in HOSTS:
            self._wait(self._paths.port(f"engine-{host}").exists, f"the port of engine {host}", START_SECONDS)
            engine = f"{self._options.kind}={self._engines[host].url}"
            self._children.start(f"subscriber-{host}", subscriber_command(self._paths, host, engine))
        self._children.start("gateway", gateway_command(self._paths))
        daemons = [self._publisher, *self._subscribers.values()]
        self._wait(
            lambda: all(map(Daemon.is_ready, daemons)) and observe.ready_hosts(self._gateway) == len(HOSTS),
            "all parts ready",
            self._options.start_seconds,
        )

    def _engine_command(self, host: str, number: int) -> list[str | Path]:
        python = self._options.engine_python
        if python is None:
            return engine_command(self._paths, host, number)
        return vllm_command(self._paths, host, number, python, self._options.adapters)

    def _train(self) -> None:
        self._phase = "training"
        command = trainer_command(self._paths, self._gateway.url, self._options)
        trainer = self._children.start("trainer", command)
        deadline = TRAIN_SECONDS * self._options.patience
        if not self._options.freeze:
            half = self._options.steps // 2
            self._wait(lambda: self._steps_done() >= half, "half of the steps", deadline)
            self._kill_publisher()
        self._wait(lambda: not trainer.running, "the end of the training", deadline)

    def _steps_done(self) -> int:
        return len(observe.read_steps(self._paths.metrics(self._shown)))

    def _kill_publisher(self) -> None:
        """While it has something to publish, if it can be caught at that."""
        with suppress(TimeoutError):
            self._wait(self._has_unpublished, "a checkpoint to publish", 5.0)
        self._children["publisher"].kill()
        self._kills += 1
        self._paths.port("publisher").unlink(missing_ok=True)
        self._children.start("publisher", publisher_command(self._paths))

    def _has_unpublished(self) -> bool:
        """Directories of adapters' saves stay in the watched one, empty; those of the model are deleted."""
        saved, channel = len(list(self._paths.watch.glob("step_*"))), self._channel
        published = [observe.pointer(channel, name) for name in self._options.adapters]
        return saved > min(published, default=0)

    def _settle(self) -> None:
        self._phase = "waiting until the last version is served"
        self._note_updates()
        self._wait(self._is_settled, "the last version served", END_SECONDS * self._options.patience)

    def _is_settled(self) -> bool:
        if self._options.adapters:
            newest = {f"{name}@{observe.pointer(self._channel, name)}" for name in self._options.adapters}
            loaded = [observe.loaded_adapters(engine) for engine in self._engines.values()]
            return not self._has_unpublished() and all(newest.issubset(labels) for labels in loaded)
        newest = observe.pointer(self._channel)
        wanted = (str(newest),) if newest else ("0", "default")
        labels = [observe.label_of(engine) for engine in self._engines.values()]
        return not self._has_unpublished() and all(label in wanted for label in labels)

    def _facts(self) -> Facts:
        paths = self._paths
        wanted = checkpoint.file_checksums(paths.last)
        files = {f"local checkpoint {host}": checkpoint.file_checksums(paths.local(host)) for host in HOSTS}
        return Facts(
            versions=observe.read_versions(self._channel, observe.pointer(self._channel)),
            engines={host: self._events(host) for host in HOSTS},
            steps=observe.read_steps(paths.metrics()),
            full_bytes=sum(file.stat().st_size for file in checkpoint.weight_files(paths.base)),
            kills=self._kills,
            max_lag=self._options.max_lag,
            seconds=time.monotonic() - self._began,
            wanted=wanted,
            found={**self._live(wanted), **files},
        )

    def _adapter_facts(self, name: str) -> Facts:
        paths, newest = self._paths, observe.pointer(self._channel, name)
        last = paths.last / name
        wanted = checkpoint.file_checksums(last)
        if self._options.engine_python is None:
            labelled = f"{name}@{newest}"
            live = {f"engine {h}": observe.live_checksums(e, labelled) for h, e in self._engines.items()}
        else:
            live = self._live_vllm(wanted, paths.base, last)
        files = {
            f"exported files {host}": checkpoint.same_files(last, paths.exported(host, name, newest))
            for host in HOSTS
        }
        return Facts(
            versions=observe.read_versions(self._channel, newest, name),
            engines={host: self._adapter_events(host, name) for host in HOSTS},
            steps=observe.read_steps(paths.metrics(name)),
            full_bytes=(last / checkpoint.ADAPTER).stat().st_size,
            kills=self._kills,
            max_lag=self._options.max_lag,
            seconds=time.monotonic() - self._began,
            wanted=wanted,
            found={**live, **files},
        )

    def _events(self, host: str) -> Sequence[EngineEvent]:
        if self._options.engine_python is None:
            return observe.read_events(self._paths.events(host))
        return vllm.events_of(self._updates[host].values())

    def _adapter_events(self, host: str, name: str) -> Sequence[EngineEvent]:
        if self._options.engine_python is None:
            return observe.read_loads(self._paths.events(host), name)
        loads = ((at, *label.split("@")) for label, at in self._loads[host].items())
        return [EngineEvent(at, "resumed", version) for at, which, version in loads if which == name]

    def _live(self, wanted: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
        if self._options.engine_python is None:
            return {f"engine {host}": observe.live_checksums(e) for host, e in self._engines.items()}
        return self._live_vllm(wanted, self._paths.last)

    def _live_vllm(
        self, wanted: Mapping[str, str], model: Path, adapter: Path | None = None
    ) -> dict[str, Mapping[str, str]]:
        """By its answers, as its checksums leave out what its CPU build repacks."""
        gates = {host: s.get("/v1/status")["gate"]["url"] for host, s in self._subscribers.items()}
        return {
            f"engine {host} (its answers)": wanted if vllm.answers_like(gate, model, adapter) else {}
            for host, gate in gates.items()
        }

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self._children.check(may_end=ENDING)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s")
            self._note_updates()
            self._screen.show(self._view)
            time.sleep(POLL_SECONDS)
        self._children.check(may_end=ENDING)

    def _note_updates(self) -> None:
        """A status keeps the newest ones only."""
        if self._options.engine_python is None:
            return
        for host, subscriber in self._subscribers.items():
            status = subscriber.get("/v1/status") or {}
            for update in status.get("updates", ()):
                self._updates[host][update["at"]] = update
            for one in status.get("adapters", ()):
                for version in one["loaded"]:
                    self._loads[host].setdefault(f"{one['name']}@{version}", time.time())

    def _view(self) -> View:
        return View(
            phase=self._phase,
            seconds=time.monotonic() - self._began,
            processes=self._children.states(),
            publisher=observe.publisher_view(self._publisher, self._channel, self._shown),
            ready_hosts=observe.ready_hosts(self._gateway),
            hosts=[self._host_view(host) for host in HOSTS],
            steps=observe.read_steps(self._paths.metrics(self._shown)),
            wanted_steps=self._options.steps,
        )

    def _host_view(self, host: str) -> HostView:
        subscriber, engine = self._subscribers[host], self._engines[host]
        if self._shown:
            return observe.adapter_view(host, subscriber, engine, self._shown)
        return observe.host_view(host, subscriber, engine)

    def close(self) -> None:
        for daemon in (self._publisher, self._gateway, *self._engines.values(), *self._subscribers.values()):
            daemon.close()


def run_demo(paths: Paths, options: Options, console: Console) -> dict[str, Summary]:
    """Raises ProcessDied or TimeoutError; no process is left whatever happens."""
    children = Children(paths.run / "logs", REPOSITORY)
    screen = Screen(console)
    demo = Demo(paths, children, screen, options)
    try:
        return demo.run()
    except (ProcessDied, TimeoutError, httpx.HTTPError):
        screen.close()
        console.print(children.tails(), markup=False, highlight=False)
        raise
    finally:
        screen.close()
        children.stop()
        demo.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="RL with weightcast on one machine, in about two minutes.")
    parser.add_argument("--run-dir", type=Path, default=Path("demo-run"), help="made anew for every run")
    parser.add_argument("--steps", type=int, default=32, help="of the trainer, one version each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--freeze", action="store_true", help="publish nothing: the demo must then fail")
    parser.add_argument(
        "--engine-python", type=Path, help="Python of an environment with vLLM, which is the engine then"
    )
    parser.add_argument(
        "--lora", action="store_true", help="train two adapters over a frozen base, with peft"
    )
    parser.add_argument(
        "--trainer-python", type=Path, default=Path(sys.executable), help="Python of an environment with peft"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run directory after success too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="receives the summary")
    parser.add_argument(
        "--channel",
        default=DIRECTORY,
        help="s3: in an S3 server that the demo starts; s3://BUCKET: with the environment's address and "
        "credentials (AWS_*); without it, a directory",
    )
    parser.add_argument(
        "--max-lag",
        type=int,
        help=f"versions that a rollout may be old ({MAX_LAG}; vLLM, --lora: {LEAST_LAG})",
    )
    parser.add_argument(
        "--off-policy",
        action="store_true",
        help=f"the same training for --max-lag {', '.join(map(str, MAX_LAGS))}, and what each costs",
    )
    given = parser.parse_args()
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    # a shell's background jobs start with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.lora and given.off_policy:
        parser.error("--lora does not take --off-policy")
    usual = (MAX_LAG if given.engine_python is None and not given.lora else LEAST_LAG,)
    max_lags = MAX_LAGS if given.off_policy else usual if given.max_lag is None else (given.max_lag,)
    summaries: list[Summary] = []
    runs: dict[str, Summary] = {}
    failures: dict[str, str] = {}
    try:
        for max_lag in max_lags:
            trainer = given.trainer_python if given.lora else None
            options = Options(given.steps, given.seed, given.freeze, max_lag, given.engine_python, trainer)
            runs = _run(given, options, console)
            summaries += runs.values()
            for name, summary in runs.items():
                failures |= {f"{check} {name}".strip(): why for check, why in summary.failures.items()}
    except RefusedDirectory as error:
        console.print(f"error: {error}", style="red")
        return 2
    except (ProcessDied, TimeoutError, httpx.HTTPError) as error:
        failures["died"] = str(error)
    except KeyboardInterrupt:
        return 130
    if given.json is not None:
        facts = [asdict(summary) for summary in summaries] or [{"failures": failures}]
        by_adapter = dict(zip(runs, facts, strict=True)) if given.lora and runs else facts[0]
        given.json.write_text(json.dumps(facts if given.off_policy else by_adapter, indent=1) + "\n")
    if given.off_policy:
        console.print(compare(summaries))
    return _finish(failures, given, console)


def _run(given: argparse.Namespace, options: Options, console: Console) -> dict[str, Summary]:
    """Raises RefusedDirectory, and what `run_demo` raises."""
    if given.channel == OWN_SERVER and shutil.which("radosgw") is None:
        raise RefusedDirectory(NO_SERVER)
    paths = claim_directory(given.run_dir, given.channel)
    with serving(paths.run, console) if given.channel == OWN_SERVER else nullcontext():
        summaries = run_demo(paths, options, console)
    console.print(render(summaries))
    return summaries


def _finish(failures: Mapping[str, str], given: argparse.Namespace, console: Console) -> int:
    if failures:
        for check, reason in failures.items():
            console.print(f"FAILED, {check}: {reason}", style="red", markup=False)
        console.print(f"logs: {given.run_dir.resolve() / 'logs'}", markup=False, soft_wrap=True)
        return 1
    if not given.keep:
        shutil.rmtree(given.run_dir)
    console.print("The demo holds.", style="green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
