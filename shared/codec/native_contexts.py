"""`contexts`, compiled."""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from weightcast.shared.codec import contexts, rice
from weightcast.shared.digest.native import kernel

for rule in (rice.rice_parameter, contexts._first_exponent, contexts._plan):
    register_jitable(rule)

plan_contexts: Any = kernel(contexts.plan_contexts)
