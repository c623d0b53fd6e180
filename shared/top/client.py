"""Generations through a gateway or a gate, with the versions that made them. Needs httpx alone.

async with Client("http://gateway:8343", token=TOKEN) as client:
    answer = await client.generate({"prompt": "Why?", "max_tokens": 64}, min_version=41, wait=5)
    answer.text, answer.version, answer.last_version
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from weightcast.subscriber.gate.conditions import batch_of

Body = Mapping[str, Any]
_RETRIED = (409, 429, 503)
_LEAST_PAUSE = 0.05
_PROMPTS = ("input_ids", "text", "messages", "prompt")


class RequestRefused(Exception):
    """A request was refused. `status` is the HTTP status, `facts` the body: of a 409 with `served` and
    `target`."""

    def __init__(self, status: int, facts: Body, retry_after: float = 1.0) -> None:
        remedy = f" ({facts['remedy']})" if facts.get("remedy") else ""
        super().__init__(
            f"refused with {status}: {facts.get('message') or facts.get('error') or facts}{remedy}"
        )
        self.status, self.facts, self.retry_after = status, facts, retry_after

    @property
    def may_pass(self) -> bool:
        return self.status in _RETRIED and self.facts.get("ended_by") != "abort"


@dataclass(frozen=True)
class Piece:
    """The result of one request. Every token is from a version within [`version`, `last_version`]. `ids`: the
    tokens, if the engine reports them; `raw`: its answer, or the events of its stream."""

    text: str
    ids: list[int]
    tokens: int
    version: int
    last_version: int
    ended_by: str
    """`update` or `abort` for a partial answer, else empty"""
    adapter: str
    """the adapter that made it, as math@17; the other versions are the model's"""
    raw: Any


@dataclass(frozen=True)
class Answer:
    """A generation, in several pieces if updates interrupted it. `partial`: the last piece was cut off."""

    pieces: tuple[Piece, ...]
    partial: bool

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def version(self) -> int:
        return min(piece.version for piece in self.pieces)

    @property
    def last_version(self) -> int:
        return max(piece.last_version for piece in self.pieces)


class Client:
    """Sends requests to a gateway or a gate. A cancelled request ends on its engine too.

    Args:
        url: Of the gateway or gate.
        token: Sent as a bearer token.
        seconds: How long a request, with all its pieces, is retried after 409, 429, 503 and broken
            connections.
        ca: PEM file of authorities for https; default: the system's.
        cert: PEM file with a client certificate and its key.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        seconds: float = 600.0,
        ca: str | None = None,
        cert: str | None = None,
    ) -> None:
        trust: ssl.SSLContext | bool = url.lower().startswith("https:")
        if trust:
            for file in filter(None, (ca, cert)):
                Path(file).open().close()  # ssl's own error does not name it
            trust = ssl.create_default_context(cafile=ca)
            if cert is not None:
                trust.load_cert_chain(cert)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            trust_env=False,
            verify=trust,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )
        self._seconds = seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def generate(
        self,
        body: Body,
        *,
        min_version: int | None = None,
        exact_version: int | None = None,
        max_lag: int | None = None,
        session: str | None = None,
        wait: float | None = None,
    ) -> Answer:
        """Generates, and continues on the new weights when an update ends the answer (not with
        `exact_version`, nor for several answers).

        Args:
            body: A request for SGLang's /generate (`text`, `input_ids`), /v1/completions (`prompt`) or
                /v1/chat/completions (`messages`).
            min_version: This version or a later one.
            exact_version: This version for every token.
            max_lag: At most so many versions behind the newest target.
            session: Requests of a session go to the same host while it may answer.
            wait: Seconds to wait for such a version; default: refused at once.

        Raises:
            RequestRefused: Refused for as long as the client retries.
            ValueError: The body has no prompt.
        """
        asked = {"min-version": min_version, "exact-version": exact_version, "max-lag": max_lag}
        asked |= {"session": session, "wait": wait}  # type: ignore[dict-item]
        headers = {f"Weightcast-{name}": str(value) for name, value in asked.items() if value is not None}
        pieces: list[Piece] = []
        following: Body | None = body
        deadline = time.monotonic() + self._seconds
        while following is not None:
            pieces.append(await self._taken(following, headers, deadline))
            goes_on = pieces[-1].ended_by == "update" and exact_version is None
            following = continued(body, pieces) if goes_on else None
        return Answer(tuple(pieces), partial=bool(pieces[-1].ended_by) and _left(body, pieces) != 0)

    async def abort(self, **which: object) -> int:
        """Ends all requests, or those of a `session` or `version`.

        Returns:
            How many were ended.
        """
        answer = (await self._http.post("/abort", json=which)).raise_for_status()
        return int(answer.json()["aborted"])

    async def _taken(self, body: Body, headers: Mapping[str, str], deadline: float) -> Piece:
        while True:
            try:
                return await self._ask(body, headers)
            except RequestRefused as error:
                pause = max(error.retry_after, _LEAST_PAUSE) * random.uniform(0.5, 1.5)
                if not error.may_pass or time.monotonic() + pause > deadline:
                    raise
            except httpx.TransportError as error:
                pause = random.uniform(0.5, 1.5)
                if time.monotonic() + pause > deadline:
                    error.args = (f"{self._http.base_url}: {error}",)
                    raise
            await asyncio.sleep(pause)

    async def _ask(self, body: Body, headers: Mapping[str, str]) -> Piece:
        path = _path(body)
        if path != "/generate" and body.get("n", 1) == 1 and batch_of(body) is None:
            # an update leaves nothing of an answer of vLLM that is not streamed
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {**body, "stream": True, "stream_options": options}
        async with self._http.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                raise _refusal(response, await response.aread())
            if response.headers["content-type"].startswith("text/event-stream"):
                return await _of_stream(response.aiter_lines())
            return _of_whole(json.loads(await response.aread()), response.headers)


def continued(body: Body, pieces: list[Piece]) -> Body | None:
    """The request for what is left of an answer. None: nothing is, or it cannot be asked for."""
    text = "".join(piece.text for piece in pieces)
    ids = [token for piece in pieces for token in piece.ids]
    left, name, new = _left(body, pieces), _prompt_of(body), dict(body)
    prompt = body[name]
    if left == 0 or isinstance(pieces[-1].raw, list) != (name in ("prompt", "messages")):
        return None
    if name == "messages" and text:
        more = {"continue_final_message": True, "add_generation_prompt": False}
        new |= {**more, name: [*prompt, {"role": "assistant", "content": text}]}
    elif name != "messages":
        new[name] = prompt + text if isinstance(prompt, str) else [*prompt, *ids]
    return new if left is None else _limited(new, left)


def _left(body: Body, pieces: list[Piece]) -> int | None:
    """Tokens that the answer may yet have; None without a limit."""
    limits = (*map(body.get, ("max_tokens", "max_completion_tokens")), _sampling(body).get("max_new_tokens"))
    limit = next((limit for limit in limits if limit is not None), None)
    return None if limit is None else max(0, limit - sum(piece.tokens for piece in pieces))


def _limited(body: Body, tokens: int) -> Body:
    if "max_new_tokens" in _sampling(body):
        return {**body, "sampling_params": {**_sampling(body), "max_new_tokens": tokens}}
    name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    return {**body, name: tokens}


def _sampling(body: Body) -> Body:
    return body.get("sampling_params") or {}


def _prompt_of(body: Body) -> str:
    found = next((name for name in _PROMPTS if name in body), None)
    if found is None:
        raise ValueError(f"the body has no prompt: give one of {', '.join(_PROMPTS)}")
    return found


def _path(body: Body) -> str:
    name = _prompt_of(body)
    return {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}.get(name, "/generate")


def _refusal(response: httpx.Response, text: bytes) -> RequestRefused:
    after = response.headers.get("retry-after", "1")
    try:
        facts = json.loads(text)
    except ValueError:
        facts = {"error": text[:1000].decode(errors="replace")}
    seconds = float(after) if after.isdecimal() else 1.0
    return RequestRefused(response.status_code, facts if isinstance(facts, dict) else {}, seconds)


async def _of_stream(lines: AsyncIterator[str]) -> Piece:
    events: list[Any] = []
    label: dict[str, Any] = {}
    async for line in lines:
        if line.startswith("data: {"):
            events.append(json.loads(line[6:]))
        elif line.startswith(": weightcast "):
            label = json.loads(line.removeprefix(": weightcast "))
    if not label:
        raise httpx.RemoteProtocolError("the stream ended without its label")
    if events and "meta_info" in events[-1]:
        # of SGLang, the last holds all that came before it
        return _of_whole({**events[-1], "weightcast": label}, {})
    choices = [choice for event in events for choice in event.get("choices", ())]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    return _piece(_text_of(choices), ids, counts[-1] if counts else len(choices), label, events)


def _text_of(choices: Iterable[Body]) -> str:
    parts = (
        choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices
    )
    return "".join(part.get("content") or "" for part in parts)


def _of_whole(answer: Any, headers: Mapping[str, str]) -> Piece:
    """A list, of several prompts, has its label in the headers."""
    one = answer if isinstance(answer, dict) else {}
    label = one.get("weightcast") or {
        "version": headers["weightcast-version"],
        "last_version": headers["weightcast-last-version"],
        "adapter": headers.get("weightcast-adapter", ""),
    }
    ids = one.get("output_ids") or []
    counted = one.get("meta_info") or one.get("usage") or {}
    text = one.get("text") or _text_of(one.get("choices", ()))
    return _piece(text, ids, counted.get("completion_tokens", len(ids)), label, answer)


def _piece(text: str, ids: list[int], tokens: int, label: Body, raw: Any) -> Piece:
    versions = int(label["version"]), int(label["last_version"])
    ended_by, adapter = (str(label.get(name, "")) for name in ("ended_by", "adapter"))
    return Piece(text, ids, tokens, *versions, ended_by, adapter, raw)
