"""What stands around an engine, and lets everything through but for what it changes."""

from __future__ import annotations

from weightcast.subscriber.engines.base import Confirmation, Engine, EngineFacts, EngineSpec, ReloadOutcome


class Around:
    """As the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def spec(self) -> EngineSpec:
        return self.engine.spec

    @property
    def copies_weights(self) -> bool:
        return self.engine.copies_weights

    def probe(self) -> EngineFacts:
        return self.engine.probe()

    def pause(self) -> None:
        self.engine.pause()

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        return self.engine.reload(path, version, label)

    def read_back(self, label: str) -> Confirmation:
        return self.engine.read_back(label)

    def resume(self) -> None:
        self.engine.resume()

    def relabel(self, label: str) -> Confirmation:
        return self.engine.relabel(label)

    def close(self) -> None:
        self.engine.close()
