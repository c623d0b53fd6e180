"""Settings of the subscriber."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from weightcast.shared.local.access import Readers
from weightcast.shared.service.settings import SUBSCRIBER_PORT, ServiceSettings
from weightcast.subscriber.engines.roster import Order


class SubscriberSettings(ServiceSettings):
    port: int = Field(SUBSCRIBER_PORT, ge=0, le=65535, description="Its port; 0 takes a free one.")
    channel: Path = Field(description="The channel's directory.")
    local: Path = Field(description="Local checkpoint: the directory that engines load from.")
    base: Path | None = Field(None, description="HF checkpoint directory that the run starts from.")
    engine: tuple[str, ...] = Field(
        (), description="Inference engine kind=URL[,key=value...]; may be repeated. Kinds: docs/engines.md."
    )
    target: str = Field("latest", min_length=1, max_length=255, description="latest, a version or a tag.")
    visible_deadline: float = Field(
        120.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds until what the pointer names must be visible here.",
    )
    engine_deadline: float = Field(
        300.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Seconds that an engine may take to reload.",
    )
    reload: Order = Field(
        "together", description="Engines at the same time, or the next once the one before is confirmed."
    )
    engine_check_seconds: float = Field(
        2.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Pause between two looks at engines that serve, to see one that restarted.",
    )
    engine_attempts: int = Field(
        5, ge=1, le=1000, description="Rounds of reloads in vain until an engine counts as failed."
    )
    on_engine_failed: str | None = Field(
        None,
        min_length=1,
        description="Command run when an engine has failed; the word exit: end with code 5.",
    )
    readable_by: Readers | None = Field(
        None, description="Who may read the local checkpoint; unset: whom the umask lets."
    )
    report: bool = Field(True, description="Write a report of this host to the channel.")
