"""Settings of the gateway."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from weightcast.shared.daemon.settings import GATEWAY_PORT, ChannelPlace, DaemonSettings, ServerUrl, Token


class GatewaySettings(DaemonSettings):
    """A text below a setting is its description."""

    port: int = Field(GATEWAY_PORT, ge=0, le=65535)
    """Port of the HTTP side; 0 takes a free one."""
    channel: ChannelPlace | None = None
    """The channel in whose reports the gates are found; or --publisher, or --gates."""
    publisher: str | None = None
    """URL of the publisher, which is asked for the reports instead."""
    publisher_token: Token | None = None
    """Bearer token of the publisher."""
    gates: tuple[ServerUrl, ...] = Field((), max_length=4096)
    """URL of a host's gate, repeatable, instead of reports."""
    gate_pattern: tuple[str, ...] = ("*",)
    """Pattern of HOST:PORT, repeatable, that gates found in reports must fit: rollout-*.example:8350."""
    gate_token: Token | None = None
    """Bearer token that the gates get: their WEIGHTCAST_TOKEN, so that aborts of all requests pass through.
    Unset: none is sent."""
    caller_token: Token | None = None
    """Bearer token of callers, who abort their own requests alone; unset: WEIGHTCAST_TOKEN, which opens
    everything."""
    hold: float = Field(60.0, gt=0, le=86400)
    """Seconds that a request is held while no host can take it."""
    requests: int = Field(1024, ge=1, le=4096)
    """Requests at a time, under way and waiting."""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if sum((self.channel is not None, self.publisher is not None, bool(self.gates))) != 1:
            raise ValueError("channel, publisher, gates: give one of them")
        if self.caller_token is not None and self.token is None:
            raise ValueError("caller_token: set WEIGHTCAST_TOKEN too, which opens the gateway's own routes")
        return self
