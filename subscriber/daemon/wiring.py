"""From settings to the parts that daemon and one-shot share. No web framework: one-shots start quickly."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.shared.base.errors import Refused, WeightcastError
from weightcast.shared.channel.signing import Trust
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import read_state
from weightcast.shared.checkpoint.update.fetch import PreRead
from weightcast.shared.daemon.environment import working_threads
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.settings import text_of
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.engines.adapter import Adapter
from weightcast.subscriber.engines.base import BadEngineOption, Timeouts, parse_engines
from weightcast.subscriber.engines.host import Engines, RetryPace
from weightcast.subscriber.groups.lead import PATIENCE, GroupPace, Lead
from weightcast.subscriber.groups.messages import NAME_LIMIT
from weightcast.subscriber.sync.options import SyncOptions, parse_target

if TYPE_CHECKING:
    from weightcast.subscriber.gate.gate import Gate

ATTEMPTS = 2


def options_of(settings: SubscriberSettings) -> SyncOptions:
    """Raises BadTarget, and Refused for a trusted key that is none."""
    return SyncOptions(
        channel=settings.channel,
        local=settings.local.absolute(),
        base=settings.base,
        base_version=settings.base_version,
        target=parse_target(settings.target),
        threads=working_threads(settings.threads, settings.memory_budget),
        visible_seconds=settings.visible_deadline,
        pre_read=None if settings.pre_read is None else _hook(settings.pre_read, settings.hook_seconds),
        fetch_rate=int(settings.fetch_rate),
        trust=Trust.load(settings.trusted_key),
        readable_by=settings.readable_by,
        verified_within=settings.verified_within,
        group_follower=settings.group_follower,
        group_patch=settings.group_patch,
        transfer_patch=settings.transfer_patch,
        draft=None if settings.draft is None else settings.draft.absolute(),
        adapters=() if settings.adapters == ("none",) else settings.adapters,
        adapters_kept=settings.adapters_kept,
        adapters_plain_names=settings.adapters_plain_names,
        allow_base_drift=settings.allow_base_drift,
    )


def _hook(command: str, seconds: float) -> PreRead:
    def run(version: int, directory: Path) -> None:
        run_hook(command, version=version, directory=directory, phase="pre_read", deadline_seconds=seconds)

    return run


def open_lead(settings: SubscriberSettings) -> Lead:
    """Connects to nothing yet."""
    lease = settings.group_lease
    members = []
    if settings.group_member:
        # an HTTP client takes long to import, and most commands ask nobody
        from weightcast.subscriber.groups.client import MemberClient

        token = settings.secret(settings.group_token)
        members = [MemberClient(url, token, lease, settings.client_tls(url)) for url in settings.group_member]
    return Lead(
        members,
        name=f"{socket.gethostname()}:{settings.local.absolute()}"[:NAME_LIMIT],
        pace=GroupPace(lease=lease, deadline=settings.group_deadline, patience=min(lease, PATIENCE)),
        first_term=int(time.time() * 1000),
    )


def open_engines(
    settings: SubscriberSettings, lead: Lead | None = None, stopping: Callable[[], bool] = lambda: False
) -> Engines:
    """Connects to nothing yet. `lead`: of the group whose hosts the engines read. `stopping`: as of Engines.
    Raises BadEngineOption."""
    specs = parse_engines(settings.engine, settings.local, settings.draft)
    limits = Timeouts(reload=settings.engine_deadline)
    pace = RetryPace(ATTEMPTS, total=settings.engine_deadline, rounds=settings.engine_attempts)
    mapping = [spec.name for spec in specs if not spec.copies_weights]
    if settings.reload == "rolling" and len(mapping) > 1:
        raise BadEngineOption(
            f"--reload rolling: {', '.join(mapping)} map the same files and must be paused together; "
            "use together, or copies=true for engines that copy their weights"
        )
    lives = [spec.name for spec in specs if spec.via == "live"]
    if settings.transfer_patch and lives:
        raise BadEngineOption(f"--transfer-patch: {lives[0]} takes patches by via=live; remove either")
    others = [spec.name for spec in specs if spec.kind != "vllm"]
    if settings.adapters_plain_names and others:
        raise BadEngineOption(
            f"--adapters-plain-names: {others[0]} cannot move a name: let clients ask for it at the --gate"
        )
    engines: list[Adapter] = []
    if specs:
        # an HTTP client takes long to import
        from weightcast.subscriber.engines.kinds import open_engine

        run_id = partial(_run_id, settings.local)
        engines = [open_engine(spec, run_id=run_id, timeouts=limits) for spec in specs]
    return Engines(
        engines,
        pace=pace,
        order=settings.reload,
        look_seconds=settings.engine_check_seconds,
        group=lead if lead is not None and lead.members else None,
        group_patches=settings.group_patch,
        stopping=stopping,
    )


def open_gate(
    settings: SubscriberSettings, engines: Engines, run_id: Callable[[], str], wake: Callable[[], None]
) -> Gate | None:
    """None without --gate. `engines` are closed and opened for its requests. Raises Refused for engines that
    answer none, BadEngineOption for a key that is not set."""
    if settings.gate is None:
        return None
    from weightcast.subscriber.engines.wire import keys_of, trusted
    from weightcast.subscriber.gate.gate import Gate, Upstream
    from weightcast.subscriber.gate.traffic import Traffic

    upstreams = {}
    for spec in (engine.spec for engine in engines.engines):
        if spec.kind == "webhook":
            raise Refused(
                f"engine {spec.name}: a webhook answers no requests",
                remedy="leave out --gate, or let the engine answer as SGLang does: docs/engines.md, Your own "
                "engine behind a gate",
            )
        trust = trusted(spec.url, spec.ca, verify=spec.verify)
        keys = keys_of(spec, os.environ)
        upstreams[spec.name] = Upstream(spec.kind, spec.url, keys.read.value, trust, keys.control.value)
    engines.traffic = traffic = Traffic(
        upstreams,
        policy=settings.gate_updates,
        drain_seconds=settings.gate_drain,
        hold_seconds=settings.gate_hold,
        most=settings.gate_requests,
    )
    traffic.drifts = settings.allow_base_drift
    tokens = {"token": text_of(settings.token), "caller_token": text_of(settings.gate_token)}
    return Gate(upstreams, traffic, **tokens, run_id=run_id, wake=wake)


def _run_id(local: Path) -> str:
    """For the engines' information; empty for a foreign channel. The channel itself may hang just now."""
    try:
        state = read_state(LocalPaths(local).state)
    except (WeightcastError, OSError):
        return ""
    return "" if state is None or state.foreign else state.run_id
