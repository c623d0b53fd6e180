"""Models with the loaders that engines have, small, on any rank of any tensor parallel size; and an engine
around one of them. `Llama` is on a GPU where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from weightcast_engine.update.front import Front
from weightcast_engine.update.rank import Answer, EngineRank, Order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 16, 4, 2, 8, 24, 20
PADDED = 24
"""rows of the embedding, so that ranks divide it"""


def checkpoint(dtype: torch.dtype = torch.float32, seed: int = 0, tied: bool = False) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "q.weight": (HEADS * HEAD, HIDDEN),
        "k.weight": (KV_HEADS * HEAD, HIDDEN),
        "v.weight": (KV_HEADS * HEAD, HIDDEN),
        "q.bias": (HEADS * HEAD,),
        "o.weight": (HIDDEN, HEADS * HEAD),
        "gate.weight": (INNER, HIDDEN),
        "up.weight": (INNER, HIDDEN),
        "down.weight": (HIDDEN, INNER),
        "norm.weight": (HIDDEN,),
        "scale": (),
        "empty": (0, 4),
        "odd": (3, 5),
        "head.weight": (VOCABULARY, HIDDEN),
    }
    if tied:
        del shapes["head.weight"]
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


class Llama(nn.Module):
    """Fused qkv and gate_up, a padded vocabulary, replicated key heads beside more ranks than heads."""

    def __init__(self, dtype: torch.dtype, rank: int = 0, ranks: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.rank, self.ranks, self.tied = rank, ranks, tied
        kv = max(1, KV_HEADS // ranks) * HEAD
        q = HEADS * HEAD // ranks
        self._kv, self._q = kv, q

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, device=DEVICE).to(dtype), requires_grad=False)

        self.embed = weight(PADDED // ranks, HIDDEN)
        self.qkv, self.qkv_bias = weight(q + 2 * kv, HIDDEN), weight(q + 2 * kv)
        self.o, self.gate_up = weight(HIDDEN, q), weight(2 * INNER // ranks, HIDDEN)
        self.down, self.norm = weight(HIDDEN, INNER // ranks), weight(HIDDEN)
        self.scale, self.empty, self.odd = weight(1), weight(0, 4), weight(3, 5)
        self.head = self.embed if tied else weight(PADDED // ranks, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            getattr(self, "_load_" + name.split(".")[0])(name, tensor)
            loaded.add(name)
        return loaded

    def _rows(self, parameter: Tensor, tensor: Tensor, at: int, rows: int, rank: int) -> None:
        parameter.data.narrow(0, at, rows).copy_(tensor.narrow(0, rank * rows, rows))

    def _columns(self, parameter: Tensor, tensor: Tensor) -> None:
        columns = parameter.shape[1]
        parameter.data.copy_(tensor.narrow(1, self.rank * columns, columns))

    def _load_embed(self, name: str, tensor: Tensor, parameter: Tensor | None = None) -> None:
        parameter = self.embed if parameter is None else parameter
        start = self.rank * len(parameter)
        mine = tensor[start : start + len(parameter)]
        parameter[: len(mine)].data.copy_(mine)
        parameter[len(mine) :].data.fill_(0)

    def _load_head(self, name: str, tensor: Tensor) -> None:
        if not self.tied:
            self._load_embed(name, tensor, self.head)

    def _load_q(self, name: str, tensor: Tensor) -> None:
        self._rows(self.qkv_bias if "bias" in name else self.qkv, tensor, 0, self._q, self.rank)

    def _load_k(self, name: str, tensor: Tensor, at: int = 0) -> None:
        self._rows(
            self.qkv, tensor, self._q + at, self._kv, self.rank * KV_HEADS // max(self.ranks, KV_HEADS)
        )

    def _load_v(self, name: str, tensor: Tensor) -> None:
        self._load_k(name, tensor, self._kv)

    def _load_o(self, name: str, tensor: Tensor) -> None:
        self._columns(self.o, tensor)

    def _load_gate(self, name: str, tensor: Tensor, at: int = 0) -> None:
        self._rows(self.gate_up, tensor, at, INNER // self.ranks, self.rank)

    def _load_up(self, name: str, tensor: Tensor) -> None:
        self._load_gate(name, tensor, INNER // self.ranks)

    def _load_down(self, name: str, tensor: Tensor) -> None:
        self._columns(self.down, tensor)

    def _load_norm(self, name: str, tensor: Tensor) -> None:
        self.norm.data.copy_(tensor)

    def _load_odd(self, name: str, tensor: Tensor) -> None:
        self.odd.data.copy_(tensor.to(self.odd.device))

    def _load_empty(self, name: str, tensor: Tensor) -> None:
        self.empty.data.copy_(tensor)

    def _load_scale(self, name: str, tensor: Tensor) -> None:
        self.scale.data.copy_(tensor.view(self.scale.shape))


class Mixture(nn.Module):
    """The experts' gates and ups in one parameter, their downs in another. A rank has some of the experts
    (`by` "experts") or a slice of each. `packed`: the checkpoint has all experts in one tensor, transposed.
    """

    def __init__(
        self, experts: int, rank: int = 0, ranks: int = 1, *, by: str = "experts", packed: bool = False
    ) -> None:
        super().__init__()
        self._packed, share = packed, (ranks, 1) if by == "experts" else (1, ranks)
        own, inner = experts // share[0], 8 // share[1]
        self._experts = range(rank * own, (rank + 1) * own) if share[0] > 1 else range(experts)
        self._slice = slice(rank * inner, (rank + 1) * inner) if share[1] > 1 else slice(None)
        self.up = nn.Parameter(torch.zeros(own, 2 * inner, 16), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(own, 16, inner), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if self._packed:
                turned = tensor.transpose(1, 2)
                parts = {"down": turned} if name == "down" else dict(zip(("gate", "up"), turned.chunk(2, 1)))  # noqa: B905
                for kind, part in parts.items():
                    for number, expert in enumerate(self._experts):
                        self._put(number, kind, part[expert])
            else:
                expert, kind = name.split(".")
                if int(expert) in self._experts:
                    self._put(self._experts.index(int(expert)), kind, tensor)

    def _put(self, number: int, kind: str, part: Tensor) -> None:
        if kind == "down":
            self.down.data[number].copy_(part[:, self._slice])
        else:
            gate, up = self.up.data[number].chunk(2)
            (gate if kind == "gate" else up).copy_(part[self._slice])

    @classmethod
    def checkpoint(cls, experts: int, *, packed: bool = False) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(experts)
        if packed:
            shapes = {"gate_up": (experts, 16, 16), "down": (experts, 8, 16)}
        else:
            kinds = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
            shapes = {f"{n}.{kind}": shape for n in range(experts) for kind, shape in kinds.items()}  # type: ignore[misc]
        return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


class ToyEngine:
    """`rank.Engine` around a module."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.refused: dict[int, str] = {}
        self.packing: dict[int, Tensor] = {}
        self.said: str | None = None
        self.failures = 0
        """so many of the next synchronisations fail"""
        self.asked = 0
        self.drafted = 0

    def reload_draft(self) -> None:
        """Fails as synchronisations do."""
        self.drafted += 1

    def hindrance(self) -> str | None:
        self.asked += 1
        return self.said

    def drafter(self) -> str:
        return "none"

    draft_directory = None

    def misplaced(self, patches: Path) -> str | None:
        return None

    def refusals(self) -> Mapping[int, str]:
        return self.refused

    def orders(self) -> Mapping[int, Tensor]:
        return self.packing

    def at_rest(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, own: Any) -> Sequence[Any]:
        return [own]

    def synchronise(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is gone")

    def reload(self) -> None:
        from safetensors.torch import load_file

        load: Any = self.model.load_weights
        with torch.no_grad():
            load(load_file(self.directory / "model.safetensors").items())


class Ranks:
    """`front.Controls` over ranks in this process."""

    def __init__(self, ranks: Sequence[EngineRank]) -> None:
        self._ranks = ranks
        self.is_paused = False
        self.labels: list[str] = []
        self.orders: list[str] = []
        self.rows: list[int] = []
        """of each answer that has some"""
        self.slow = False
        self.fails = ""
        """of its own orders, the one that does not work"""
        self.pauses = 0

    async def ranks(self, order: Order) -> Sequence[Answer]:
        self.orders.append(str(order["do"]))
        if self.slow:
            await asyncio.sleep(0)
        answers = [rank.obey(order) for rank in self._ranks]
        self.rows += [len(answer["rows"]) for answer in answers if "rows" in answer]
        return answers

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pause(self, policy: str) -> None:
        self._try("pause")
        self.pauses += not self.is_paused
        self.is_paused = True

    async def resume(self) -> None:
        self._try("resume")
        self.is_paused = False

    def _try(self, name: str) -> None:
        if self.fails == name:
            raise RuntimeError(f"{name}: the engine core is gone")

    async def paused(self) -> bool:
        return self.is_paused

    async def relabel(self, label: str) -> None:
        self._try("relabel")
        self.labels.append(label)


class ToyHost:
    """Several ranks of one model behind one front, with what they were loaded from."""

    def __init__(self, models: Sequence[nn.Module], tensors: Mapping[str, Tensor], room: Path) -> None:
        from patch_writer import write_checkpoint

        self.directory = write_checkpoint(room / "model", tensors)
        self.patches = room / "patches"
        self.patches.mkdir(exist_ok=True)
        self.engines = [ToyEngine(model, self.directory) for model in models]
        for engine in self.engines:
            engine.reload()
        self.controls = Ranks([EngineRank(engine, self.patches, 1 << 24) for engine in self.engines])
        self.front = Front(self.controls)

    def run(self, name: str, *arguments: Any) -> Any:
        return asyncio.run(getattr(self.front, name)(*arguments))

    def update(self, file: str, label: str = "1") -> Any:
        self.run("check", file)
        self.run("pause", "recompute")
        try:
            return self.run("apply", file, label)
        finally:
            self.run("resume")

    def live(self) -> list[dict[str, bytes]]:
        from patch_writer import bytes_of

        return [
            {name: bytes_of(tensor).tobytes() for name, tensor in engine.model.named_parameters()}
            for engine in self.engines
        ]
