"""Publishes from transformers' Trainer and everything built on it, TRL's trainers among them.

>>> publish = PublishCallback("/mnt/run7/channel", local="/nvme/weightcast/publisher", base="/mnt/run7/base")
>>> trainer = GRPOTrainer(..., callbacks=[publish])

Needs transformers, which is imported here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_callback import ExportableState

from weightcast.publisher.api import Publisher, PublisherOptions
from weightcast.publisher.resume import Resumed
from weightcast.publisher.submit import Handle, Hold, WhenBusy
from weightcast.publisher.trainer.precision import cast_like
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import Refused, on_error
from weightcast.shared.channel.index import Encoding

Export = Callable[[Any], Mapping[str, Any] | Iterable[tuple[str, Any]]]
"""a model to its tensors, under the names that its files have"""

_POSITION = "position"


def named_tensors(model: Any) -> Mapping[str, Any]:
    """As `save_pretrained` names and shapes them: a model may hold its experts fused and store them one by
    one. A model without such a rule gives its own tensors, nothing is copied."""
    state: Mapping[str, Any] = model.state_dict()
    return revert_weight_conversion(model, state) if isinstance(model, PreTrainedModel) else state


class PublishCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Publishes after every optimizer step, or after `every` of them and at the end. The trainer's
    checkpoints know their place in the channel; a run that is resumed from one continues the chain.

    Where the model is whole on every process (one process, DistributedDataParallel), the main process
    publishes. Where its parameters are DTensors (FSDP2) every process publishes its local shards, and nothing
    is gathered. FSDP1 and ZeRO-3, whose parameters are flat or absent, are refused.

    Weights in another precision than the base's are rounded to it, as `cast_like` does. What a publication
    raises ends the training at the next step; nothing wrong is published.
    """

    def __init__(
        self,
        channel: str | Path | None,
        *,
        local: str | Path,
        base: str | Path | None = None,
        every: int = 1,
        when_busy: WhenBusy = "block",
        hold: Hold = "tensors",
        export: Export = named_tensors,
        encoding: Encoding = "fast",
        options: PublisherOptions | None = None,
        component: str = MAIN,
    ) -> None:
        """Takes the arguments of `Publisher.open`, and:

        Args:
            channel: As for `Publisher.open`, like `local`, `base`, `encoding` and `options`.
            every: Optimizer steps per version.
            when_busy: As for `Publisher.submit`, like `hold`.
            export: Maps the trainer's model to its tensors, for models that hold more than the fleet loads
                (adapters to be merged, a value head).
            component: `adapter/NAME`: publishes the active adapter of a peft model, and nothing else of it.
        """
        if channel is None:
            raise Refused(
                "PublishCallback has no channel",
                remedy="give one; turn off restore_callback_states_from_checkpoint, which makes callbacks "
                "without their arguments (the place in the channel is restored anyway)",
            )
        if every < 1:
            raise Refused(f"every={every}", remedy="give a number of steps, 1 or more")
        options = options or PublisherOptions()
        self._open = partial(
            Publisher.open, channel, local=local, base=base, encoding=encoding, options=options
        )
        self._every, self._export, self._component = every, export, component
        self._when_busy, self._hold = when_busy, hold
        self._handle: Handle | None = None
        self._submitted: int | None = None
        self.publisher: Publisher | None = None
        """while a training runs, on the processes that publish"""
        self.resumed: Resumed | None = None
        """how far the channel was ahead of the checkpoint that the training went on from"""

    def state(self) -> dict[str, Any]:
        """For the trainer's checkpoint."""
        position = None if self.publisher is None else self.publisher.state_dict()
        return {"args": {"channel": None, "local": None}, "attributes": {_POSITION: position}}

    def close(self) -> None:
        """Waits for what was submitted. For a training that was broken off; one that ends does this."""
        publisher, self.publisher, self._handle = self.publisher, None, None
        if publisher is not None:
            publisher.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        ranks = _ranks(kwargs["model"], state.is_world_process_zero)
        if ranks is None:
            return
        if ranks["world_size"] > 1 and self._when_busy == "newest":
            raise Refused(
                'when_busy="newest" with a sharded model: each rank would leave out other steps',
                remedy='leave when_busy at "block", or give every=',
            )
        self._submitted = state.global_step
        self.publisher = self._open(**ranks)
        position = _position_in(state.stateful_callbacks.get(type(self).__name__))
        with on_error(self.close):
            self.resumed = None if position is None else self.publisher.load_state_dict(position)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._handle is not None:
            self._handle.release()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            self._submit(kwargs["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.publisher is None:
            return
        # leaving it raises what went wrong with the last publications
        with self.publisher:
            try:
                if self._submitted != state.global_step:
                    self._submit(kwargs["model"], state.global_step)
            finally:
                self.publisher = self._handle = None

    def _submit(self, model: Any, step: int) -> None:
        if self.publisher is None:
            return
        how: dict[str, Any] = {"step": step, "when_busy": self._when_busy, "hold": self._hold}
        if self._component == MAIN:
            self._handle = self.publisher.submit(cast_like(self.publisher, self._export(model)), **how)
        else:
            tensors, config = _adapter_of(model)
            self._handle = self.publisher.submit(tensors, component=self._component, config=config, **how)
        self._submitted = step


def _adapter_of(model: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The active adapter's tensors, under the names that its file has, and its configuration."""
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        raise Refused(f"{type(model).__name__} has no adapter", remedy="train a peft model with component=")
    name = model.active_adapter
    return get_peft_model_state_dict(model, adapter_name=name), model.peft_config[name].to_dict()


def _ranks(model: Any, is_main: bool) -> Mapping[str, Any] | None:
    """Which rank of how many this process's publisher is; None: the main process publishes for it. The same
    on all processes, or all raise Refused."""
    parameters = list(model.parameters())
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise Refused("FSDP1 holds flat parameters, not the model's tensors", remedy="set fsdp_version to 2")
    if any(hasattr(parameter, "ds_tensor") for parameter in parameters):
        raise Refused(
            "DeepSpeed's ZeRO-3 holds pieces of parameters without their places",
            remedy="train with ZeRO-2 or FSDP2, or publish full checkpoints (publisher run --watch)",
        )
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return {"rank": 0, "world_size": 1} if is_main else None
    return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}


def _position_in(saved: Any) -> Mapping[str, object] | None:
    """What `state` put into the checkpoint; None for one that was written without this callback."""
    attributes = saved.get("attributes") if isinstance(saved, Mapping) else None
    position = attributes.get(_POSITION) if isinstance(attributes, Mapping) else None
    return position if isinstance(position, Mapping) else None
