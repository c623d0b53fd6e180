"""Two inference servers in a process of their own, which outlives the subscribers that are killed.

One copies the weights when it loads (SGLang's dialect), one maps the files (the webhook's). Both note what
they held whenever they began to serve.
"""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core_cases import read_checkpoint
from crash_observe import digest_of
from doubles import SGLangDouble, WebhookDouble, serve


def on_disk(directory: Path) -> str:
    """Digest of the tensors in a checkpoint directory; empty while there are none, or half a file."""
    try:
        return digest_of(read_checkpoint(directory))
    except (OSError, ValueError):
        return ""


class Copying(SGLangDouble):
    """Loads what lies in a checkpoint directory. While it `refuses`, it takes only what it had before."""

    maps = False

    def __init__(self, others: tuple[Path, ...] = ()) -> None:
        super().__init__()
        self.others = others
        """what the engine's other hosts read"""
        self.refuses = self.loaded = False
        self.served: list[str] = []

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
        if self.loaded:
            self.served.append(self.held)

    def now_held(self) -> str:
        return self.held


class Mapping(WebhookDouble):
    maps = True
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


def run_engines(local: Path, kinds: tuple[str, ...], wire: Connection, others: tuple[Path, ...] = ()) -> None:
    """Sends the engines' options, then answers `see`, `refuse`, `accept`, `restart` and `end`.
    `others`: local checkpoints of an engine group's other hosts."""
    with ExitStack() as stack:
        doubles: list[tuple[str, Copying | Mapping]] = []
        for kind in kinds:
            double = Copying(others) if kind == "copy" else Mapping(local)
            dialect = "sglang" if kind == "copy" else "webhook"
            doubles.append((f"{dialect}={stack.enter_context(serve(double))},name={kind}", double))
        wire.send([option for option, _ in doubles])
        while (order := wire.recv()) != "end":
            for _, double in doubles:
                _obey(double, order)
            wire.send([_facts(double) for _, double in doubles])


def _obey(double: Copying | Mapping, order: str) -> None:
    if order in ("refuse", "accept"):
        double.refuses = order == "refuse"
    elif order == "restart":
        # a new process, which has loaded nothing yet
        double.restart()
        double.loaded = False


def _facts(double: Copying | Mapping) -> dict[str, Any]:
    label = "" if double.label == "default" else double.label
    return {
        "name": "copy" if isinstance(double, Copying) else "map",
        "maps": double.maps,
        "loaded": double.loaded,
        "held": double.now_held() if double.loaded else "",
        "paused": double.paused,
        "spoiled": double.resumed_broken,
        "served": double.served[-8:],
        "label": label,
        "calls": len([call for call in double.calls if call.method == "POST"]),
    }
