"""What a run measures: all of it within twenty minutes on two cores, or a quick look within two."""

from __future__ import annotations

from dataclasses import dataclass

from .codec import DENSITIES, RATES
from .files import Block, Scenario

_MB, _GB = 10**6, 10**9


@dataclass(frozen=True)
class Plan:
    quick: bool
    densities: tuple[float, ...]
    rates: tuple[float, ...]
    """learning rates of trained traces"""
    threads: tuple[int, ...]
    rounds: int
    scenarios: tuple[Scenario, ...]
    empty_cache: bool
    """whether first use is measured with every kernel still to be compiled"""


def full(cores: int) -> Plan:
    threads = _threads(cores)
    most = threads[-1]
    return Plan(
        quick=False,
        densities=DENSITIES,
        rates=RATES,
        threads=threads,
        rounds=5,
        scenarios=(
            Scenario(20 * _MB, most, (Block(5),)),
            Scenario(200 * _MB, most, (Block(5),)),
            Scenario(_GB, 1, (Block(2),), ("fast", "field")),
            Scenario(
                _GB, most, (Block(5), *(Block(3, density) for density in (0.003, 0.04, 0.08, 0.18, 0.5, 1.0)))
            ),
            # of 1.5 million words each, as many models have them, and of few
            Scenario(_GB, most, (Block(3),), ("fast", "field"), experts=320),
            Scenario(400 * _MB, most, (Block(3),), ("fast", "field"), experts=50_000),
            # every turn writes back a model: a third contender would take a third more of disk and time
            Scenario(
                4 * _GB,
                most,
                (Block(5), Block(3, doors="commands"), Block(1, doors="commands", cache="cold")),
                ("fast", "field"),
            ),
        ),
        empty_cache=True,
    )


def quick(cores: int) -> Plan:
    most = _threads(cores)[-1]
    return Plan(
        quick=True,
        densities=(0.0, 0.003, 0.014, 0.18, 1.0),
        rates=(),
        threads=(most,),
        rounds=2,
        scenarios=(
            Scenario(20 * _MB, most, (Block(2),)),
            Scenario(20 * _MB, most, (Block(1),), ("fast", "field"), experts=2_000),
            Scenario(100 * _MB, most, (Block(3), Block(1, 0.18), Block(1, doors="commands"))),
        ),
        empty_cache=False,
    )


def custom(megabytes: int, density: float, rounds: int, threads: int) -> Scenario:
    return Scenario(megabytes * _MB, threads, (Block(rounds, density), Block(1, density, "commands")))


def _threads(cores: int) -> tuple[int, ...]:
    """One, two, and all of up to eight."""
    return tuple(sorted({1, min(2, cores), min(8, cores)}))
