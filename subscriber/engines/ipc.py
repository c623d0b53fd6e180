"""Engines fed from this host's memory (`via=ipc`), by the protocol of checkpoint-engine's workers.

One load, in the order of `_Load.run`:
order    the engine's HTTP request, in a thread of its own; its ranks connect, each to its device's socket
attach   they map the buffer; up to here no weight has changed
fill     every tensor: one half of the buffer is filled while the ranks load the other half
finish   they release the buffer and process what they loaded; the request is answered

All ranks answer a step before the next one is sent. A rank waits for messages as long as it lives, so a rank
that is not served any more is sent an error: at once after a failure; after a kill of this process by the
next look, which finds `open` in the room. Ranks reconnect by themselves to a socket of the same name.

The room is a directory in /dev/shm for this user alone: engines unpickle what comes from its sockets. Their
answers are text, nothing is unpickled here. Messages are calls into weightcast-engine, pickled by hand: this
process has neither that package nor torch.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import pickle
import re
import secrets
import stat
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import zmq

from weightcast.shared.base.elements import DTYPES, TensorSpec
from weightcast.shared.base.errors import DamagedFile, EngineFailed, Refused, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.daemon.environment import without_secrets
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.durable import named, open_regular, read_at
from weightcast.shared.files.hf_checkpoint import Place, open_checkpoint
from weightcast.shared.files.paths import exists
from weightcast.subscriber.engines.adapter import LOG, NONE, Server, drafter_named
from weightcast.subscriber.engines.base import QUOTED, EngineFacts, Intact, ReloadOutcome, Suspect, Unfit
from weightcast.subscriber.engines.sglang import SGLang
from weightcast.subscriber.engines.vllm import EXPERTS, VLLM, configuration, vllm_config, vllm_drafter
from weightcast.subscriber.engines.wire import Reply

SHARED_MEMORY = Path("/dev/shm")
GIVE_DEVICES = "give devices=UUID,UUID as `nvidia-smi -L` shows them"
_MODULE = "weightcast_engine.memory"
_ALIGNED = 256
_OPEN, _BUFFER = "open", "buffer"
_STOP = pickle.dumps(RuntimeError("weightcast ended this update"))
_TICK_SECONDS, _RECONNECT_SECONDS, _LIST_SECONDS = 0.02, 1.0, 30.0
_ANSWER_LIMIT = 4 << 20
_Sockets = Mapping[str, "zmq.Socket[bytes]"]
"""by device"""
_Order = Reply | Intact | Suspect


class FromMemory(Server):
    """Every load sends all tensors: the engine needs no files, and may have started without weights."""

    _devices: tuple[str, ...] = ()
    _ranks = 0

    def _as_told(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its settings by their names in SGLang."""
        return settings

    @abstractmethod
    def _order(self, handles: Mapping[str, str], label: str) -> _Order:
        """Used by a thread of its own."""

    @property
    def _local(self) -> Path:
        assert self.spec.local is not None  # of every parsed option
        return self.spec.local

    @property
    def _room(self) -> Path:
        key = sha256(f"{self._local}\0{self.spec.name}".encode()).hexdigest()[:16]
        return SHARED_MEMORY / f"weightcast-ipc-{os.geteuid()}-{key}"

    def probe(self) -> EngineFacts:
        with suppress(OSError, Refused):
            # `doctor` looks too: while a subscriber loads, the room is locked
            if exists(self._room / _OPEN):
                with _locked(self._room, fcntl.LOCK_NB):
                    _end_left(self._room)
        return super().probe()

    def close(self) -> None:
        with suppress(OSError):
            self._room.rmdir()
        super().close()

    def _settings(self, process: str | None, seconds: float) -> Mapping[str, object]:
        settings = super()._settings(process, seconds)
        self._devices = self._devices or self.spec.devices or _listed_devices()
        told, config = self._as_told(settings), configuration(self._local)
        ranks = [told.get("tp_size"), told.get("pp_size", 1)]
        self._ranks = math.prod(number for number in ranks if isinstance(number, int))
        drafter = drafter_named(told.get("speculative_algorithm"))
        quantised = told.get("quantization") or any(part.get("quantization_config") for part in config)
        several = any(told.get(key) not in (None, 1) for key in ("dp_size", "nnodes"))
        packed = self.spec.kind == "vllm" and any(part.get(key) for part in config for key in EXPERTS)
        faults = {
            "does not say in /server_info how many ranks it has": None in ranks,
            "has replicas, or ranks on other hosts": several,
            "would process quantised weights twice": bool(quantised),
            "would pack its experts twice": packed,
            f"runs a draft model ({drafter})": drafter != NONE,
        }
        for fault in (fault for fault, applies in faults.items() if applies):
            raise Unfit(f"via=ipc: {self.spec.shown_url} {fault}", remedy="give via=reload")
        if self._ranks > len(self._devices):
            text = f"{self.spec.shown_url} has {self._ranks} ranks, {len(self._devices)} devices are known"
            raise Unfit(f"via=ipc: {text}", remedy=GIVE_DEVICES)
        return settings

    def _load(self, path: str, label: str) -> ReloadOutcome:
        try:
            batches = _batches(self._local, self.spec.buffer)
            load = _Load(self._room, batches, self._devices, self._ranks, self._timeouts.control)
            with _locked(self._room):
                reply = load.run(lambda handles: self._order(handles, label))
        except (OSError, WeightcastError) as error:
            return Intact(f"via=ipc: {_text(error)}", untried=True)
        if load.failure is None:
            outcome = self._judged(reply, label)
            return Suspect(outcome.reason) if isinstance(outcome, Intact) else outcome
        said = reply.describe() if isinstance(reply, Reply) else reply.reason
        reason = f"via=ipc: {_text(load.failure)}; {said}"
        # without an answer nobody knows whether its ranks still wait
        return Suspect(reason) if load.changed or isinstance(reply, Suspect) else Intact(reason, untried=True)


class SGLangIpc(FromMemory, SGLang):
    def _order(self, handles: Mapping[str, str], label: str) -> _Order:
        return self._update("/update_weights_from_ipc", {"zmq_handles": handles}, label)


class VLLMIpc(FromMemory, VLLM):
    def _as_told(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        config = vllm_config(settings)
        parallel, model = (config.get(key) or {} for key in ("parallel_config", "model_config"))
        return {
            "tp_size": parallel.get("world_size"),
            "dp_size": parallel.get("data_parallel_size"),
            "nnodes": parallel.get("nnodes"),
            "quantization": model.get("quantization"),
            "speculative_algorithm": vllm_drafter(config),
        }

    def _order(self, handles: Mapping[str, str], label: str) -> _Order:
        return self._rpc({"method": "update_weights_from_ipc", "args": [handles]})


def _listed_devices() -> tuple[str, ...]:
    """UUIDs of this host's GPUs and their instances. Raises Unfit."""
    environment = without_secrets(os.environ)
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], env=environment, capture_output=True, timeout=_LIST_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unfit(f"via=ipc: nvidia-smi failed: {error}", remedy=GIVE_DEVICES) from error
    return tuple(re.findall(r"UUID: ([A-Z]+-[\w./-]+)", listed.decode("ascii", "replace")))


def _text(error: Exception) -> str:
    return disk_text(error, SHARED_MEMORY) if isinstance(error, OSError) else str(error)


@dataclass
class _Batch:
    """Of one message: tensors, where their bytes are, and their offsets in its part of the buffer.
    `alone`: it needs more than half of the buffer."""

    tensors: list[tuple[TensorSpec, Place, int]] = field(default_factory=list)
    nbytes: int = 0
    alone: bool = False


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _batches(directory: Path, most: int) -> list[_Batch]:
    """Up to half of `most` bytes each; a larger module alone, up to `most`. The tensors of a module come in
    one message: some loaders of SGLang join two tensors and drop either if it is alone. Raises Refused."""
    checkpoint = open_checkpoint(directory, follow_links=False)
    modules: dict[str, list[tuple[TensorSpec, Place]]] = {}
    for tensor, spec in enumerate(checkpoint.table):
        if spec.dtype not in DTYPES:
            raise Refused(f"{spec.name} has dtype {spec.dtype}", remedy="give via=reload")
        modules.setdefault(spec.name.rsplit(".", 2)[0], []).append((spec, checkpoint.places[tensor]))
    batches = [_Batch()]
    for module, tensors in modules.items():
        nbytes = sum(_padded(spec.nbytes) for spec, _ in tensors)
        if nbytes > most:
            text = f"{module} needs {nbytes} bytes in one message, buffer= allows {most}"
            raise Refused(text, remedy=f"give buffer={nbytes}")
        if batches[-1].tensors and batches[-1].nbytes + nbytes > most // 2:
            batches.append(_Batch())
        batch = batches[-1]
        for spec, place in tensors:
            batch.tensors.append((spec, place, batch.nbytes))
            batch.nbytes += _padded(spec.nbytes)
        batch.alone = batch.nbytes > most // 2
    return batches


@contextmanager
def _locked(room: Path, flags: int = 0) -> Iterator[None]:
    """Makes it, and locks it against other processes. Raises OSError, and Refused for another user's."""
    room.mkdir(0o700, exist_ok=True)
    fd = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise Refused(f"{room} is open to other users", remedy="remove it")
        fcntl.flock(fd, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(fd)


@contextmanager
def _bound(paths: Sequence[Path]) -> Iterator[list[zmq.Socket[bytes]]]:
    """A DEALER is a REQ that may send again before it is answered."""
    context = zmq.Context()
    try:
        sockets = [context.socket(zmq.DEALER) for _ in paths]
        for socket, path in zip(sockets, paths, strict=True):
            socket.set(zmq.MAXMSGSIZE, _ANSWER_LIMIT)
            socket.bind(f"ipc://{path}")
        yield sockets
    finally:
        context.destroy(linger=int(_RECONNECT_SECONDS * 1000))
        for path in paths:
            path.unlink(missing_ok=True)


def _send(socket: zmq.Socket[bytes], message: bytes) -> None:
    """Lost where the rank is gone: its request ends then."""
    with suppress(zmq.Again):
        socket.send_multipart([b"", message], zmq.DONTWAIT)


def _connected(socket: zmq.Socket[bytes], seconds: float = 0.0) -> bool:
    return bool(socket.poll(int(max(0.0, seconds) * 1000), zmq.POLLOUT))


def _end(sockets: Sequence[zmq.Socket[bytes]], seconds: float = 0.0) -> None:
    """Ends the ranks that are connected, or are in time. A rank that was sent nothing yet answers the error
    and ends at the next message, whatever it says; a rank that has answered with an error does the latter."""
    deadline = time.monotonic() + seconds
    for socket in sockets:
        if _connected(socket, deadline - time.monotonic()):
            _send(socket, _STOP)
            _send(socket, b"")


def _end_left(room: Path) -> None:
    """What a killed process, or a load without an answer, left behind; the room is locked."""
    (room / _BUFFER).unlink(missing_ok=True)
    with _bound([room / name for name in (room / _OPEN).read_text().split()]) as sockets:
        _end(sockets, _RECONNECT_SECONDS)
    (room / _OPEN).unlink()


def _call(function: str, arguments: tuple[object, ...], ends: bytes = b"R.") -> bytes:
    """The pickle of a call; other opcodes at its end make something else of function and arguments."""
    packed = pickle.dumps(arguments, 2)[2:-1]
    return b"\x80\x02c%b\n%b\n%b%b" % (_MODULE.encode(), function.encode(), packed, ends)


class _Load:
    """One load, in a room that is locked, into `count` ranks on some of the devices. `patience`: seconds from
    the connection of a rank to that of the next."""

    def __init__(
        self, room: Path, batches: Sequence[_Batch], devices: Sequence[str], count: int, patience: float
    ) -> None:
        self._room, self._batches, self._devices = room, batches, devices
        self._count, self._patience = count, patience
        self._half = max((batch.nbytes for batch in batches if not batch.alone), default=0)
        self._nbytes = max(_ALIGNED, 2 * self._half, *(batch.nbytes for batch in batches))
        self._stack = ExitStack()
        self._files: dict[Path, int] = {}
        self._ranks: _Sockets = {}
        self.changed = False
        """weights may have changed"""
        self.failure: Exception | None = None
        """why not everything was loaded"""

    def run(self, order: Callable[[Mapping[str, str]], _Order]) -> _Order:
        """What the request came to. Raises OSError before it is sent."""
        if exists(self._room / _OPEN):
            _end_left(self._room)
        with self._stack:
            memory = self._make_buffer()
            # names of their own: a rank of an earlier load may be about to connect again
            load = secrets.token_hex(4)
            paths = [self._room / f"{load}-{at}" for at in range(len(self._devices))]
            (self._room / _OPEN).write_text("\n".join(path.name for path in paths))
            sockets = self._stack.enter_context(_bound(paths))
            pool = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ipc"))
            handles = {device: f"ipc://{path}" for device, path in zip(self._devices, paths, strict=True)}
            self._reply, done = pool.submit(order, handles), False
            try:
                self._attach(dict(zip(self._devices, sockets, strict=True)))
                self._fill(memory)
                for step in ("release the buffer", "process its weights"):
                    self._ask(pickle.dumps(None))
                    self._answers(step)
                done = True
            except (OSError, WeightcastError) as error:
                self.failure = error
            finally:
                if not done:
                    _end(sockets)
            reply = self._reply.result()
        if not isinstance(reply, Suspect):
            (self._room / _OPEN).unlink()
        return reply

    def _make_buffer(self) -> memoryview:
        path = self._room / _BUFFER
        path.unlink(missing_ok=True)
        self._stack.callback(path.unlink, missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with named(path, "posix_fallocate"):
                os.posix_fallocate(fd, 0, self._nbytes)
            return memoryview(mmap.mmap(fd, self._nbytes))
        finally:
            os.close(fd)

    def _attach(self, sockets: _Sockets) -> None:
        limit = math.inf
        while len(self._ranks) < self._count:
            self._require_request()
            found = {device: socket for device, socket in sockets.items() if _connected(socket)}
            if len(found) > len(self._ranks):
                self._ranks, limit = found, time.monotonic() + self._patience
            if time.monotonic() > limit:
                text = f"{len(found)} of {self._count} ranks connected, of {', '.join(found)}"
                raise EngineFailed(text, remedy=GIVE_DEVICES)
            time.sleep(_TICK_SECONDS)
        # the rank puts its device into the seventh argument
        arguments = (str(self._room / _BUFFER), self._nbytes, *[0] * 5)
        self._ask(_call("attach", arguments, b"\x86."))
        self._answers("map the buffer")
        (self._room / _BUFFER).unlink()

    def _fill(self, memory: memoryview) -> None:
        begin, loading = 0, None
        for batch in self._batches:
            overlaps = loading is None or loading.alone or batch.alone
            begin = 0 if overlaps else self._half - begin
            if loading is not None and overlaps:
                self._answers("load", loading)
            self._copy(batch, memory, begin)
            if loading is not None and not overlaps:
                self._answers("load", loading)
            rows = [(spec.name, spec.dtype, spec.shape, begin + at) for spec, _, at in batch.tensors]
            self.changed, loading = True, batch
            self._ask(_call("entries", (rows,)))
            failpoint("engine.sent")
        self._answers("load", loading)

    def _copy(self, batch: _Batch, memory: memoryview, begin: int) -> None:
        for spec, place, at in batch.tensors:
            if place.file not in self._files:
                self._files[place.file] = open_regular(place.file)
                self._stack.callback(os.close, self._files[place.file])
            room = memory[begin + at : begin + at + spec.nbytes]
            with named(place.file):
                if read_at(self._files[place.file], room, place.offset) != spec.nbytes:
                    raise DamagedFile(f"{place.file} ends within {spec.name}", remedy="run `weightcast sync`")

    def _ask(self, message: bytes) -> None:
        for socket in self._ranks.values():
            _send(socket, message)

    def _answers(self, step: str, batch: _Batch | None = None) -> None:
        """Of all ranks. Raises EngineFailed for a traceback, and when the request ends before."""
        names = [] if batch is None else [spec.name for spec, _, _ in batch.tensors]
        for device, socket in self._ranks.items():
            while not socket.poll(int(_TICK_SECONDS * 1000)):
                self._require_request()
            text = socket.recv_multipart()[-1].decode("utf-8", "replace").strip()
            if text:
                within = f" one of {names[0]} to {names[-1]}" if names else ""
                what = next((f" {name}" for name in names if name in text), within)
                remedy = LOG if batch else "run the engine as this user, with the same /dev/shm"
                if "No module named 'weightcast_engine" in text:
                    remedy = "install weightcast-engine in the engine's environment"
                said = text.splitlines()[-1][:QUOTED]
                raise EngineFailed(f"{device} did not {step}{what}: {said}", remedy=remedy)

    def _require_request(self) -> None:
        if self._reply.done():
            raise EngineFailed("the request ended before all tensors were loaded", remedy=LOG)
