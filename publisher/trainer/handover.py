"""The trainer's side of a hand-over: one copy into shared memory, and the publisher does the rest.

Needs numpy; torch only for torch tensors, of any version.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import secrets
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, SupportsIndex
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import numpy as np

from weightcast.publisher.weights.given import (
    CastTensor,
    RawTensor,
    in_torch,
    on_cuda,
    pairs_of,
    spec_of,
    torch,
    whole_step,
)
from weightcast.shared.base.elements import MAIN, TensorSpec
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.shared.checkpoint.state.locks import FileLock, owner_text
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import ADAPTER_CONFIG, ADAPTER_MODEL
from weightcast.shared.files.paths import exists, is_link
from weightcast.shared.files.probes import HAND_OVER_NEEDS, require
from weightcast.shared.files.safetensors import Entry, pack_header
from weightcast.shared.files.strict_json import Members, parse_object, write_object

_PAGE = 4096
_TELL_SECONDS = 2.0
_TRY_EVERY = 0.02

_Given = tuple[TensorSpec, Any]


class HandOver:
    """One per trainer process and directory. Not thread-safe. The directory takes two copies of the weights
    and should be memory-backed (tmpfs); a publisher with `--hand-over` reads it.

    Examples:
        >>> with HandOver("/dev/shm/run7", sidecar="http://127.0.0.1:8340") as hand_over:
        ...     hand_over.put(model.state_dict(), step=step)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        sidecar: str | None = None,
        token: str | None = None,
        ca: str | Path | None = None,
    ) -> None:
        """Takes the directory.

        Args:
            directory: As given to the publisher's `--hand-over`.
            sidecar: URL of the publisher, to wake it after each `put`; else it looks every `--poll-seconds`.
            token: The publisher's `WEIGHTCAST_TOKEN`.
            ca: PEM file with the authority of an https sidecar's certificate.

        Raises:
            RetryLater: Another process hands over there.
            Refused: The directory is a link.
        """
        self._export = Export(Path(directory))
        self._url, self._token, self._ca = sidecar, token, ca
        self._maps: dict[str, mmap.mmap] = {}
        self._pinned: dict[str, int] = {}
        """addresses"""
        self._headers: dict[str, bytes] = {}
        self._telling: threading.Thread | None = None
        self._adapters: dict[str, HandOver] = {}
        """by component, with slots of their own"""
        self._export.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._export.check()
        require("hand-over directory", self._export.directory, HAND_OVER_NEEDS)
        self._own = FileLock(self._export.directory / "writer.lock")
        self._own.acquire(text=owner_text())
        newest = self._export.newest()
        self._sequence = 0 if newest is None else newest.sequence
        self._name = secrets.token_hex(8)

    def __enter__(self) -> HandOver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """What was put stays there for the publisher."""
        for slot in list(self._maps):
            self._unmap(slot)
        for each in self._adapters.values():
            each.close()
        self._own.release()

    def put(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        step: SupportsIndex | None = None,
        timeout: float = 60.0,
        component: str = MAIN,
        config: Mapping[str, Any] | str | Path | None = None,
        main_version: SupportsIndex | None = None,
    ) -> Handed:
        """Copies the tensors, which may change when this returns. The newest wins: earlier ones that are not
        being read are replaced.

        Args:
            named_tensors: (HF name, tensor): torch on any device, numpy, `RawTensor`, `cast_like`'s.
            step: The trainer's step.
            timeout: To wait for a slot, in seconds.
            component: `adapter/NAME`: the tensors are those of `peft.get_peft_model_state_dict(model)`. Its
                newest wins over its own earlier ones alone.
            config: Of an adapter, required: `peft_config.to_dict()`, or peft's file.
            main_version: Of `main`, on which the adapter was trained; the newest when it is published if not
                given.

        Raises:
            RetryLater: The memory is too small, or no slot became free in time. The publisher keeps what was
                complete before.
            Refused: Not a tensor that a file can hold, or an adapter without a configuration.
        """
        if component != MAIN:
            # blake3 and more, which a trainer without adapters does not need
            from weightcast.publisher.weights.config import component_config as written

            files = written(config, component)
            handed = self._of(component)._put(named_tensors, step, timeout, files, main_version)
        elif main_version is not None:
            raise Refused("main_version is not for main", remedy="give component= too, or leave it out")
        else:
            handed = self._put(named_tensors, step, timeout)
        self._tell()
        return handed

    def _of(self, component: str) -> HandOver:
        from weightcast.shared.channel.run_files import is_adapter

        if not is_adapter(component):
            raise Refused(
                f"{component[:80]!r} cannot be handed over",
                remedy="give adapter/NAME; publish a draft model from a directory",
            )
        if component not in self._adapters:
            one = HandOver(self._export.directory / component)
            one._export = Export(one._export.directory, ADAPTER_MODEL)
            self._adapters[component] = one
        return self._adapters[component]

    def _put(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        step: SupportsIndex | None,
        timeout: float,
        config: Mapping[str, bytes] | None = None,
        main_version: SupportsIndex | None = None,
    ) -> Handed:
        """`config`: None for main."""
        if config is not None and ADAPTER_CONFIG not in config:
            raise Refused("config= is missing", remedy="give peft_config.to_dict() with component=")
        number, main = whole_step(step), None if main_version is None else operator.index(main_version)
        given = [(spec_of(name, tensor), tensor) for name, tensor in pairs_of(named_tensors)]
        twice = [name for name, count in Counter(spec.name for spec, _ in given).items() if count > 1]
        if twice:
            raise Refused(f"{min(twice)} was given twice", remedy="give each tensor once")
        # widest elements first: each tensor lies at a multiple of its element's size
        given.sort(key=lambda one: one[0].nbytes // max(1, one[0].elements), reverse=True)
        slot, lock = self._free_slot(timeout)
        try:
            return self._write(slot, given, number, config or {}, main)
        except OSError as error:
            raise RetryLater(
                f"{self._export.directory}: {error.strerror or error}",
                remedy="enlarge the tmpfs: two copies of the weights must fit",
            ) from error
        finally:
            lock.release()

    def _free_slot(self, timeout: float) -> tuple[str, FileLock]:
        """The one with the older weights, unless it is being read."""
        deadline = time.monotonic() + timeout
        while True:
            newest = self._export.newest()
            for slot in sorted(SLOTS, key=lambda slot: newest is not None and slot == newest.slot):
                lock = self._export.lock(slot)
                with contextlib.suppress(RetryLater):
                    lock.acquire()
                    return slot, lock
            if time.monotonic() >= deadline:
                raise RetryLater(
                    f"both slots of {self._export.directory} are being read",
                    remedy="start only one publisher with this --hand-over",
                )
            time.sleep(_TRY_EVERY)

    def _write(
        self,
        slot: str,
        given: Sequence[_Given],
        step: int | None,
        files: Mapping[str, bytes],
        main: int | None,
    ) -> Handed:
        self._export.withdraw(slot)
        header = _header([spec for spec, _ in given])
        nbytes = len(header) + sum(spec.nbytes for spec, _ in given)
        memory = self._mapped(slot, header, nbytes, any(on_cuda(tensor) for _, tensor in given))
        at = len(header)
        for spec, tensor in given:
            _copy(tensor, spec, memory, at)
            at += spec.nbytes
        for name, data in files.items():
            durable.replace(self._export.slot(slot) / name, data)
        self._sequence += 1
        handed = Handed(self._name, self._sequence, slot, step, nbytes, main)
        self._export.commit(handed)
        return handed

    def _mapped(self, slot: str, header: bytes, nbytes: int, pinned: bool) -> mmap.mmap:
        """The slot's file with this header. Reused while tensors and file stay the same."""
        path = self._export.weights(slot)
        known = self._maps.get(slot)
        if known is not None:
            if self._headers[slot] == header and exists(path) and path.stat().st_size == nbytes:
                return known
            self._unmap(slot)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # a page that cannot be had is an error here, and SIGBUS in a mapping
            os.posix_fallocate(fd, 0, nbytes)
            memory = mmap.mmap(fd, nbytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        memory[: len(header)] = header
        self._maps[slot], self._headers[slot] = memory, header
        if pinned:
            self._pin(slot)
        return memory

    def _pin(self, slot: str) -> None:
        """A copy from a GPU to pinned memory takes a quarter of the time. Without it nothing else changes."""
        memory = self._maps[slot]
        address = int(torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr())
        if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) == 0:
            self._pinned[slot] = address
            return
        # the failure stays CUDA's last error, and the next kernel would raise it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")

    def _unmap(self, slot: str) -> None:
        if slot in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(slot))
        self._maps.pop(slot).close()

    def _tell(self) -> None:
        """In a thread: a publisher that does not answer costs the step nothing, and finds out by itself."""
        if self._url is not None and (self._telling is None or not self._telling.is_alive()):
            self._telling = threading.Thread(
                target=_wake, args=(self._url, self._token, self._ca), daemon=True
            )
            self._telling.start()


def _wake(url: str, token: str | None, ca: str | Path | None) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with contextlib.suppress(OSError, ValueError, HTTPException):
        trust = ssl.create_default_context(cafile=ca) if url.startswith("https:") else None
        # without the environment's proxies: it is on this machine
        direct = build_opener(ProxyHandler({}), HTTPSHandler(context=trust))
        direct.open(Request(f"{url.rstrip('/')}/v1/wake", b"", headers), timeout=_TELL_SECONDS).close()


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries, end = [], 0
    for spec in specs:
        entries.append(Entry(spec.name, spec.dtype, spec.shape, end, end + spec.nbytes))
        end += spec.nbytes
    length = len(pack_header(entries, {}))
    return pack_header(entries, {}, reserve=-(-length // _PAGE) * _PAGE)


def _copy(tensor: Any, spec: TensorSpec, memory: mmap.mmap, at: int) -> None:
    """The only copy, from a device straight into the mapping."""
    if not spec.nbytes:
        return
    if isinstance(tensor, CastTensor):
        tensor = tensor.made()
    if in_torch(tensor):
        there = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes, offset=at)
        there.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return
    there = np.frombuffer(memory, np.uint8, spec.nbytes, at)
    if isinstance(tensor, RawTensor):
        there[:] = tensor.flat
    else:
        there.view(tensor.dtype).reshape(tensor.shape)[...] = tensor


FORMAT = 1
SLOTS = ("a", "b")
WEIGHTS = "model.safetensors"
_RECORD_LIMIT = 64 << 10


@dataclass(frozen=True)
class Handed:
    """One complete slot. `writer` names the process that wrote it, `sequence` rises with every one."""

    writer: str
    sequence: int
    slot: str
    step: int | None
    nbytes: int
    """of the file"""
    main_version: int | None = None
    """of main, on which an adapter was trained"""


@dataclass(frozen=True)
class Export:
    """Where things lie; refuses links. `file`: of a slot's weights."""

    directory: Path
    file: str = WEIGHTS

    def check(self) -> None:
        """Raises Refused when the directory, or a slot, is a link."""
        for path in (self.directory, *(self.slot(slot) for slot in SLOTS)):
            if is_link(path):
                raise Refused(f"{path} is a symbolic link", remedy="give a directory of its own")

    def lock(self, slot: str) -> FileLock:
        return FileLock(self.directory / f"{slot}.lock")

    def slot(self, slot: str) -> Path:
        return self.directory / slot

    def weights(self, slot: str) -> Path:
        return self.slot(slot) / self.file

    def record(self, slot: str) -> Path:
        return self.directory / f"{slot}.json"

    def read(self, slot: str) -> Handed | None:
        """None when the slot is not complete. Raises DamagedFile."""
        path = self.record(slot)
        try:
            data = durable.read_file(path, _RECORD_LIMIT)
        except (FileNotFoundError, NotADirectoryError):
            return None
        members = Members(parse_object(data, str(path)), str(path))
        found = members.record(Handed)
        if members.integer("format") != FORMAT or found.slot != slot:
            raise DamagedFile(f"{path} does not describe this slot", remedy="hand the weights over again")
        return found

    def newest(self) -> Handed | None:
        """Of the complete slots; what cannot be read counts for nothing."""
        found = []
        for slot in SLOTS:
            with contextlib.suppress(OSError, WeightcastError):
                found.append(self.read(slot))
        return max(filter(None, found), key=lambda handed: handed.sequence, default=None)

    def commit(self, handed: Handed) -> None:
        durable.replace(self.record(handed.slot), write_object({"format": FORMAT, **asdict(handed)}))

    def withdraw(self, slot: str) -> None:
        self.record(slot).unlink(missing_ok=True)
