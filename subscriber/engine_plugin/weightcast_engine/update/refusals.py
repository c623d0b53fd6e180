"""Why an order is not carried out. Each becomes one HTTP status of the engine's routes.

Refusal
├── BadPatch     422   the file, or what it asks for, can't be patched into this engine: reload this version
├── OtherBase    409   the engine does not hold what the patch starts from: reload, and say what it holds
├── NotPaused    423   the order needs a paused engine
└── InDoubt      500   nobody knows what the engine holds: it stays paused until a reload
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Refusal(Exception):
    """`message` names the file or the tensor, `remedy` says what to do."""

    status: ClassVar[int] = 500

    def __init__(self, message: str, *, tensor: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message, self.tensor, self.remedy = message, tensor, remedy

    @staticmethod
    def of(told: Mapping[str, Any]) -> Refusal:
        """From what `told` gave."""
        kinds = {kind.status: kind for kind in Refusal.__subclasses__()}
        kind = kinds.get(told["status"], InDoubt)
        return kind(told["error"], tensor=told.get("tensor", ""), remedy=told.get("remedy", ""))

    def told(self) -> dict[str, object]:
        """As it crosses processes, and as a route answers."""
        words = {"error": self.message, "tensor": self.tensor, "remedy": self.remedy}
        return {"status": self.status, **{key: word for key, word in words.items() if word}}


class BadPatch(Refusal):
    status = 422


class OtherBase(Refusal):
    status = 409


class NotPaused(Refusal):
    status = 423


class InDoubt(Refusal):
    status = 500


RELOAD = "reload this version from disk"
RELOAD_AND_TELL = "reload the engine from disk and say what it holds"
