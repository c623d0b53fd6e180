"""What must hold before an engine is let at a local checkpoint. Reads headers, no weights, writes nothing: an
engine's user may have no right to."""

from __future__ import annotations

from pathlib import Path

from weightcast.shared.channel.base import BASE_LIMIT, parse_base
from weightcast.shared.errors import NeedsReseed, Refused, RetryLater
from weightcast.shared.files import durable
from weightcast.shared.files.checkpoint import open_checkpoint
from weightcast.shared.local.carried import Carried
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.seed import table_problems
from weightcast.shared.local.state import LocalState, Phase, read_state

_SYNC = "run `weightcast sync`, or start the subscriber"


def require_loadable(directory: Path) -> LocalState:
    """The state of a checkpoint that is one version, complete in names, shapes and sizes. The caller holds
    the patch lock, at least shared. Raises RetryLater while it is not there or being written, NeedsReseed
    when what lies there is not what its state says."""
    paths = LocalPaths(directory)
    state = read_state(paths.state)
    if state is None:
        raise RetryLater(f"{directory} is not seeded yet", remedy=_SYNC)
    if state.phase is not Phase.CLEAN:
        raise RetryLater(f"{directory} is unfinished: {state.phase.value}", remedy=_SYNC)
    try:
        base = parse_base(durable.read_file(paths.base, BASE_LIMIT))
        found = open_checkpoint(directory, follow_links=False)
    except (FileNotFoundError, Refused) as error:
        raise NeedsReseed(f"{directory} cannot be loaded: {error}", remedy=_SYNC) from error
    problems = table_problems(found.table, base.table)
    if problems:
        raise NeedsReseed(f"{directory} cannot be loaded: {'; '.join(problems[:5])}", remedy=_SYNC)
    carried = Carried(paths).unsettled(directory, base, state.position)
    if carried is not None:
        version = state.position.version
        raise RetryLater(f"{directory / carried} is not yet that of version {version}", remedy=_SYNC)
    return state
