"""Faults in a real worker, by vLLM's own way of loading plugins: a file in WEIGHTCAST_TEST_FAULTS brings the
fault of its name about, once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    from weightcast_engine.vllm.hook import VllmEngine

    synchronise, hindrance = VllmEngine.synchronise, VllmEngine.hindrance

    def faulty_synchronise(engine: Any) -> None:
        """After the words were written."""
        rank = engine._worker.rank
        if wanted(f"die-{rank}"):
            os._exit(9)
        if wanted(f"fail-{rank}"):
            raise RuntimeError("a fault of this test")
        synchronise(engine)

    def flipping_hindrance(engine: Any) -> str | None:
        """While the engine serves."""
        if wanted(f"flip-{engine._worker.rank}"):
            import torch

            weight = next(p for name, p in engine.model.named_parameters() if "down_proj" in name)
            weight.data.view(-1).view(torch.int32)[11] ^= 1 << 21
        return hindrance(engine)

    VllmEngine.synchronise = faulty_synchronise
    VllmEngine.hindrance = flipping_hindrance


def wanted(fault: str) -> bool:
    path = Path(os.environ["WEIGHTCAST_TEST_FAULTS"]) / fault
    if path.exists():
        path.unlink()
        return True
    return False
