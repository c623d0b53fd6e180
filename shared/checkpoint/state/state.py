"""The durable state of a local checkpoint: `.weightcast/state.json`, replaced as a whole."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.digest.checksums import Lanes, root
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import FileIdentity
from weightcast.shared.files.strict_json import parse_object
from weightcast.shared.files.system import BOOT_ID, MACHINE_ID, system_text


@dataclass(frozen=True)
class Boot:
    """Empty strings where the system does not tell: then nothing unsynced is trusted after a restart."""

    boot_id: str
    machine_id: str

    @classmethod
    def here(cls) -> Boot:
        return cls(system_text(BOOT_ID), system_text(MACHINE_ID) or socket.gethostname())

    def same_boot(self, other: Boot) -> bool:
        return bool(self.boot_id) and self == other


UNKNOWN_BOOT = Boot("", "")

STATE_FORMAT = 1
_LIMIT = 256 << 20
LANES_BYTES = 16
"""of one tensor"""
_FIND_OUT = (
    "run `weightcast sync --rehash` or `local verify --repair`: they find the version from the weights"
)


class Phase(StrEnum):
    CLEAN = "clean"
    SEEDING = "seeding"
    PATCHING = "patching"
    UNDOING = "undoing"
    DIRTY = "dirty"


@dataclass(frozen=True)
class Position:
    """A version as a local checkpoint knows it. `digest` is that of its index (of base.json for version 0),
    `lanes` are packed: 16 bytes per tensor in table order."""

    version: int
    digest: str
    root: str
    epoch: int
    lanes: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Step:
    """A journal on disk and the two positions that it leads between."""

    journal: str
    base: Position
    target: Position


class Mark(StrEnum):
    """What a host knows of an engine: it serves a version, may be paused by us, or cannot be trusted."""

    SERVED = "served"
    PAUSING = "pausing"
    SUSPECT = "suspect"


@dataclass(frozen=True)
class EngineState:
    mark: Mark
    version: int | None = None
    """the last version it confirmed"""
    confirmed_by: str = ""
    """digest, label or status-only"""
    process: str | None = None
    """identity of the engine process that confirmed"""
    reason: str = ""


@dataclass(frozen=True)
class Blocked:
    """A version that engines refused, by the digest of its index."""

    version: int
    digest: str
    reason: str
    attempts: int = 1


@dataclass(frozen=True)
class LocalState:
    run_id: str
    position: Position
    phase: Phase = Phase.CLEAN
    active: Step | None = None
    """the step under way in phases patching and undoing"""
    undo: tuple[Step, ...] = ()
    """steps from the served version to `position`, oldest first; their journals are kept"""
    generation: int = 0
    epoch: int = 0
    """the highest that was ever followed here; seeding does not lower it"""
    files: tuple[FileIdentity, ...] = ()
    """the weight files when their bytes were last known to be those of `position`"""
    host: Boot = UNKNOWN_BOOT
    foreign: bool = False
    engines: Mapping[str, EngineState] = field(default_factory=dict)
    unanswered: frozenset[str] = frozenset()
    """names of engines that were sent a pause and are not known to have answered it: they may yet pause"""
    blocked: tuple[Blocked, ...] = ()
    last_full_hash: float | None = None
    """unix time at which every byte was last read and agreed with the root"""

    def but(self, **changes: Any) -> LocalState:
        return replace(self, **changes)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those whose journals are kept."""
        return self.undo if self.active is None else (*self.undo, self.active)

    def followed(self, position: Position) -> int:
        """`epoch` when `position` is arrived at."""
        return max(self.epoch, position.epoch)


def pack_lanes(lanes: NDArray[np.uint64]) -> bytes:
    """`lanes`: uint64[tensors, 2]."""
    return lanes.astype("<u8").tobytes()


def unpack_lanes(packed: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(packed, "<u8").reshape(-1, 2).astype(np.uint64)


def lanes_list(packed: bytes) -> list[Lanes]:
    return list(map(Lanes._make, unpack_lanes(packed).tolist()))


def write_state(path: Path, state: LocalState) -> None:
    data = {"format": STATE_FORMAT} | asdict(state) | asdict(state.host)
    del data["host"]
    data |= {"files": list(map(astuple, state.files)), "unanswered": sorted(state.unanswered)}
    durable.replace(path, json.dumps(data, separators=(",", ":"), default=_packed).encode())


def read_state(path: Path) -> LocalState | None:
    """None when there is none. DamagedFile when it cannot be read."""
    try:
        return _from_json(parse_object(durable.read_file(path, _LIMIT), str(path)))
    except FileNotFoundError:
        return None
    except (DamagedFile, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedFile(
            f"{path}: not the state of a local checkpoint ({error})", remedy=_FIND_OUT
        ) from error


def check_roots(path: Path, state: LocalState, table: TensorTable) -> None:
    """Raises DamagedFile where lanes in `state`, read from `path`, do not give their root: against such
    lanes correct weights look wrong, and repair has no target."""
    positions = {state.position, *(one for step in state.steps for one in (step.base, step.target))}
    for position in positions:
        fits = len(position.lanes) == LANES_BYTES * len(table)
        if not fits or root(table, unpack_lanes(position.lanes)) != position.root:
            raise DamagedFile(
                f"{path}: its lanes of version {position.version} do not give the version's root",
                remedy=_FIND_OUT,
            )


def _packed(value: object) -> str:
    """Lanes, for JSON."""
    assert isinstance(value, bytes)
    return base64.b64encode(value).decode()


def _from_json(data: Mapping[str, Any]) -> LocalState:
    if data["format"] != STATE_FORMAT:
        raise UnknownFormat(f"state format {data['format']!r}", remedy="use the release that wrote it")
    return LocalState(
        run_id=str(data["run_id"]),
        position=_position(data["position"]),
        phase=Phase(data["phase"]),
        active=None if data["active"] is None else parse_step(data["active"]),
        undo=tuple(parse_step(step) for step in data["undo"]),
        generation=int(data["generation"]),
        epoch=int(data["epoch"]),
        files=tuple(FileIdentity(str(name), *map(int, numbers)) for name, *numbers in data["files"]),
        host=Boot(str(data["boot_id"]), str(data["machine_id"])),
        foreign=bool(data["foreign"]),
        engines={
            name: EngineState(Mark(e["mark"]), e["version"], e["confirmed_by"], e["process"], e["reason"])
            for name, e in data["engines"].items()
        },
        unanswered=frozenset(map(str, data.get("unanswered", ()))),
        blocked=tuple(
            Blocked(int(b["version"]), str(b["digest"]), str(b["reason"]), int(b["attempts"]))
            for b in data["blocked"]
        ),
        last_full_hash=None if data["last_full_hash"] is None else float(data["last_full_hash"]),
    )


def _position(data: Mapping[str, Any]) -> Position:
    lanes = base64.b64decode(data["lanes"], validate=True)
    if len(lanes) % LANES_BYTES:
        raise ValueError(f"{len(lanes)} bytes of lanes")
    return Position(int(data["version"]), str(data["digest"]), str(data["root"]), int(data["epoch"]), lanes)


def step_json(step: Step) -> Any:
    """`step` for a file of JSON; `parse_step` reads it back."""
    return json.loads(json.dumps(asdict(step), default=_packed))


def parse_step(data: Mapping[str, Any]) -> Step:
    """Raises ValueError, KeyError, TypeError or AttributeError for what `step_json` did not write."""
    journal = str(data["journal"])
    if not journal.isalnum():
        raise ValueError(f"journal id {journal!r}")
    return Step(journal, _position(data["base"]), _position(data["target"]))


class Proofs:
    """Times of `clock` at which tensors were last hashed in full and matched. A cache in memory: when the
    checkpoint is opened, `last_full_hash` of its state is all that is known."""

    def __init__(self, tensors: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._at = np.full(tensors, -np.inf)

    def add(self, tensors: NDArray[np.int64] | int | slice, at: float) -> None:
        """`at`: before the first of their bytes was read."""
        self._at[tensors] = np.maximum(self._at[tensors], at)

    def add_full_hash(self, unix_time: float | None) -> None:
        """All tensors at once. A time in the future proves nothing: the clock was set back since."""
        age = -1.0 if unix_time is None else time.time() - unix_time
        if age >= 0:
            self.add(slice(None), self.clock() - age)

    def before(self, at: float) -> NDArray[np.int64]:
        """Tensors last hashed before `at`."""
        return np.flatnonzero(self._at < at)

    @property
    def age(self) -> float:
        """Of the oldest proof, in seconds; infinite if a tensor was never hashed."""
        now = self.clock()
        return float(now - self._at.min(initial=now))
