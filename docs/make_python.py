"""Prints the page of the Python API, directives of mkdocstrings: python docs/make_python.py"""

from __future__ import annotations

from weightcast import publisher

FIRST = ("Publisher", "PublisherOptions", "Handle", "PublishReport", "init_channel", "HandOver", "cast_like")
HOOKS = ("transformers_hook.PublishCallback", "field_hook.point")
OPTIONS = {
    "Publisher": 'filters: ["!^_", "!^(components?|trained_on|run|store)$"]\n      '
    "merge_init_into_class: false",
    "PublishReport": "inherited_members: true\n      show_if_no_docstring: true\n      "
    'filters: ["!^shown$", "!^_"]',
}
TOP = """\
# Python API

For trainers: [publishing from a trainer](../trainers.md). Import these names from `weightcast.publisher`, the
hooks from their modules. Everything else may change. All errors are a `WeightcastError`, with `message` and
`remedy`.
"""


def document() -> str:
    names = [*FIRST, *(name for name in publisher.__all__ if name not in FIRST), *HOOKS]
    return TOP + "".join(f"\n::: weightcast.publisher.{name}\n{_options(name)}" for name in names)


def _options(name: str) -> str:
    return f"    options:\n      {OPTIONS[name]}\n" if name in OPTIONS else ""


if __name__ == "__main__":
    print(document(), end="")
