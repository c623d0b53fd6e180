from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from waiting import wait_until

from weightcast.shared.base.errors import EngineFailed, Refused, RetryLater, WeightcastError
from weightcast.shared.daemon.http import BODY_LIMIT, HEADER_LIMIT, StrictRoute
from weightcast.shared.daemon.status import Readiness

TOKEN = "not-a-real-secret"
Serve = Callable[..., Any]


class Order(BaseModel):
    version: int


def routes(app: FastAPI) -> None:
    router = APIRouter()

    @router.post("/v1/order")
    def order(order: Order) -> Order:
        return order

    strict = APIRouter(route_class=StrictRoute)

    @strict.post("/v1/strict")
    def strictly(order: Order) -> Order:
        return order

    app.include_router(strict)

    @router.get("/v1/fail/{kind}")
    def fail(kind: str) -> None:
        errors: dict[str, type[WeightcastError]] = {
            "refused": Refused,
            "later": RetryLater,
            "engine": EngineFailed,
        }
        raise errors[kind]("weight_v000003 is not right", remedy="publish again")

    @router.get("/v1/slow")
    def slow() -> None:
        entered.set()
        leave.wait(20)

    app.include_router(router)


entered = threading.Event()
leave = threading.Event()


def test_probes_status_and_metrics_answer(serve: Serve) -> None:
    with serve(prepare=routes).client() as client:
        assert client.get("/healthz").json() == {"ready": True, "reasons": []}
        assert client.get("/readyz").status_code == 200
        status = client.get("/v1/status")
        assert status.headers["content-type"] == "application/json"
        assert status.json()["version"] == 7
        assert client.get("/metrics").headers["content-type"].startswith("text/plain")
        schema = client.get("/openapi.json").json()
    assert "/v1/wake" in schema["paths"]
    assert "LoopStatus" in schema["components"]["schemas"]


def test_the_docs_name_every_route_and_every_schema(serve: Serve) -> None:
    with serve(prepare=routes).client() as client:
        page = client.get("/docs")
        schema = client.get("/openapi.json").json()
        assert client.get("/redoc").status_code == 404
    assert page.headers["content-type"].startswith("text/plain")
    assert page.headers["x-content-type-options"] == "nosniff"
    blocks = {block.partition("\n")[0].partition(":")[0]: block for block in page.text.split("\n\n")}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            assert f"{method.upper()} {path}" in blocks
            assert "default" in route["responses"]
    schemas = schema["components"]["schemas"]
    assert set(schemas) > {"Order", "LoopStatus"}
    for name, one in schemas.items():
        assert all(f"\n    {member} (" in blocks[name] for member in one.get("properties", ()))
    assert "\n    Order\n    takes Order\n" in blocks["POST /v1/order"]


def test_not_ready_says_why(serve: Serve) -> None:
    served = serve()
    served.readiness[0] = Readiness(ready=False, reasons=("no engine confirmed a version",))
    with served.client() as client:
        answer = client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["no engine confirmed a version"]
        assert client.get("/healthz").status_code == 200


def test_wake_runs_a_step_before_the_poll(serve: Serve) -> None:
    served = serve(poll_seconds=3600)
    wait_until(lambda: served.loop.get().steps == 1)
    with served.client() as client:
        assert client.post("/v1/wake").status_code == 202
    wait_until(lambda: served.loop.get().steps == 2)


def test_everything_but_healthz_asks_for_the_token(serve: Serve) -> None:
    served = serve(token=TOKEN)
    paths = ["/readyz", "/v1/status", "/metrics", "/docs", "/openapi.json", "/nothing"]
    with served.client() as client:
        for path in paths:
            refused = client.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in refused.text
        assert client.get("/healthz").status_code == 200
        assert client.get("/healthz/").status_code == 401
    with served.client(TOKEN) as client:
        assert [client.get(path).status_code for path in paths] == [200, 200, 200, 200, 200, 404]


def test_wrong_authorization(serve: Serve) -> None:
    wrong = [
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN} x",
    ]
    with serve(token=TOKEN).client() as client:
        for header in wrong:
            assert client.get("/v1/status", headers={"Authorization": header}).status_code == 401
            assert client.post("/v1/wake", headers={"Authorization": header}).status_code == 401


def test_a_token_stands_nowhere_but_in_requests(serve: Serve, quiet: io.StringIO) -> None:
    served = serve(token=TOKEN, prepare=routes)
    with served.client(TOKEN) as client:
        answers = [
            client.get(path) for path in ("/v1/status", "/metrics", "/openapi.json", "/v1/fail/refused")
        ]
        answers += [client.get("/v1/status", headers={"Authorization": f"Bearer {TOKEN}x"})]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 422, 401]
    assert all(TOKEN not in f"{answer.headers}{answer.text}" for answer in answers)
    assert TOKEN not in quiet.getvalue()


def test_headers_have_a_limit(serve: Serve) -> None:
    served = serve(prepare=routes)
    port = urlsplit(served.url).port
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ")
        connection.sendall(b"x" * 2 * HEADER_LIMIT)
        answer = connection.recv(4096)
        assert answer == b"" or b" 400 " in answer.splitlines()[0], "the end never came"
    with served.client() as client:
        for wrong in ({"X-Long": "x" * HEADER_LIMIT}, {f"X-{number}": "x" * 99 for number in range(200)}):
            refused = client.get("/v1/status", headers=wrong)
            assert refused.status_code == 431 and refused.json()["remedy"]
        assert client.get("/v1/status?" + "x" * HEADER_LIMIT).status_code == 431
        fitting = {"X-Long": "x" * (HEADER_LIMIT - 1024)}
        assert client.get("/v1/status", headers=fitting).status_code == 200


def test_the_scheme_name_is_case_insensitive(serve: Serve) -> None:
    with serve(token=TOKEN).client() as client:
        assert client.get("/v1/status", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
        odd = client.get("/v1/status", headers={"Authorization": f"Bearer {TOKEN}é".encode("latin-1")})
        assert odd.status_code == 401


def test_bodies_have_a_limit_with_and_without_a_length(serve: Serve) -> None:
    with serve(prepare=routes).client() as client:
        assert client.post("/v1/order", json={"version": 3}).json() == {"version": 3}
        client.headers["Content-Type"] = "application/json"
        fitting = b'{"version": 3' + b" " * (BODY_LIMIT - 14) + b"}"
        assert client.post("/v1/order", content=fitting).status_code == 200
        assert client.post("/v1/order", content=fitting + b" ").status_code == 413
        chunked = iter([b" " * 65536] * 40)
        answer = client.post("/v1/order", content=chunked)
        assert answer.status_code == 413
        assert str(BODY_LIMIT) in answer.json()["message"] and answer.json()["remedy"]


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "APPLICATION/JSON",
        "Application/Json; charset=utf-8",
        "application/vnd.order+JSON",
        "application/json ; x=json",
    ],
)
def test_a_key_that_stands_twice_is_refused_whatever_the_body_is_called(
    serve: Serve, content_type: str
) -> None:
    with serve(prepare=routes).client() as client:
        client.headers["Content-Type"] = content_type
        assert client.post("/v1/strict", content=b'{"version": 3}').json() == {"version": 3}
        refused = client.post("/v1/strict", content=b'{"version": 3, "version": 4}')
        assert refused.status_code == 422 and "duplicate key" in refused.json()["message"]
        client.headers["Content-Type"] = "text/plain"
        unnamed = client.post("/v1/strict", content=b'{"version": 3}')
        assert unnamed.status_code == 422 and "Content-Type" in unnamed.json()["remedy"]


def test_a_false_length_is_refused_before_the_body_comes(serve: Serve) -> None:
    address = urlsplit(serve().url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as peer:
        peer.sendall(b"POST /v1/wake HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n")
        assert peer.recv(100).startswith(b"HTTP/1.1 413 ")


def test_half_a_body_reaches_no_handler(serve: Serve) -> None:
    seen: list[bytes] = []

    def take(app: FastAPI) -> None:
        @app.post("/v1/take")
        async def handler(request: Request) -> None:
            seen.append(await request.body())

    served = serve(prepare=take)
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as peer:
        peer.sendall(b"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf")
        peer.shutdown(socket.SHUT_WR)
        assert not peer.recv(100).startswith(b"HTTP/1.1 2")
    with served.client() as client:
        assert client.post("/v1/take", content=b"whole").status_code == 200
    assert seen == [b"whole"]


def test_errors_keep_their_status_message_and_remedy(serve: Serve) -> None:
    expected = {"refused": (422, "Refused"), "later": (503, "RetryLater"), "engine": (502, "EngineFailed")}
    with serve(prepare=routes).client() as client:
        for kind, (code, name) in expected.items():
            answer = client.get(f"/v1/fail/{kind}")
            assert answer.status_code == code
            assert answer.json() == {
                "error": name,
                "message": "weight_v000003 is not right",
                "remedy": "publish again",
            }
            assert ("retry-after" in answer.headers) == (kind == "later")


def test_wrong_input_and_wrong_paths_have_the_same_form(serve: Serve) -> None:
    with serve(prepare=routes).client() as client:
        invalid = client.post("/v1/order", json={"version": "secret-text"})
        assert invalid.status_code == 422
        assert invalid.json()["error"] == "InvalidRequest"
        assert "body.version" in invalid.json()["message"]
        assert "secret-text" not in invalid.text
        unnamed = client.post("/v1/order", content=b'{"version": 3}')
        assert unnamed.status_code == 422 and "Content-Type" in unnamed.json()["remedy"]
        assert client.get("/nothing").json()["error"] == "NotFound"
        assert client.get("/v1/wake").status_code == 405


def test_a_blocking_handler_leaves_the_probes_alone(serve: Serve) -> None:
    served = serve(prepare=routes)
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as peer:
        peer.sendall(b"GET /v1/slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert entered.wait(20)
        with served.client() as client:
            assert client.get("/healthz").status_code == 200
        leave.set()
        assert peer.recv(100).startswith(b"HTTP/1.1 200 ")


def test_without_a_token_web_pages_are_kept_out(serve: Serve) -> None:
    served = serve()
    with served.client() as client:
        assert client.post("/v1/wake", headers={"Origin": "https://example.com"}).status_code == 403
        assert client.post("/v1/wake", headers={"Origin": served.url}).status_code == 202
        assert client.get("/v1/status", headers={"Host": "example.com:80"}).status_code == 403
        assert client.get("/v1/status", headers={"Host": "localhost:1"}).status_code == 200
        assert client.get("/v1/status", headers={"Host": "[::1]:1"}).status_code == 200
