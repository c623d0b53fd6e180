"""What this machine, or this container, gives a process: facts, no judgement."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.files.space import space_of
from weightcast.shared.local.boot import Boot
from weightcast.shared.service.kernels import kernel_status
from weightcast.shared.service.threads import usable_cores

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_SHM = Path("/dev/shm")
_VM = Path("/proc/sys/vm")
_NONE = 1 << 62


@dataclass(frozen=True)
class MachineFacts:
    cores: int
    memory_bytes: int
    """of the machine"""
    limit_bytes: int
    """of the machine or of the control group that allows less"""
    available_bytes: int
    """that may still be taken, page cache included"""
    dirty_bytes: int
    """of pages that may wait for their disk before the kernel slows down who writes more"""
    shm_bytes: int
    """size of /dev/shm; 0: there is none"""
    open_files: int
    """RLIMIT_NOFILE: soft"""
    open_files_most: int
    """hard"""
    file_bytes: int | None
    """RLIMIT_FSIZE; None: no limit"""
    locked_bytes: int | None
    """RLIMIT_MEMLOCK; None: no limit"""
    boot_id: bool
    """whether the kernel tells one"""
    machine_id: bool
    kernels: str
    """numba or numpy"""
    kernel_problem: str


def look_at_machine() -> MachineFacts:
    """Compiles a first kernel where none is kept."""
    rows = _meminfo()
    memory, available = (rows.get(name, _NONE) for name in ("MemTotal", "MemAvailable"))
    limit, used = _control_group()
    host, kernels = Boot.here(), kernel_status()
    open_files, open_files_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        cores=usable_cores(),
        memory_bytes=memory,
        limit_bytes=min(memory, limit),
        available_bytes=min(available, max(0, limit - used)),
        dirty_bytes=_unthrottled(rows, limit),
        shm_bytes=_size_of(_SHM),
        open_files=open_files,
        open_files_most=open_files_most,
        file_bytes=_limit(resource.RLIMIT_FSIZE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        boot_id=bool(host.boot_id),
        machine_id=_text(Path("/etc/machine-id")) != "",
        kernels=kernels.kind,
        kernel_problem=kernels.problem,
    )


def _meminfo() -> dict[str, int]:
    """Of proc(5), in bytes."""
    rows = dict(line.split(":", 1) for line in _text(_MEMINFO).splitlines() if ":" in line)
    numbers = {name: row.split()[:1] for name, row in rows.items()}
    return {name: int(one[0]) << 10 for name, one in numbers.items() if one and one[0].isdigit()}


def _unthrottled(meminfo: dict[str, int], limit: int) -> int:
    """The kernel's mm/page-writeback.c: half way between the amounts at which it begins to write back and at
    which it stops writers, shares of the memory that files may have."""
    files = sum(meminfo.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
    most, least = (_amount(name, min(files, limit)) for name in ("dirty", "dirty_background"))
    return (most + (least if least < most else most // 2)) // 2 if most else _NONE


def _amount(name: str, memory: int) -> int:
    """Of a pair of vm.NAME_bytes and vm.NAME_ratio, of which the other one is 0."""
    nbytes, percent = (_number(_text(_VM / f"{name}_{unit}")) or 0 for unit in ("bytes", "ratio"))
    return nbytes or memory * percent // 100


def _control_group() -> tuple[int, int]:
    """Limit and use of the tightest control group (version 2) that this process is in. What the page cache
    of files holds can be taken back and is not counted; files in a tmpfs cannot, and are."""
    own = next((line[3:] for line in _text(_OWN_CGROUP).splitlines() if line.startswith("0::")), "/")
    found = [(_NONE, 0)]
    directory = _CGROUPS / own.lstrip("/")
    for place in (directory, *directory.parents):
        if place.is_relative_to(_CGROUPS):
            limit = _number(_text(place / "memory.max"))
            if limit is not None:
                found.append((limit, _in_use(place)))
    return min(found, key=lambda each: each[0] - each[1])


def _in_use(group: Path) -> int:
    rows = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    cached = (_number(rows.get("file", "")) or 0) - (_number(rows.get("shmem", "")) or 0)
    return max(0, (_number(_text(group / "memory.current")) or 0) - max(0, cached))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _size_of(mount: Path) -> int:
    try:
        return space_of(mount).total_bytes
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
