"""The command as the fixture `weightcast` of conftest.py runs it."""

from __future__ import annotations

from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""Exit code, stdout, stderr."""
