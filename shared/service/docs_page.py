"""`/docs`: what a daemon answers to, as one page without scripts. The framework's own page loads its scripts
from the internet, where a host of a fleet has no way to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; }
tr { border-top: 1px solid color-mix(in srgb, currentcolor 20%, transparent); }
h2 { font-size: 1rem; margin: 2rem 0 .25rem; }
"""

Schema = Mapping[str, Any]


def docs_page(openapi: Schema) -> str:
    """HTML of an OpenAPI 3.1 document: its routes, then its schemas with their members."""
    title = escape(openapi["info"]["title"])
    schemas = openapi.get("components", {}).get("schemas", {})
    shown = "".join(_members(name, schema) for name, schema in sorted(schemas.items()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
        f"<table>{_head('Route', 'What it does', 'Takes', 'Answers')}{''.join(_routes(openapi))}</table>"
        f"{shown}</html>\n"
    )


def _head(*titles: str) -> str:
    return f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _routes(openapi: Schema) -> Iterator[str]:
    for path, methods in sorted(openapi["paths"].items()):
        for method, route in methods.items():
            yield _row(
                f"<code>{method.upper()} {escape(path)}</code>",
                escape(route.get("description") or route["summary"]),
                "<br>".join([*_bodies(route.get("requestBody", {})), *_parameters(route)]),
                "<br>".join(
                    " ".join(["else" if status == "default" else escape(status), *_bodies(answer)])
                    for status, answer in sorted(route["responses"].items())
                ),
            )


def _parameters(route: Schema) -> Iterator[str]:
    for each in route.get("parameters", ()):
        yield f"<code>{escape(each['name'])}</code> ({escape(each['in'])}): {_kind(each['schema'])}"


def _bodies(holder: Schema) -> list[str]:
    """Of a request or an answer: a schema for each media type that says one."""
    found = (_kind(each.get("schema", {})) for each in holder.get("content", {}).values())
    return list(filter(None, found))


def _members(name: str, schema: Schema) -> str:
    rows = "".join(
        _row(f"<code>{escape(member)}</code>", _kind(each), escape(each.get("description", "")))
        for member, each in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{about}</p><table>{rows}</table>'


def _kind(schema: Schema) -> str:
    """A type in words: `list of <a>Host</a>`, `integer or null`, `"delta" or "anchor"`."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, Mapping):
        return f"{'list of' if schema['type'] == 'array' else 'by name:'} {_kind(inner)}"
    return escape(str(schema.get("type", "")))
