"""A file system that misbehaves on demand: a directory shown through FUSE, by the kernel's protocol alone.

`serve(source, mount, rules)` mounts and answers until it is unmounted. `rules` is a JSON file, read again
whenever it changes: a list of objects with `path` (a pattern below the mount), `action` and its arguments.

    error    {"op": "READ", "errno": 5, "times": 2}   answers with an error (times: then no longer)
    short    {"bytes": 100}                           a read ends after so many bytes of the file
    hide     {}                                       not visible, neither by name nor in a listing
    show     {"file": "/elsewhere"}                   has the content of another file
    hang     {"op": "LOOKUP"}                         no answer until the rule is gone or the caller is killed
    flat     {}                                       directories that hold something cannot be renamed

Nothing is cached by the kernel. One thread, no locks, no special files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import json
import os
import select
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BUFFER = (1 << 20) + 4096
_IN = struct.Struct("<IIQQIIIHH")  # fuse_in_header
_OUT = struct.Struct("<IiQ")  # fuse_out_header
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")  # fuse_attr
_DIRENT = struct.Struct("<QQII")
_DIRECT_IO = 1
_LOOK_SECONDS = 0.02
_FLAGS = 1 << 5 | 1 << 3  # big writes, O_TRUNC with open

_OPS = {
    1: "LOOKUP",
    2: "FORGET",
    3: "GETATTR",
    4: "SETATTR",
    8: "MKNOD",
    9: "MKDIR",
    10: "UNLINK",
    11: "RMDIR",
    12: "RENAME",
    13: "LINK",
    14: "OPEN",
    15: "READ",
    16: "WRITE",
    17: "STATFS",
    18: "RELEASE",
    20: "FSYNC",
    25: "FLUSH",
    26: "INIT",
    27: "OPENDIR",
    28: "READDIR",
    29: "RELEASEDIR",
    30: "FSYNCDIR",
    34: "ACCESS",
    35: "CREATE",
    36: "INTERRUPT",
    38: "DESTROY",
    42: "BATCH_FORGET",
    45: "RENAME2",
}


class _HangingError(Exception):
    """No answer now."""


@dataclass(frozen=True)
class _Request:
    op: str
    unique: int
    node: int
    body: bytes


@dataclass
class Rules:
    """What is to go wrong; the file is looked at before every answer."""

    file: Path
    _seen: tuple[int, int] = (0, 0)
    _rules: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> bool:
        """Whether they have changed."""
        found = self.file.stat()
        seen = (found.st_mtime_ns, found.st_ino)
        if seen == self._seen:
            return False
        self._seen, self._rules = seen, json.loads(self.file.read_text())
        return True

    def find(self, action: str, path: str, op: str = "") -> dict[str, Any] | None:
        for rule in self._rules:
            if rule["action"] == action and rule.get("op", op) == op and fnmatch.fnmatch(path, rule["path"]):
                return rule
        return None

    def disturb(self, path: str, op: str) -> None:
        """Raises what the rules want for an operation on a path."""
        rule = self.find("error", path, op)
        if rule is not None and rule.get("times", 1) > 0:
            if "times" in rule:
                rule["times"] -= 1
            raise OSError(rule.get("errno", errno.EIO), "on demand")
        if self.find("hang", path, op) is not None:
            raise _HangingError


class FaultyFs:
    """Paths are relative to the source; node 1 is its root, ''."""

    def __init__(self, source: Path, device: int, rules: Rules) -> None:
        self._source, self._device, self._rules = source, device, rules
        self._paths = {1: ""}
        self._nodes = {"": 1}
        self._listings: dict[int, list[tuple[int, bytes, int]]] = {}
        self._next = 2
        self._parked: list[_Request] = []

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        while True:
            ready = poll.poll(_LOOK_SECONDS * 1000)
            if self._rules.read():
                parked, self._parked = self._parked, []
                for request in parked:
                    self._answer(request)
            if ready and not self._take():
                return

    def _take(self) -> bool:
        """False once it is unmounted."""
        try:
            data = os.read(self._device, _BUFFER)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                return True
            if error.errno == errno.ENODEV:
                return False
            raise
        length, opcode, unique, node, *_ = _IN.unpack_from(data)
        self._answer(_Request(_OPS.get(opcode, ""), unique, node, data[_IN.size : length]))
        return True

    def _answer(self, request: _Request) -> None:
        if request.op in ("FORGET", "BATCH_FORGET"):
            return
        if request.op == "INTERRUPT":
            self._interrupt(*struct.unpack_from("<Q", request.body))
            return
        method: Callable[[_Request], bytes] | None = getattr(self, f"_{request.op.lower()}", None)
        try:
            if method is None:
                raise OSError(errno.ENOSYS, "")
            self._disturb(request)
            self._reply(request.unique, 0, method(request))
        except OSError as error:
            self._reply(request.unique, -(error.errno or errno.EIO), b"")
        except _HangingError:
            self._parked.append(request)

    def _disturb(self, request: _Request) -> None:
        """A lookup is of a name, everything else of what has been looked up."""
        if request.op == "INIT":
            return
        path = self._paths[request.node]
        if request.op == "LOOKUP":
            path = _join(path, request.body.split(b"\0")[0].decode())
        self._rules.disturb(path, request.op)

    def _interrupt(self, unique: int) -> None:
        for request in self._parked:
            if request.unique == unique:
                self._parked.remove(request)
                self._reply(unique, -errno.EINTR, b"")
                return

    def _reply(self, unique: int, error: int, body: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # the caller is gone
            os.write(self._device, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    # names

    def _real(self, path: str) -> Path:
        rule = self._rules.find("show", path)
        return Path(rule["file"]) if rule is not None else self._source / path

    def _node(self, path: str) -> int:
        if path not in self._nodes:
            self._nodes[path], self._paths[self._next] = self._next, path
            self._next += 1
        return self._nodes[path]

    def _require_visible(self, path: str) -> None:
        if self._rules.find("hide", path) is not None:
            raise FileNotFoundError(errno.ENOENT, "hidden")

    def _named(self, request: _Request, skip: int = 0) -> str:
        return _join(self._paths[request.node], request.body[skip:].split(b"\0")[0].decode())

    # attributes

    def _attributes(self, path: str) -> bytes:
        found = os.lstat(self._real(path))
        times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
        return _ATTR.pack(
            self._node(path),
            found.st_size,
            found.st_blocks,
            *(time // 10**9 for time in times),
            *(time % 10**9 for time in times),
            found.st_mode,
            found.st_nlink,
            found.st_uid,
            found.st_gid,
            0,
            4096,
            0,
        )

    def _entry(self, path: str) -> bytes:
        attributes = self._attributes(path)
        return struct.pack("<QQQQII", self._node(path), 0, 0, 0, 0, 0) + attributes

    def _init(self, request: _Request) -> bytes:
        major, _, ahead, _ = struct.unpack_from("<IIII", request.body)
        return struct.pack("<IIIIHHIIHH8I", major, 31, ahead, _FLAGS, 12, 9, 1 << 20, 1, 256, 0, *[0] * 8)

    def _lookup(self, request: _Request) -> bytes:
        path = self._named(request)
        self._require_visible(path)
        return self._entry(path)

    def _getattr(self, request: _Request) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._paths[request.node])

    def _setattr(self, request: _Request) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", request.body)
        path = self._real(self._paths[request.node])
        if valid & 8:
            os.truncate(path, size)
        if valid & 1:
            (mode,) = struct.unpack_from("<I", request.body, 68)
            path.chmod(stat.S_IMODE(mode))
        return self._getattr(request)

    def _access(self, request: _Request) -> bytes:
        return b""

    def _statfs(self, request: _Request) -> bytes:
        found = os.statvfs(self._source)
        return struct.pack(
            "<QQQQQIIII6I",
            found.f_blocks,
            found.f_bfree,
            found.f_bavail,
            found.f_files,
            found.f_ffree,
            found.f_bsize,
            255,
            found.f_frsize,
            0,
            *[0] * 6,
        )

    # files

    def _open(self, request: _Request) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        handle = os.open(self._real(self._paths[request.node]), flags & ~os.O_DIRECT)
        return struct.pack("<QII", handle, _DIRECT_IO, 0)

    def _create(self, request: _Request) -> bytes:
        flags, mode, *_ = struct.unpack_from("<IIII", request.body)
        path = self._named(request, 16)
        handle = os.open(self._source / path, flags | os.O_CREAT, mode)
        return self._entry(path) + struct.pack("<QII", handle, _DIRECT_IO, 0)

    def _read(self, request: _Request) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", request.body)
        rule = self._rules.find("short", self._paths[request.node])
        if rule is not None:
            size = max(0, min(size, rule["bytes"] - offset))
        return os.pread(handle, size, offset)

    def _write(self, request: _Request) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", request.body)
        return struct.pack("<II", os.pwrite(handle, request.body[40 : 40 + size], offset), 0)

    def _fsync(self, request: _Request) -> bytes:
        os.fsync(*struct.unpack_from("<Q", request.body))
        return b""

    def _flush(self, request: _Request) -> bytes:
        return b""

    def _release(self, request: _Request) -> bytes:
        os.close(*struct.unpack_from("<Q", request.body))
        return b""

    # directories

    def _opendir(self, request: _Request) -> bytes:
        path = self._paths[request.node]
        entries = [(self._node(path), b".", stat.S_IFDIR), (1, b"..", stat.S_IFDIR)]
        for name in os.listdir(self._source / path):
            child = _join(path, name)
            if self._rules.find("hide", child) is None:
                entries.append((self._node(child), name.encode(), os.lstat(self._source / child).st_mode))
        handle = self._next
        self._next += 1
        self._listings[handle] = entries
        return struct.pack("<QII", handle, 0, 0)

    def _readdir(self, request: _Request) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", request.body)
        found = b""
        for number, (node, name, mode) in enumerate(self._listings[handle][offset:], offset + 1):
            entry = _DIRENT.pack(node, number, len(name), mode >> 12) + name
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found

    def _releasedir(self, request: _Request) -> bytes:
        del self._listings[struct.unpack_from("<Q", request.body)[0]]
        return b""

    def _fsyncdir(self, request: _Request) -> bytes:
        return b""

    def _mkdir(self, request: _Request) -> bytes:
        mode, _ = struct.unpack_from("<II", request.body)
        path = self._named(request, 8)
        (self._source / path).mkdir(mode)
        return self._entry(path)

    def _unlink(self, request: _Request) -> bytes:
        (self._source / self._named(request)).unlink()
        return b""

    def _rmdir(self, request: _Request) -> bytes:
        (self._source / self._named(request)).rmdir()
        return b""

    def _link(self, request: _Request) -> bytes:
        (old,) = struct.unpack_from("<Q", request.body)
        path = self._named(request, 8)
        (self._source / path).hardlink_to(self._source / self._paths[old])
        return self._entry(path)

    def _rename(self, request: _Request) -> bytes:
        return self._moved(request, 8)

    def _rename2(self, request: _Request) -> bytes:
        return self._moved(request, 16)

    def _moved(self, request: _Request, skip: int) -> bytes:
        (parent,) = struct.unpack_from("<Q", request.body)
        old, new, _ = request.body[skip:].split(b"\0", 2)
        before = _join(self._paths[request.node], old.decode())
        after = _join(self._paths[parent], new.decode())
        source = self._source / before
        if self._rules.find("flat", before) is not None and source.is_dir() and any(source.iterdir()):
            raise OSError(errno.ENOTEMPTY, "flat")
        source.rename(self._source / after)
        self._follow(before, after)
        return b""

    def _follow(self, before: str, after: str) -> None:
        """What is open keeps its node."""
        for path, node in list(self._nodes.items()):
            if path == before or path.startswith(f"{before}/"):
                moved = after + path[len(before) :]
                del self._nodes[path]
                self._nodes[moved], self._paths[node] = node, moved


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


@contextlib.contextmanager
def _mounted(mount: Path) -> Iterator[int]:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mount(b"faulty", os.fsencode(mount), b"fuse.faulty", 6, options.encode())  # nosuid, nodev
    if done != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(mount))
    try:
        yield device
    finally:
        os.close(device)


def serve(source: Path, mount: Path, rules: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Until it is unmounted, or this process ends: callers that wait then get an error."""
    with _mounted(mount) as device:
        ready()
        FaultyFs(source, device, Rules(rules)).run()
