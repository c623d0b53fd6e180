"""weightcast-engine's routes, as its interface says: a patch file is read, and written into the weights that
the double holds. Written from docs/FORMAT.md, with none of weightcast's code but the lanes of bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import ITEM_SIZES, unpack
from doubles import Answer, Call, Double
from hosts import digest, on_disk

from weightcast.shared.digest.checksums import hash_bytes

ROUTES = "/v1/weightcast"
WIDTHS = {**ITEM_SIZES, "U16": 2}
FILE = re.compile(r"[0-9]+-[0-9a-f]{8}\.patch")


class Bad(Exception):
    pass


def lanes_of(data: bytes) -> str:
    return hash_bytes(np.frombuffer(data, np.uint8)).hex()


def read_patch(path: Path) -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Header; per tensor elements and new elements (uint8[n, width]). Raises Bad."""
    data = path.read_bytes()
    body, end = data[:-32], data[-32:]
    if hashlib.sha256(body).digest() != end or body[:8] != b"wcpatch1":
        raise Bad(f"{path.name} is damaged")
    length = int.from_bytes(body[8:16], "little")
    header = json.loads(body[16 : 16 + length])
    start = -(-(16 + length) // 64) * 64
    if set(body[16 + length : start]) - {0}:
        raise Bad("padding")
    payload, at, found = body[start:], 0, {}
    for one in header["tensors"]:
        if one["offset"] != at:
            raise Bad(f"{one['name']} is not where it should be")
        wide, width, count = one["index_width"], WIDTHS[one["dtype"]], one["changes"]
        index = np.frombuffer(payload, f"<u{wide}", count, at).astype(np.int64)
        at += -(-count * wide // 8) * 8
        words = np.frombuffer(payload, np.uint8, count * width, at).reshape(count, width)
        at += -(-count * width // 8) * 8
        if count == 0 or (np.diff(index) <= 0).any() or index[-1] >= int(np.prod(one["shape"])):
            raise Bad(f"{one['name']}: indices")
        found[one["name"]] = (index, words)
    if at != len(payload):
        raise Bad("more bytes than tensors")
    return header, found


class PluginDouble(Double):
    """Holds real bytes; reloads from `directory`, patches from its `.weightcast/engine`."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.weights: dict[str, bytes] = {}
        self.version: int | None = None
        self.root: str | None = None
        self.in_doubt = False
        self.patchable = True
        self.drafter = "none"
        self.draft: Path | None = None
        """the directory that it drafts from"""
        self.drafts = ""
        """digest of what it drafts with"""
        self.refused: dict[str, str] = {}
        self.installed = True
        self.applied = 0
        self.reloaded = 0
        self.key: str | None = None
        self.unpaused_writes = 0

    @property
    def held(self) -> str:
        return digest(self.weights)

    @held.setter
    def held(self, value: str) -> None:
        """Set by the class below, of no meaning here."""

    def restart(self) -> None:
        super().restart()
        self.version, self.root, self.in_doubt = None, None, False
        self.load_disk()
        if self.draft is not None:
            self.drafts = on_disk(self.draft)

    def load_disk(self) -> None:
        self.weights = {}
        for file in sorted(self.directory.glob("model*.safetensors")):
            self.weights |= unpack(file.read_bytes())

    def flip(self, name: str) -> None:
        """A bit of a live parameter."""
        data = bytearray(self.weights[name])
        data[len(data) // 2] ^= 1
        self.weights[name] = bytes(data)

    def routes(self) -> list[str]:
        """What was done, in order: the last part of each path."""
        return [call.path.rpartition("/")[2] for call in self.calls if call.method == "POST"]

    def behave(self, call: Call) -> Answer:
        if not self.installed:
            return Answer(404, {"detail": "Not Found"})
        if self.key is not None and call.headers.get("authorization") != f"Bearer {self.key}":
            return Answer(401, {"error": "Unauthorized"})
        if call.method == "GET" and call.path == ROUTES:
            return Answer(200, self.facts())
        act: Callable[[Any], Answer] | None = getattr(
            self, f"on_{call.path.removeprefix(ROUTES + '/')}", None
        )
        if call.method != "POST" or not call.path.startswith(ROUTES + "/") or act is None:
            return Answer(404, {"detail": "Not Found"})
        return act(call.body)

    def facts(self) -> dict[str, Any]:
        return {
            "plugin": "0.1.0",
            "format": 1,
            "process": self.started,
            "version": self.version,
            "root": self.root,
            "label": self.label,
            "ranks": 1,
            "paused": self.paused,
            "drafter": self.drafter,
            "draft": str(self.draft or ""),
            "patchable": self.patchable,
            "reason": "" if self.patchable else "the weights are packed",
            "refused": self.refused,
            "refused_count": len(self.refused),
            "in_doubt": self.in_doubt,
        }

    def on_holds(self, body: Any) -> Answer:
        assert set(body) == {"version", "root", "label"}
        if self.in_doubt:
            return Answer(409, {"error": "the weights are in doubt", "remedy": "reload"})
        self.version, self.root, self.label = body["version"], body["root"], body["label"]
        return Answer(200, {})

    def on_pause(self, body: Any) -> Answer:
        assert body["policy"] in ("recompute", "wait", "abort") and len(body) == 1
        self.paused = True
        return Answer(200, {})

    def on_resume(self, body: Any) -> Answer:
        assert body == {}
        if self.in_doubt:
            return Answer(409, {"error": "the weights are in doubt", "remedy": "reload"})
        self.resume()
        return Answer(200, {})

    def on_reload(self, body: Any) -> Answer:
        assert set(body) == {"label"}
        if not self.paused:
            return Answer(423, {"error": "not paused", "remedy": "pause first"})
        try:
            self.load_disk()
        except (OSError, ValueError) as error:
            self.in_doubt = True
            return Answer(500, {"error": f"what lies on disk cannot be loaded: {error}", "state": "in-doubt"})
        self.reloaded += 1
        self.in_doubt, self.version, self.root, self.label = False, None, None, body["label"]
        return Answer(200, {"label": self.label, "seconds": 0.1})

    def on_draft(self, body: Any) -> Answer:
        assert body == {} and self.draft is not None
        self.drafts = on_disk(self.draft)
        return Answer(200, {})

    def on_check(self, body: Any) -> Answer:
        assert set(body) == {"file"}
        judged = self.judge(body["file"])
        if isinstance(judged, Answer):
            return judged
        changes = sum(len(index) for index, _ in judged[1].values())
        return Answer(200, {"tensors": len(judged[1]), "changes": changes, "bytes": 0, "seconds": 0.0})

    def judge(self, name: str) -> Answer | tuple[dict[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
        if not FILE.fullmatch(name):
            return Answer(422, {"error": f"{name} is no patch's name", "tensor": None, "remedy": ""})
        try:
            header, tensors = read_patch(self.directory / ".weightcast" / "engine" / name)
        except (OSError, Bad) as error:
            return Answer(422, {"error": str(error), "tensor": None, "remedy": "reload"})
        if header["base"] != {"version": self.version, "root": self.root}:
            holds = {"version": self.version, "root": self.root}
            return Answer(409, {"error": "the patch has another base", "holds": holds})
        for one in header["tensors"]:
            problem = self.refused.get(one["name"]) or self.misfit(one, tensors[one["name"]])
            if problem:
                return Answer(422, {"error": problem, "tensor": one["name"], "remedy": "reload from disk"})
        return header, tensors

    def misfit(self, one: dict[str, Any], change: tuple[np.ndarray, np.ndarray]) -> str:
        if lanes_of(self.weights[one["name"]]) != one["lanes_old"]:
            return f"{one['name']} is not what the patch starts from"
        return "" if lanes_of(self.patched(one["name"], change)) == one["lanes_new"] else "other lanes"

    def patched(self, name: str, change: tuple[np.ndarray, np.ndarray]) -> bytes:
        index, words = change
        array = np.frombuffer(self.weights[name], np.uint8).reshape(-1, words.shape[1]).copy()
        array[index] = words
        return array.tobytes()

    def on_apply(self, body: Any) -> Answer:
        assert set(body) == {"file", "label"}
        if not self.paused:
            self.unpaused_writes += 1
            return Answer(423, {"error": "not paused", "remedy": "pause first"})
        judged = self.judge(body["file"])
        if isinstance(judged, Answer):
            return judged
        header, tensors = judged
        self.weights |= {name: self.patched(name, change) for name, change in tensors.items()}
        self.version, self.root = header["target"]["version"], header["target"]["root"]
        self.label, self.applied = body["label"], self.applied + 1
        seconds = {"validate": 0.0, "write": 0.0, "label": 0.0}
        return Answer(
            200, {"version": self.version, "root": self.root, "label": self.label, "seconds": seconds}
        )

    def on_update(self, body: Any) -> Answer:
        assert set(body) == {"file", "label", "policy"} and body["policy"] in ("recompute", "abort")
        was_paused, self.paused = self.paused, True
        answer = self.on_apply({"file": body["file"], "label": body["label"]})
        if not was_paused:
            self.resume()
        if answer.status != 200:
            return answer
        assert isinstance(answer.body, dict)
        told = {**answer.body, "resumed": not was_paused}
        return Answer(200, {**told, "seconds": {**told["seconds"], "still": 0.125}})

    def on_digest(self, body: Any) -> Answer:
        assert set(body) == {"tensors", "from", "count"}
        names = sorted(self.weights) if body["tensors"] is None else body["tensors"]
        part = names[body["from"] : body["from"] + body["count"]]
        lanes = {name: lanes_of(self.weights[name]) for name in part if name not in self.refused}
        refused = {name: self.refused[name] for name in part if name in self.refused}
        after = body["from"] + body["count"]
        return Answer(
            200,
            {"version": self.version, "lanes": lanes, "refused": refused, "changed": False}
            | {"next": after if after < len(names) else None},
        )

    # what goes wrong, for `script`

    def rolls_back(self, call: Call) -> Answer:
        return Answer(500, {"error": "rank 1: out of memory", "state": "rolled-back"})

    def half_applied(self, call: Call) -> Answer:
        """Nobody knows what the weights are."""
        first = sorted(self.weights)[0]
        self.weights[first] = bytes(len(self.weights[first]))
        self.in_doubt = self.paused = True
        return Answer(500, {"error": "rank 1 did not roll back", "state": "in-doubt"})

    def dies(self, call: Call) -> Answer:
        """Another process, which has loaded what lies on disk, answers from now on."""
        self.restart()
        return Answer(409, {"error": "the patch has another base", "holds": {"version": None, "root": None}})
