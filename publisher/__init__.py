"""The trainer's side: writes versions and the pointer.

Names are imported when they are used: `weightcast.publisher.trainer.handover` needs numpy alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcast.publisher.api import Publisher, PublisherOptions
    from weightcast.publisher.channel_init import init_channel
    from weightcast.publisher.publish.publish_job import PublishReport
    from weightcast.publisher.submit import Handle
    from weightcast.publisher.trainer.handover import HandOver
    from weightcast.publisher.trainer.precision import CastWeights, cast_like
    from weightcast.publisher.weights.given import RawTensor, Shard
    from weightcast.publisher.weights.quantise import Quantiser, quantise, quantise_checkpoint
    from weightcast.shared.channel.rate import Rate

__all__ = [
    "CastWeights",
    "HandOver",
    "Handle",
    "PublishReport",
    "Publisher",
    "PublisherOptions",
    "Quantiser",
    "Rate",
    "RawTensor",
    "Shard",
    "cast_like",
    "init_channel",
    "quantise",
    "quantise_checkpoint",
]
_MODULES = {
    "CastWeights": "trainer.precision",
    "HandOver": "trainer.handover",
    "Handle": "submit",
    "PublishReport": "publish.publish_job",
    "Publisher": "api",
    "PublisherOptions": "api",
    "Quantiser": "weights.quantise",
    "Rate": "api",
    "RawTensor": "weights.given",
    "Shard": "weights.given",
    "cast_like": "trainer.precision",
    "init_channel": "channel_init",
    "quantise": "weights.quantise",
    "quantise_checkpoint": "weights.quantise",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
