"""What `weightcast doctor` and `local verify --engine` ask engines; nothing is ordered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, EngineFailed, Refused, RetryLater
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.run_files import BASE_LIMIT, parse_base
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Phase, Position, read_state
from weightcast.shared.cli.local import EngineFound
from weightcast.shared.digest.checksums import Lanes, root
from weightcast.shared.doctor.rules import Finding, Level
from weightcast.shared.files import durable
from weightcast.subscriber.engines.adapter import NONE, UNKNOWN, Adapter, EngineLanes, LiveAdapter, guarded
from weightcast.subscriber.engines.base import (
    EngineFacts,
    EngineSpec,
    KeyRefused,
    Timeouts,
    parse_engine,
    parse_engines,
    unreachable,
)
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.live import Live, differing, next_piece, read_lanes
from weightcast.subscriber.engines.sglang import SGLang
from weightcast.subscriber.engines.vllm import DEV_MODE

_TIMES = 3
CANNOT_TELL = "cannot tell whether a draft model is loaded: a reload would leave its weights old"


def look(option: str, local: Path, names: Sequence[str], advance: Advance | None) -> EngineFound:
    """Reads the memory of the engine while it serves. Raises BadEngineOption, EngineFailed, RetryLater, and
    Refused when the local checkpoint is not a whole version."""
    # a bare URL is a vLLM's; who asks for its memory means that it can be read
    text = f"vllm={option}" if option.lower().startswith(("http://", "https://")) else option
    spec = parse_engine(text if ",via=" in text else f"{text},via=live", local)
    paths = LocalPaths(local)
    table = parse_base(durable.read_file(paths.base, BASE_LIMIT)).table
    unknown = [name for name in names if name not in table.numbers]
    if unknown:
        raise DamagedFile(f"{unknown[0]} is not a tensor of the checkpoint", remedy="see its index file")
    chosen = TensorTable(tuple(table.named(name) for name in names)) if names else table
    with closing(open_engine(spec)) as adapter:
        live = HostEngine(adapter).live
        if live is None:
            raise Refused(f"{spec.name} takes no patches", remedy="give it via=live")
        for _ in range(_TIMES):
            position = _position(paths)
            found = _read_all(live, chosen, position, advance)
            if found is not None:
                numbers = [table.numbers[each.name] for each in chosen]
                wrong = differing(table, position, numbers, found)
                whole = _root(table, found.lanes)
                return EngineFound(spec.name, position.version, whole, len(chosen), wrong, found.refused)
    raise RetryLater(
        f"{spec.shown_url} does not hold the version of the local checkpoint, or both move on",
        remedy="wait until the host is ready, then try again",
    )


def _read_all(
    live: Live, table: TensorTable, position: Position, advance: Advance | None
) -> EngineLanes | None:
    """None: the engine or the local checkpoint moved meanwhile."""
    lanes: dict[str, str] = {}
    refused: dict[str, str] = {}
    at = 0
    while at < len(table):
        piece = next_piece(table, at)
        found = read_lanes(live, table, piece)
        if found.changed or found.version != position.version:
            return None
        lanes |= found.lanes
        refused |= found.refused
        at = piece.stop
        if advance is not None:
            advance(sum(table[number].nbytes for number in piece))
    return EngineLanes(position.version, lanes, refused, False)


def _root(table: TensorTable, lanes: Mapping[str, str]) -> str | None:
    """Over all tensors as they are in memory; None where some are refused or were not asked for."""
    try:
        return root(table, [Lanes.from_hex(lanes[spec.name]) for spec in table])
    except (KeyError, ValueError):
        return None


def _position(paths: LocalPaths) -> Position:
    state = read_state(paths.state)
    if state is None or state.phase is not Phase.CLEAN:
        raise Refused(f"{paths.directory} is not a whole version now", remedy="let the next sync finish it")
    return state.position


_PROBE_SECONDS = 5.0
_SETTINGS = {
    "sglang": "its /server_info should tell speculative_algorithm",
    "vllm": f"its /server_info should tell speculative_config: {DEV_MODE}",
    "webhook": "",
}
_RESTARTS = {
    "sglang": "start SGLang with --enable-metrics",
    "vllm": "its /metrics should tell process_start_time_seconds",
    "webhook": "let its answer to GET name `process`",
}


def judge_engines(texts: Sequence[str], local: Path, seconds: float, draft: Path | None) -> Iterator[Finding]:
    """`texts`: values of `--engine`. Raises BadEngineOption."""
    timeouts = Timeouts(connect=min(seconds, _PROBE_SECONDS), probe=min(seconds, _PROBE_SECONDS))
    for spec in parse_engines(texts, local, draft):
        with closing(open_engine(spec, timeouts=timeouts)) as engine:
            yield from judge_engine(spec, _facts(engine))


def _facts(engine: Adapter) -> EngineFacts:
    facts = HostEngine(engine).probe()
    if not isinstance(engine, SGLang) or isinstance(engine, LiveAdapter) or not facts.reachable:
        return facts
    try:
        with guarded(engine.spec):
            engine.require_control()
    except KeyRefused as failure:
        return unreachable(failure)
    except EngineFailed:
        pass
    return facts


def judge_engine(spec: EngineSpec, facts: EngineFacts) -> Iterator[Finding]:
    """Rules: no IO."""

    def found(check: str, level: Level, says: str, remedy: str = "") -> Finding:
        code = EngineFailed.exit_code if level == "failure" else Refused.exit_code
        return Finding(spec.name, check, level, says, remedy, code)

    if not facts.reachable:
        silent = "does not answer as it should"
        says = f"nothing listens at {spec.shown_url}" if facts.absent else f"{spec.shown_url} {silent}"
        start = "start the engine, or correct its URL; the subscriber waits for it"
        remedy = facts.remedy or ("" if facts.hindrance else start)
        yield found("answers", "failure", facts.hindrance or says, remedy)
        return
    release = f"{spec.kind} {facts.software}" if facts.software else f"{spec.kind}, which tells no version"
    yield found("answers", "ok", f"{spec.shown_url}: {release}")
    if spec.kind == "vllm" and facts.paused is None:
        yield found(
            "control", "failure", "its control routes are not there: versions cannot be loaded", DEV_MODE
        )
    if facts.paused:
        yield found(
            "paused",
            "warning",
            "it is paused: requests wait",
            "nothing while a version is loaded; its subscriber, if it runs, resumes what it paused itself; "
            "else resume it by hand (vLLM: POST /resume)",
        )
    if facts.process is None:
        remedy = facts.remedy or _RESTARTS[spec.kind]
        yield found("restarts", "warning", "whether it restarted cannot be seen", remedy)
    if facts.drafter == UNKNOWN:
        yield found("drafter", "note", CANNOT_TELL, _SETTINGS[spec.kind])
    elif facts.drafter not in ("", NONE) and spec.drafter == "keep":
        says = f"its draft model ({facts.drafter}) stays as it was loaded (drafter=keep)"
        yield found("drafter", "warning", says, "start the engine anew to load another one")
    elif facts.drafter not in ("", NONE):
        yield found("drafter", "ok", f"its draft model ({facts.drafter}) is reloaded with it")
    if spec.via == "live" and spec.kind == "vllm":
        if facts.unpatchable:
            says = f"versions are loaded from disk: {facts.unpatchable}"
            yield found("memory", "warning", says, "docs/live-patch.md says what can be")
        else:
            yield found("memory", "ok", "versions can be patched into its memory")
    if facts.label is None:
        unknown = "tells no version of its weights"
        yield found("label", "warning" if facts.remedy else "note", unknown, facts.remedy)
    else:
        yield found("label", "ok", f"holds weights {facts.label!r}")
