"""`contexts`, compiled."""

from __future__ import annotations

from typing import Any

from weightcast.shared.codec import contexts, rice
from weightcast.shared.digest.native import kernel, rule

for each in (rice.rice_parameter, contexts._first_exponent, contexts._plan):
    rule(each)

plan_contexts: Any = kernel(contexts.plan_contexts)
