"""One rank's part of an update: a small state machine around its live weights. Engine-free.

`EngineRank` carries out the orders of `front`. Orders and answers are dicts of JSON's types, for they cross
processes; the outcome of an order is its answer, never an exception.

    stage ─> sums ─> passed ─> apply ─> commit          rollback: after apply, also when it failed

A rank that is the only one commits with its apply.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightcast_engine import FORMAT, VERSION
from weightcast_engine.loader.derived import (
    OwnTensor,
    WeightPlace,
    copies_kept,
    late_copies,
    live_tensors,
    memory_shared,
    own_tensors,
    places_of,
    private_copies,
    unloaded,
)
from weightcast_engine.loader.guard import are_left, unchanged
from weightcast_engine.loader.trace import Map, trace
from weightcast_engine.update.elements import Form, checkpoint_forms
from weightcast_engine.update.live_elements import LiveUpdate, resident
from weightcast_engine.update.patch_file import LIMIT, ReadPatch, Stand, read_patch
from weightcast_engine.update.places import on_whole_words, storage
from weightcast_engine.update.refusals import RELOAD, RELOAD_AND_TELL, BadPatch, InDoubt, OtherBase, Refusal

if TYPE_CHECKING:  # an engine may run on Python 3.10
    from typing import Self


class Stage:
    """Reads and checks `name` in a thread of its own: reading and hashing leave the interpreter to others."""

    def __init__(self, directory: Path, name: str, limit: int) -> None:
        self.name = name
        pool = ThreadPoolExecutor(1, "patch")
        self._found = pool.submit(read_patch, directory, name, limit)
        pool.shutdown(wait=False)

    def wait(self, seconds: float) -> bool:
        """Whether it is read, or refused."""
        return bool(wait([self._found], seconds).done)

    def patch(self) -> ReadPatch:
        if not self._found.done():
            raise BadPatch(f"{self.name} is still being read")
        try:
            return self._found.result()
        except BadPatch:
            raise
        except Exception as error:
            raise BadPatch(f"{self.name}: {type(error).__name__}: {error}"[:500]) from error


Order = Mapping[str, Any]
Answer = dict[str, Any]
Row = list[int]
"""number of the tensor, number of its piece on this rank, then sums: a, b, once or before and after"""
NOT_ENDED = "a reload was not ended"
_NOTHING = ("", -1, "")
_MOST_ROWS = 128
"""of an answer: a row of a few changes takes as long as one of a thousand, and the engine waits meanwhile"""


class EngineHere(ABC):
    """What an adapter knows of the engine around it."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """With a `load_weights`."""

    @property
    @abstractmethod
    def directory(self) -> Path:
        """Which the engine loaded its weights from."""

    @abstractmethod
    def hindrance(self) -> str | None:
        """Why no weight of this engine can be patched."""

    @abstractmethod
    def drafter(self) -> str:
        """How the engine drafts tokens (speculative decoding): its name of the method; `none`."""

    @property
    def draft_directory(self) -> Path | None:
        """Which a draft model with weights was loaded from; None without one."""
        return None

    def misplaced(self, patches: Path) -> str | None:
        """Why a reload would bring other weights than those of the checkpoint that `patches` belong to."""
        return None

    @abstractmethod
    def packed(self, name: str, module: Any) -> str | None:
        """Why writing this module's weights may not change what it computes."""

    def refusals(self) -> Mapping[int, str]:
        """Storage (`places.storage`) to the reason why weights in it can't be patched."""
        found: dict[int, str] = {}
        for name, module in self.model.named_modules():
            reason = self.packed(name, module)
            if reason is not None:
                found |= {storage(weight): f"belongs to {name}, {reason}" for weight in module.parameters()}
        return found

    def orders(self) -> Mapping[int, Tensor]:
        """Of packed storages: where each element of a unit is after packing (`places.Piece`)."""
        return {}

    def at_rest(self) -> AbstractContextManager[None]:
        """What a loader of this engine expects around it."""
        return nullcontext()

    def gather(self, own: Any) -> Sequence[Any]:
        """What every rank gives here, in the same order on all; an engine of one rank has only its own."""
        return [own]

    def synchronise(self) -> None:
        """Returns when the device has finished its work."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    @abstractmethod
    def reload(self) -> None:
        """All weights from `directory`."""

    def reload_draft(self) -> None:
        """The draft model's weights from `draft_directory`."""
        raise NotImplementedError("this engine reloads no draft model")


class EngineRank:
    """`patches`: the directory of patches; `limit`: bytes of one. For one thread at a time."""

    def __init__(self, engine: EngineHere, patches: Path, limit: int) -> None:
        self._engine, self._patches, self._limit = engine, patches, limit
        self._process = uuid.uuid4().hex
        self._held: Stand | None = None
        self._label: str | None = None
        self._doubt = ""
        self._changes = 0
        """raised by whatever may change weights, so that sums in several parts can tell"""
        self._residence = _Residence(engine, self._process, patches)
        self._stage: Stage | None = None
        self._passed = _NOTHING
        self._update: LiveUpdate | None = None
        """whose touched words were all reported"""
        self._undo: LiveUpdate | None = None
        self._spent: tuple[object, ...] = ()
        """of the update that was committed last: let go with the next order, for it takes milliseconds"""
        self._work: Iterator[tuple[int, Row]] = iter(())
        self._turn = ""
        """the order's name: several servers may use one engine"""

    @classmethod
    def from_environment(cls, engine: EngineHere) -> Self:
        limit = int(os.environ.get("WEIGHTCAST_PATCH_LIMIT", LIMIT))
        return cls(engine, Path(os.environ["WEIGHTCAST_PATCH_DIR"]), limit)

    def obey(self, order: Order) -> Answer:
        """The method `do_` that `order["do"]` names. The answer has `status` 200, or what a Refusal tells."""
        self._spent = ()
        try:
            with torch.no_grad():
                return {"status": 200, **getattr(self, "do_" + order["do"])(order)}
        except InDoubt as doubt:
            self._doubt = self._doubt or doubt.message
            return doubt.told()
        except Refusal as refusal:
            return refusal.told()
        except Exception as error:  # an order must not end the engine
            return InDoubt(f"{type(error).__name__}: {error}"[:500]).told()

    def do_look(self, order: Order) -> Answer:
        held = self._held
        return {
            "misplaced": self._engine.misplaced(self._patches) or "",
            "drafter": self._engine.drafter(),
            "draft": str(self._engine.draft_directory or ""),
            "plugin": VERSION,
            "format": FORMAT,
            "process": self._process,
            "version": None if held is None else held.version,
            "root": None if held is None else held.root,
            "label": self._label,
            "doubt": self._in_doubt(),
            "changes": self._changes,
        }

    def _in_doubt(self) -> str:
        return self._doubt or ("an update was not ended" if self._undo is not None else "")

    def _require_certain(self) -> None:
        if self._in_doubt():
            raise OtherBase(f"what the engine holds is in doubt: {self._in_doubt()}", remedy=RELOAD_AND_TELL)

    def do_map(self, order: Order) -> Answer:
        return self._residence.told(order["known"])

    def do_hold(self, order: Order) -> Answer:
        self._require_certain()
        self._held, self._label = Stand(order["version"], order["root"]), order["label"]
        return {}

    # a patch, beside an engine that serves

    def do_stage(self, order: Order) -> Answer:
        """`anew`: whatever was read under this name before."""
        self._require_certain()
        if order["anew"]:
            self._update, self._passed = None, _NOTHING
            self._stage = Stage(self._patches, order["file"], self._limit)
        if not self._require_stage(order).wait(order["seconds"]):
            return {"ready": False}
        patch = self._patch(order)
        return {
            "ready": True,
            "tensors": [[change.name, change.old.hex(), change.new.hex()] for change in patch.changes],
            "changes": patch.count,
            "bytes": patch.nbytes,
        }

    def _require_stage(self, order: Order) -> Stage:
        if self._stage is None or self._stage.name != order["file"]:
            raise OtherBase(f"{order['file']} was not checked", remedy="check it before it is applied")
        return self._stage

    def _patch(self, order: Order) -> ReadPatch:
        patch = self._require_stage(order).patch()
        if patch.base != self._held:
            raise OtherBase(f"{patch.name} starts from version {patch.base.version}", remedy=RELOAD_AND_TELL)
        return patch

    def do_sums(self, order: Order) -> Answer:
        """Begins the sums over the touched words, before and after, and the update. Nothing is written."""
        patch, found = self._patch(order), self._residence.current()
        # what was checked before is gone with its update
        update, self._update, self._passed = LiveUpdate(), None, _NOTHING
        late = self._residence.late()
        for change in patch.changes:
            self._residence.require(change.name, change.form, found, late)

        def work() -> Iterator[tuple[int, Row]]:
            for number, change in enumerate(patch.changes):
                for at, piece in enumerate(found.pieces[change.name]):
                    for changes, sums in update.touched(piece, change):
                        yield changes, [number, at, *sums]
            update.join()
            self._update = update

        self._work, self._turn = work(), order["turn"]
        return {}

    def do_digest(self, order: Order) -> Answer:
        """Begins the sums over all of some tensors; those that are refused are left out."""
        found = self._residence.current()

        def work() -> Iterator[tuple[int, Row]]:
            for number, name in enumerate(order["names"]):
                for at, piece in enumerate(found.pieces.get(name, ())):
                    for words, lanes in resident(piece, self._residence.forms[name]):
                        yield words, [number, at, *lanes]

        self._work, self._turn = work(), order["turn"]
        return {"changes": self._changes}

    def do_more(self, order: Order) -> Answer:
        """The next rows of what was begun, until `budget` changes or words are done, or many rows."""
        if self._turn != order["turn"]:
            raise OtherBase("another order came between", remedy="ask again")
        left, rows = order["budget"], list[Row]()
        while left > 0 and len(rows) < _MOST_ROWS:
            done, row = next(self._work, (0, None))
            if row is None:
                return {"rows": rows, "done": True}
            rows.append(row)
            left -= done
        return {"rows": rows, "done": False}

    def do_passed(self, order: Order) -> Answer:
        stage = self._require_stage(order)
        if self._update is None or self._turn != order["turn"]:
            raise OtherBase("another order came between", remedy="ask again")
        self._passed = (stage.name, self._changes, self._residence.print)
        return {}

    # a paused engine

    def do_apply(self, order: Order) -> Answer:
        """Everything or nothing, on this rank. With a label it is the only one, and has committed too."""
        self._require_certain()
        patch = self._patch(order)
        self._residence.current()
        if self._update is None or self._passed != (patch.name, self._changes, self._residence.print):
            raise OtherBase(f"{patch.name} was not checked, or weights moved since", remedy="check it again")
        self._undo, self._changes = self._update, self._changes + 1
        try:
            self._undo.write()
            self._engine.synchronise()
        except BaseException:
            self.do_rollback(order)
            raise
        return {} if order["label"] is None else self.do_commit(order)

    def do_rollback(self, order: Order) -> Answer:
        """Nothing to do is fine."""
        if self._undo is not None:
            try:
                self._undo.take_back()
                self._engine.synchronise()
            except BaseException as error:
                self._doubt = f"an update could not be taken back: {error}"[:300]
                raise InDoubt(self._doubt, remedy=RELOAD_AND_TELL) from error
            self._undo = self._update = None
        return {}

    def do_commit(self, order: Order) -> Answer:
        stage = self._require_stage(order)
        patch = stage.patch()
        self._held, self._label = patch.target, order["label"]
        self._spent = (stage, patch, self._undo, self._update, self._work)
        self._undo = self._stage = self._update = None
        self._work = iter(())
        return self.do_look(order)

    def do_reload(self, order: Order) -> Answer:
        self.forget(NOT_ENDED)
        try:
            self._engine.reload()
            self._engine.synchronise()
        except BaseException as error:
            self._doubt = f"a reload failed: {type(error).__name__}: {error}"[:300]
            raise InDoubt(self._doubt, remedy="see the engine's log; restart it if this stays") from error
        self._doubt = ""
        return {}

    def do_draft(self, order: Order) -> Answer:
        """What goes wrong makes no answer wrong: drafts are judged by the main model."""
        self._engine.reload_draft()
        self._engine.synchronise()
        return {}

    def forget(self, doubt: str | None = None) -> None:
        """Somebody else loads weights: what they are then, only `hold` can say. `doubt`: None leaves what
        there was."""
        self._doubt = self._doubt if doubt is None else doubt
        self._changes += 1
        self._held = self._label = self._undo = self._stage = self._update = None
        self._work = iter(())
        self._residence.forget()


class _Residence:
    """Where the checkpoint's tensors lie on this rank, for as long as they stay there."""

    def __init__(self, engine: EngineHere, process: str, patches: Path) -> None:
        self._engine, self._process, self._patches = engine, process, patches
        self.barred = ""
        """why this model is never traced again"""
        self.forget()

    def forget(self) -> None:
        self._map: Map | None = None
        self._places: Sequence[WeightPlace] = ()
        self._own: Sequence[OwnTensor] = ()
        self._mirrors: Sequence[OwnTensor] = ()
        self.forms: Mapping[str, Form] = {}
        self.print = ""

    def current(self) -> Map:
        """Traced again when a weight moved. Raises BadPatch."""
        hindrance = self.barred or self._engine.hindrance() or self._engine.misplaced(self._patches)
        if hindrance is not None:
            raise BadPatch(hindrance, remedy=RELOAD)
        places = places_of(self._engine.model)
        if self._map is None or places != self._places or not all(one.stands for one in self._mirrors):
            self.forget()
            self.forms = checkpoint_forms(self._engine.directory)
            try:
                self._map, self._own = _mapped(self._engine, self.forms)
            except InDoubt as doubt:
                self.barred = doubt.message
                raise
            self._places = places
            self._mirrors = [one for one in self._own if storage(one.tensor) in self._map.mirrored]
            known = (self._process, places, [one.address for one in self._mirrors])
            self.print = hashlib.sha256(repr(known).encode()).hexdigest()
        return self._map

    def told(self, known: list[str]) -> Answer:
        """Which elements of each tensor are here, unless the caller knows this print already."""
        found = self.current()
        if self.print in known:
            return {"print": self.print}
        return {
            "print": self.print,
            "elements": {name: form.elements for name, form in self.forms.items()},
            "keys": {name: [list(key) for key in found.keys(name)] for name in found.pieces},
            "refused": found.refused,
        }

    def late(self) -> Mapping[int, str]:
        """Storage to reason: what can't be patched any more, since the model keeps something that may be made
        of it and that was not there when the map was made."""
        return late_copies(self._engine.model, self._own)

    def require(self, name: str, patched: Form | None, found: Map, late: Mapping[int, str]) -> None:
        """Raises BadPatch for a tensor that can't be patched here. `patched`: what a patch says of it;
        `found`: the current map."""
        form, reason = self.forms.get(name), found.refused.get(name)
        if late and reason is None:
            lies = [storage(piece.flat) for piece in found.pieces.get(name, ())]
            reason = next((late[key] for key in lies if key in late), None)
        if form is None:
            reason = f"{self._engine.directory} has no such tensor"
        elif patched is not None and patched != form:
            reason = (
                f"is {form.dtype} {list(form.shape)} here, {patched.dtype} {list(patched.shape)} in the patch"
            )
        if reason is not None:
            raise BadPatch(f"{name} {reason}", tensor=name, remedy=RELOAD)


def _mapped(engine: EngineHere, forms: Mapping[str, Form]) -> tuple[Map, Sequence[OwnTensor]]:
    """And what else the modules keep. Raises InDoubt."""
    with engine.at_rest(), unchanged(engine.model):
        load: Any = engine.model.load_weights
        live = [tensor for _, tensor in live_tensors(engine.model)]
        found = trace(load, forms, live, [own.tensor for own in own_tensors(engine.model)])
    if are_left(found.unfilled):
        raise InDoubt(
            "the model's loader keeps what it was given while it was looked at", remedy=RELOAD_AND_TELL
        )
    # asked again: a loader may have made others
    own = list(own_tensors(engine.model))
    stored = {
        **private_copies(own, found.mirrored),
        **unloaded(engine.model, found.reached | found.mirrored),
        **copies_kept(engine.model, found.reached, found.mirrored),
        **memory_shared(engine.model),
        **engine.refusals(),
    }
    orders = engine.orders()
    for name, pieces in list(found.pieces.items()):
        if orders:
            found.pieces[name] = tuple(replace(one, order=orders.get(storage(one.flat))) for one in pieces)
        reasons = [stored[key] for key in (storage(piece.flat) for piece in pieces) if key in stored]
        if reasons:
            found.refuse(name, reasons[0])
        elif not all(
            on_whole_words(key, forms[name].per_word, forms[name].elements) for key in found.keys(name)
        ):
            found.refuse(name, "has slices that share an 8-byte word of its digest")
    return found, own
