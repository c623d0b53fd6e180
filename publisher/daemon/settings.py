"""Settings of the publisher's daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo, field_validator

from weightcast.publisher.maintenance.retention import Retention
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.weights.export_rules import BadRule, ExportRules
from weightcast.publisher.weights.precision import NonFinite
from weightcast.publisher.weights.side_configs import CARRY_CONFIG
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.index import Encoding
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.signing import load_private_key
from weightcast.shared.checkpoint.local_updater import open_base
from weightcast.shared.daemon.fleet import LOST_SECONDS, STALE_SECONDS, Bounds
from weightcast.shared.daemon.settings import PUBLISHER_PORT, ServiceSettings, Token, problem_of
from weightcast.shared.files.paths import exists, file_name, is_within, require_places

THREADS = 2
"""at most, unless told: the trainer needs the cores"""


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
    port: int = Field(PUBLISHER_PORT, ge=0, le=65535, description="Its port; 0 takes a free one.")
    channel: Path = Field(description="The channel's directory; made from the base if it is not there.")
    base: Path | None = Field(
        None,
        description="HF checkpoint directory that the run starts from. Required to make the channel; later "
        "found where this user made the channel on this machine.",
    )
    local: Path = Field(description="The publisher's own local checkpoint: a directory of its own.")
    watch: Path | None = Field(None, description="Directory in which the trainer leaves checkpoints.")
    watch_pattern: Annotated[str, AfterValidator(_relative_glob)] | None = Field(
        None,
        description="Glob of the paths of checkpoints, relative to --watch: global_step_*/actor/huggingface; "
        "** matches any directories. Unset: all, at any depth where it is clear.",
    )
    marker: Annotated[str, AfterValidator(_plain_name)] | None = Field(
        None, description="File that the trainer puts into a checkpoint when it is complete."
    )
    settle_seconds: float = Field(
        1.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Time that a checkpoint written in place must stand still, without a marker.",
    )
    every: bool = Field(False, description="Publish every checkpoint, not only the newest that waits.")
    existing: bool = Field(
        False, description="Publish what was there at the first start, if nothing was published since."
    )
    consume: bool = Field(False, description="Delete a watched checkpoint once it is published.")
    hand_over: Path | None = Field(
        None, description="Memory-backed directory in which a trainer leaves weights (HandOver)."
    )
    cast: bool = Field(False, description="Round floating-point tensors of exports to the base's dtypes.")
    rename: list[str] = Field(
        default_factory=list,
        description="A=B: rename tensors of exports that begin with A, or match A with *; repeatable.",
    )
    drop: list[str] = Field(
        default_factory=list, description="Glob of tensors of exports to leave out; repeatable."
    )
    frozen: list[str] = Field(
        default_factory=list,
        description="Glob of tensors that never change and may be left out, repeatable; for a new channel.",
    )
    alias: Annotated[list[str], AfterValidator(_pairs)] = Field(
        default_factory=list,
        description="A=B: tensor A is always the same as B, repeatable; for a new channel. What "
        "config.json ties is known.",
    )
    non_finite: NonFinite = Field(
        "allow", description="Whether deltas are published in which elements become NaN or infinite."
    )
    carry_config: bool = Field(False, description=CARRY_CONFIG)
    allow: list[Path] = Field(
        default_factory=list,
        description="Directory whose checkpoints may be published over HTTP, repeatable; unset: the watched "
        "one, or any if none is watched.",
    )
    threads: PositiveInt | None = Field(
        None, description=f"Working threads, as far as the memory goes; unset: {THREADS} at most."
    )
    encoding: Encoding = Field(
        "fast",
        description="Of the deltas: fast; small, a quarter less for slow links; xor, overwrite: the field's.",
    )
    anchor_every: int = Field(0, ge=0, description="Versions from one anchor to the next; 0 makes none.")
    anchor_share: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="An anchor when the deltas since the last are this share of the full weights; 0: never.",
    )
    anchor_seconds: float = Field(
        600.0,
        ge=0,
        allow_inf_nan=False,
        description="An anchor when a host would take this long for the deltas since the last, as this "
        "publisher stages and patches them, and they have half the bytes of the full weights; 0: never.",
    )
    skip_span: int = Field(
        64, ge=0, le=1 << 20, description="Versions that the widest delta from an older one spans; 0: none."
    )
    history_share: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="Space for journals of past steps in --local, as a share of the full weights.",
    )
    keep_versions: PositiveInt | None = Field(
        None,
        description="Prune: keep this many of the newest versions; with neither this nor --keep-hours all.",
    )
    keep_hours: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Prune: keep versions younger than this."
    )
    host_versions: int = Field(
        64, ge=0, description="Prune: versions kept beyond these, at most, for hosts that are behind."
    )
    report_token: Token | None = Field(
        None,
        description="Bearer token for hosts' reports to the publisher, no more; unset: WEIGHTCAST_TOKEN.",
    )
    stale_seconds: float = Field(
        STALE_SECONDS,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="A host whose report stood still for so long is stale.",
    )
    lost_seconds: float = Field(
        LOST_SECONDS,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="A host whose report stood still for so long is lost.",
    )
    post_write: str | None = Field(
        None, min_length=1, description="Command run after a version was written, and after the pointer was."
    )
    take_over: bool = Field(False, description="Take the channel from a publisher that seems alive.")
    sign_key: Path | None = Field(
        None,
        validate_default=True,
        description="File with the key that signs every version: `weightcast keygen`.",
    )
    publish_seconds: float = Field(
        600.0, gt=0, le=86400, allow_inf_nan=False, description="Deadline of one publication."
    )

    @field_validator("watch_pattern", "marker", "every", "existing", "consume", mode="after")
    @classmethod
    def _needs_watch(cls, value: object, info: ValidationInfo) -> object:
        # What is wrong with `watch` itself is said elsewhere, and it is then absent here.
        if value and "watch" in info.data and info.data["watch"] is None:
            raise ValueError("means nothing without a directory to watch (--watch)")
        return value

    @field_validator("rename", mode="after")
    @classmethod
    def _renames(cls, texts: list[str]) -> list[str]:
        try:
            ExportRules.of(False, texts, ())
        except BadRule as error:
            raise ValueError(str(error)) from error
        return texts

    @field_validator("sign_key", mode="after")
    @classmethod
    def _signs_what_it_trusts(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None and info.data.get("trusted_key"):
            raise ValueError("required beside trusted keys (--trusted-key)")
        return value

    def missing(self) -> list[str]:
        key = self.sign_key
        problems = [
            *super().missing(),
            problem_of(lambda: require_places(self.channel, self.local)),
            self._base_missing(),
            "" if key is None else problem_of(lambda: load_private_key(key)),
            *self._own_places_consumed(),
        ]
        return [problem for problem in problems if problem]

    def _base_missing(self) -> str:
        base = self.base
        if base is not None:
            return problem_of(lambda: open_base(base))
        made = exists(Layout(self.channel).channel_json)
        return "" if made else f"base: required to make the channel {self.channel} (--base)"

    def _own_places_consumed(self) -> list[str]:
        if self.watch is None or not self.consume:
            return []
        watched = self.watch
        return [
            f"{name}: {path} lies in the watched directory, where --consume deletes"
            for name, path in self.own_places.items()
            if is_within(path, watched)
        ]

    @property
    def own_places(self) -> dict[str, Path]:
        places = {
            "base": self.base,
            "channel": self.channel,
            "local": self.local,
            "hand_over": self.hand_over,
        }
        return {name: path for name, path in places.items() if path is not None}

    @property
    def upkeep(self) -> UpkeepOptions:
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
        return ExportRules.of(self.cast, self.rename, self.drop)

    @property
    def bounds(self) -> Bounds:
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
