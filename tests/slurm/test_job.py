"""deploy/slurm/weightcast.sbatch on a real Slurm, with the demo's trainer and engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import NODES, Cluster, events
from ports import free_port
from waiting import wait_until

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "weightcast.sbatch"
PROGRAMS = Path(sys.executable).parent
ENGINE = (
    "exec python -m examples.engine --model $WEIGHTCAST_LOCAL --host $ENGINE_HOST --port $ENGINE_PORT"
    " --events $RUN/events-$SLURM_JOB_ID-$SLURMD_NODENAME"
)
TRAINER = (
    "weightcast wait --version 0 --min-hosts 2 --timeout 60 && python -m examples.trainer run"
    " --dir $RUN/trainer --watch $WEIGHTCAST_WATCH --url $GATEWAY_URL"
    " --questions 4 --group 4"
)


@dataclass
class Job:
    """One submission of the script for the run that lies in `run`."""

    cluster: Cluster
    run: Path
    number: str

    @property
    def directory(self) -> Path:
        return self.run / "slurm" / self.number

    @property
    def token(self) -> str:
        return (self.directory / "token").read_text()

    def log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return path.read_text() if path.exists() else ""

    @property
    def logs(self) -> str:
        """Everything, for the message of a test that fails."""
        paths = sorted([*self.directory.glob("*.log"), *self.run.glob(f"job-{self.number}.log")])
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def engine_events(self, node: str) -> list[dict[str, Any]]:
        return events(self.run / f"events-{self.number}-{node}")

    def reached(self, node: str) -> int:
        """The newest version that the engine says it loaded."""
        labels = [int(event["label"]) for event in self.engine_events(node) if event["event"] == "reloaded"]
        return max(labels, default=0)

    def ask(self, port_file: str, *words: str) -> dict[str, Any]:
        address = f"127.0.0.1:{(self.directory / port_file).read_text().strip()}"
        found: dict[str, Any] = json.loads(
            self.cluster.tell(
                str(PROGRAMS / "weightcast"),
                *(address if word == "ADDRESS" else word for word in words),
                "--json",
                extra={"WEIGHTCAST_TOKEN": self.token},
            )
        )
        return found


@dataclass
class Run:
    cluster: Cluster
    place: Path

    @property
    def version(self) -> int:
        pointer = self.place / "channel" / "latest"
        return int(pointer.read_text()) if pointer.exists() else 0

    def submit(self, trainer: str, *options: str) -> Job:
        given = {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "RUN": str(self.place),
            "LOCAL": str(self.place / "disk"),
            "ENGINE": ENGINE,
            "TRAINER": trainer,
            "LINGER_SECONDS": "2",
            "GATEWAY_PORT": str(free_port()) if trainer else "",
            "WEIGHTCAST_EVERY": "true",
            "WEIGHTCAST_POLL_SECONDS": "0.2",
        }
        log = f"--output={self.place}/job-%j.log"
        number = self.cluster.tell("sbatch", "--parsable", log, *options, str(SCRIPT), extra=given, cwd=ROOT)
        assert number.isdigit(), number
        return Job(self.cluster, self.place, number)


@pytest.fixture(scope="module")
def run(cluster: Cluster) -> Run:
    """A run with a base, on disks that all nodes see."""
    place = cluster.root / "run7"
    (place / "disk").mkdir(parents=True)
    prepare = [
        sys.executable,
        "-m",
        "examples.trainer",
        "prepare",
        "--warm-steps",
        "2",
        "--dir",
        place / "trainer",
    ]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=120)
    shutil.copytree(place / "trainer" / "base", place / "base")
    return Run(cluster, place)


def until(job: Job, condition: Any, what: str) -> None:
    try:
        wait_until(condition, 60, what, 0.1, (OSError, ValueError, KeyError, httpx.HTTPError))
    except AssertionError as late:
        raise AssertionError(f"{late}\n{job.logs}") from None


def nothing_left(cluster: Cluster) -> bool:
    return wait_until(lambda: not cluster.processes(), 10, f"{cluster.processes()} ended") is True


def no_engine_paused(job: Job) -> bool:
    """By what each engine itself wrote last."""
    last = [job.engine_events(node)[-1]["event"] for node in NODES if job.engine_events(node)]
    return "paused" not in last


def engine_addresses(job: Job) -> list[str]:
    port = 20000 + int(job.number) % 10000
    return [f"http://{NODES[node]}:{port}" for node in ("n2", "n3")]


def test_the_script_passes_shellcheck() -> None:
    done = subprocess.run(
        ["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_loop_runs_ends_with_the_trainers_code_and_goes_on_in_the_next_job(run: Run) -> None:
    first = run.submit(f"{TRAINER} --steps 4 && exit 7")
    assert run.cluster.ended(first.number) == ("FAILED", 7), first.logs
    assert run.version == 4
    assert [first.reached(node) for node in ("n2", "n3")] == [4, 4], first.logs
    assert nothing_left(run.cluster) and no_engine_paused(first)
    assert stat.S_IMODE((first.directory / "token").stat().st_mode) == 0o600

    second = run.submit(f"rm -r $RUN/trainer/last; {TRAINER} --steps 100000")
    until(second, lambda: min(second.reached("n2"), second.reached("n3")) >= 6, "version 6 in both engines")
    for address in engine_addresses(second):
        label = httpx.get(f"{address}/model_info", trust_env=False).json()["weight_version"]
        assert int(label) >= 6
    assert "kind=seed" not in second.log("n2-subscriber") + second.log("n3-subscriber")
    hosts = second.ask("publisher.port", "fleet", "--url", "ADDRESS")["hosts"]
    assert {host["host"] for host in hosts} == {"n2", "n3"}
    assert not [line for line in run.cluster.processes().values() if second.token in line]

    # all of one host dies at once, what would start it again too
    for pid in run.cluster.processes("SLURMD_NODENAME=n3"):
        os.kill(pid, signal.SIGKILL)
    seen = run.version
    until(second, lambda: second.reached("n2") >= seen + 5, "versions on the host that is left")

    run.cluster.tell("scancel", "--batch", "--signal=TERM", second.number)
    assert run.cluster.ended(second.number) == ("FAILED", 128 + signal.SIGTERM), second.logs
    # not its engine's last word: the same signal may have ended it while it was paused
    assert nothing_left(run.cluster)
    for name in ("n1-publisher", "n2-subscriber"):
        assert re.search(r"\bstopped\b.*\n\Z", second.log(name)), second.logs


def test_a_job_without_a_trainer_joins_and_a_plain_scancel_ends_it(run: Run) -> None:
    """After the test above, in whose channel it joins."""
    job = run.submit("", "--nodes=1", "--nodelist=n2", "--job-name=rollouts")
    until(job, lambda: job.ask("n2-subscriber.port", "status", "ADDRESS")["ready"], "a ready host")
    status = job.ask("n2-subscriber.port", "status", "ADDRESS")
    assert (status["served_version"], status["lag_versions"]) == (run.version, 0)
    assert not job.log("n2-publisher")
    run.cluster.tell("scancel", job.number)
    assert run.cluster.ended(job.number)[0] == "CANCELLED"
    assert nothing_left(run.cluster) and no_engine_paused(job)
    assert re.search(r"\bstopped\b", job.log("n2-subscriber")), job.logs


@pytest.mark.parametrize(
    ("trainer", "wrong"),
    [("touch $RUN/trained", "WEIGHTCAST_ENCODING=none"), ("", "ENGINE_KIND=none")],
    ids=["publisher", "subscriber"],
)
def test_wrong_settings_end_the_job(run: Run, trainer: str, wrong: str) -> None:
    job = run.submit(trainer, "--nodes=1", f"--export=ALL,{wrong}")
    assert run.cluster.ended(job.number) == ("FAILED", 2), job.logs
    assert not (run.place / "trained").exists()
    assert nothing_left(run.cluster)
