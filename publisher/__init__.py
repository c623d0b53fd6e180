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
    from weightcast.shared.base.errors import (
        DamagedFile,
        Forked,
        NeedsReseed,
        NotInTime,
        Refused,
        RetryLater,
        UnknownFormat,
        Untrusted,
        WeightcastError,
        WrongRun,
    )
    from weightcast.shared.channel.claims import OwnerAlive
    from weightcast.shared.channel.rate import Rate

__all__ = [
    "CastWeights",
    "DamagedFile",
    "Forked",
    "HandOver",
    "Handle",
    "NeedsReseed",
    "NotInTime",
    "OwnerAlive",
    "PublishReport",
    "Publisher",
    "PublisherOptions",
    "Quantiser",
    "Rate",
    "RawTensor",
    "Refused",
    "RetryLater",
    "Shard",
    "UnknownFormat",
    "Untrusted",
    "WeightcastError",
    "WrongRun",
    "cast_like",
    "init_channel",
    "quantise",
    "quantise_checkpoint",
]
_MODULES = {
    "CastWeights": "publisher.trainer.precision",
    "HandOver": "publisher.trainer.handover",
    "Handle": "publisher.submit",
    "OwnerAlive": "shared.channel.claims",
    "PublishReport": "publisher.publish.publish_job",
    "Publisher": "publisher.api",
    "PublisherOptions": "publisher.api",
    "Quantiser": "publisher.weights.quantise",
    "Rate": "shared.channel.rate",
    "RawTensor": "publisher.weights.given",
    "Shard": "publisher.weights.given",
    "cast_like": "publisher.trainer.precision",
    "init_channel": "publisher.channel_init",
    "quantise": "publisher.weights.quantise",
    "quantise_checkpoint": "publisher.weights.quantise",
}
"""of all names but errors"""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"weightcast.{_MODULES.get(name, 'shared.base.errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
