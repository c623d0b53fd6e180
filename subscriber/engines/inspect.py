"""What `weightcast doctor` and `local verify --engine` ask engines; nothing is ordered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from weightcast.shared.base.errors import EngineFailed, Refused
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.run_files import BASE_LIMIT, parse_base
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Phase, Position, read_state
from weightcast.shared.cli.local import EngineFound
from weightcast.shared.doctor.findings import Finding, Level
from weightcast.shared.files import durable
from weightcast.subscriber.engines.base import (
    Engine,
    EngineFacts,
    EngineSpec,
    KeyRefused,
    Timeouts,
    parse_engine,
    parse_engines,
    unreachable,
)
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.live import live_of
from weightcast.subscriber.engines.probes import CANNOT_TELL, NONE, UNKNOWN
from weightcast.subscriber.engines.proxy import EngineProxy, guarded
from weightcast.subscriber.engines.sglang import SGLang
from weightcast.subscriber.engines.verify import verify_engine
from weightcast.subscriber.engines.vllm import DEV_MODE


def look(option: str, local: Path, names: Sequence[str], advance: Advance | None) -> EngineFound:
    """Reads the memory of the engine while it serves. Raises BadEngineOption, EngineFailed, RetryLater, and
    Refused when the local checkpoint is not a whole version."""
    spec = _spec(option, local)
    paths = LocalPaths(local)
    table = parse_base(durable.read_file(paths.base, BASE_LIMIT)).table
    with closing(open_engine(spec)) as engine:
        live = live_of(engine)
        if live is None:
            raise Refused(f"{spec.name} takes no patches", remedy="give it via=live")
        found = verify_engine(live, table, lambda: _position(paths), names, advance)
    return EngineFound(
        spec.name, found.version, found.root, found.tensors, found.differing, dict(found.refused)
    )


def _spec(option: str, local: Path) -> EngineSpec:
    """A bare URL is a vLLM's. Who asks for its memory means that it can be read."""
    text = f"vllm={option}" if option.lower().startswith(("http://", "https://")) else option
    return parse_engine(text if ",via=" in text else f"{text},via=live", local)


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


def judge_engines(texts: Sequence[str], local: Path, seconds: float) -> Iterator[Finding]:
    """`texts`: values of `--engine`. Raises BadEngineOption."""
    timeouts = Timeouts(connect=min(seconds, _PROBE_SECONDS), probe=min(seconds, _PROBE_SECONDS))
    for spec in parse_engines(texts, local):
        with closing(open_engine(spec, timeouts=timeouts)) as engine:
            yield from judge_engine(spec, _facts(engine))


def _facts(engine: Engine) -> EngineFacts:
    facts = EngineProxy(engine).probe()
    if not isinstance(engine, SGLang) or not facts.reachable:
        return facts
    try:
        with guarded(engine.spec):
            facts = replace(facts, software=engine.release())
            engine.require_control()
    except KeyRefused as failure:
        return unreachable(failure)
    except EngineFailed:
        pass
    return facts


def judge_engine(spec: EngineSpec, facts: EngineFacts) -> Iterator[Finding]:
    """Rules: no IO."""
    if not facts.reachable:
        yield _silent(spec, facts)
        return
    release = f"{spec.kind} {facts.software}" if facts.software else f"{spec.kind}, which tells no version"
    yield Finding(spec.name, "answers", "ok", f"{spec.shown_url}: {release}")
    if spec.kind == "vllm" and facts.paused is None:
        yield Finding(
            spec.name,
            "control",
            "failure",
            "its control routes are not there: versions cannot be loaded",
            DEV_MODE,
            EngineFailed.exit_code,
        )
    if facts.paused:
        yield Finding(
            spec.name,
            "paused",
            "warning",
            "it is paused: requests wait",
            "nothing while a version is loaded; its subscriber, if it runs, resumes what it paused itself; "
            "else resume it by hand (vLLM: POST /resume)",
        )
    if facts.process is None:
        remedy = facts.remedy or _RESTARTS[spec.kind]
        yield Finding(spec.name, "restarts", "warning", "whether it restarted cannot be seen", remedy)
    if facts.drafter not in ("", NONE):
        yield _drafter(spec, facts)
    if spec.via == "live" and spec.kind == "vllm":
        yield _live(spec, facts)
    if facts.label is None:
        level: Level = "warning" if facts.remedy else "note"
        yield Finding(spec.name, "label", level, "tells no version of its weights", facts.remedy)
    else:
        yield Finding(spec.name, "label", "ok", f"holds weights {facts.label!r}")


def _live(spec: EngineSpec, facts: EngineFacts) -> Finding:
    if facts.unpatchable:
        says = f"versions are loaded from disk: {facts.unpatchable}"
        return Finding(spec.name, "memory", "warning", says, "docs/engines.md, Live patch, says what can be")
    return Finding(spec.name, "memory", "ok", "versions can be patched into its memory")


def _drafter(spec: EngineSpec, facts: EngineFacts) -> Finding:
    if facts.drafter == UNKNOWN:
        return Finding(spec.name, "drafter", "note", CANNOT_TELL, _SETTINGS[spec.kind])
    if spec.drafter == "keep":
        says = f"its draft model ({facts.drafter}) stays as it was loaded (drafter=keep)"
        return Finding(spec.name, "drafter", "warning", says, "start the engine anew to load another one")
    return Finding(spec.name, "drafter", "ok", f"its draft model ({facts.drafter}) is reloaded with it")


def _silent(spec: EngineSpec, facts: EngineFacts) -> Finding:
    says = (
        f"nothing listens at {spec.shown_url}"
        if facts.absent
        else f"{spec.shown_url} does not answer as it should"
    )
    says = facts.hindrance or says
    remedy = facts.remedy or "start the engine, or correct its URL; the subscriber waits for it"
    return Finding(spec.name, "answers", "failure", says, remedy, EngineFailed.exit_code)
