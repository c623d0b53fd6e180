"""The page's files: for everybody who reaches the port, and nothing else with them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from weightcast.publisher.daemon.status import PublisherStatus
from weightcast.publisher.fleet.lag_history import LagHistory, LagSample
from weightcast.publisher.fleet.routes import PAGE_PATHS, page_routes
from weightcast.publisher.fleet.versions import (
    CatchUp,
    CatchUpRow,
    Joiner,
    PlannedVersion,
    PrunePlan,
    VersionRow,
)
from weightcast.shared.channel.reports import AdapterReport, Update
from weightcast.shared.daemon.fleet import (
    EngineLine,
    Fleet,
    Host,
    LagCount,
    PublisherLine,
    RefusedCheckpoint,
    Standing,
)
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.status import Readiness

TOKEN = "correct-horse"
PAGE = Path(__file__).parents[2] / "publisher" / "page"


@pytest.fixture(params=[None, TOKEN], ids=["open", "token"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    app = make_app(
        "test",
        lambda: PublisherStatus(channel="", local="", encoding="fast"),
        lambda: Readiness(ready=True),
        CollectorRegistry(),
        request.param,
        lambda: None,
        PublisherStatus,
        open_paths=PAGE_PATHS,
    )
    app.include_router(page_routes())
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            await super().startup()
            started.set()

    server = Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait(20)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as opened:
        yield opened
    server.should_exit = True
    thread.join(20)


def test_every_file_comes_under_a_policy_that_lets_nothing_else_in(client: httpx.Client) -> None:
    for path in PAGE_PATHS:
        answer = client.get(path)
        assert answer.status_code == 200 and answer.content, path
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_has_no_script_or_style_of_its_own(client: httpx.Client) -> None:
    text = client.get("/").text
    assert "<style" not in text and "style=" not in text and " on" not in text.replace(" one", "")
    assert text.count("<script") == 1 and '<script type="module" src="page/page.js"></script>' in text
    assert "//" not in text.replace("<!doctype", ""), "everything comes from the publisher itself"


def test_what_a_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/page/page.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/page/page.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/page.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.head("/page/page.js").headers["etag"] == tag


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/page.ts"]
)
def test_nothing_beside_the_page_s_files_is_served(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code in (401, 404)


def test_files_are_only_read_and_figures_ask_for_the_token(client: httpx.Client) -> None:
    assert client.post("/").status_code in (401, 405)
    assert client.request("DELETE", "/page/page.js").status_code in (401, 405)
    figures = client.get("/v1/status").status_code
    assert figures == (401 if client.post("/").status_code == 401 else 200)


def test_without_a_token_foreign_names_see_no_page(client: httpx.Client) -> None:
    answer = client.get("/", headers={"Host": "evil.example"})
    with_token = client.get("/v1/status").status_code == 401
    assert answer.status_code == (200 if with_token else 403)


FORMS: dict[str, type] = {
    "Update": Update,
    "Adapter": AdapterReport,
    "Engine": EngineLine,
    "Host": Host,
    "LagCount": LagCount,
    "LagSample": LagSample,
    "LagHistory": LagHistory,
    "RefusedCheckpoint": RefusedCheckpoint,
    "Publisher": PublisherLine,
    "Fleet": Fleet,
    "Version": VersionRow,
    "CatchUpRow": CatchUpRow,
    "Joiner": Joiner,
    "CatchUp": CatchUp,
    "Planned": PlannedVersion,
    "PrunePlan": PrunePlan,
}


def test_what_the_page_reads_is_what_the_publisher_answers() -> None:
    """Names of members, as the page's sources declare them."""
    text = (PAGE / "src" / "api.ts").read_text()
    declared = dict(re.findall(r"export interface (\w+) \{\n(.*?)\n\}", text, re.DOTALL))
    assert set(declared) == set(FORMS)
    for name, body in declared.items():
        members = set(re.findall(r"^  (\w+)\??:", body, re.MULTILINE))
        assert members and members <= set(FORMS[name].__annotations__), name


def test_phases_and_standings_are_the_ones_that_hosts_have() -> None:
    text = (PAGE / "src" / "api.ts").read_text()
    (standings,) = re.findall(r"STANDINGS = \[(.*?)\]", text)
    assert set(re.findall(r"\w+", standings)) == set(get_args(Standing))
    css = (PAGE / "src" / "page.css").read_text()
    (phases,) = re.findall(r"PHASES = \[(.*?)\n\]", text, re.DOTALL)
    named = re.findall(r'"(\w+)"', phases)
    assert {"plan", "fetch", "stage", "patch", "pause", "reload", "read_back", "resume"} <= set(named)
    assert all(f".phase-{phase} {{" in css and f"--{phase}:" in css for phase in named)


def test_the_page_lies_beside_its_sources() -> None:
    names = {"index.html", "page.js", "page.css", "icon.svg", "licenses.txt"}
    assert {path.name for path in (PAGE / "dist").iterdir()} == names
