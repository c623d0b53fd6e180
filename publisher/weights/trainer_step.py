"""The trainer's step that weights are of."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from weightcast.shared.errors import Refused
from weightcast.shared.files.strict_json import MAX_INTEGER


def whole_step(step: SupportsIndex | None, world_size: int = 1) -> int | None:
    """As a version's index can state it; numpy's integers and the like are taken. Raises Refused, also for
    none among several ranks."""
    if step is None and world_size > 1:
        # by the step alone ranks know that they publish the same weights
        raise Refused(
            f"no step is given, and {world_size} ranks publish together", remedy="give the trainer's step"
        )
    if step is None:
        return None
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INTEGER:
        raise Refused(f"step {step!r} is no number of a step", remedy="give an integer from 0 on, or none")
    return number
