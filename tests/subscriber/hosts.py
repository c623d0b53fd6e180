"""A run to follow and a host that follows it: real files, a real publisher, engines over real HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import pack, unpack
from doubles import Answer, Double, SGLangDouble, VLLMDouble, WebhookDouble, serve

from weightcast.publisher import PublisherOptions
from weightcast.publisher.api import Publisher
from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.publish.publish_job import PublishReport
from weightcast.shared.checkpoint.state.state import LocalState, read_state
from weightcast.subscriber.engines.base import Timeouts, parse_engines
from weightcast.subscriber.engines.host import Engines, RetryPace
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.groups.messages import Order
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.sync.host import Callbacks
from weightcast.subscriber.sync.options import SyncOptions, parse_target
from weightcast.subscriber.sync.sync import Sync

WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "U16": 2, "F16": 2, "BOOL": 1}
QUICK = Timeouts(connect=5, probe=5, control=5, drain=1, reload=5)
CONFIG = b'{"architectures": ["Tiny"]}'


@dataclass(frozen=True)
class Weights:
    """Tensors by name: dtype, shape, bytes. Odd sizes on purpose."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]

    @classmethod
    def make(cls, seed: int = 0) -> Weights:
        random = np.random.default_rng(seed)

        def tensor(dtype: str, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
            return dtype, shape, random.bytes(int(np.prod(shape)) * WIDTHS[dtype])

        return cls(
            {
                "model.embed.weight": tensor("BF16", 67, 33),
                "model.layers.0.up.weight": tensor("F32", 251),
                "model.layers.0.down.weight": tensor("F8_E4M3", 17, 3),
                "model.layers.0.scale": tensor("F32"),
                "model.none": tensor("BF16", 0, 4),
                "model.steps": tensor("I64", 3),
            }
        )

    def changed(self, seed: int, *names: str) -> Weights:
        """Some bytes of the named tensors (default: the first three) are others."""
        random = np.random.default_rng(seed)
        tensors = dict(self.tensors)
        for name in names or list(tensors)[:3]:
            dtype, shape, data = tensors[name]
            array = np.frombuffer(data, np.uint8).copy()
            at = random.choice(array.size, max(1, array.size // 50), replace=False)
            array[at] ^= random.integers(1, 256, at.size, dtype=np.uint8)
            tensors[name] = dtype, shape, array.tobytes()
        return Weights(tensors)

    def write(self, directory: Path, shards: int = 2) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        names = list(self.tensors)
        weight_map = {}
        for number in range(shards):
            mine = {name: self.tensors[name] for name in names[number::shards]}
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            (directory / file).write_bytes(pack(mine))
            weight_map |= dict.fromkeys(mine, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (directory / "config.json").write_bytes(CONFIG)
        return directory

    @property
    def data(self) -> dict[str, bytes]:
        return {name: data for name, (_, _, data) in self.tensors.items()}

    def digest(self) -> str:
        return digest(self.data)


def adapter_tensors(label: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    random = np.random.default_rng(list(label.encode()))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{prefix}.lora_A.weight": (2, 33), f"{prefix}.lora_B.weight": (31, 2)}
    return {each: ("F32", shape, random.bytes(4 * shape[0] * shape[1])) for each, shape in shapes.items()}


def digest(tensors: Mapping[str, bytes]) -> str:
    text = "".join(f"{name} {hashlib.sha256(tensors[name]).hexdigest()}\n" for name in sorted(tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def on_disk(directory: Path) -> str:
    """Digest of the tensors that lie in a checkpoint directory."""
    tensors: dict[str, bytes] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= unpack(file.read_bytes())
    return digest(tensors)


class _Loads(Double):
    """Holds the digest of the tensors that it loaded, as an engine that copies them."""

    def digest_of(self, weights: Path) -> str:
        return digest(unpack(weights.read_bytes()))

    @property
    def loaded(self) -> dict[str, str]:
        """Digests of its adapters."""
        return {name: held for name, (_, held) in self.adapters.items()}

    def load(self, directory: str) -> bool:
        if not Path(directory).is_dir():
            return False
        self.held = on_disk(Path(directory))
        self.broken = False
        return True


class SGLang(_Loads, SGLangDouble):
    pass


class VLLM(_Loads, VLLMDouble):
    """Tells whether it is paused."""


class Mapping_(_Loads, WebhookDouble):
    """Maps the files: what it held at each phase is what lay on disk then."""

    def __init__(self, local: Path) -> None:
        super().__init__()
        self.local = local
        self.seen: list[tuple[str, str]] = []
        self.pauses = self.loads = True

    def behave(self, call: Any) -> Any:
        if not self.pauses and call.method == "POST" and call.body["phase"] == "pause":
            return Answer(500)
        if not self.loads and call.method == "POST" and call.body["phase"] == "reload":
            return Answer(500)
        answer = super().behave(call)
        if call.method == "POST":
            self.seen.append((call.body["phase"], on_disk(self.local)))
        return answer


@dataclass
class Clock:
    at: float = 1000.0

    def __call__(self) -> float:
        return self.at


class Run:
    """A channel and its publisher."""

    def __init__(
        self,
        root: Path,
        stack: ExitStack,
        encoding: Any = "fast",
        sign_key: Path | None = None,
        base: Weights | None = None,
        upkeep: UpkeepOptions | None = None,
    ) -> None:
        self.root = root
        self.base = Weights.make() if base is None else base
        self.base_dir = self.base.write(root / "base")
        self.channel = root / "channel"
        self.versions = [self.base]
        self.adapters: dict[str, str] = {}
        """digests of what was published as adapters, by name and version"""
        self.drafts = [Weights.make(100)]
        """what was published as the draft model, after its version 0"""
        init_channel(self.channel, self.base_dir, sign_key=sign_key)
        self._publisher = stack.enter_context(
            Publisher.open(
                self.channel,
                local=root / "publisher",
                base=self.base_dir,
                encoding=encoding,
                options=PublisherOptions(sign_key=sign_key, upkeep=upkeep, upkeep_thread=False),
            )
        )

    def close(self) -> None:
        """Another publisher may take the channel."""
        self._publisher.close()

    def publish(self, weights: Weights | None = None, *, anchor: bool = False) -> int:
        """A version with a few changes, or with these weights."""
        number = len(self.versions)
        new = self.versions[-1].changed(number) if weights is None else weights
        directory = new.write(self.root / f"given{number}")
        report = self._publisher.publish_checkpoint(directory, step=number)
        self.versions.append(new)
        assert report.version == number
        if anchor:
            self._publisher.write_anchor()
        return number

    def publish_adapter(self, name: str = "math", main_version: int | None = None) -> str:
        """A version in which every byte is another one; returns its name in engines."""
        number = 1 + sum(label.startswith(f"{name}@") for label in self.adapters)
        label = f"{name}@{number}"
        made = adapter_tensors(label)
        directory = self.root / label
        directory.mkdir()
        (directory / "adapter_model.safetensors").write_bytes(pack(made))
        (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
        report = self._publisher.publish(
            directory, step=number, component=f"adapter/{name}", main_version=main_version
        )
        assert report.version == number
        self.adapters[label] = digest({each: data for each, (_, _, data) in made.items()})
        return label

    def publish_draft(self, main_version: int | None = None) -> int:
        """A version of the draft model with a few changes."""
        number = len(self.drafts)
        new = self.drafts[-1].changed(100 + number)
        directory = new.write(self.root / f"draft{number}")
        report = self._publisher.publish(directory, component="draft", main_version=main_version)
        assert report.version == number
        self.drafts.append(new)
        return number

    def retire(self, name: str) -> None:
        self._publisher.retire(f"adapter/{name}")

    def make_due(self) -> list[str]:
        """What its upkeep makes beside the versions."""
        return self._publisher.make_due()

    def publish_by_two(self) -> int:
        """A version whose parts two ranks write; the last one that this run publishes."""
        self._publisher.close()
        number = len(self.versions)
        new = self.versions[-1].changed(number)
        with ThreadPoolExecutor(2) as ranks:
            reports = list(ranks.map(lambda rank: self._publish_as(rank, new, number), (0, 1)))
        self.versions.append(new)
        assert {report.version for report in reports} == {number}
        return number

    def _publish_as(self, rank: int, new: Weights, step: int) -> PublishReport:
        mine = Weights({name: new.tensors[name] for name in list(new.tensors)[rank::2]})
        directory = mine.write(self.root / f"rank{rank}", shards=1)
        with Publisher.open(
            self.channel,
            local=self.root / "publisher",
            rank=rank,
            world_size=2,
            options=PublisherOptions(deadline_seconds=30),
        ) as publisher:
            return publisher.publish_checkpoint(directory, step=step)

    def digest(self, version: int) -> str:
        return self.versions[version].digest()


@dataclass
class Host:
    """A host's parts as the daemon wires them; `step` is what its loop calls."""

    options: SyncOptions
    urls: tuple[str, ...]
    stack: ExitStack
    timeouts: Timeouts = QUICK
    conduct: Mapping[str, Any] = field(default_factory=dict)
    """more arguments of Engines"""
    pace: Mapping[str, Any] = field(default_factory=dict)
    """more arguments of their RetryPace"""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        specs = parse_engines(self.urls, self.options.local, self.options.draft)
        engines = [open_engine(spec, timeouts=self.timeouts) for spec in specs]
        ticks = count(1)

        def clock() -> float:
            """So that what is measured takes some time."""
            return self.clock.at + 1e-6 * next(ticks)

        pace = RetryPace(**{"attempts": 2, "first": 0.0, "longest": 0.0, "clock": clock, **self.pace})
        self.sync = Sync(
            self.options,
            Engines(engines, pace=pace, **self.conduct),
            callbacks=Callbacks(clock=self.clock),
        )
        self.stack.callback(self.sync.close)

    def restart(self) -> None:
        self.sync.close()
        self.start()

    def step(self, order: Order | None = None) -> HostStatus:
        return self.sync.sync_once(order)

    def retry(self) -> HostStatus:
        """A step after every wait for a failed engine has passed."""
        self.clock.at += 61
        return self.step()

    @property
    def local(self) -> Path:
        return self.options.local

    @property
    def state(self) -> LocalState:
        state = read_state(self.local / ".weightcast" / "state.json")
        assert state is not None
        return state

    @property
    def status(self) -> HostStatus:
        return self.sync.status

    @property
    def journals(self) -> list[str]:
        return sorted(path.name for path in (self.local / ".weightcast" / "journal").iterdir())

    @property
    def spool(self) -> list[Path]:
        return list((self.local / ".weightcast" / "spool").rglob("*"))

    def at(self, run: Run, version: int) -> bool:
        """What is on disk is this version, in state and bytes, and nothing is left over."""
        state = self.state
        assert (state.position.version, state.phase.value) == (version, "clean")
        assert on_disk(self.local) == run.digest(version)
        assert self.spool == []
        return True


class Site:
    """Makes runs, engines and hosts of a test, and ends them."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.stack = root, stack

    def run(self, name: str = "run", encoding: Any = "fast", sign_key: Path | None = None) -> Run:
        return Run(self.root / name, self.stack, encoding, sign_key)

    def serve(self, double: Double, port: int = 0) -> str:
        return self.stack.enter_context(serve(double, port))

    def host(
        self,
        run: Run,
        *engines: Double | str,
        name: str = "host",
        timeouts: Timeouts = QUICK,
        target: str = "latest",
        conduct: Mapping[str, Any] | None = None,
        pace: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Host:
        urls = tuple(each if isinstance(each, str) else self.option(each) for each in engines)
        known = SyncOptions(
            run.channel, self.root / name, run.base_dir, parse_target(target), visible_seconds=0.2
        )
        return Host(replace(known, **options), urls, self.stack, timeouts, conduct or {}, pace or {})

    def option(self, double: Double) -> str:
        kinds = {WebhookDouble: "webhook", VLLMDouble: "vllm", SGLangDouble: "sglang"}
        kind = next(kind for cls, kind in kinds.items() if isinstance(double, cls))
        return f"{kind}={self.serve(double)}"
