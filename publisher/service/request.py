"""By what a publication is known again after an error or a kill: a request, which the version's index says.

That the channel moved on would tell nothing: another publisher, an operator or a rollback may have moved it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from weightcast.shared.channel.index import Index

MadeFor = Callable[[str, int], Index | None]
"""The version that came of a request, if it is one after another version."""


def new_request() -> str:
    return secrets.token_hex(8)
