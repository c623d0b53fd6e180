"""The trainer's side: writes versions and the pointer."""

from weightcast.publisher.channel_init import init_channel
from weightcast.publisher.publisher import Publisher
from weightcast.publisher.report import PublishReport

__all__ = ["PublishReport", "Publisher", "init_channel"]
