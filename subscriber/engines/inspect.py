"""What `local verify --engine` asks an engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from weightcast.shared.base.errors import Refused
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.run_files import BASE_LIMIT, parse_base
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Phase, Position, read_state
from weightcast.shared.cli.local import EngineFound
from weightcast.shared.files import durable
from weightcast.subscriber.engines.base import EngineSpec, parse_engine
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.live import live_of
from weightcast.subscriber.engines.verify import verify_engine


def look(option: str, local: Path, names: Sequence[str], advance: Advance | None) -> EngineFound:
    """Reads the memory of the engine while it serves. Raises BadEngineOption, EngineFailed, RetryLater, and
    Refused when the local checkpoint is no version."""
    spec = _spec(option, local)
    paths = LocalPaths(local)
    table = parse_base(durable.read_file(paths.base, BASE_LIMIT)).table
    with closing(open_engine(spec)) as engine:
        live = live_of(engine)
        if live is None:
            raise Refused(f"{spec.name} is not one that is patched", remedy="give it via=live")
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
        raise Refused(f"{paths.directory} is no whole version now", remedy="let the next sync finish it")
    return state.position
