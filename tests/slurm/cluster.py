"""A real Slurm of three nodes on this machine: munged, slurmctld, and a slurmd for each node, in namespaces
where the host has another name. All lies in one directory, by whose name processes are found."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ports import free_ports
from waiting import wait_until

# an address each: all use one port for their engines
NODES = {"n1": "127.0.1.11", "n2": "127.0.1.12", "n3": "127.0.1.13"}
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel")
UNSHARE = ("unshare", "--uts", "--mount", "sh", "-c")
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D'
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
ReturnToService=2
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        assert not missing, f"apt-get install slurm-wlm munge: {missing} are not here"
        assert os.geteuid() == 0, "nodes with host names of their own need root"
        # short, since sockets lie in it
        self.root = Path(tempfile.mkdtemp(prefix="weightcast-slurm-"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        port, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname()
        nodes = [
            f"NodeName={name} NodeAddr={address} Port={port} CPUs=4"
            for (name, address), port in zip(NODES.items(), ports, strict=True)
        ]
        text = CONFIG.format(
            host=host,
            port=port,
            root=self.root,
            nodes="\n".join(nodes),
            names=",".join(NODES),
        )
        (self.root / "slurm.conf").write_text(text)
        hosts = self.root / "hosts"
        names = "".join(f"{address} {name}\n" for name, address in NODES.items())
        hosts.write_text(f"127.0.0.1 localhost {host}\n{names}")
        for directory in ("state", "munge", *(f"spool-{name}" for name in NODES)):
            (self.root / directory).mkdir()
        self._start_munge(self.root / "munge")
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for name in NODES:
            self._start(f"slurmd-{name}", [*UNSHARE, ENTER, name, name, str(hosts)])
        wait_until(lambda: self.tell("sinfo", "-h", "-o", "%D %t") == f"{len(NODES)} idle", 60, "idle nodes")

    def _start_munge(self, place: Path) -> None:
        (place / "key").write_bytes(secrets.token_bytes(128))
        (place / "key").chmod(0o400)
        files = {
            "socket": "socket",
            "key-file": "key",
            "log-file": "log",
            "pid-file": "pid",
            "seed-file": "seed",
        }
        options = [f"--{option}={place / name}" for option, name in files.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        wait_until((place / "socket").exists, 30, "munge's socket")

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.root / f"{name}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=out, stderr=out, start_new_session=True
                )
            )

    def tell(self, *command: str, extra: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command,
            env={**self.environment, **(extra or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else f"{done.returncode}: {done.stderr}"

    def state(self, job: str) -> tuple[str, int]:
        """What Slurm says of a job, and its exit code."""
        words = dict(
            word.split("=", 1) for word in self.tell("scontrol", "show", "job", job).split() if "=" in word
        )
        return words["JobState"], int(words["ExitCode"].partition(":")[0])

    def ended(self, job: str) -> tuple[str, int]:
        wait_until(lambda: not self.tell("squeue", "-h", "-j", job), 90, f"the end of job {job}")
        return self.state(job)

    def processes(self, *also: str) -> dict[int, str]:
        """Of jobs: number and command line of all whose environment has these words."""
        wanted = {word.encode() for word in (f"SLURM_CONF={self.root / 'slurm.conf'}", *also)}
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                given = set((entry / "environ").read_bytes().split(b"\0"))
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # daemons and what this test starts have no job
                if wanted <= given and any(word.startswith(b"SLURM_JOB_ID=") for word in given):
                    found[int(entry.name)] = line
        return found

    def close(self) -> None:
        self.tell("scancel", "--state=RUNNING")
        self.tell("scancel", "--state=PENDING")
        with suppress(AssertionError):
            wait_until(lambda: not self.tell("squeue", "-h"), 45, "the end of all jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root)


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
