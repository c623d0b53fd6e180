"""The version in a local checkpoint (docs/FORMAT.md), read under its shared patch lock and loaded into a
rank. All that is read is compared with the version's lanes before the first word of the rank is written.
"""

from __future__ import annotations

import base64
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weightcast_engine.update import routes
from weightcast_engine.update.checksums import PIECE, Lanes, sums
from weightcast_engine.update.elements import DTYPES, INTEGERS, open_regular
from weightcast_engine.update.front import Front
from weightcast_engine.update.live_elements import fill
from weightcast_engine.update.patch_file import Stand
from weightcast_engine.update.places import Piece
from weightcast_engine.update.rank import NOT_ENDED, Answer, EngineHere, EngineRank, Order
from weightcast_engine.update.refusals import BadPatch, InDoubt, OtherBase, Refusal
from weightcast_engine.update.strict_json import json_object

LOCK_SECONDS = 60.0
"""the longest that a subscriber patches"""
_TRY_SECONDS = 0.02
_LIMIT = 256 << 20
"""bytes of state.json and of base.json"""
_WAIT = "wait until the host's subscriber has this version"
_WITHOUT = "update to the version without base, which loads it from the local checkpoint"
_VERIFY = "run `weightcast local verify`"
DRIVEN = "the engine takes its versions by vLLM's weight transfer"
ONE_DRIVER = "remove its --engine from the subscriber, or start vLLM without --weight-transfer-config"


class LocalVersion:
    """Of the local checkpoint in `directory`. Nothing in it changes while `read_version` yields this."""

    def __init__(self, directory: Path, files: ExitStack) -> None:
        room = directory / ".weightcast"
        state, base = (_object(room, name) for name in ("state.json", "base.json"))
        position: Any = state["position"]
        if state["phase"] != "clean":
            raise OtherBase(f"{directory} is unfinished: {state['phase']}", remedy=_WAIT)
        self.stand = Stand(position["version"], position["root"])
        packed = np.frombuffer(base64.b64decode(position["lanes"]), "<u8").reshape(-1, 2).tolist()
        rows: Any = base["tensors"]
        self.lanes: Mapping[str, Lanes] = dict(
            zip((name for name, *_ in rows), map(Lanes._make, packed), strict=True)
        )
        opened = [
            files.enter_context(safe_open(path, "pt")) for path in sorted(directory.glob("*.safetensors"))
        ]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        for name in self.lanes.keys() - self._files.keys():
            raise ValueError(f"no file has {name}")

    def tensor(self, name: str) -> Tensor:
        """Mapped from its file."""
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def require(self, name: str) -> None:
        if lanes_of(self.tensor(name)) != self.lanes[name]:
            raise BadPatch(
                f"{name} in the local checkpoint differs from version {self.stand.version}",
                tensor=name,
                remedy=_VERIFY,
            )


@contextmanager
def read_version(directory: Path, version: int, root: str | None) -> Iterator[LocalVersion]:
    """Raises OtherBase where the checkpoint holds another version, BadPatch where it cannot be read."""
    with ExitStack() as stack:
        try:
            stack.callback(os.close, _locked(directory / ".weightcast"))
            found = LocalVersion(directory, stack)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise BadPatch(
                f"{directory} is not a readable local checkpoint: {error}"[:500], remedy=_VERIFY
            ) from error
        if found.stand.version != version or root not in (None, found.stand.root):
            held = f"version {found.stand.version} with root {found.stand.root}"
            raise OtherBase(
                f"{directory} holds {held}, expected version {version} with root {root}", remedy=_WAIT
            )
        yield found


def _locked(room: Path) -> int:
    """A descriptor that holds the shared patch lock."""
    fd, deadline = open_regular(room, "patch"), time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise OtherBase(f"{room}: locked for {LOCK_SECONDS:g} s", remedy=_WAIT) from None
            time.sleep(_TRY_SECONDS)
        else:
            return fd


def _object(room: Path, name: str) -> dict[str, object]:
    with os.fdopen(open_regular(room, name), "rb") as file:
        data = file.read(_LIMIT + 1)
    if len(data) > _LIMIT:
        raise ValueError(f"{name} exceeds the limit of {_LIMIT} bytes")
    return json_object(data)


def lanes_of(tensor: Tensor) -> Lanes:
    """Of a contiguous tensor in host memory."""
    octets, found = tensor.reshape(-1).view(torch.uint8), Lanes()
    for start in range(0, len(octets), 8 * PIECE):
        block = octets[start : start + 8 * PIECE]
        words = torch.zeros(-(-len(block) // 8), dtype=torch.int64)
        words.view(torch.uint8)[: len(block)] = block
        found = found.plus(sums(words, torch.arange(len(words)) + start // 8))
    return found


class CheckpointRank(EngineRank):
    """Takes versions from the local checkpoint, as a training framework asks for them. Subscribers are
    refused: two drivers would end each other's pauses."""

    _lanes: Mapping[str, Lanes] = {}
    """of the version that it holds"""
    refusal = ""
    """why the framework's last order was not carried out"""

    def __init__(self, engine: EngineHere, patches: Path, limit: int) -> None:
        super().__init__(engine, patches, limit)
        # this class's own `obey` is the subscriber's way in
        self._front = Front(routes.FromWithin(super().obey, engine.gather))

    def obey(self, order: Order) -> Answer:
        if order["do"] in ("hold", "stage", "reload"):
            return OtherBase(DRIVEN, remedy=ONE_DRIVER).told()
        return super().obey(order)

    def do_look(self, order: Order) -> Answer:
        return {**super().do_look(order), "misplaced": f"{DRIVEN}: {ONE_DRIVER}", "refusal": self.refusal}

    def load(
        self, version: int, root: str | None, load_all: Callable[[Iterable[tuple[str, Tensor]]], None]
    ) -> None:
        """Only tensors that differ from what the rank holds, straight into their places; all of them, by
        `load_all`, where that is not known, or one of them has no plain place. Raises Refusal; after any but
        InDoubt the rank holds what it held before."""
        with read_version(self._engine.directory, version, root) as found, torch.no_grad():
            known = self._lanes if self._held is not None and not self._in_doubt() else {}
            changed = [name for name, lanes in found.lanes.items() if known.get(name) != lanes]
            pieces = self._pieces(changed) if known else None
            for name in found.lanes if pieces is None else changed:
                found.require(name)
            try:
                if pieces is None:
                    self.forget(NOT_ENDED)
                    load_all((name, found.tensor(name)) for name in found.lanes)
                else:
                    self._doubt, self._held, self._changes = NOT_ENDED, None, self._changes + 1
                    for name in changed:
                        tensor = found.tensor(name)
                        words = tensor.view(INTEGERS[tensor.element_size()]).reshape(-1)
                        for piece in pieces.get(name, ()):
                            fill(piece, words)
                self._engine.synchronise()
            except Exception as error:
                self._doubt = f"version {version} was not loaded: {type(error).__name__}: {error}"[:300]
                raise InDoubt(self._doubt, remedy="load a version again before the engine resumes") from error
            self._doubt, self._held, self._label, self._lanes = "", found.stand, str(version), found.lanes

    def patch(self, wanted: Order) -> None:
        """From version `base` to `version` by the patch that the subscriber staged: its words alone are read
        and written, by all ranks or by none. Raises Refusal; after any but InDoubt nothing has changed."""
        routes.at_once(self._front.transfer(wanted, str(wanted["version"])))

    def do_find(self, order: Order) -> Answer:
        version, base = order["version"], order["base"]
        with read_version(self._engine.directory, version, order["root"]) as found:
            root = found.stand.root
        held = "an unknown version" if self._held is None else f"version {self._held.version}"
        if held != f"version {base}":
            raise OtherBase(f"the engine holds {held}, expected base {base}", remedy=_WITHOUT)
        names = [path.name for path in self._patches.glob(f"{version}-*.patch")]
        if len(names) != 1:
            text = f"{self._patches} has {len(names)} patches of version {version}, expected 1"
            raise BadPatch(text, remedy=f"{_WITHOUT}, or give the subscriber --transfer-patch")
        return {"file": names[0], "root": root}

    def do_named(self, order: Order) -> Answer:
        """The patch leads to the local checkpoint's version, and changes no tensor but those named."""
        patch, names = self._require_stage(order).patch(), order["names"]
        if patch.target != Stand(order["version"], order["root"]):
            raise BadPatch(
                f"{patch.name} leads to other weights than the local checkpoint's", remedy=_WITHOUT
            )
        for name, dtype, shape in zip(
            names or (), order["dtype_names"] or repeat(None), order["shapes"] or repeat(None), strict=False
        ):
            form = self._residence.forms.get(name)
            has = None if form is None else (f"{DTYPES[form.dtype]}"[6:], list(form.shape))
            if has is None or dtype not in (None, has[0]) or shape not in (None, has[1]):
                given = f"update_info names it {dtype} {shape}"
                raise BadPatch(f"{name} is {has} in the local checkpoint, {given}", tensor=name)
        more = {change.name for change in patch.changes}.difference(names or ())
        if names is not None and more:
            text = f"version {patch.target.version} changes {min(more)} too, expected in names"
            raise BadPatch(text, tensor=min(more))
        return {}

    def do_commit(self, order: Order) -> Answer:
        changed = {change.name: change.new for change in self._require_stage(order).patch().changes}
        self._lanes = {**self._lanes, **changed}
        return super().do_commit(order)

    def _pieces(self, names: Sequence[str]) -> Mapping[str, Sequence[Piece]] | None:
        """Where these tensors are; None where one of them cannot be written in place."""
        try:
            found = self._residence.current()
            late = self._residence.late()
            for name in names:
                self._residence.require(name, None, found, late)
        except Refusal:
            return None
        return found.pieces
