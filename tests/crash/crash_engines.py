"""Inference servers in a process of their own, which outlives the subscribers that are killed.

One copies the weights when it loads (SGLang's dialect), one maps the files (the webhook's), one is patched in
memory (the plugin's routes). All note what they held whenever they began to serve.
"""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core_cases import read_checkpoint
from crash_observe import digest_of
from doubles import Answer, Double, SGLangDouble, WebhookDouble, serve
from plugin_double import PluginDouble


def on_disk(directory: Path) -> str:
    """Digest of the tensors in a checkpoint directory; empty while there are none, or half a file."""
    try:
        return digest_of(read_checkpoint(directory))
    except (OSError, ValueError):
        return ""


class Copying(SGLangDouble):
    """Loads what lies in a checkpoint directory. While it `refuses`, it takes only what it had before."""

    name, maps = "copy", False

    def __init__(self, others: tuple[Path, ...] = ()) -> None:
        super().__init__()
        self.others = others
        """what the engine's other hosts read"""
        self.refuses = self.loaded = False
        self.served: list[str] = []
        self.mixed: list[tuple[str, dict[str, str]]] = []
        """the weights and adapters that requests could have used at once"""

    def digest_of(self, weights: Path) -> str:
        return on_disk(weights.parent)

    def load_adapter(self, name: str, path: str) -> str:
        said = super().load_adapter(name, path)
        self.note()
        return said

    def note(self) -> None:
        if self.loaded and self.adapters and not self.paused:
            self.mixed.append((self.held, {name: digest for name, (_, digest) in self.adapters.items()}))

    def load(self, directory: str) -> bool:
        found = on_disk(Path(directory))
        if not found or (self.refuses and found != self.held):
            return False
        same = all(on_disk(other) == found for other in self.others)
        self.held = found if same else "several versions at once"
        self.loaded, self.broken = True, False
        return True

    def resume(self) -> None:
        super().resume()
        self.note()
        if self.loaded:
            self.served.append(self.held)

    def now_held(self) -> str:
        return self.held


class Patching(PluginDouble):
    """As `Copying`, and takes patches."""

    name, maps = "live", False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.refuses = self.loaded = False
        self.served: list[str] = []

    def load_disk(self) -> None:
        self.weights = read_checkpoint(self.directory)
        self.loaded = True

    def restart(self) -> None:
        """Another process, which has loaded nothing yet."""
        Double.restart(self)
        self.version, self.root, self.in_doubt, self.weights = None, None, False, {}

    def on_check(self, body: Any) -> Answer:
        return self.refusal() if self.refuses else super().on_check(body)

    def on_reload(self, body: Any) -> Answer:
        if self.refuses and on_disk(self.directory) != self.now_held():
            return self.refusal()
        return super().on_reload(body)

    def refusal(self) -> Answer:
        return Answer(422, {"error": "not these weights", "tensor": "scalar", "remedy": "others"})

    def resume(self) -> None:
        super().resume()
        if self.loaded:
            self.served.append(self.now_held())

    def now_held(self) -> str:
        return digest_of(self.weights)


class Mapping(WebhookDouble):
    name, maps = "map", True
    refuses = False

    def __init__(self, local: Path) -> None:
        super().__init__()
        self.local, self.loaded = local, False
        self.served: list[str] = []

    def load(self, directory: str) -> bool:
        self.loaded = True
        return True

    def resume(self) -> None:
        super().resume()
        if self.loaded:
            self.served.append(self.now_held())

    def now_held(self) -> str:
        return on_disk(self.local)


Engine = Copying | Mapping | Patching


def made(kind: str, local: Path, others: tuple[Path, ...]) -> tuple[Engine, str, str]:
    """With its dialect, and what else its option says."""
    if kind == "copy":
        return Copying(others), "sglang", ""
    return (Mapping(local), "webhook", "") if kind == "map" else (Patching(local), "vllm", ",via=live")


def run_engines(local: Path, kinds: tuple[str, ...], wire: Connection, others: tuple[Path, ...] = ()) -> None:
    """Sends the engines' options, then answers `see`, `refuse`, `accept`, `restart` and `end`.
    `others`: local checkpoints of an engine group's other hosts."""
    with ExitStack() as stack:
        doubles: list[tuple[str, Engine]] = []
        for kind in kinds:
            double, dialect, more = made(kind, local, others)
            option = f"{dialect}={stack.enter_context(serve(double))},name={kind}{more}"
            doubles.append((option, double))
        wire.send([option for option, _ in doubles])
        while (order := wire.recv()) != "end":
            for _, double in doubles:
                _obey(double, order)
            wire.send([_facts(double) for _, double in doubles])


def _obey(double: Engine, order: str) -> None:
    if order in ("refuse", "accept"):
        double.refuses = order == "refuse"
    elif order == "restart":
        # a new process, which has loaded nothing yet
        double.restart()
        double.loaded = False


def _facts(double: Engine) -> dict[str, Any]:
    label = "" if double.label == "default" else double.label
    return {
        "name": double.name,
        "maps": double.maps,
        "loaded": double.loaded,
        "held": double.now_held() if double.loaded else "",
        "paused": double.paused,
        "spoiled": double.resumed_broken,
        "served": double.served[-8:],
        "label": label,
        "adapters": {name: digest for name, (_, digest) in double.adapters.items()},
        "mixed": getattr(double, "mixed", [])[-8:],
        "calls": len([call for call in double.calls if call.method == "POST"]),
    }
