"""Settings of the publisher's daemon."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import (
    AfterValidator,
    ByteSize,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from weightcast.publisher.maintenance.retention import Retention
from weightcast.shared.base.choices import (
    CARRY_CONFIG,
    LOST_SECONDS,
    STALE_SECONDS,
    Encoding,
    Layout,
    NonFinite,
    SchemeName,
)
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.daemon.environment import working_threads
from weightcast.shared.daemon.settings import (
    PUBLISHER_PORT,
    ChannelPlace,
    ServiceSettings,
    Size,
    Token,
    problem_of,
)
from weightcast.shared.files.paths import (
    file_name,
    is_within,
    require_directory,
    require_places,
)

if TYPE_CHECKING:
    from weightcast.publisher.maintenance.upkeep import UpkeepOptions
    from weightcast.publisher.weights.export_rules import ExportRules
    from weightcast.shared.daemon.fleet import Bounds

# modules that methods import take longer than help
THREADS = 2
"""at most, unless set: the trainer needs the cores"""
_NotNegative = Annotated[float, Field(ge=0)]
_UpToADay = Annotated[float, Field(gt=0, le=86400)]
_EXTRAS = {"anchor_every", "anchor_share", "anchor_seconds", "skip_span", "keep_versions", "keep_hours"}
"""settings that layout stitch excludes"""


def _plain_name(name: str) -> str:
    try:
        return file_name(name)
    except DamagedFile as error:
        raise ValueError("must be the name of a file, without directories") from error


def _relative_glob(glob: str) -> str:
    if not glob.strip("/") or glob.startswith("/") or ".." in glob.split("/"):
        raise ValueError("must be relative to the watched directory, without '..'")
    return glob


def _pairs(texts: list[str]) -> list[str]:
    for text in texts:
        name, _, target = text.partition("=")
        if not name or not target:
            raise ValueError(f"{text} is not A=B")
    return texts


class PublisherSettings(ServiceSettings):
    """A text below a setting is its description."""

    port: int = Field(PUBLISHER_PORT, ge=0, le=65535)
    """Port of the HTTP side; 0 takes a free one."""
    channel: ChannelPlace
    """Directory or URL (s3://, gs://, az://) of the channel; created from the base if it is missing."""
    base: Path | None = None
    """HF checkpoint directory that the run starts from. Required to create the channel; later remembered for
    the user and machine that created it."""
    local: Path
    """The publisher's own local checkpoint: a separate directory."""
    watch: Path | None = None
    """Directory into which the trainer saves checkpoints."""
    watch_pattern: Annotated[str, AfterValidator(_relative_glob)] | None = None
    """Glob of checkpoint paths relative to --watch, e.g. global_step_*/actor/huggingface; ** matches any
    directories. Unset: any checkpoint whose layout is unambiguous."""
    marker: Annotated[str, AfterValidator(_plain_name)] | None = None
    """File that the trainer writes into a checkpoint when it is complete."""
    settle_seconds: float = Field(1.0, ge=0, le=3600)
    """How long a checkpoint written in place must stay unchanged, without --marker."""
    every: bool = False
    """Publish every checkpoint, not only the newest one waiting."""
    existing: bool = False
    """Publish checkpoints that existed before the first start, if none was published since."""
    consume: bool = False
    """Delete a watched checkpoint after it is published."""
    hand_over: Path | None = None
    """Memory-backed directory through which a trainer hands over weights (HandOver)."""
    quantise: SchemeName | None = None
    """Quantise exports to this format, that of the base; requires torch."""
    cast: bool = False
    """Round floating-point tensors of exports to the base's dtypes."""
    rename: list[str] = Field([])
    """A=B: replace prefix A of exported tensor names by B (A may contain *); repeatable."""
    drop: list[str] = Field([])
    """Glob of exported tensors to leave out; repeatable."""
    frozen: list[str] = Field([])
    """Glob of tensors that never change and may be left out; repeatable, new channels only."""
    alias: Annotated[list[str], AfterValidator(_pairs)] = Field([])
    """A=B: tensor A always equals B; repeatable, new channels only. Ties in config.json are detected."""
    non_finite: NonFinite = "allow"
    """Whether to publish deltas in which elements become NaN or infinite."""
    carry_config: bool = Field(False, description=CARRY_CONFIG)
    allow: list[Path] = Field([])
    """Directory whose checkpoints may be published over HTTP; repeatable. Unset: --watch, or any if nothing
    is watched."""
    threads: PositiveInt | None = Field(
        None, description=f"Worker threads (capped by --memory-budget; default {THREADS})."
    )
    encoding: Encoding = "fast"
    """Delta encoding: fast; small (a quarter less, for slow links); xor or overwrite (slime)."""
    layout: Layout = "plain"
    """plain; stitch: the channel is ROOT/updates, and Stitch's replicas follow ROOT too (docs/FORMAT.md)."""
    anchor_every: NonNegativeInt = 0
    """Write an anchor every N versions; 0: never."""
    anchor_share: _NotNegative = 0.0
    """Write an anchor when deltas since the last reach this share of the model; 0: never."""
    anchor_seconds: _NotNegative = 600.0
    """Write an anchor when a host would need this long to apply the deltas since the last one (estimated from
    this publisher) and they reach half the model's bytes; 0: never."""
    skip_span: int = Field(64, ge=0, le=1 << 20)
    """Maximum span of multi-step deltas, in versions; 0: none."""
    history_share: _NotNegative = 1.0
    """Disk for past journals in --local, as a fraction of model size."""
    keep_versions: PositiveInt | None = None
    """Prune: keep this many newest versions. Without this and --keep-hours nothing is pruned."""
    keep_hours: float | None = Field(None, gt=0)
    """Prune: keep versions younger than this."""
    host_versions: NonNegativeInt = 64
    """Prune: maximum number of additional versions kept for hosts that are behind."""
    report_token: Token | None = None
    """Bearer token that only allows hosts to post reports; unset: WEIGHTCAST_TOKEN."""
    stale_seconds: _UpToADay = STALE_SECONDS
    """A host is stale when its report has not changed for this long."""
    lost_seconds: _UpToADay = LOST_SECONDS
    """A host is lost when its report has not changed for this long."""
    post_write: str | None = Field(None, min_length=1)
    """Command to run after a version is written and again after the pointer moves."""
    take_over: bool = False
    """Take the channel over from a publisher that seems alive."""
    unfenced: bool = False
    """Publish also to a store that ignores conditions of writes: nothing keeps a second publisher out."""
    sign_key: Path | None = Field(None, validate_default=True)
    """File with the key that signs every version (make one: `weightcast keygen`)."""
    publish_rate: Size = Field(ByteSize(0), ge=0)
    """Bytes per second that are written to the channel, e.g. 50MB; 0: no limit."""
    publish_seconds: _UpToADay = 600.0
    """Deadline of one publication."""

    @field_validator("watch_pattern", "marker", "every", "existing", "consume", mode="after")
    @classmethod
    def _needs_watch(cls, value: object, info: ValidationInfo) -> object:
        # What is wrong with `watch` itself is said elsewhere, and it is then absent here.
        if value and "watch" in info.data and info.data["watch"] is None:
            raise ValueError("requires --watch")
        return value

    @field_validator("rename", mode="after")
    @classmethod
    def _renames(cls, texts: list[str]) -> list[str]:
        from weightcast.publisher.weights.export_rules import ExportRules

        problem = problem_of(lambda: ExportRules.of(False, texts, ()))
        if problem:
            raise ValueError(problem)
        return texts

    @field_validator("sign_key", mode="after")
    @classmethod
    def _signs_what_it_trusts(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None and info.data.get("trusted_key"):
            raise ValueError("required with trusted keys (--trusted-key)")
        return value

    def missing(self) -> list[str]:
        return [problem for problem in (*super().missing(), *self._problems()) if problem]

    def _problems(self) -> Iterator[str]:
        from weightcast.publisher.publish.stitch import check_layout
        from weightcast.shared.channel.signing import load_private_key

        yield problem_of(lambda: require_places(self.channel, self.local))
        if self.base is not None:
            from weightcast.shared.checkpoint.update.sources import open_base

            yield problem_of(partial(open_base, self.base))
        elif not self.has_channel:
            yield f"base: required to make the channel {self.channel} (--base)"
        if self.sign_key is not None:
            yield problem_of(partial(load_private_key, self.sign_key))
        if self.layout == "stitch":
            extras = not _EXTRAS.isdisjoint(self.model_fields_set)
            yield problem_of(partial(check_layout, str(self.channel), self.encoding, extras))
        for option, path in (("--watch", self.watch), ("--hand-over", self.hand_over)):
            if path is None:
                continue
            yield problem_of(partial(require_directory, option, path))
            for own, place in (("--channel", self.channel), ("--local", self.local)):
                if isinstance(place, Path) and is_within(path, place):
                    yield f"{option} {path} is inside {own} {place} (give a directory of its own)"
        if self.watch is not None and self.consume:
            for name, path in self.own_places.items():
                if is_within(path, self.watch):
                    yield f"{name}: {path} is inside the watched directory, where --consume deletes"

    @property
    def has_channel(self) -> bool:
        from weightcast.shared.channel.directory_store import open_store
        from weightcast.shared.channel.layout import CHANNEL_JSON

        return open_store(self.channel).stat(CHANNEL_JSON) is not None

    @property
    def own_places(self) -> dict[str, Path]:
        places = {name: getattr(self, name) for name in ("base", "channel", "local", "hand_over")}
        return {name: path for name, path in places.items() if isinstance(path, Path)}

    @property
    def upkeep(self) -> UpkeepOptions:
        from weightcast.publisher.maintenance.upkeep import UpkeepOptions

        if self.layout == "stitch":
            return UpkeepOptions(history_share=self.history_share)
        return UpkeepOptions(
            skip_span=self.skip_span,
            anchor_every=self.anchor_every,
            anchor_share=self.anchor_share,
            anchor_seconds=self.anchor_seconds,
            history_share=self.history_share,
            encoding="small" if self.encoding == "small" else "fast",
            retention=Retention(self.keep_versions, self.keep_hours, self.host_versions),
        )

    @property
    def rules(self) -> ExportRules:
        """For exports, whatever way they come."""
        from weightcast.publisher.weights.export_rules import ExportRules

        return ExportRules.of(self.cast, self.rename, self.drop, self.quantise or "")

    @property
    def worker_threads(self) -> int:
        return working_threads(self.threads, self.memory_budget, default=THREADS)

    @property
    def bounds(self) -> Bounds:
        from weightcast.shared.daemon.fleet import Bounds

        return Bounds(stale_seconds=self.stale_seconds, lost_seconds=self.lost_seconds)

    @property
    def aliases(self) -> dict[str, str]:
        return {name: target for name, _, target in (text.partition("=") for text in self.alias)}

    @property
    def roots(self) -> tuple[Path, ...]:
        """Where a checkpoint named over HTTP must lie; empty: anywhere."""
        if self.allow:
            return tuple(self.allow)
        return () if self.watch is None else (self.watch,)
