"""The campaign: which kill comes next, what became of each, the table at the end.

    python tests/crash/crash_run.py --kills 500 --cover 3

At every failpoint at least `--cover` processes are killed, and at least one in each kind of file by each side
that passes it; one that is never reached fails the run, as does every violation. What is not covered goes
before everything else; then rows with less than `--cover` kills. `--seed` fixes the plan, not the timing.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "tests" / "subscriber")]

import crash_processes  # noqa: E402
import httpx  # noqa: E402
from crash_failpoints import failpoints_of  # noqa: E402
from crash_processes import NotReached, Order  # noqa: E402
from crash_scenarios import DISTURBED, RANDOM, SCENARIOS, Run, Scenario  # noqa: E402
from crash_world import Shape, World  # noqa: E402
from forked import import_weightcast  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from s3_gateway import Away, bucket_at, outages  # noqa: E402

USES_OF_A_WORLD = 30
WEIGHTS = {
    "take over": 0.08,
    "disturb publisher": 0.05,
    "disturb host": 0.05,
    "lose engine": 0.05,
    "power of host": 0.05,
    "power of publisher": 0.05,
}
"""share of the strikes that are more, or less, than a kill; the rest is shared by need"""
SHARE_OF_MOMENTS = 0.08
MISSES = 8
"""after these a row is one of the others; if it is not covered, half of the turns go to rows like it"""
SHARE_BEFORE_COVER = 0.5
"""of these weights, while a row has less kills than are wanted"""
SECONDS_BETWEEN_LINES = 20.0
USES_BY_A_MISS = 6
"""a row that was not passed may want a world of another shape"""


@dataclass
class Row:
    """What happened at one failpoint of one side."""

    side: str
    name: str
    kills: int = 0
    suspended: int = 0
    errors: int = 0
    seconds: list[float] = field(default_factory=list)
    violations: int = 0


@dataclass(frozen=True)
class Violation:
    scenario: str
    order: Order
    world_seed: int
    texts: tuple[str, ...]


class Tally:
    """Kills by side and row, of all parts of a campaign that write into the same file."""

    def __init__(self, file: Path) -> None:
        self.file, self._read = file, 0
        self._rows: Counter[tuple[str, str]] = Counter()
        self._failpoints: Counter[str] = Counter()
        file.touch()

    def add(self, side: str, row: str) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([side, row]) + "\n")

    def look(self) -> None:
        """Takes in what was added since."""
        with self.file.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        for line in whole.splitlines():
            side, row = json.loads(line)
            self._rows[side, row] += 1
            self._failpoints[failpoint_of(row)] += 1

    def kills(self, side: str, row: str) -> int:
        return self._rows[side, row]

    def of_failpoint(self, name: str) -> int:
        return self._failpoints[name]

    def covers(self, side: str, row: str, cover: int) -> bool:
        """The side was killed there, and enough at this failpoint."""
        return self._rows[side, row] > 0 and self._failpoints[failpoint_of(row)] >= cover


def failpoint_of(row: str) -> str:
    return row.partition(" ")[0]


class Plan:
    """Which scenario and row come next: the rows struck least, in a scenario that passes them."""

    def __init__(
        self,
        rng: random.Random,
        names: Sequence[str],
        row: str,
        cover: int,
        tally: Tally,
        *,
        moments: bool = True,
    ) -> None:
        self.names = tuple(names)
        self._rng, self._row, self._cover, self._tally = rng, row, cover, tally
        self._moments = moments
        """also at random moments"""
        self.passed: dict[str, dict[str, int]] = {}
        """scenario to the rows it passes, and how often"""
        self.struck: Counter[tuple[str, str]] = Counter()
        """(scenario, row)"""
        self._missed: Counter[tuple[str, str]] = Counter()
        self._passes: Counter[tuple[str, str]] = Counter()
        """runs that passed a row of a scenario"""
        self._first: dict[str, frozenset[str]] = {}
        """scenario to the rows that it passed when nobody was struck"""

    def asked(self, name: str) -> list[str]:
        """Rows that the scenario passes by what it does. What was passed once, by what a kill happened to
        leave, is not asked for there; its failpoint is."""
        first = self._first.get(name, frozenset())
        return [row for row in self.passed.get(name, {}) if row in first or self._passes[name, row] > 1]

    def next(self) -> tuple[str, Order]:
        for name in self.names:
            if name not in self.passed:
                return name, Order()
        self._tally.look()
        name, row = min(self._wanted(), key=self._score)
        return name, self._order(name, row)

    def _wanted(self) -> list[tuple[str, str]]:
        """What is not covered goes before everything else. Then other kinds of strikes have their share,
        and random moments when no row is short."""
        usual = [name for name in self.names if name not in WEIGHTS]
        missing, few = self._lacking(usual)
        easy = [each for each in missing if self._missed[each] < MISSES]
        if easy or (missing and self._rng.random() < 0.5):
            return easy or missing
        few = [each for each in few if self._missed[each] < MISSES]
        kind = self._drawn(SHARE_BEFORE_COVER if few else 1.0)
        if kind and (of_kind := self._candidates([kind])):
            return of_kind
        candidates = few or self._candidates(usual) or self._candidates(self.names)
        if not candidates:
            raise SystemExit(self._no_such_row())
        moments = [each for each in candidates if each[1] == RANDOM]
        return moments if moments and self._rng.random() < SHARE_OF_MOMENTS else candidates

    def _no_such_row(self) -> str:
        known = {row for rows in self.passed.values() for row in rows}
        near = difflib.get_close_matches(self._row, known, 5, 0.3) or sorted(known)[:5]
        which = f"row contains {self._row!r}" if self._row else "row can be struck"
        return f"no {which} in {', '.join(self.names)}; rows that were passed: {', '.join(near)}, ..."

    def _lacking(self, names: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Candidates that are not covered, and those with less kills than the cover; none without one."""
        asked = {name: set(self.asked(name)) for name in names if self._cover}
        rows = [(name, row) for name, row in self._candidates(names) if row in asked.get(name, ())]
        sides = {name: SCENARIOS[name].side for name in names}
        tally, cover = self._tally, self._cover
        missing = [(name, row) for name, row in rows if not tally.covers(sides[name], row, cover)]
        return missing, [(name, row) for name, row in rows if tally.kills(sides[name], row) < cover]

    def _drawn(self, share: float) -> str:
        """A scenario that is more, or less, than a kill; empty for the others."""
        kinds = [name for name in self.names if name in WEIGHTS]
        weights = [WEIGHTS[name] * share for name in kinds]
        return self._rng.choices([*kinds, ""], [*weights, max(0.0, 1 - sum(weights))])[0]

    def _candidates(self, names: Sequence[str]) -> list[tuple[str, str]]:
        known = [(name, row) for name in names for row in self.passed[name]]
        found = [each for each in known if each[1] == self._row]
        found = found or [each for each in known if self._row in each[1]]
        if self._moments and not self._row:
            found += [(name, RANDOM) for name in names if SCENARIOS[name].moments]
        return found

    def _score(self, candidate: tuple[str, str]) -> tuple[float, ...]:
        """Rows with less kills than are wanted at first, those tried least among them."""
        name, row = candidate
        if name in WEIGHTS:
            return self.struck[candidate] + self._missed[candidate], self._rng.random()
        own = self._tally.kills(SCENARIOS[name].side, row)
        short = row != RANDOM and own < max(1, self._cover) and self._missed[candidate] < MISSES
        struck = sum(count for (_, which), count in self.struck.items() if which == row)
        tried = self._missed[candidate] + (struck / 4 if row == RANDOM else own)
        return not short, tried, self.struck[candidate], self._rng.random()

    def _order(self, name: str, row: str) -> Order:
        if row == RANDOM:
            return Order(RANDOM)
        never = name not in WEIGHTS and not self._tally.kills(SCENARIOS[name].side, row)
        if never or self._missed[name, row] > self.struck[name, row]:
            return Order(row)
        most = max(1, self.passed[name][row])
        return Order(row, self._rng.choice((1, most, self._rng.randint(1, most))))

    def learn(self, name: str, run: Run) -> None:
        known = self.passed.setdefault(name, {})
        for row, count in run.rows.items():
            if count > 0 and not run.by_moment:
                known[row] = max(known.get(row, 0), count)
                self._passes[name, row] += 1
        if name not in self._first:
            self._first[name] = frozenset(known)
        if run.order.key:
            self.struck[name, run.order.key] += run.struck
            self._missed[name, run.order.key] += not run.struck


def _kind_of(scenario: Scenario) -> object:
    made_for = scenario.engines, scenario.keep_versions, scenario.member, scenario.shards
    return scenario.daemons, *made_for, scenario.adapters


class Campaign:
    def __init__(
        self,
        root: Path,
        seed: int,
        names: Sequence[str],
        row: str,
        cover: int,
        tally: Tally,
        *,
        errors: bool = False,
        channel: str = "",
    ) -> None:
        self.seed, self._channel, self._root, self.cover, self._tally = seed, channel, root, cover, tally
        self._errors = errors
        """of disks, in place of kills"""
        self._rng = random.Random(seed)
        self.plan = Plan(self._rng, names, row, cover, tally, moments=not errors)
        self.rows: dict[tuple[str, str], Row] = {}
        self.violations: list[Violation] = []
        self.others = self.left_out = 0
        """kills on the way; runs in which the object store was away"""
        self._outages = outages()
        self._worlds: dict[object, tuple[World, int, int]] = {}
        """by what they can be used for: the world, its seed, how often it was used"""
        self._made = 0

    @property
    def strikes(self) -> int:
        return sum(len(row.seconds) for row in self.rows.values())

    @property
    def kills(self) -> int:
        return self.others + sum(row.kills for row in self.rows.values())

    @property
    def errors(self) -> int:
        return sum(row.errors for row in self.rows.values())

    def close(self) -> None:
        for key in list(self._worlds):
            self._drop(key)

    def once(self) -> Violation | None:
        """Of a run in which the object store was away nothing counts."""
        name, order = self.plan.next()
        scenario = (DISTURBED if self._errors else SCENARIOS)[name]
        key: object = name if scenario.new else _kind_of(scenario)
        before = self._outages
        try:
            run, seed = self._run(key, scenario, order)
        except (RuntimeError, httpx.HTTPError):
            if not self._was_away(before):
                raise
            return self._leave_out(key)
        if run.violations and self._was_away(before):
            return self._leave_out(key)
        self.plan.learn(name, run)
        self._note(scenario, run)
        if run.order.key and not run.struck:
            self._wear(key)
        violation = None
        if run.violations:
            violation = Violation(name, run.order, seed, tuple(run.violations))
            self.violations.append(violation)
        if run.violations or scenario.new:
            self._drop(key)
        else:
            run.world.rest()
        return violation

    def _was_away(self, before: int) -> bool:
        self._outages = outages()
        return self._outages > before

    def _leave_out(self, key: object) -> None:
        self.left_out += 1
        if key in self._worlds:
            self._drop(key)

    def _run(self, key: object, scenario: Scenario, order: Order) -> tuple[Run, int]:
        world, seed = self._world(key, scenario)
        run = Run(world, order, random.Random(self._rng.getrandbits(32)))
        world.wake()
        try:
            scenario.act(run)
        except NotReached as error:
            run.check([f"did not come to an end: {error}"])
        return run, seed

    def _wear(self, key: object) -> None:
        world, seed, used = self._worlds[key]
        self._worlds[key] = (world, seed, used + USES_BY_A_MISS)

    def _world(self, key: object, scenario: Scenario) -> tuple[World, int]:
        if key in self._worlds and self._worlds[key][2] >= USES_OF_A_WORLD:
            self._drop(key)
        if key not in self._worlds:
            self._made += 1
            seed = self.seed * 1_000_003 + self._made
            self._worlds[key] = (self._make(seed, scenario), seed, 0)
        world, seed, used = self._worlds[key]
        self._worlds[key] = (world, seed, used + 1)
        return world, seed

    def _make(self, seed: int, scenario: Scenario) -> World:
        shape = Shape.drawn(random.Random(seed))
        if scenario.engines is not None:
            shape = replace(shape, engines=scenario.engines)
        if scenario.keep_versions is not None:
            shape = replace(shape, keep_versions=scenario.keep_versions)
        if scenario.shards is not None:
            shape = replace(shape, shards=scenario.shards)
        shape = replace(shape, member=scenario.member, adapters=scenario.adapters)
        world = World(self._root / f"world-{seed}", seed, shape, self._channel)
        if scenario.member:
            world.start_member()
        if scenario.daemons:
            world.start_publisher()
            world.hand_over()
            if shape.adapters:
                world.hand_over_adapters()
            world.start_host()
            world.seeds = 1
            found = world.settle()
            if found:
                world.close()
                raise RuntimeError(f"a world does not even start: {found}")
        return world

    def _drop(self, key: object) -> None:
        world, _, _ = self._worlds.pop(key)
        world.close()
        shutil.rmtree(world.root)

    def _note(self, scenario: Scenario, run: Run) -> None:
        self.others += run.others
        if not run.order.key:
            return
        row = self.rows.setdefault((scenario.side, run.order.key), Row(scenario.side, run.order.key))
        if run.struck:
            row.kills += run.order.action == "kill"
            if run.order.action == ("error" if self._errors else "kill"):
                self._tally.add(scenario.side, run.order.key)
            row.suspended += run.order.action == "stop"
            row.errors += run.order.action == "error"
            row.seconds.append(run.seconds)
        row.violations += bool(run.violations)

    def passed(self) -> list[tuple[str, str]]:
        """Sides, and the rows that they pass."""
        return sorted(
            {
                (SCENARIOS[name].side, row)
                for name in self.plan.names
                for row in self.plan.asked(name)
                if name not in WEIGHTS
            }
        )

    def uncovered(self) -> list[str]:
        """By any part."""
        self._tally.look()
        return uncovered(self.passed(), self._tally, self.cover) if self.cover else []

    def short(self) -> list[str]:
        """What would be covered more often with more time: rows, and kinds of strikes."""
        kinds: Counter[str] = Counter()
        for (name, _), count in self.plan.struck.items():
            kinds[name] += count
        few = [name for name in self.plan.names if name in WEIGHTS and kinds[name] < self.cover]
        return short(self.passed(), self._tally, self.cover) + [f"{name}: {kinds[name]}" for name in few]

    def facts(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "kills": self.kills,
            "errors": self.errors,
            "strikes": self.strikes,
            "rows": [asdict(row) for row in self.rows.values()],
            "others": self.others,
            "left_out": self.left_out,
            "passed": self.passed(),
            "violations": [asdict(each) for each in self.violations],
        }


def uncovered(passed: Sequence[tuple[str, str]], tally: Tally, cover: int) -> list[str]:
    """Failpoints with less kills than `cover`; rows, by the kind of file, that a side passes and where it was
    never killed."""
    failpoints = sorted({failpoint_of(row) for _, row in passed})
    few = [(name, tally.of_failpoint(name)) for name in failpoints if tally.of_failpoint(name) < cover]
    never = [(side, row) for side, row in passed if not tally.kills(side, row)]
    return [
        *(f"{name}: {kills} kills" for name, kills in few),
        *(f"{row}: no {side} was killed there" for side, row in never),
    ]


def short(passed: Sequence[tuple[str, str]], tally: Tally, cover: int) -> list[str]:
    """Rows at which the side was killed, and less often than `cover`."""
    kills = [(side, row, tally.kills(side, row)) for side, row in passed if row != RANDOM]
    return [f"{row}, {side}: {count} kills" for side, row, count in kills if 0 < count < cover]


def never_reached(tally: Tally, channel: str) -> list[str]:
    return [f"{name}: never reached" for name in failpoints_of(channel) if not tally.of_failpoint(name)]


def table_of(facts: Mapping[str, Any]) -> Table:
    table = Table(title=f"{facts['kills']} kills")
    for title in ("side", "failpoint"):
        table.add_column(title)
    for title in ("kills", "suspended", "errors", "mean s", "worst s", "violations"):
        table.add_column(title, justify="right")
    rows = [Row(**row) for row in facts["rows"]]
    for row in sorted(rows, key=lambda row: (row.side, row.name)):
        mean = f"{sum(row.seconds) / len(row.seconds):.2f}" if row.seconds else ""
        worst = f"{max(row.seconds):.2f}" if row.seconds else ""
        numbers = (row.kills, row.suspended, row.errors, mean, worst, row.violations)
        table.add_row(row.side, row.name, *(str(each or "") for each in numbers))
    table.add_row("any", "on the way, at random moments", str(facts["others"]), "", "", "", "", "")
    return table


def run_campaign(arguments: argparse.Namespace, campaign: Campaign, console: Console) -> list[str]:
    """Until enough was killed and all is covered, or time is up. Returns what is not covered."""
    began = shown = time.monotonic()
    deadline = began + arguments.minutes * 60
    while time.monotonic() < deadline:
        violation = campaign.once()
        if violation is not None:
            _show(violation, console)
            if arguments.first or len(campaign.violations) >= arguments.most:
                break
        if time.monotonic() - shown > SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            text = _progress(campaign, arguments.part, shown - began)
            console.print(text, style="dim", highlight=False)
        if arguments.strikes:
            if campaign.strikes >= arguments.strikes:
                break
        elif _enough(arguments, campaign) and not campaign.uncovered() and not campaign.short():
            break
    return campaign.uncovered()


def _enough(arguments: argparse.Namespace, campaign: Campaign) -> bool:
    return (campaign.errors if arguments.errors else campaign.kills) >= arguments.kills


def _progress(campaign: Campaign, part: str, seconds: float) -> str:
    left = f", {len(campaign.uncovered())} rows not covered, {len(campaign.short())} short"
    errors = f" and {campaign.errors} errors" if campaign.errors else ""
    done = f"{campaign.kills} kills{errors} in {seconds:.0f} s{left if campaign.cover else ''}"
    return f"{part}: {done}" if part else done


def _show(violation: Violation, console: Console) -> None:
    console.print(
        f"VIOLATION in {violation.scenario!r}, {violation.order}, world {violation.world_seed}",
        style="bold red",
        highlight=False,
    )
    for text in violation.texts:
        console.print(f"  {text}", highlight=False, markup=False)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--strikes", type=int, default=0, help="end after so many strikes of any kind")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--cover", type=int, default=0, help="kills that every failpoint must see")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--jobs", type=int, default=2, help="1: all in one process, one after the other")
    parser.add_argument(
        "--patience", type=float, default=3.0, help="multiplies every wait: for a busy machine"
    )
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--tally", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--row", default="", help="only this row, or rows whose name contains this")
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument(
        "--errors",
        action="store_true",
        help="disk errors in place of kills: once or for a while; --kills and --cover then count them",
    )
    parser.add_argument("--most", type=int, default=10, help="end after so many violations")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file")
    parser.add_argument(
        "--channel", default="", help="s3, or s3://BUCKET of the environment's server; else a directory"
    )
    parser.add_argument("--root", type=Path, default=None, help="where the worlds lie")
    return parser.parse_args(arguments)


def run_here(arguments: argparse.Namespace, seed: int, console: Console) -> dict[str, Any]:
    """The campaign in this process; its results."""
    crash_processes.patience = arguments.patience
    import_weightcast()
    memory = Path("/dev/shm")
    place = arguments.root or (memory if os.access(memory, os.W_OK) else None)
    root = Path(tempfile.mkdtemp(prefix="weightcast-crash-", dir=place))
    tally = Tally(root / "kills" if arguments.tally is None else arguments.tally)
    known = DISTURBED if arguments.errors else SCENARIOS
    names = [name for name in arguments.scenario or known if name in known]
    options = {"errors": arguments.errors, "channel": arguments.channel}
    campaign = Campaign(root, seed, names, arguments.row, arguments.cover, tally, **options)
    away: list[str] = []
    try:
        try:
            missing = run_campaign(arguments, campaign, console)
        except Away as error:
            away = missing = [str(error)]
        if arguments.cover and not (arguments.part or arguments.scenario or arguments.row):
            missing += never_reached(tally, arguments.channel)
        return {**campaign.facts(), "missing": missing, "short": campaign.short(), "away": away}
    finally:
        campaign.close()
        shutil.rmtree(root)


def run_parts(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The scenarios of hosts, of publishers' daemons, of adapters and of what runs without daemons at once,
    each in a process of its own; the results of all."""
    kinds: dict[str, list[str]] = {"hosts": [], "publishers": [], "adapters": [], "without daemons": []}
    for name, each in SCENARIOS.items():
        side = "publishers" if each.side == "publisher" else "hosts"
        kinds["adapters" if each.adapters else side if each.daemons else "without daemons"].append(name)
    with tempfile.TemporaryDirectory() as directory:
        tally = Tally(Path(directory) / "kills")
        files = [Path(directory) / f"{number}.json" for number in range(len(kinds))]
        parts = [
            subprocess.Popen(_part(arguments, seed + number, kind, file, tally.file, kinds[kind]))
            for number, (kind, file) in enumerate(zip(kinds, files, strict=True))
        ]
        ended = [part.wait() for part in parts]
        if not all(file.exists() for file in files):
            raise SystemExit(f"a part ended without results: {ended}")
        results = [json.loads(file.read_text()) for file in files]
        tally.look()
    merged = {key: sum((each[key] for each in results[1:]), results[0][key]) for key in results[0]}
    merged["rows"] = _summed(Row(**row) for row in merged["rows"])
    passed = sorted({(side, row) for side, row in merged["passed"]})
    cover = arguments.cover
    missing = [*uncovered(passed, tally, cover), *never_reached(tally, arguments.channel)] if cover else []
    return {
        **merged,
        "passed": passed,
        "missing": missing + merged["away"],
        "short": short(passed, tally, cover),
        "seed": seed,
    }


def _summed(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Parts strike the same failpoints: one row for each side and failpoint."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        whole = found.setdefault((row.side, row.name), Row(row.side, row.name))
        whole.kills += row.kills
        whole.suspended += row.suspended
        whole.errors += row.errors
        whole.seconds += row.seconds
        whole.violations += row.violations
    return [asdict(row) for row in found.values()]


def _part(
    arguments: argparse.Namespace, seed: int, kind: str, file: Path, tally: Path, names: Sequence[str]
) -> list[str]:
    command = [sys.executable, __file__, "--jobs", "1", "--part", kind, "--json", str(file)]
    command += ["--seed", str(seed), "--tally", str(tally)]
    for option in ("minutes", "cover", "most", "patience"):
        command += [f"--{option}", str(getattr(arguments, option))]
    command += ["--kills", str(-(-arguments.kills // 4))]
    command += ["--channel", arguments.channel] + ["--errors"] * arguments.errors
    return command + [word for name in names for word in ("--scenario", name)]


def main() -> int:
    arguments = parse()
    console = Console(width=None if sys.stdout.isatty() else 110)
    seed = int.from_bytes(os.urandom(3), "little") if arguments.seed is None else arguments.seed
    console.print(f"seed {seed}")
    began = time.monotonic()
    whole = not (arguments.scenario or arguments.row or arguments.strikes)
    parts = whole and arguments.jobs > 1
    with tempfile.TemporaryDirectory() as directory, bucket_at(arguments.channel, Path(directory)) as channel:
        arguments.channel = channel
        facts = run_parts(arguments, seed) if parts else run_here(arguments, seed, console)
    facts["seconds"] = time.monotonic() - began
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(facts, indent=1))
    if not arguments.part:
        console.print(table_of(facts))
        if facts["short"]:
            console.print(f"less than {arguments.cover} kills: {'; '.join(facts['short'])}", highlight=False)
        for text in facts["missing"]:
            console.print(text, style="red", highlight=False)
    violations = len(facts["violations"])
    errors = f", {facts['errors']} disk errors" if facts["errors"] else ""
    away = f", {facts['left_out']} runs left out: the store was away" if facts["left_out"] else ""
    console.print(f"{facts['kills']} kills{errors}, {violations} violations, {facts['seconds']:.0f} s{away}")
    few = facts["errors" if arguments.errors else "kills"] < arguments.kills and not arguments.strikes
    return 1 if violations or facts["missing"] or few else 0


if __name__ == "__main__":
    sys.exit(main())
