"""Secrets are known by their names: of fields in the log, of variables in the environment. In addresses they
stand in the query."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weightcast.shared.service.variables import PREFIX

_SECRET = re.compile(r"token(?!iz)|secret|password|authorization|api_?key", re.IGNORECASE)
_OPTION_BEHIND = rf",(?!\w*(?:{_SECRET.pattern}))[a-z_]+="
_QUERY = re.compile(rf"\?(?:[^\s,'\"]|(?!{_OPTION_BEHIND}),)+", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    return _SECRET.search(name) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a command that we start inherits: no secret of either daemon's settings, which read names in any
    case; one settings file may serve both. Tests hold the settings' secrets to this rule."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.upper().startswith(PREFIX) and is_secret_name(name))
    }


def hide_queries(text: str) -> str:
    """Of all addresses in it: receivers take tokens there. A query ends before what looks like an engine's
    next option."""
    return _QUERY.sub("?...", text)
