"""Prints the page of the Python API, directives of mkdocstrings: python docs/make_python.py"""

from __future__ import annotations

from weightcast import publisher

FIRST = ("Publisher", "PublisherOptions", "Handle", "PublishReport", "init_channel", "HandOver", "Shard", "RawTensor")
HOOKS = ("transformers_hook.PublishCallback", "field_hook.point")
TOP = """\
# Python API

For trainers: [publishing from a trainer](../trainers.md). Import these names from `weightcast.publisher`, the hooks from
their modules. Everything else may change.
"""


def document() -> str:
    names = [*FIRST, *(name for name in publisher.__all__ if name not in FIRST), *HOOKS]
    return TOP + "".join(f"\n::: weightcast.publisher.{name}\n" for name in names)


if __name__ == "__main__":
    print(document(), end="")
