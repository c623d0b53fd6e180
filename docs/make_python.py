"""Prints the page of the Python API, directives of mkdocstrings: python docs/make_python.py"""

from __future__ import annotations

from weightcast import publisher

FIRST = ("Publisher", "PublisherOptions", "Handle", "PublishReport", "init_channel", "HandOver", "cast_like")
HOOKS = ("publisher.transformers_hook.PublishCallback", "publisher.field_hook.point")
OTHERS = (
    *("client.Client", "client.Answer", "client.Piece", "client.RequestRefused"),
    "shared.daemon.wait.wait_for_hosts",
)
OPTIONS = {
    "Publisher": 'filters: ["!^_", "!^(components?|trained_on|run|store)$"]\n      '
    "merge_init_into_class: false",
    "PublisherOptions": "inherited_members: true\n      merge_init_into_class: false",
    "PublishReport": "inherited_members: true\n      show_if_no_docstring: true\n      "
    'filters: ["!^(shown|but|by_name)$", "!^_"]',
    **dict.fromkeys(("Answer", "Piece"), 'show_if_no_docstring: true\n      filters: ["!^_"]'),
}
TOP = """\
# Python API

For trainers: [publishing from a trainer](../trainers.md). For requests: [the client](../gate.md#the-client).
Import these names from `weightcast.publisher`, the client's from `weightcast.client`, hooks and
`wait_for_hosts` from the modules shown. Everything else may change. All errors of publishing are a
`WeightcastError`, with `message` and `remedy`.
"""


def document() -> str:
    names = [*FIRST, *(name for name in publisher.__all__ if name not in FIRST)]
    paths = [*(f"publisher.{name}" for name in names), *HOOKS, *OTHERS]
    return TOP + "".join(f"\n::: weightcast.{path}\n{_options(path)}" for path in paths)


def _options(path: str) -> str:
    name = path.rpartition(".")[2]
    return f"    options:\n      {OPTIONS[name]}\n" if name in OPTIONS else ""


if __name__ == "__main__":
    print(document(), end="")
