"""Settings of the subscriber."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    ByteSize,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from weightcast.shared.base.choices import LEASE_LIMIT, Readers, ReloadOrder
from weightcast.shared.daemon.settings import (
    SUBSCRIBER_PORT,
    ChannelPlace,
    ReportSettings,
    ServerUrl,
    ServiceSettings,
    Size,
    Token,
    problem_of,
    require_reachable,
)
from weightcast.shared.files.paths import require_places
from weightcast.subscriber.engines.base import (
    SYNTAX,
    BadEngineOption,
    address_of,
    parse_engine,
    parse_engines,
)
from weightcast.subscriber.gate.conditions import UpdatePolicy

MOST_MEMBERS = 256
_UpToADay = Annotated[float, Field(gt=0, le=86400)]
_Command = Annotated[str, Field(min_length=1)]


class SubscriberSettings(ServiceSettings, ReportSettings):
    """A text below a setting is its description."""

    port: int = Field(SUBSCRIBER_PORT, ge=0, le=65535)
    """Port of the HTTP side; 0 takes a free one."""
    channel: ChannelPlace
    """The channel: a directory, or a URL (s3://, gs://, az://, http[s]://)."""
    local: Path
    """Local checkpoint: the directory that engines load from."""
    base: Path | None = None
    """HF checkpoint directory that the run starts from."""
    base_version: NonNegativeInt = 0
    """Version whose weights --base has, of a foreign run that was resumed (Stitch)."""
    draft: Path | None = None
    """Local checkpoint of the run's draft model (component draft): the directory that engines draft from."""
    engine: tuple[str, ...] = ()
    """Inference engine KIND=URL[,KEY=VALUE...]; repeatable. KIND: sglang, vllm, webhook (docs/engines.md)."""
    target: str = Field("latest", min_length=1, max_length=255)
    """What to follow: latest, a version or a tag."""
    adapters: tuple[str, ...] = ("*",)
    """LoRA adapters to follow: names or patterns; may be repeated; none: no adapters."""
    adapters_kept: int = Field(2, ge=1, le=64)
    """Versions of each adapter that engines keep loaded."""
    adapters_plain_names: bool = False
    """vLLM also serves an adapter's newest version under its plain name, for clients without the gate."""
    allow_base_drift: bool = False
    """Load adapters over other main weights than they were trained on."""
    pre_read: _Command | None = None
    """Command run before a version of the channel is read."""
    fetch_rate: Size = Field(ByteSize(0), ge=0)
    """Bytes per second that are read from the channel, e.g. 50MB; 0: no limit."""
    visible_deadline: _UpToADay = 120.0
    """Seconds to wait for a new version's files to become visible on this host."""
    engine_deadline: _UpToADay = 300.0
    """Seconds that an engine may take to reload."""
    reload: ReloadOrder = "together"
    """Reload engines at the same time (together), or one after the other (rolling)."""
    engine_check_seconds: float = Field(2.0, gt=0, le=3600)
    """Seconds between two looks at engines that serve, to notice restarts."""
    engine_attempts: int = Field(5, ge=1, le=1000)
    """Failed reload rounds before an engine is marked failed."""
    on_engine_failed: _Command | None = None
    """Command run when an engine has failed; the word exit: end with code 5."""
    verify_engine_every: int = Field(0, ge=0, le=1_000_000)
    """Versions after which all of a patched engine's memory is verified at once; 0: at the pace of
    --verify-rate alone."""
    verified_within: float = Field(600.0, ge=0, le=86400 * 365)
    """Before engines reload, weights last hashed more than this many seconds ago are hashed again. 0, or up
    to 1 GiB of weights: all of them, before every reload."""
    readable_by: Readers | None = None
    """Who may read the local checkpoint; unset: as the umask says."""
    gate: int | None = Field(None, ge=0, le=65535)
    """Port of the gate: requests to the engines (sglang, vllm; a webhook takes none), each answered by a
    version that it allows; 0 takes a free one, unset: none."""
    gate_url: ServerUrl | None = Field(None, max_length=256)
    """URL at which a gateway reaches the gate; unset: its port at this machine's name, or at --host."""
    gate_token: Token | None = None
    """Bearer token of the gate's callers, who abort their own requests alone; unset: WEIGHTCAST_TOKEN, which
    opens everything."""
    gate_updates: UpdatePolicy = "pass"
    """Requests under way at an update go on, if they allow the new version (pass); finish before it (drain);
    or end with what they have (partial)."""
    gate_drain: _UpToADay = 30.0
    """Seconds that an update waits for requests which must finish before it."""
    gate_hold: _UpToADay = 60.0
    """Seconds that the gate holds a request while no engine can take it."""
    gate_requests: int = Field(256, ge=1, le=4096)
    """Requests under way per engine; as many again may wait."""
    group_member: tuple[str, ...] = Field((), max_length=MOST_MEMBERS)
    """URL of another host's subscriber in the engine group that this one leads; repeatable."""
    group_follower: bool = False
    """The local checkpoint moves only when the leader of its engine group asks."""
    group_patch: bool = False
    """Every host of the engine group stages patches for engines with via=live; set it on all."""
    transfer_patch: bool = False
    """Stage each version's patch for a vLLM that a framework drives by weight transfer; not with via=live."""
    group_token: Token | None = None
    """Bearer token of the group's members; unset: this subscriber's own."""
    group_lease: float = Field(30.0, ge=0.3, le=LEASE_LIMIT)
    """Seconds that group members keep their version without word of their leader."""
    group_deadline: _UpToADay = 300.0
    """Seconds that group members may take to reach a version."""

    @field_validator("engine", mode="after")
    @classmethod
    def _check_engines(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # What is wrong with `local` itself is said elsewhere, and it is then absent here.
        local, problems, needs_syntax = info.data.get("local", Path("/")), dict[str, None](), False
        each = (partial(parse_engine, text) for text in value)
        parts: list[Callable[[Path, Path | None], object]] = [*each, partial(parse_engines, value)]
        for parse in parts:
            try:
                parse(local, info.data.get("draft"))
            except BadEngineOption as error:
                known = error.remedy == SYNTAX
                problems[error.message if known else f"{error.message}; {error.remedy}"] = None
                needs_syntax |= known
        if problems:
            raise ValueError("; ".join((*problems, *([SYNTAX] if needs_syntax else ()))))
        return value

    @field_validator("target", mode="after")
    @classmethod
    def _check_target(cls, value: str) -> str:
        from weightcast.subscriber.sync.options import parse_target

        problem = problem_of(lambda: parse_target(value))
        if problem:
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.base_version and self.base is None:
            raise ValueError("base_version: needs the checkpoint of that version (--base)")
        if self.pre_read is not None and isinstance(self.channel, str):
            raise ValueError(f"pre_read: {self.channel} is not a directory; leave the hook out")
        if self.group_follower and (self.engine or self.group_member):
            raise ValueError("group_follower: engines and members are given to the group's leader")
        for url in self.group_member:
            require_reachable("group_member", url, self.secret(self.group_token), "WEIGHTCAST_GROUP_TOKEN")
        if self.draft is not None and (self.group_follower or self.group_member):
            raise ValueError("draft: engine groups take no draft model of its own; leave it out")
        if len(set(map(address_of, self.group_member))) < len(self.group_member):
            raise ValueError("group_member: a URL is given twice")
        return self

    def missing(self) -> list[str]:
        places = [self.local, *([] if self.draft is None else [self.draft])]
        problems = [problem_of(partial(require_places, self.channel, place)) for place in places]
        return [*super().missing(), *filter(None, problems)]
