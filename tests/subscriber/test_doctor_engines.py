"""Engines as `weightcast doctor` finds them: asked over real HTTP, never told anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import Answer, Double, SGLangDouble, VLLMDouble, WebhookDouble, nobody, serve
from in_process import Command
from plugin_double import PluginDouble

from weightcast.shared.cli.main import run

Levels = dict[str, str]
Ask = Callable[[str], tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def ask(weightcast: Command, monkeypatch: pytest.MonkeyPatch) -> Ask:
    for name in ("CHANNEL", "LOCAL", "ENGINE"):
        monkeypatch.delenv(f"WEIGHTCAST_{name}", raising=False)

    def call(option: str) -> tuple[int, dict[str, dict[str, Any]]]:
        code, out, _ = weightcast("doctor", "--engine", f"{option},name=e", "--json")
        return code, {f["check"]: f for f in json.loads(out)["findings"] if f["place"] == "e"}

    return call


class TellingSGLang(SGLangDouble):
    def behave(self, call: Any) -> Answer:
        if call.path == "/server_info":
            return Answer(200, {"version": "0.5.9", "speculative_algorithm": None})
        return super().behave(call)


@pytest.mark.parametrize(
    ("kind", "double", "release", "drafter"),
    [
        ("vllm", VLLMDouble(), "vllm 0.32.0", {}),
        ("sglang", TellingSGLang(), "sglang 0.5.9", {}),
        ("sglang", SGLangDouble(), "sglang, which tells no version", {"drafter": "note"}),
        ("webhook", WebhookDouble(), "webhook, which tells no version", {}),
    ],
)
def test_engines_that_are_well(kind: str, double: Double, release: str, drafter: Levels, ask: Ask) -> None:
    with serve(double) as url:
        code, found = ask(f"{kind}={url}")
    assert code == 0
    assert {check: finding["level"] for check, finding in found.items()} == {
        "answers": "ok",
        "label": "ok",
        **drafter,
    }
    assert found["answers"]["says"].endswith(release)
    assert double.paths() == [], "nothing was told"


def test_an_engine_whose_memory_is_patched(ask: Ask, tmp_path: Path) -> None:
    engine = PluginDouble(tmp_path)
    with serve(engine) as url:
        code, found = ask(f"vllm={url},via=live")
        assert code == 0 and found["memory"]["level"] == "ok"
        assert found["answers"]["says"].endswith("with weightcast-engine 0.1.0")
        engine.patchable = False
        assert "the weights are packed" in ask(f"vllm={url},via=live")[1]["memory"]["says"]
        engine.installed = False
        code, found = ask(f"vllm={url},via=live")
    assert code == 5 and "install weightcast-engine" in found["answers"]["says"]
    assert engine.routes() == [], "nothing was told"


def test_nobody_there(ask: Ask) -> None:
    with nobody() as url:
        code, found = ask(f"vllm={url}")
    assert code == 5
    assert found["answers"]["level"] == "failure" and "nothing listens" in found["answers"]["says"]


def test_vllm_without_dev_mode(ask: Ask) -> None:
    double = VLLMDouble()
    double.missing |= {"/is_paused", "/weight_info"}
    with serve(double) as url:
        code, found = ask(f"vllm={url}")
    assert code == 5
    assert found["control"]["level"] == "failure" and "DEV_MODE" in found["control"]["remedy"]
    assert found["label"]["level"] == "note"


def test_an_engine_that_waits_and_one_whose_restarts_are_not_seen(ask: Ask) -> None:
    waiting, silent = VLLMDouble(), SGLangDouble()
    waiting.paused = True
    silent.missing.add("/metrics")
    with serve(waiting) as url:
        code, found = ask(f"vllm={url}")
    assert code == 0 and found["paused"]["level"] == "warning"
    assert "resume it by hand" in found["paused"]["remedy"]
    with serve(silent) as url:
        code, found = ask(f"sglang={url}")
    assert code == 0 and "--enable-metrics" in found["restarts"]["remedy"]


def test_a_wrong_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--engine", "tgi=http://127.0.0.1:1"]) == 2
    assert "unknown engine kind" in capsys.readouterr().err
