"""SGLang with the hook of weightcast-engine: its own routes, orders as questions and as names of tensors."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

from doubles import Answer, Call
from plugin_double import PluginDouble

LOADER = "weightcast_engine.sglang.hook.load"
ACTION = "weightcast "


class _Reader(pickle.Unpickler):
    """As SGLang's: exact names alone."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("torch", "FloatTensor")
        return lambda size: ("tensor", size)


class SGLangPlugin(PluginDouble):
    ranks = 2

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.session = False
        self.crashed = False
        self.loaders = [LOADER]
        self.settings: dict[str, object] = {"pp_size": 1, "dp_size": 1, "offload_group_size": -1}
        self.waited = 0
        """orders that came through the route for tensors while it served"""
        self.answers = True
        """a hook that can be asked while it serves"""
        self.steps = 2
        """of a check or a digest"""
        self.known_label: str | None = None
        """which the hook was told; the server's own may be another"""
        self._asked: list[str] = []

    def behave(self, call: Call) -> Answer:
        match call.method, call.path:
            case "POST", "/pause_generation":
                self.paused = True
            case "POST", "/continue_generation":
                self.resume()
            case "POST", "/begin_weight_update":
                if self.session:
                    return self.said(False, "a weight-update session is already open")
                self.session = True
                return self.said(True, "")
            case "POST", "/end_weight_update":
                self.session = False
                return self.said(True, "")
            case "POST", "/update_weights_from_disk":
                return self.from_disk(call.body)
            case "POST", "/update_weights_from_tensor":
                return self.from_tensor(call.body)
            case "POST", "/weights_checker":
                return self.question(call.body["action"])
            case "POST", "/update_weight_version":
                self.label = call.body["new_version"]
            case "GET", "/model_info":
                return Answer(200, {"model_path": str(self.directory), "weight_version": self.label})
            case "GET", "/server_info":
                told = {"tp_size": self.ranks, "custom_weight_loader": self.loaders, **self.settings}
                return Answer(200, told)
            case "GET", "/metrics":
                return self.metrics()
            case _:
                return Answer(404, {"detail": "Not Found"})
        return Answer(200, {"status": "ok"})

    @staticmethod
    def said(success: bool, message: str) -> Answer:
        return Answer(200 if success else 400, {"success": success, "message": message})

    def from_disk(self, body: Any) -> Answer:
        self.load_disk()
        self.reloaded += 1
        self.version, self.root, self.in_doubt, self.known_label = None, None, False, None
        self.label = body["weight_version"]
        return self.said(True, "Succeeded to update model weights.")

    def question(self, action: str) -> Answer:
        if not self.answers or not action.startswith(ACTION):
            return self.said(False, f"Unsupported {action=}")
        text = action.removeprefix(ACTION)
        order = json.loads(text)
        if order["door"] == "look":
            return self.said(True, json.dumps({"status": 200, **self.facts(), "label": self.known_label}))
        self._asked = [*self._asked, text] if self._asked[-1:] in ([text], []) else [text]
        if len(self._asked) < self.steps and order["door"] in ("check", "digest"):
            return self.said(True, '{"status": 202, "rest": 0.001}')
        self._asked = []
        answer = self.carried_out(order)
        return self.said(answer.status == 200, json.dumps({"status": answer.status, **answer.body}))

    def carried_out(self, order: Any) -> Any:
        label = self.label
        answer = getattr(self, f"on_{order['door']}")(order["body"])
        assert isinstance(answer.body, dict)
        if answer.status == 200 and "label" in order["body"]:
            self.known_label = order["body"]["label"]
        self.label = label
        return answer

    def from_tensor(self, body: Any) -> Answer:
        self.waited += not self.paused
        if not self.session:
            return self.said(False, "update_weights_from_tensor must run between begin and end")
        if body["load_format"] not in self.loaders:
            self.crashed = True
            return Answer(500, b"")
        orders = {self.order(text) for text in body["serialized_named_tensors"]}
        assert len(body["serialized_named_tensors"]) == self.ranks and len(orders) == 1
        order = json.loads(orders.pop())
        answer = self.carried_out(order)
        text = json.dumps({"status": answer.status, **answer.body})
        if answer.status == 200 and body["weight_version"] is not None:
            self.label = body["weight_version"]
            text += f" Weight version updated to {self.label}."
        return self.said(answer.status == 200, text)

    @staticmethod
    def order(text: str) -> str:
        [(name, tensor)] = _Reader(io.BytesIO(base64.b64decode(text, validate=True))).load()
        assert tensor == ("tensor", 1)
        return str(name)
