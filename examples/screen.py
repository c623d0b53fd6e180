"""The demo's display: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from examples.observe import HostView, PublisherView
from examples.summary import TrainerStep

TABLE_SECONDS = 0.3
LINE_SECONDS = 5.0
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class View:
    phase: str
    seconds: float
    processes: Mapping[str, str]
    publisher: PublisherView
    ready_hosts: int
    """that the gateway sends requests to"""
    hosts: Sequence[HostView]
    steps: Sequence[TrainerStep]
    wanted_steps: int


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()
        self._shown = float("-inf")

    def show(self, view: Callable[[], View]) -> None:
        """Calls `view` only when it is time to show something."""
        now = time.monotonic()
        if now - self._shown < (LINE_SECONDS if self._live is None else TABLE_SECONDS):
            return
        self._shown = now
        if self._live is None:
            self._console.print(line(view()), markup=False, highlight=False, soft_wrap=True)
        else:
            self._live.update(table(view()), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def line(view: View) -> str:
    hosts = ", ".join(
        f"{host.name} {_text(host.local_version)}/{_text(host.served_version)}" for host in view.hosts
    )
    reward = _recent_reward(view.steps)
    return (
        f"[{view.seconds:4.0f} s] {view.phase}; step {len(view.steps)}/{view.wanted_steps}, "
        f"published {view.publisher.version}, local/served: {hosts}, reward {reward}"
    )


def table(view: View) -> Table:
    shown = Table(title=f"{view.phase}, {view.seconds:.0f} s", caption=_curve(view.steps))
    for heading in ("process", "state", "version", "facts"):
        shown.add_column(heading)
    publisher = view.publisher
    shown.add_row(
        "trainer", _state(view, "trainer"), f"step {len(view.steps)}/{view.wanted_steps}", _lag(view.steps)
    )
    shown.add_row("publisher", _state(view, "publisher"), _text(publisher.version), publisher.facts)
    shown.add_row("gateway", _state(view, "gateway"), "", f"{view.ready_hosts} hosts ready")
    for host in view.hosts:
        versions = f"local {_text(host.local_version)}, served {_text(host.served_version)}"
        shown.add_row(
            f"subscriber-{host.name}", _state(view, f"subscriber-{host.name}"), versions, host.facts
        )
        shown.add_row(f"engine-{host.name}", _state(view, f"engine-{host.name}"), _text(host.label), "")
    return shown


def _state(view: View, name: str) -> str:
    return view.processes.get(name, "-")


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _lag(steps: Sequence[TrainerStep]) -> str:
    if not steps:
        return ""
    return f"rollouts {max(steps[-1].lags)} versions behind at most, reward {_recent_reward(steps)}"


def _recent_reward(steps: Sequence[TrainerStep], window: int = 4) -> str:
    recent = [reward for step in steps[-window:] for reward in step.rewards]
    return f"{statistics.fmean(recent):.3f}" if recent else "-"


def _curve(steps: Sequence[TrainerStep]) -> str:
    """Mean reward per step, scaled to what was seen so far."""
    means = [statistics.fmean(step.rewards) for step in steps]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((mean - low) * scale)] for mean in means)
    return f"reward {low:.3f} {bars} {high:.3f}"
