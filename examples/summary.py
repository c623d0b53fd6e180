"""What a demo run showed, computed from facts, and whether that is enough. No input or output."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.table import Table

LEAST_VERSIONS = 20
LEAST_RISE = 3.0
"""standard errors of the difference by which the reward has to rise"""


@dataclass(frozen=True)
class Version:
    number: int
    created: float
    """unix time"""
    changed: int
    """elements"""
    elements: int
    """of the model"""
    delta_bytes: int
    """all files of the version"""


@dataclass(frozen=True)
class EngineEvent:
    time: float
    """unix time"""
    event: str
    """paused, reloaded or resumed"""
    label: str
    """weight version, "" for a pause"""


@dataclass(frozen=True)
class TrainerStep:
    step: int
    rewards: tuple[float, ...]
    """mean of every question's group"""
    lags: Mapping[int, int]
    """versions by which a rollout is older than the weights that it trains: rollouts"""
    versions_per_answer: Mapping[int, int] = field(default_factory=dict)
    """that may have made its tokens: rollouts"""
    time: float = 0.0
    """unix time of its end"""


@dataclass(frozen=True)
class Facts:
    versions: Sequence[Version]
    engines: Mapping[str, Sequence[EngineEvent]]
    steps: Sequence[TrainerStep]
    full_bytes: int
    """of one complete checkpoint's weight files"""
    kills: int
    """of the publisher"""
    max_lag: int
    """that the trainer asked for"""
    seconds: float
    wanted: Mapping[str, str]
    """tensor: checksum of the trainer's last export; empty when there was none"""
    found: Mapping[str, Mapping[str, str]]
    """place: its checksums"""


@dataclass(frozen=True)
class Reward:
    first_quarter: float
    last_quarter: float
    rise: float
    standard_error: float


@dataclass(frozen=True)
class Summary:
    """`failures`: check (versions, lag, reward, bits, died): what is wrong. None of them: the demo holds.
    `lags` and `versions_per_answer` have shares of all rollouts, which are all of one length."""

    versions_published: int
    versions_served: Mapping[str, int]
    density: float
    delta_bytes: float
    full_bytes: int
    bits_per_change: float
    latency_seconds_p50: float | None
    latency_seconds_max: float | None
    pause_ms_p50: float | None
    pause_ms_max: float | None
    lags: Mapping[int, float]
    lag_mean: float
    lag_max: int
    lag_allowed: int
    versions_per_answer: Mapping[int, float]
    step_seconds_p50: float | None
    reward: Reward | None
    publisher_kills: int
    bit_exact: Mapping[str, bool]
    seconds: float
    failures: Mapping[str, str] = field(default_factory=dict)


def summarise(facts: Facts) -> Summary:
    changed = sum(version.changed for version in facts.versions)
    latencies = [
        latency for events in facts.engines.values() for latency in _latencies(facts.versions, events)
    ]
    pauses = [1000 * pause for events in facts.engines.values() for pause in _pauses(events)]
    lags = _shares(step.lags for step in facts.steps)
    ends = [step.time for step in facts.steps]
    reward = reward_of(facts.steps)
    served = {name: _served(facts.versions, events) for name, events in facts.engines.items()}
    exact = {place: bool(facts.wanted) and found == facts.wanted for place, found in facts.found.items()}
    return Summary(
        versions_published=len(facts.versions),
        versions_served=served,
        density=changed / max(1, sum(version.elements for version in facts.versions)),
        delta_bytes=statistics.fmean([version.delta_bytes for version in facts.versions] or [0]),
        full_bytes=facts.full_bytes,
        bits_per_change=8 * sum(version.delta_bytes for version in facts.versions) / max(1, changed),
        latency_seconds_p50=statistics.median(latencies) if latencies else None,
        latency_seconds_max=max(latencies, default=None),
        pause_ms_p50=statistics.median(pauses) if pauses else None,
        pause_ms_max=max(pauses, default=None),
        lags=lags,
        lag_mean=sum(lag * share for lag, share in lags.items()),
        lag_max=max(lags, default=0),
        lag_allowed=facts.max_lag,
        versions_per_answer=_shares(step.versions_per_answer for step in facts.steps),
        step_seconds_p50=statistics.median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else None,
        reward=reward,
        publisher_kills=facts.kills,
        bit_exact=exact,
        seconds=facts.seconds,
        failures=_failures(len(facts.versions), served, reward, exact) | _lag_failure(lags, facts.max_lag),
    )


def _shares(counts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    total = sum(map(Counter[int], counts), Counter[int]())
    return {number: total[number] / total.total() for number in sorted(total)}


def _lag_failure(lags: Mapping[int, float], allowed: int) -> dict[str, str]:
    most = max(lags, default=0)
    return {"lag": f"a rollout is {most} versions old; {allowed} are allowed"} if most > allowed else {}


def reward_of(steps: Sequence[TrainerStep]) -> Reward | None:
    """Over the questions of the first and last quarter of all steps; None for fewer than four steps."""
    quarter = len(steps) // 4
    if quarter == 0:
        return None
    first = [reward for step in steps[:quarter] for reward in step.rewards]
    last = [reward for step in steps[-quarter:] for reward in step.rewards]
    error = (statistics.variance(first) / len(first) + statistics.variance(last) / len(last)) ** 0.5
    means = statistics.fmean(first), statistics.fmean(last)
    return Reward(*means, rise=means[1] - means[0], standard_error=error)


def _served(versions: Sequence[Version], events: Sequence[EngineEvent]) -> int:
    """Versions that an engine loaded and generated with; one that it skipped does not count."""
    published = {str(version.number) for version in versions}
    return len(published & {event.label for event in events if event.event == "resumed"})


def _latencies(versions: Sequence[Version], events: Sequence[EngineEvent]) -> list[float]:
    """From a version's creation until the engine generates with it or a newer one."""
    served = [
        (int(event.label), event.time)
        for event in events
        if event.event == "resumed" and event.label.isdigit()
    ]
    first = [[time for number, time in served if number >= version.number] for version in versions]
    return [min(times) - version.created for version, times in zip(versions, first, strict=True) if times]


def _pauses(events: Sequence[EngineEvent]) -> list[float]:
    """Seconds from each pause to the next resumption, where the weights changed in between."""
    spans: list[float] = []
    began: float | None = None
    reloaded = False
    for event in events:
        if event.event == "paused":
            began, reloaded = event.time if began is None else began, False
        elif event.event == "reloaded":
            reloaded = True
        elif event.event == "resumed" and began is not None:
            spans += [event.time - began] if reloaded else []
            began = None
    return spans


def _failures(
    published: int, served: Mapping[str, int], reward: Reward | None, exact: Mapping[str, bool]
) -> dict[str, str]:
    failures = {}
    fewest = min(served.values(), default=0)
    if min(published, fewest) < LEAST_VERSIONS:
        failures["versions"] = f"{published} published, {fewest} served; {LEAST_VERSIONS} are needed"
    if reward is None or reward.rise <= LEAST_RISE * reward.standard_error:
        failures["reward"] = "did not rise" if reward is None else _too_little(reward)
    different = [place for place, same in exact.items() if not same]
    if different or not exact:
        failures["bits"] = f"not the trainer's last export: {', '.join(different) or 'nothing was compared'}"
    return failures


def _too_little(reward: Reward) -> str:
    least = LEAST_RISE * reward.standard_error
    return f"rose by {reward.rise:+.4f}; {LEAST_RISE:.0f} standard errors are {least:.4f}"


def render(summaries: Mapping[str, Summary]) -> Table:
    """A column for each adapter; for the model alone, "", one without a heading."""
    table = Table("", *summaries, title="weightcast demo", show_header=len(summaries) > 1)
    for rows in zip(*map(_rows, summaries.values()), strict=True):
        table.add_row(rows[0][0], *(value for _, value in rows))
    return table


def _rows(summary: Summary) -> list[tuple[str, str]]:
    served = ", ".join(f"{name} {count}" for name, count in summary.versions_served.items())
    share = summary.delta_bytes / max(1, summary.full_bytes)
    rows = [
        ("versions published", str(summary.versions_published)),
        ("versions served", served),
        ("publisher killed and restarted", f"{summary.publisher_kills}x"),
        ("changed elements per version", f"{summary.density:.2%}"),
        (
            "bytes per version",
            f"{summary.delta_bytes:,.0f} of {summary.full_bytes:,} ({share:.2%}), "
            f"{summary.bits_per_change:.2f} bits per changed element",
        ),
        ("publish to served, s", _spread(summary.latency_seconds_p50, summary.latency_seconds_max, ".2f")),
        ("engine pause, ms", _spread(summary.pause_ms_p50, summary.pause_ms_max, ".0f")),
        (
            "lag of rollouts",
            f"mean {summary.lag_mean:.2f} versions, max {summary.lag_max} of {summary.lag_allowed}",
        ),
        ("versions per answer", _share_text(summary.versions_per_answer)),
        ("seconds per step", "-" if summary.step_seconds_p50 is None else f"{summary.step_seconds_p50:.2f}"),
        ("mean reward", _reward_text(summary.reward)),
    ]
    rows += [
        (f"bits: {place}", "equal" if same else "DIFFERENT") for place, same in summary.bit_exact.items()
    ]
    return [*rows, ("wall clock", f"{summary.seconds:.0f} s")]


def compare(summaries: Sequence[Summary]) -> Table:
    """What it costs to train on younger rollouts."""
    table = Table(title="off-policy: share of tokens by lag in versions")
    most = max((summary.lag_max for summary in summaries), default=0)
    columns = ["at most", *map(str, range(most + 1)), "s per step", "last reward"]
    for column in columns:
        table.add_column(column, justify="right")
    for summary in summaries:
        shares = [f"{summary.lags.get(lag, 0.0):.0%}" for lag in range(most + 1)]
        reward = "-" if summary.reward is None else f"{summary.reward.last_quarter:.4f}"
        table.add_row(str(summary.lag_allowed), *shares, f"{summary.step_seconds_p50 or 0:.2f}", reward)
    return table


def _share_text(shares: Mapping[int, float]) -> str:
    return ", ".join(f"{number}: {share:.1%}" for number, share in shares.items()) or "-"


def _spread(median: float | None, most: float | None, form: str) -> str:
    return "-" if median is None or most is None else f"p50 {median:{form}}, max {most:{form}}"


def _reward_text(reward: Reward | None) -> str:
    if reward is None:
        return "-"
    return (
        f"first quarter {reward.first_quarter:.4f}, last quarter {reward.last_quarter:.4f}: "
        f"{reward.rise:+.4f}, standard error {reward.standard_error:.4f}"
    )
