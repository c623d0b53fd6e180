"""vLLM's OpenAI server. Its processes are forked, as on a GPU: on a CPU each imports vLLM anew, most of a
start. `make test-engines-full` leaves that as it is."""

import multiprocessing
import os
import runpy
from multiprocessing.context import BaseContext

context_of = multiprocessing.get_context


def forked(method: str | None = None) -> BaseContext:
    return context_of("fork" if method == "spawn" else method)


if not os.environ.get("WEIGHTCAST_ENGINES_FULL"):
    multiprocessing.get_context = forked  # type: ignore[assignment]
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
