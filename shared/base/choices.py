"""Values that settings and options name. Light to import: help of every command needs them."""

from __future__ import annotations

from typing import Literal

MAIN = "main"
"""The component of a channel's root. Its name in the root's key is the empty string."""
Encoding = Literal["fast", "small", "xor", "overwrite"]
"""of a delta"""
Layout = Literal["plain", "stitch"]
"""of a channel; stitch: `publisher/publish/stitch.py`"""
SchemeName = Literal["fp8-block", "fp8-channel", "int8-channel", "mxfp8", "nvfp4"]
"""of quantised weights"""
NonFinite = Literal["refuse", "allow"]
CARRY_CONFIG = "Versions carry changed tokenizer, chat template, generation and processor files to hosts."
Readers = Literal["owner", "group", "all"]
"""of a local checkpoint"""
ReloadOrder = Literal["together", "rolling"]
"""All engines of a host at the same time, or one after the other confirmed."""
LEASE_LIMIT = 3600.0
"""seconds that a follower of an engine group keeps its version without word of the leader"""
STALE_SECONDS = 60.0
LOST_SECONDS = 120.0
"""without a change of a host's report"""


def size(text: str) -> int:
    """Bytes as settings and options take them (50MB, 16MiB). Raises ValueError."""
    from pydantic import ByteSize, TypeAdapter

    return int(TypeAdapter(ByteSize).validate_python(text))
