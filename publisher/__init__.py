"""The trainer's side: writes versions and the pointer.

Names are imported when they are used: `weightcast.publisher.handover` needs numpy alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.publisher.cast import CastWeights, cast_like
    from weightcast.publisher.channel_init import init_channel
    from weightcast.publisher.given import RawTensor, Shard
    from weightcast.publisher.handover import HandOver
    from weightcast.publisher.publisher import Publisher
    from weightcast.publisher.report import PublishReport
    from weightcast.publisher.submit import Handle

__all__ = [
    "CastWeights",
    "HandOver",
    "Handle",
    "PublishReport",
    "Publisher",
    "RawTensor",
    "Shard",
    "cast_like",
    "init_channel",
]
_MODULES = {
    "CastWeights": "cast",
    "HandOver": "handover",
    "Handle": "submit",
    "PublishReport": "report",
    "Publisher": "publisher",
    "RawTensor": "given",
    "Shard": "given",
    "cast_like": "cast",
    "init_channel": "channel_init",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
