"""Weight updates for a rollout fleet: `weightcast.publisher` writes versions, `weightcast.subscriber` applies
them on every host.

The command is `weightcast`; in Python begin with `weightcast.publisher.Publisher`.
"""

from importlib import import_module
from typing import Any

__all__ = ["__version__"]
_MODULES = ("client", "integrations", "publisher")
"""that trainers use; imported when they are named"""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weightcast.shared.daemon.status import VERSION

    return VERSION


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
