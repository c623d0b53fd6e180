"""What the adapters share: a trainer's rank that publishes, a rollout worker that reads its host's local
checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from weightcast.publisher import Publisher, PublisherOptions, cast_like, init_channel
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Phase, read_state
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.sync.options import SyncOptions
from weightcast.subscriber.sync.sync import Sync

_LOOK_SECONDS = 0.1


class Sender:
    """A rank of a trainer whose ranks gather whole tensors: the rank that calls `open` publishes them."""

    def __init__(
        self, channel: str, base: str | Path, local: str | Path, options: Mapping[str, Any] | None = None
    ) -> None:
        """
        Args:
            channel: As for `Publisher.open`; made from `base` if it is missing.
            base: The checkpoint directory that trainer and rollouts start from.
            local: A directory of this machine's own, with room for the weights.
            options: Of `PublisherOptions`, by name.
        """
        self._channel, self._base, self._local = channel, Path(base), Path(local)
        self._options = PublisherOptions(**(options or {}))
        self._publisher: Publisher | None = None

    def open(self) -> int:
        """Makes this rank the publisher; the version that the coming one follows."""
        if self._publisher is None:
            init_channel(self._channel, self._base)
            self._publisher = Publisher.open(
                self._channel, local=self._local, base=self._base, options=self._options
            )
        return self._publisher.version

    async def send(
        self, weights: Iterable[tuple[str, Any]], step: int | None = None, fraction: float = 0.0
    ) -> dict[str, float]:
        """Publishes the pairs, copied into host memory, and waits until this fraction of the hosts serves
        them. Every rank calls it, since gathering is collective. Raises what `Publisher.publish` and `wait`
        raise.

        Returns:
            Version, seconds, bytes of the delta, share of the elements that changed; empty on other ranks.
        """
        publisher, began = self._publisher, time.perf_counter()
        pairs = [(name, tensor.detach().cpu()) for name, tensor in weights if publisher is not None]
        if publisher is None:
            return {}
        report = await asyncio.to_thread(publisher.publish, cast_like(publisher, pairs), step=step)
        if fraction:
            await asyncio.to_thread(publisher.wait, report.version, fraction=fraction)
        return {
            "weightcast/version": report.version,
            "weightcast/seconds": time.perf_counter() - began,
            "weightcast/delta_bytes": report.delta_bytes,
            "weightcast/changed_share": report.density_elements,
        }

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


class Receiver:
    """A rollout worker. The workers of a host share its local checkpoint: one of them patches it, the others
    wait for it. No subscriber runs."""

    def __init__(self, channel: str, base: str | Path, local: str | Path, deadline_seconds: float) -> None:
        self._channel, self._base, self._local = channel, Path(base), Path(local)
        self._deadline_seconds = deadline_seconds
        self._sync: Sync | None = None

    def follow(self, before: int) -> None:
        """Until the local checkpoint is at a version after `before`, moved there by this process or another
        one of the host. Raises RetryLater when that version does not come in time, and what a sync raises."""
        deadline, problem = time.monotonic() + self._deadline_seconds, ""
        while not self._is_after(before):
            if time.monotonic() > deadline:
                waited = f"in {self._deadline_seconds:g} s"
                raise RetryLater(
                    f"{self._local} did not get past version {before} {waited}{problem}",
                    remedy="see the trainer's log: its rank 0 publishes",
                )
            if self._sync is None:
                self._sync = Sync(SyncOptions(self._channel, self._local, self._base))
            try:
                self._sync.sync_once()
            except RetryLater as error:
                # another worker of this host patches it, or the channel is being made
                problem = f": {error.message}"
            time.sleep(_LOOK_SECONDS)

    def _is_after(self, version: int) -> bool:
        state = read_state(LocalPaths(self._local).state)
        return state is not None and state.phase is Phase.CLEAN and state.position.version > version

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The local checkpoint, tensor by tensor from its mapped files."""
        for path in open_checkpoint(self._local, follow_links=False).weight_files:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)
