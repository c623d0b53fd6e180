"""Inference servers that behave, and misbehave, as measured on the real ones; over real HTTP.

Each double keeps what a test wants to see (`calls`, `held`, `paused`, `broken`) and does on demand what real
engines do when things go wrong: `double.script(path, act, ...)` gives the next calls of a path other answers.
"""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

JSON = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    status: int
    body: JSON | bytes = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Drop:
    """Closes the connection without a word; with `after`, once the call has had its effect."""

    after: bool = False


@dataclass(frozen=True)
class Hang:
    """Answers only when the test calls `release()`; the call has its effect then."""


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Trickle:
    """Answers with `head` and then with `piece` again and again, faster than any timeout between two bytes;
    it ends long after every deadline of a test."""

    head: bytes
    piece: bytes


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TRICKLES = {
    "interim": Trickle(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "status": Trickle(b"HTTP/1.1 200 ", b"a"),
    "header": Trickle(b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "body": Trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"a"),
    "body to the end": Trickle(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", b" "),
    "chunk": Trickle(_CHUNKED + b"2;", b"a"),
    "trailer": Trickle(_CHUNKED + b"2\r\n{}\r\n0\r\nX: ", b"a"),
}

Act = Answer | Drop | Trickle | Hang | Callable[[Call], Answer]


_STARTS = count()


class Double:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.source = "m"
        self.held = "seed"
        """the content of the `weights` file that the engine has loaded"""
        self.label = "default"
        self.paused = False
        self.broken = False
        """weights half loaded: a resume now would serve nonsense or kill the process"""
        self.resumed_broken = False
        self.started = f"{1700000000.25 + 1000 * next(_STARTS)}"
        self.adapters: dict[str, tuple[str, str]] = {}
        """by name: the directory, and the digest of the tensors that were in it"""
        self.lora = True
        """started with LoRA"""
        self.most_adapters = 100
        self.limits: dict[str, Any] = {}
        """what it says of its LoRA options"""
        self.missing: set[str] = set()
        """routes that this release does not have"""
        self.in_front: Callable[[Call], Answer | None] = lambda call: None
        """what stands in front of the handlers: keys, proxies"""
        self._scripts: dict[str, deque[Act]] = defaultdict(deque)
        self._released = threading.Event()
        self._hanging = threading.Event()

    def script(self, path: str, *acts: Act) -> None:
        self._scripts[path].extend(acts)

    def release(self) -> None:
        self._released.set()

    def wait_until_hanging(self) -> None:
        assert self._hanging.wait(10), "no call arrived"

    def paths(self) -> list[str]:
        """What was done to the engine, in order: without the calls that only look."""
        return [call.path for call in self.calls if call.method == "POST"]

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    def trickle(self, act: Trickle, send: Callable[[bytes], object]) -> None:
        send(act.head)
        for _ in range(400):
            if self._released.wait(0.02):
                return
            send(act.piece)

    def respond(self, call: Call) -> Answer | Drop | Trickle:
        self.calls.append(call)
        refusal = self.in_front(call)
        if refusal is not None:
            return refusal
        script = self._scripts[call.path]
        act: Act = script.popleft() if script else self.behave
        if call.path in self.missing:
            return Answer(404, {"detail": "Not Found"})
        match act:
            case Drop(after=True):
                self.behave(call)
                return act
            case Drop() | Answer() | Trickle():
                return act
            case Hang():
                self._hanging.set()
                self._released.wait(20)
                return self.behave(call)
            case _:
                return act(call)

    def behave(self, call: Call) -> Answer:
        raise NotImplementedError

    def load(self, directory: str) -> bool:
        try:
            self.held = (Path(directory) / "weights").read_text()
        except FileNotFoundError:
            return False
        self.broken = False
        return True

    def resume(self) -> None:
        self.paused = False
        self.resumed_broken |= self.broken

    def restart(self) -> None:
        self.started = str(float(self.started) + 60)
        self.label, self.paused, self.broken = "default", False, False
        self.adapters.clear()

    def load_adapter(self, name: str, path: str) -> str:
        """As an error message; empty: it is loaded."""
        if name in self.adapters:
            return f"The lora adapter '{name}' has already been loaded."
        if not (Path(path) / "adapter_config.json").exists():
            return f"Loading lora {name} failed: No adapter found for {path}"
        self.adapters[name] = path, self.digest_of(Path(path) / "adapter_model.safetensors")
        if len(self.adapters) > self.most_adapters:
            del self.adapters[next(iter(self.adapters))]
        return ""

    def digest_of(self, weights: Path) -> str:
        return hashlib.sha256(weights.read_bytes()).hexdigest()

    def models(self) -> Answer:
        cards = [{"id": name, "root": path, "parent": "m"} for name, (path, _) in self.adapters.items()]
        return Answer(200, {"object": "list", "data": [{"id": "m", "root": "m"}, *cards]})

    def metrics(self) -> Answer:
        page = f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.started}\n"
        return Answer(200, page.encode())


class SGLangDouble(Double):
    """SGLang 0.5: see the adapter for what each reply proves."""

    def metrics(self) -> Answer:
        """Of several processes, none of which tells when it started."""
        named = 'sglang:startup_time_seconds{engine_type="unified",model_name="m",phase='
        phases = {"load_weight": "0.25", "tokenizer_e2e": self.started}
        page = "".join(f'{named}"{phase}"}} {seconds}\n' for phase, seconds in phases.items())
        return Answer(200, page.encode())

    def behave(self, call: Call) -> Answer:
        match call.method, call.path:
            case "POST", "/pause_generation":
                if call.body is None:
                    return Answer(422, {"detail": "body required"})
                self.paused = True
            case "POST", "/continue_generation":
                self.resume()
            case "POST", "/update_weights_from_disk":
                return self.update(call)
            case "POST", "/update_weight_version":
                self.label = call.body["new_version"]
                return Answer(200, {"success": True, "message": "", "new_version": self.label})
            case "POST", "/load_lora_adapter" | "/unload_lora_adapter":
                return self.change_adapter(call)
            case "GET", "/v1/models":
                return self.models()
            case "GET", "/server_info" if self.limits:
                return Answer(200, {"enable_lora": self.lora, "random_seed": 1, **self.limits})
            case "GET", "/model_info" | "/get_model_info" | "/get_weight_version":
                return Answer(200, {"model_path": self.source, "weight_version": self.label})
            case "GET", "/metrics":
                return self.metrics()
            case _:
                return Answer(404, {"detail": "Not Found"})
        return Answer(200, {"status": "ok"})

    def change_adapter(self, call: Call) -> Answer:
        name, said = call.body["lora_name"], ""
        if not self.lora:
            said = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        elif call.path == "/load_lora_adapter":
            said = self.load_adapter(name, call.body["lora_path"])
        elif self.adapters.pop(name, None) is None:
            said = f"LoRA with name {name} does not exist. Loaded LoRAs: {self.adapters.keys()}"
        loaded = {name: path for name, (path, _) in self.adapters.items()}
        body = {"success": not said, "error_message": said or None, "loaded_adapters": loaded}
        return Answer(400 if said else 200, body)

    def update(self, call: Call) -> Answer:
        if not self.load(call.body["model_path"]):
            return Answer(
                400, self.reply(False, f"Failed to get weights iterator: {call.body['model_path']}.")
            )
        self.source = call.body["model_path"]
        if call.body["weight_version"] is not None:
            self.label = call.body["weight_version"]
        return Answer(200, self.reply(True, "Succeeded to update model weights."))

    def updated_but_not_flushed(self, call: Call) -> Answer:
        self.load(call.body["model_path"])
        return Answer(400, self.reply(False, "weights were updated, but the cache was not flushed"))

    def half_loaded(self, call: Call) -> Answer:
        self.broken = True
        return Answer(
            400, self.reply(False, "Failed to update weights: short.\nRolling back to original weights.")
        )

    def label_stays(self, call: Call) -> Answer:
        self.load(call.body["model_path"])
        return Answer(200, self.reply(True, "Succeeded to update model weights."))

    @staticmethod
    def reply(success: bool, message: str) -> JSON:
        return {"success": success, "message": message, "num_paused_requests": 0}


class VLLMDouble(Double):
    """vLLM 0.32 in dev mode."""

    workers = 2
    device = "cuda"
    speculative: JSON | None = None
    """`speculative_config`, as the release tells it"""

    def behave(self, call: Call) -> Answer:
        match call.method, call.path:
            case "POST", "/pause":
                if call.query.get("mode") not in ("abort", "wait", "keep"):
                    return Answer(400, {"error": "bad mode"})
                self.paused = True
                return Answer(200, {"status": "paused"})
            case "POST", "/resume":
                self.resume()
                return Answer(200, {"status": "resumed"})
            case "POST", "/collective_rpc":
                return self.reload(call)
            case "POST", "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" if self.lora:
                return self.change_adapter(call)
            case "GET", "/v1/models":
                return self.models()
            case "POST", "/update_weight_version":
                self.label = call.body["new_version"]
                return Answer(200, {"success": True, "new_version": self.label})
            case "GET", "/weight_info":
                return Answer(200, {"weight_version": self.label})
            case "GET", "/is_paused":
                return Answer(200, {"is_paused": self.paused})
            case "GET", "/version":
                return Answer(200, {"version": "0.32.0"})
            case "GET", "/server_info":
                config = {"device_config": {"device": self.device}, "speculative_config": self.speculative}
                config["lora_config"] = self.limits if self.lora else None
                return Answer(200, {"vllm_config": config, "vllm_env": {}, "system_env": {}})
            case "GET", "/metrics":
                return self.metrics()
        return Answer(404, {"detail": "Not Found"})

    def change_adapter(self, call: Call) -> Answer:
        name = call.body["lora_name"]
        if call.path == "/v1/load_lora_adapter":
            said, status = self.load_adapter(name, call.body["lora_path"]), 400
        else:
            said = "" if self.adapters.pop(name, None) else f"The lora adapter '{name}' cannot be found."
            status = 404
        if said:
            return Answer(status, {"error": {"message": said, "code": status}})
        return Answer(200, f"Success: LoRA adapter '{name}' was changed.".encode())

    def reload(self, call: Call) -> Answer:
        if not self.load(call.body["kwargs"]["weights_path"]):
            return self.half_loaded(call)
        return Answer(200, {"results": [None] * self.workers})

    def half_loaded(self, call: Call) -> Answer:
        self.broken = True
        return Answer(500, {"error": {"message": "EngineCore encountered an issue", "code": 500}})


ADMIN_GETS = ("/get_weights_by_name",)


def guarded_as_sglang(api: str | None, admin: str | None) -> Callable[[Call], Answer | None]:
    """Which key a released SGLang (0.5.9 to 0.5.23) wants for which route."""

    def refuse(call: Call) -> Answer | None:
        controls = call.method == "POST" or call.path.partition("?")[0] in ADMIN_GETS
        wanted = admin if controls and admin is not None else api
        if call.path == "/metrics" or wanted is None:
            return None
        fits = call.headers.get("authorization") == f"Bearer {wanted}"
        return None if fits else Answer(401, {"error": "Unauthorized"})

    return refuse


class Balancer(Double):
    """A load balancer: each request is answered by the next replica, or by the one that `pick` names."""

    def __init__(self, *replicas: Double, pick: Callable[[int], int] | None = None) -> None:
        super().__init__()
        self.replicas = list(replicas)
        self._pick = pick
        self._turn = count()

    def respond(self, call: Call) -> Answer | Drop | Trickle:
        turn = next(self._turn) if self._pick is None else self._pick(len(self.replicas))
        return self.replicas[turn % len(self.replicas)].respond(call)


class WebhookDouble(Double):
    """A receiver of weightcast's webhook; its engine maps the weights file."""

    echo: str | None = "version"
    refuses_to_pause = False

    def behave(self, call: Call) -> Answer:
        if call.method == "GET":
            return Answer(200, {"label": self.label, "process": self.started, "paused": self.paused})
        match call.body["phase"]:
            case "pause" if self.refuses_to_pause:
                return Answer(200, {"ok": False})
            case "pause":
                self.paused = True
            case "resume":
                self.resume()
            case "reload":
                self.load(call.body["path"])
                self.label = call.body["label"]
                return Answer(
                    200, {"ok": True} | ({} if self.echo is None else {self.echo: call.body[self.echo]})
                )
        return Answer(200, {"ok": True})

    def phases(self) -> list[str]:
        return [call.body["phase"] for call in self.calls if call.method == "POST"]


class _Server(ThreadingHTTPServer):
    # Joined by `serve`: a test ends with no thread of its own left.
    daemon_threads = False
    block_on_close = True

    def __init__(self, double: Double, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.double = double
        super().__init__(("127.0.0.1", port), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is part of many tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        call = Call(
            self.command,
            url.path,
            dict(parse_qsl(url.query)),
            json.loads(data) if data else None,
            {key.lower(): value for key, value in self.headers.items()},
        )
        act = self.server.double.respond(call)
        if isinstance(act, Drop):
            self.close_connection = True
            return
        if isinstance(act, Trickle):
            self.close_connection = True
            with suppress(OSError):
                self.server.double.trickle(act, self.wfile.write)
            return
        body = act.body if isinstance(act.body, bytes) else json.dumps(act.body).encode()
        self.send_response(act.status)
        for name, value in act.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(double: Double, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Runs the double and yields its URL; port 0: a free one."""
    with _Server(double, port, tls) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_address[1]}"
        finally:
            double.release()
            server.shutdown()
            thread.join()


@contextmanager
def serve_files(directory: Path) -> Iterator[str]:
    """A web server of a directory, for its URL."""
    handler = partial(SimpleHTTPRequestHandler, directory=directory)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def nobody() -> Iterator[str]:
    """A URL where nothing listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler, bind_and_activate=False) as server:
        server.server_bind()
        yield f"http://127.0.0.1:{server.server_address[1]}"
