"""Backend `weightcast` of vLLM's weight transfer: a training framework names a version, and every rank loads
it from the local checkpoint that vLLM was started on, or, given its base, takes the patch between them. A
path in a request is only compared. Written against vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightcast_engine.update.front import Controls
from weightcast_engine.update.local_version import CheckpointRank
from weightcast_engine.update.rank import Answer
from weightcast_engine.update.refusals import Refusal
from weightcast_engine.update.strict_json import hexadecimal, natural
from weightcast_engine.vllm.hook import NO_DRAFTER, VllmEngine, pack_experts_again


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`checkpoint`: the local checkpoint as vLLM sees it, which must be its model directory."""

    checkpoint: str | None = None
    quiet: bool = False
    """a refusal is kept in the rank instead of raised"""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`root`: of the version; None accepts any. `base`: the version that the engine holds, from which it is
    patched; None loads the version. `names`, `dtype_names`, `shapes`, as vLLM's own backends take them: the
    tensors that the patch may change. `quiet` as in InitInfo."""

    version: int
    root: str | None = None
    base: int | None = None
    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        natural(self.version, "version")
        if self.root is not None:
            hexadecimal(self.root, "root", 64)
        if self.base is not None:
            natural(self.base, "base")
        columns = [each for each in (self.names, self.dtype_names, self.shapes) if each is not None]
        if columns and self.base is None:
            raise ValueError("names: the tensors of a patch; give base too")
        if any(type(each) is not list or len(each) != len(self.names or ()) for each in columns):
            raise ValueError("names, dtype_names, shapes: expected arrays of one length")


class WeightcastTransfer(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        if not os.environ.get("WEIGHTCAST_PATCH_DIR"):
            raise ValueError(
                "backend weightcast: WEIGHTCAST_PATCH_DIR is not set; "
                "set it to <local>/.weightcast/engine of the local checkpoint"
            )
        runner = SimpleNamespace(get_model=lambda: model)
        engine = VllmEngine(SimpleNamespace(vllm_config=vllm_config, model_runner=runner))
        misplaced = engine.misplaced(Path(os.environ["WEIGHTCAST_PATCH_DIR"]))
        if misplaced is not None:
            raise ValueError(f"{misplaced}; start vLLM on the local checkpoint")
        if engine.drafter() not in NO_DRAFTER:
            raise ValueError(
                f"the draft model ({engine.drafter()}) would keep its old weights; "
                "start vLLM without --speculative-config"
            )
        self._directory = engine.directory
        self.rank = CheckpointRank.from_environment(engine)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        asked = init_info.checkpoint
        same = asked is None or os.path.realpath(asked) == os.path.realpath(self._directory)
        text = f"checkpoint is {asked}, expected vLLM's model directory {self._directory}"
        self._refuse("" if same else text, quiet=init_info.quiet)

    def start_weight_update(self) -> None:
        self.rank.refusal = ""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        text = ""
        try:
            if update_info.base is None:
                self.rank.load(update_info.version, update_info.root, self._load_all)
            else:
                self.rank.patch(asdict(update_info))
        except Refusal as refusal:
            text = f"{refusal.message}; {refusal.remedy}"
        except Exception as error:  # of a file or of torch, before anything was written
            text = f"{type(error).__name__}: {error}"
        self._refuse(text, quiet=update_info.quiet)

    def _refuse(self, text: str, *, quiet: bool) -> None:
        self.rank.refusal = text[:500]
        if text and not quiet:
            raise RuntimeError(text[:500])

    def finish_weight_update(self) -> None:
        """All is done by `receive_weights`."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _load_all(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)
        pack_experts_again(self.model)


def follow(client: Any, controls: Controls) -> None:
    """Raises here, in the server, what a rank refuses: vLLM 0.32 leaves answers of further ranks unread after
    an error, and takes them for those to its next orders. Names the version that all ranks hold, unless the
    framework gives a name of its own."""
    init, update = client.init_weight_transfer_engine, client.update_weights
    finish = client.finish_weight_update

    async def looks() -> Sequence[Answer]:
        found = await controls.ranks({"do": "look"})
        for look in found:
            if look["refusal"]:
                raise RuntimeError(look["refusal"])
        return found

    async def quiet_init(request: Any) -> None:
        request.init_info = asdict(InitInfo(**{**request.init_info, "quiet": True}))
        await init(request)
        await looks()

    async def quiet_update(request: Any) -> None:
        each = request.update_info if type(request.update_info) is list else [request.update_info]
        infos = [asdict(UpdateInfo(**{**info, "quiet": True})) for info in each]
        if any(info != infos[0] for info in infos) and any(info["base"] is not None for info in infos):
            raise ValueError("update_info: all ranks take one patch, expected equal entries")
        request.update_info = infos if type(request.update_info) is list else infos[0]
        await update(request)
        try:
            await looks()
        except RuntimeError:
            await finish()
            raise

    async def named_finish(weight_version: str | None = None) -> None:
        await looks()
        await finish()
        found = await looks()
        versions, doubts = {look["version"] for look in found}, {look["doubt"] for look in found}
        if len(versions) > 1 or doubts != {""}:
            said = f"{sorted(map(str, versions))} {sorted(doubts)}"
            raise RuntimeError(f"the ranks hold {said}; update again before the engine resumes")
        name = weight_version if weight_version is not None else found[0]["label"]
        if name is not None:
            await controls.relabel(name)

    client.init_weight_transfer_engine = quiet_init
    client.update_weights, client.finish_weight_update = quiet_update, named_finish
