"""The hook of mkdocs.yml: navigation from docs/README.md, pages made from the code, pages for other
files that documents link to.

Documents are written for a Git host. What renders differently here is adapted while a page is built.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_commands  # noqa: E402
import make_http  # noqa: E402
import make_python  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

HOME, PAGES = "README.md", "docs/README.md"
MADE = {
    "reference/commands.md": make_commands.document,
    "reference/python.md": make_python.document,
    "reference/http.md": make_http.document,
}
BOOSTS = {
    "runbook.md": 5,
    **dict.fromkeys(("live-patch.md", "metrics.md", "mirror.md", "quantised.md", "settings.md"), 0.5),
    **dict.fromkeys(("first-gpu-run.md", "sizing.md", "status.md", "index.md"), 0.5),
    **dict.fromkeys(("reference", "stores-interface.md", "FORMAT.md", "architecture.md", "hazards.md"), 0.2),
    **dict.fromkeys(("reliability.md", "failpoints.md", "glossary.md", "comparison.md", "pages.md"), 0.2),
    **dict.fromkeys(("adr", "measurements", "files"), 0.05),
}
"""of search results: guides come before reference, and that before why it was made; matches in titles count a
thousandfold"""
LINK = re.compile(r"\]\(([^)#\s:]*)(#[\w-]+)?\)")
FENCE = re.compile(r"\s*(```|~~~)")
ITEM = re.compile(r"( *)([-*]|\d+\.) ")
FOREIGN = re.compile(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?(?:https?:)?//[^\" >]+", re.I)
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sbatch": "sh", ".env": "sh"}


def on_config(config: Any) -> Any:
    """The navigation: a section for each heading of docs/README.md, with the pages that its table names."""
    nav: list[Any] = [{"weightcast": "index.md"}]
    for line in (ROOT / PAGES).read_text().splitlines():
        if line.startswith("## "):
            nav.append({line[3:]: []})
        elif row := re.match(r"\| \[([^\]]+)\]\(([^)]+)\)", line):
            (section,) = nav[-1].values()
            section.extend(_entries(row[1], normpath(join("docs", row[2]))))
    (reference,) = next(each for each in nav if "Reference" in each).values()
    reference[:0] = MADE
    nav[-1]["Development"].append({"All pages": place_of(PAGES)})
    config.nav = nav
    return config


def _entries(title: str, path: str) -> Iterator[Any]:
    if not (ROOT / path).is_dir():
        yield place_of(path)
        return
    pages = sorted((ROOT / path).glob("*.md"))
    yield {title.strip("/"): [place_of(path), *(place_of(str(page.relative_to(ROOT))) for page in pages)]}


def place_of(path: str) -> str:
    """Where in the site a file or directory of the repository is."""
    if path in (HOME, PAGES):
        return "index.md" if path == HOME else "pages.md"
    if (ROOT / path).is_dir():
        return place_of(join(path, "index.md"))
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return join("files", path if path.endswith(".md") else f"{path}.md")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made here, and those of files outside docs/ that a document links to."""
    home = files.get_file_from_path("README.md")
    if home is not None:
        files.remove(home)
    for place, document in MADE.items():
        files.append(File.generated(config, place, content=document()))
    todo, seen = [HOME, PAGES, *_pages()], set[str]()
    while todo:
        path = todo.pop()
        if path in seen or not (ROOT / path).exists():
            continue
        seen.add(path)
        if files.get_file_from_path(place_of(path)) is None:
            files.append(File.generated(config, place_of(path), content=_content(path)))
        todo.extend(target for target in _targets(path) if target not in seen)
    ORIGINS.update({place_of(path): path for path in seen})
    return files


ORIGINS: dict[str, str] = {}
"""by place in the site: the file or directory that it shows"""


def _pages() -> Iterator[str]:
    for page in (ROOT / "docs").rglob("*.md"):
        yield str(page.relative_to(ROOT))


def _content(path: str) -> str:
    if path.endswith(".md"):
        return (ROOT / path).read_text()
    if (ROOT / path).is_dir():
        names = sorted(path.name for path in (ROOT / path).iterdir() if not path.name.startswith((".", "__")))
        items = (f"- [{_title(path, name)}]({name})\n" for name in names)
        return f"# {path.removeprefix('docs/')}\n\n{''.join(items)}"
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"


def _title(folder: str, name: str) -> str:
    if not name.endswith(".md"):
        return name
    return next(line[2:] for line in (ROOT / folder / name).read_text().splitlines() if line.startswith("# "))


def _targets(path: str) -> Iterator[str]:
    """The files that a document or directory links to."""
    if path.endswith(".md") or (ROOT / path).is_dir():
        for target, _ in LINK.findall(_content(path)):
            if target:
                yield normpath(join(_folder(path), target))


def _folder(path: str) -> str:
    return path if (ROOT / path).is_dir() else dirname(path)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    place = page.file.src_uri
    origin = ORIGINS.get(place)
    page.meta["search"] = {"boost": BOOSTS.get(place.partition("/")[0], 1)}
    if origin is None:
        return markdown

    def moved(link: re.Match[str]) -> str:
        if not link[1]:
            return link[0]
        target = normpath(join(_folder(origin), link[1]))
        is_page = (ROOT / target).is_dir() or target.endswith(".md") or not target.startswith("docs/")
        there = place_of(target) if is_page else target.removeprefix("docs/")
        return f"]({relpath(there, dirname(place) or '.')}{link[2] or ''})"

    if not (origin.endswith(".md") or (ROOT / origin).is_dir()):
        return markdown
    return "\n".join(_as_rendered_here(LINK.sub(moved, markdown).splitlines()))


def _as_rendered_here(lines: list[str]) -> Iterator[str]:
    """Lists and tables begin a block of their own, and nested lists are indented by four."""
    fenced, before = False, ""
    for line in lines:
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            item = ITEM.match(line)
            begins = item if not ITEM.match(before) else None
            table = line.startswith("|") and not before.startswith("|")
            if before.strip() and (table or (begins and not before.startswith(" "))):
                yield ""
            if item and item[1]:
                line = "    " + line.lstrip()
        yield line
        before = line


def on_post_build(config: Any) -> None:
    """Nothing is loaded from another host."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := FOREIGN.search(page.read_text()):
            raise PluginError(f"{page.relative_to(config.site_dir)} loads from another host: {found[0]}")


def on_page_context(context: Mapping[str, Any], page: Any, config: Any, nav: Any) -> None:
    page.edit_url = None
