"""Every shell block of README and pages is run: line by line, as a reader would who has a run of his own.

A page is a session: daemons that it starts go on until its end, or until it starts another of their kind.
The reader's own paths, hosts and ports are replaced; lines that need what no test has are
listed with the reason. docs/tutorial.md has test_tutorial.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from core_cases import Model, some_changed, tensor, write_checkpoint
from emulators import MOTO
from forked import Forked
from ports import free_ports
from safetensors.numpy import save_file
from test_docs_commands import DOCUMENTS, ROOT, blocks_of
from tls import Authority
from waiting import wait_until

from weightcast.publisher import Publisher, init_channel

_ENGINE = ROOT / "tests" / "subscriber" / "streaming_engine.py"
VLLM, SGLANG = "needs vLLM: tests/engines", "needs SGLang: tests/engines"
EXCUSED = {
    "README.md": {
        "git clone": "fetches a copy",
        "python3 -m venv": "installs packages: make test-packages",
    },
    "docs/adapters.md": {
        "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW": VLLM,
        "vllm serve": VLLM,
        "weightcast subscriber run --channel /shared/run7 --local /nvme/run7 --draft": VLLM,
    },
    "docs/channel.md": dict.fromkeys(
        ("weightcast status", "mv"), "a publisher that is held: tests/publisher/test_orders_live.py"
    ),
    "docs/deploying.md": {
        "python3 -m venv": "installs packages: make test-packages",
        **dict.fromkeys(("useradd", "install", "echo", "systemctl"), "needs root"),
        **dict.fromkeys(
            ("export RUN=", "TRAINER=", "sbatch", "scancel", "weightcast fleet --channel $RUN"), "needs Slurm"
        ),
        **dict.fromkeys(("WEIGHTCAST_TOKEN=$(openssl", "docker"), "needs Docker"),
        "kubectl": "needs a cluster",
        "weightcast subscriber run": "path= of a container",
    },
    "docs/engine-groups.md": dict.fromkeys(
        ("export", "python -m", "weightcast subscriber run"), "two hosts with GPUs"
    ),
    "docs/engines.md": {
        "VLLM_SERVER_DEV_MODE=1": VLLM,
        "pip install": "installs packages: make test-packages",
        "SGLANG_WAIT": SGLANG,
        "weightcast subscriber run --channel /mnt/run7/channel --base /mnt/run7/base --local "
        "/nvme/weightcast/host --engine sglang=http://127.0.0.1:30000,via=ipc": "needs GPUs: test_ipc.py",
        "weightcast run-engine": SGLANG,
    },
    "docs/frameworks.md": dict.fromkeys(
        ("--update-weight", "checkpoint_engine"), "arguments of another program"
    ),
    "docs/live-patch.md": {
        "pip install": "installs packages: make test-packages",
        "VLLM_PLUGINS": VLLM,
        "weightcast subscriber run": VLLM,
    },
    "docs/operations.md": {"weightcast run-engine": SGLANG},
}
"""by page: how lines begin that are not run, and why"""
CONFIG = '{"architectures": ["M"], "model_type": "m"}'
VERSIONS = 121
"""more than the pages name"""
SIDES = {"publisher": "8340", "subscriber": "8341", "mirror": "8342", "gateway": "8343"}
ENGINES = {"30000": "sglang", "8000": "vllm"}
PORTS = (*SIDES.values(), *ENGINES, "8350")
_DAEMON = re.compile(r"weightcast (publisher|subscriber|mirror|gateway) run\b")
_USES = {
    "subscriber": re.compile(r"weightcast (sync|local verify.*--repair)\b"),
    "publisher": re.compile(r"weightcast (publish out|channel (prune|sign))"),
}
"""by side: lines that need what its daemon owns"""


def places(root: Path) -> dict[str, str]:
    """What is there for what pages name."""
    named = {
        "channel": ("/mnt/run7/channel", "/shared/run7"),
        "base": (
            *("/mnt/run7/base", "/nvme/run7/base", "/models/base", "/data/base"),
            *("/data/model", "MODEL_DIR"),
        ),
        "publisher": (
            "/nvme/weightcast/publisher",
            "/var/lib/weightcast/publisher",
            "/data/publisher",
        ),
        "components": ("/var/lib/weightcast",),
        "host": ("/nvme/weightcast/host", "/data/policy", "/nvme/run7"),
        "exports": ("/scratch/exports", "/nvme/run7/exports"),
        "etc": ("/etc/weightcast",),
        "other": ("/shared/run",),
    }
    return {name: str(root / place) for place, names in named.items() for name in names}


_SYNC = "weightcast sync --channel /shared/run7 --base /models/base --local /data/policy"
BEFORE = {
    "docs/monitoring.md": (
        "weightcast subscriber run --channel /shared/run7 --base /models/base --local host_b",
        "weightcast subscriber run --channel /shared/run7 --base /models/base --local /data/policy",
        "weightcast publisher run --channel /shared/run7 --base /models/base --local /data/publisher",
    ),
    **dict.fromkeys(("docs/adapters.md", "docs/gate.md", "docs/runbook.md"), (_SYNC,)),
    "docs/mirror.md": ("weightcast mirror sync --from /shared/run7 --to s3://weights/run7",),
    "docs/stores.md": ("rm -r /data/publisher",),
    "docs/quantised.md": ("rm -r /shared/run7 /data/publisher",),
}
"""by page: what it supposes"""
_ELIDED = "--channel /shared/run7 --base /models/base --local /nvme/"


@dataclass
class Session:
    """Of one page."""

    root: Path
    texts: dict[str, str]
    ports: dict[str, int]
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    has_gate: bool = False

    def written(self, line: str) -> str:
        """With what is here in place of what the page names."""
        for side, local in ("publisher", "weightcast/publisher"), ("subscriber", "run7"):
            line = line.replace(f"{side} run ...", f"{side} run {_ELIDED}{local}")
        names = sorted(self.texts, key=len, reverse=True)
        line = re.sub("|".join(map(re.escape, names)), lambda found: self.texts[found[0]], line)
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: str(self.ports[found[0]]), line)

    def run(self, line: str) -> str:
        """What is wrong; empty when nothing is."""
        command = self.written(line)
        self.has_gate |= "--gate " in line
        if daemon := _DAEMON.search(line):
            return self.start(daemon[1], command)
        for side, uses in _USES.items():
            if uses.search(line):
                self.stop(side)
        if "--watch" in line:
            command = f"timeout --signal INT 4 {command.partition('#')[0]}"
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        if done.returncode == 0 or ("--watch" in line and done.returncode == 124):
            return ""
        return f"{command}\nexit {done.returncode}: {done.stdout}{done.stderr}"

    def start(self, side: str, command: str) -> str:
        """Waits until it is ready, a gateway without gates until it answers."""
        self.stop(side)
        port, log = self.ports[SIDES[side]], self.root / f"{side}.log"
        with log.open("wb") as stream:
            process = self.running[side] = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.root,
                env={**self.environment, "WEIGHTCAST_PORT": str(port)},
                stdout=stream,
                stderr=stream,
            )
        path = "healthz" if side == "gateway" and not self.has_gate else "readyz"
        url = f"{'https' if '--tls-cert' in command else 'http'}://127.0.0.1:{port}/{path}"
        headers = {"Authorization": f"Bearer {self.environment.get('WEIGHTCAST_TOKEN', 'none')}"}
        passing = (httpx.TransportError,)
        try:
            wait_until(
                lambda: (
                    process.poll() is not None
                    or httpx.get(url, verify=False, headers=headers, trust_env=False, timeout=60).is_success
                ),
                passing=passing,
                every=0.1,
            )
            process.wait(0)
        except subprocess.TimeoutExpired:
            return ""
        except AssertionError as late:
            self.stop(side)
            return f"{command}\n{late}: {log.read_text()[-3000:]}"
        del self.running[side]
        return f"{command}\nexit {process.returncode}: {log.read_text()[-3000:]}"

    def stop(self, side: str) -> None:
        process = self.running.pop(side, None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=100) == 0, (self.root / f"{side}.log").read_text()

    def close(self) -> None:
        for side in list(self.running):
            self.stop(side)


def make_run(root: Path) -> None:
    """A run with a base, VERSIONS versions, checkpoints, an adapter, a draft model and certificates."""
    rng = np.random.default_rng(7)
    model: Model = {f"layers.{n}.mlp.up_proj.weight": tensor(rng, "BF16", 128, 128) for n in range(2)}
    base = write_checkpoint(root / "base", model, config=CONFIG)
    init_channel(root / "channel", base)
    step = root / "exports" / "step_12"
    with Publisher.open(root / "channel", local=root / "publisher", base=base) as publisher:
        for _ in range(VERSIONS):
            model = some_changed(model, rng)
            publisher.publish(write_checkpoint(root / "new", model, config=CONFIG))
    shutil.copytree(base, step)
    write_checkpoint(step, some_changed(model, rng), config=CONFIG)
    shutil.copytree(base, root / "out" / "drafter-500")
    adapter = root / "out" / "checkpoint-500"
    adapter.mkdir()
    name = "base_model.model.layers.0.mlp.up_proj"
    save_file(
        {
            f"{name}.lora_{half}.weight": np.ones(shape, np.float32)
            for half, shape in (("A", (2, 128)), ("B", (128, 2)))
        },
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "peft_type": "LORA"}')
    (root / "etc").mkdir()
    ours = Authority(root)
    shutil.copy(ours.issue("publisher"), root / "publisher.key")
    (root / ".curlrc").write_text("fail-with-body\nsilent\n")


def lines_of(block: str) -> Iterator[str]:
    """Commands, with the lines on which they go on."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield " ".join(line.split())


def excuse(page: str, line: str) -> str | None:
    return next((start for start in EXCUSED.get(page, {}) if line.startswith(start)), None)


@pytest.fixture
def memory() -> Iterator[str]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Ports in place of those that pages name; engines listen on theirs."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    with ExitStack() as stack:
        for number, kind in ENGINES.items():
            process = Forked([_ENGINE, tmp_path / number, ports[number], kind])
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_until((tmp_path / number).exists)
        yield ports


@pytest.mark.timeout(900)
@pytest.mark.parametrize("buckets", [False, MOTO])
def test_blocks_of_pages_run(
    buckets: object,
    tmp_path: Path,
    engines: dict[str, int],
    memory: str,
    make_bucket: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In buckets: blocks that name one, alone."""
    channel = make_bucket(str(buckets)) if buckets else ""
    made, root = tmp_path / "made", tmp_path / "run"
    make_run(root)
    root.rename(made)
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("WEIGHTCAST_") or name == "WEIGHTCAST_CACHE"
    }
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"PATH": path, "CURL_HOME": str(root), "COLUMNS": "110"}
    wrong, run, excused = [], 0, set()
    for document in DOCUMENTS:
        page = str(document.relative_to(ROOT))
        blocks = [block for block in blocks_of(document) if ("s3://" in block) is bool(buckets)]
        if not blocks or page == "docs/tutorial.md":
            continue
        shutil.copytree(made, root)
        texts = places(root) | {"10.0.0.5": "127.0.0.1", "trainer:": "127.0.0.1:", "/dev/shm/run7": memory}
        if buckets:
            texts |= {f"s3://{name}/run7": f"{channel}/{page}/{name}" for name in ("weights", "weights-eu")}
        token = {"WEIGHTCAST_TOKEN": "a-token"} if page == "docs/security.md" else {}
        with closing(Session(root, texts, engines, environment | token)) as session:
            wrong += filter(None, map(session.run, BEFORE.get(page, ())))
            for block in blocks:
                for line in lines_of(block):
                    start = excuse(page, line)
                    if start is not None:
                        excused.add((page, start))
                        continue
                    run += 1
                    found = session.run(line)
                    wrong += [f"{page}: {found}"] if found else []
        shutil.rmtree(root)
    listed = {(page, start) for page, starts in EXCUSED.items() for start in starts}
    with capsys.disabled():
        print(f"\n{run} lines of shell blocks run, {len(excused)} kinds excused")
    assert wrong == [], "\n\n".join(wrong)
    assert buckets or listed == excused, "no page has such a line"
