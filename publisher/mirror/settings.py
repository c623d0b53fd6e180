"""Settings of the mirror."""

from __future__ import annotations

from typing import cast

from pydantic import ByteSize, Field, NonNegativeInt, PositiveInt, create_model

from weightcast.publisher.maintenance.retention import Retention
from weightcast.shared.daemon.settings import MIRROR_PORT, ChannelPlace, ReportSettings, Size
from weightcast.shared.files.paths import ChannelAddress


class MirrorPlaces(ReportSettings):
    """`MirrorSettings` without `from`, which Python keeps for itself. A text below a setting is its
    description."""

    port: int = Field(MIRROR_PORT, ge=0, le=65535)
    """Port of the HTTP side; 0 takes a free one."""
    to: ChannelPlace
    """The copy: a directory, or a URL (s3://, gs://, az://)."""
    take_over: bool = False
    """Take --to over from a mirror that seems alive."""
    unfenced: bool = False
    """Write also to a store that ignores conditions of writes: nothing keeps a second mirror out."""
    fetch_rate: Size = Field(ByteSize(0), ge=0)
    """Bytes per second that are read from --from, e.g. 50MB; 0: no limit."""
    look_seconds: float = Field(30.0, gt=0, le=3600)
    """Pause between two looks for anchors, multi-step deltas and tags."""
    serve: bool = False
    """Serve --to, a directory, to hosts: they read it with --channel http://HOST:PORT/channel."""
    keep_bytes: Size = Field(ByteSize(0), ge=0)
    """Bytes that --to may take, e.g. 400GB; 0: no limit. Before it is exceeded the oldest versions go."""
    keep_versions: PositiveInt | None = None
    """Versions that --to keeps. Without this and --keep-hours everything that --from has is copied."""
    keep_hours: float | None = Field(None, gt=0)
    """--to keeps versions younger than this."""
    host_versions: NonNegativeInt = 64
    """Maximum number of additional versions kept for hosts that are behind."""

    @property
    def source(self) -> ChannelAddress:
        return cast(ChannelAddress, getattr(self, "from"))

    @property
    def retention(self) -> Retention:
        return Retention(self.keep_versions, self.keep_hours, self.host_versions)


MirrorSettings = create_model(
    "MirrorSettings",
    __base__=MirrorPlaces,
    **{
        "from": (
            ChannelPlace,
            Field(description="The channel to copy: a directory, or a URL (s3://, gs://, az://)."),
        )
    },  # type: ignore[call-overload]
)
