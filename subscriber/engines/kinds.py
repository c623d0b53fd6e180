"""From an `--engine` option to the adapter that speaks the engine's dialect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from weightcast.subscriber.engines.adapter import Adapter
from weightcast.subscriber.engines.base import BadEngineOption, EngineSpec, Timeouts
from weightcast.subscriber.engines.sglang import SGLang, SGLangLive
from weightcast.subscriber.engines.vllm import VLLM, VLLMLive
from weightcast.subscriber.engines.webhook import Webhook
from weightcast.subscriber.engines.wire import Wire, keys_of, trusted


def open_engine(
    spec: EngineSpec,
    *,
    run_id: Callable[[], str] = str,
    timeouts: Timeouts | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Adapter:
    """Connects to nothing yet. `run_id` is sent to webhooks. Raises BadEngineOption when the variable of
    a key is not set."""
    limits = Timeouts() if timeouts is None else timeouts
    if spec.deadline is not None:
        limits = replace(limits, reload=spec.deadline)
    trust = trusted(spec.url, spec.ca, verify=spec.verify)
    wire = Wire(spec.url, limits, keys_of(spec, environ), trust)
    if spec.via == "ipc":
        try:
            from weightcast.subscriber.engines.ipc import SGLangIpc, VLLMIpc
        except ModuleNotFoundError as error:
            text = f"engine {spec.name}: via=ipc needs {error.name}"
            raise BadEngineOption(text, remedy="pip install 'weightcast[ipc]'") from error
        return (SGLangIpc if spec.kind == "sglang" else VLLMIpc)(spec, wire)
    match spec.kind:
        case "sglang":
            return (SGLangLive if spec.via == "live" else SGLang)(spec, wire)
        case "vllm":
            return (VLLMLive if spec.via == "live" else VLLM)(spec, wire)
        case "webhook":
            return Webhook(spec, wire, run_id)
