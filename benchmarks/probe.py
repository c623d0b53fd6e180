"""What the operating system says of this machine and of processes."""

from __future__ import annotations

import os
import platform
import resource
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .results import Machine

_PACKAGES = ("weightcast", "numpy", "numba", "zstandard", "xxhash", "blake3", "torch")
_SAMPLE_SECONDS = 0.02
_BLOCK = 8 << 20


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def machine(directory: Path) -> Machine:
    """`directory`: where the files of the benchmark lie."""
    return Machine(
        cpu=_processor(),
        cores=cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        file_system=_file_system(directory),
        versions={name: found for name in _PACKAGES if (found := _version(name))},
    )


def _processor() -> str:
    """By its maker's name, which generations share, and by LLVM's where kernels are compiled."""
    name = _field("/proc/cpuinfo", "model name")
    try:
        from weightcast.shared.kernels.compiler import processor
    except ImportError:
        return name
    return f"{name} ({processor()})"


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _file_system(directory: Path) -> str:
    """Type of the innermost mount that `directory` lies in."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        where, form = line.split()[1:3]
        if directory.resolve().is_relative_to(where) and Path(where).is_relative_to(best):
            best, kind = Path(where), form
    return kind


def cpu_seconds(process: int) -> float:
    """User and system time of a running process."""
    text = Path(f"/proc/{process}/stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def ended_children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def anon_bytes(process: int) -> int:
    """RssAnon; 0 once the process is gone. Pages of mapped files belong to the page cache."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(found[0]) << 10 if found else 0


class Highest:
    """The most RssAnon of a process that was seen."""

    def __init__(self) -> None:
        self.nbytes = 0


@contextmanager
def highest_anon(process: int) -> Iterator[Highest]:
    seen, over = Highest(), threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            seen.nbytes = max(seen.nbytes, anon_bytes(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def files_below(*directories: Path) -> list[Path]:
    return [path for each in directories for path in sorted(each.rglob("*")) if path.is_file()]


def forget_pages(*directories: Path) -> None:
    """Drops the files below from the page cache. Files that a process has mapped stay."""
    for path in files_below(*directories):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_all(paths: Sequence[Path], threads: int) -> int:
    """Reads the files block by block into buffers that are kept; bytes read."""
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK)]
    room = threading.local()

    def read(block: tuple[Path, int]) -> int:
        if not hasattr(room, "buffer"):
            room.buffer = bytearray(_BLOCK)
        path, at = block
        with path.open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [room.buffer], at)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, blocks))
