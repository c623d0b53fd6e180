"""Weight updates for a rollout fleet: `weightcast.publisher` writes versions, `weightcast.subscriber` applies
them on every host.

The command is `weightcast`; in Python begin with `weightcast.publisher.Publisher`.
"""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weightcast.shared.daemon.status import VERSION

    return VERSION


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
