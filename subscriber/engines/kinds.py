"""From an `--engine` option to the adapter that speaks the engine's dialect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from weightcast.subscriber.engines.base import BadEngineOption, Engine, EngineSpec, Timeouts
from weightcast.subscriber.engines.live import Live
from weightcast.subscriber.engines.sglang import SGLang
from weightcast.subscriber.engines.sglang_live import SGLangLive
from weightcast.subscriber.engines.vllm import VLLM
from weightcast.subscriber.engines.vllm_live import VLLMLive
from weightcast.subscriber.engines.webhook import Webhook
from weightcast.subscriber.engines.wire import Wire


def open_engine(
    spec: EngineSpec,
    *,
    run_id: Callable[[], str] = str,
    timeouts: Timeouts | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Engine:
    """Connects to nothing yet. `run_id` is told to webhooks. Raises BadEngineOption when the variable of
    `api_key_env` is not set."""
    limits = Timeouts() if timeouts is None else timeouts
    if spec.deadline is not None:
        limits = replace(limits, reload=spec.deadline)
    wire = Wire(spec, limits, _api_key(spec, environ))
    match spec.kind:
        case "sglang":
            return Live(SGLangLive(spec, wire, limits)) if spec.via == "live" else SGLang(spec, wire, limits)
        case "vllm":
            return Live(VLLMLive(spec, wire, limits)) if spec.via == "live" else VLLM(spec, wire, limits)
        case "webhook":
            return Webhook(spec, wire, limits, run_id)


def _api_key(spec: EngineSpec, environ: Mapping[str, str]) -> str | None:
    if spec.api_key_env is None:
        return None
    key = environ.get(spec.api_key_env, "")
    if not key or not key.isascii() or not key.isprintable():
        raise BadEngineOption(f"engine {spec.name}: the variable {spec.api_key_env} is not set to an API key")
    return key
