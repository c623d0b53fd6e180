"""Settings of the subscriber."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from weightcast.shared.service.settings import SUBSCRIBER_PORT, ServiceSettings


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
    report: bool = Field(True, description="Write a report of this host to the channel.")
