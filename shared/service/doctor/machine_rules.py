"""What is asked of a machine."""

from __future__ import annotations

from collections.abc import Iterator

from weightcast.shared.service.doctor.findings import Finding, size_text
from weightcast.shared.service.doctor.machine import MachineFacts
from weightcast.shared.service.doctor.places import LocalFacts, RunFacts
from weightcast.shared.service.threads import DAEMON_BYTES

MACHINE = "machine"
_OTHER_FILES = 256
"""descriptors of a daemon besides weight files: connections, locks, logs, libraries"""
_FILES_OF_A_PIECE = 2
"""a weight file may be open in the local checkpoint and in its source"""
_PRIVATE = "give WEIGHTCAST_CACHE a private directory with room, or free space in the one that is told"
_SMALL_SHM = 1 << 30


def judge_machine(facts: MachineFacts, run: RunFacts | None, inside: LocalFacts | None) -> Iterator[Finding]:
    """`run`, `inside`: of channel and local directory, where they were given."""
    yield from _kernels(facts)
    yield from _memory(facts)
    yield from _files(facts, run, inside)
    yield from _identity(facts)


def _kernels(facts: MachineFacts) -> Iterator[Finding]:
    if facts.kernels != "numba":
        yield Finding(
            MACHINE,
            "kernels",
            "failure",
            f"not usable: {facts.kernel_problem}",
            "install the numba and llvmlite releases that weightcast requires",
        )
    elif facts.kernel_problem:
        yield Finding(MACHINE, "kernels", "warning", facts.kernel_problem, _PRIVATE)
    else:
        yield Finding(MACHINE, "kernels", "ok", f"compiled; {facts.cores} cores")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    says = f"{size_text(facts.available_bytes)} available of {size_text(facts.limit_bytes)}"
    if facts.limit_bytes < facts.memory_bytes:
        says += f", the control group's limit (the machine has {size_text(facts.memory_bytes)})"
    if facts.available_bytes < DAEMON_BYTES:
        yield Finding(
            MACHINE,
            "memory",
            "failure",
            f"{says}: a daemon takes up to {size_text(DAEMON_BYTES)}",
            "more memory, or a smaller --memory-budget",
        )
    else:
        yield Finding(MACHINE, "memory", "ok", says)
    if facts.shm_bytes == 0:
        yield Finding(
            MACHINE, "/dev/shm", "note", "there is none", "give --hand-over and --local other directories"
        )
        return
    remedy = "too small for weights: --shm-size, or an emptyDir of medium Memory with a sizeLimit"
    small = facts.shm_bytes < min(_SMALL_SHM, facts.limit_bytes // 4)
    yield Finding(
        MACHINE,
        "/dev/shm",
        "note" if small else "ok",
        f"a tmpfs of {size_text(facts.shm_bytes)}",
        remedy if small else "",
    )


def _files(facts: MachineFacts, run: RunFacts | None, inside: LocalFacts | None) -> Iterator[Finding]:
    wanted = _OTHER_FILES + _FILES_OF_A_PIECE * (0 if inside is None else inside.files)
    if facts.open_files < wanted:
        yield Finding(
            MACHINE,
            "open files",
            "failure",
            f"{facts.open_files} files may be open (hard limit {facts.open_files_most}), {wanted} are needed",
            f"ulimit -n {wanted}, or LimitNOFILE= in the unit",
        )
    else:
        yield Finding(MACHINE, "open files", "ok", f"{facts.open_files} may be open")
    most = None if run is None else run.full_bytes
    if facts.file_bytes is not None and (most is None or facts.file_bytes < most):
        yield Finding(
            MACHINE,
            "file size",
            "warning",
            f"no file may grow beyond {size_text(facts.file_bytes)}",
            "ulimit -f unlimited, or LimitFSIZE=infinity in the unit",
        )
    locked = "no limit" if facts.locked_bytes is None else size_text(facts.locked_bytes)
    yield Finding(MACHINE, "locked memory", "ok", f"{locked}; weightcast locks none")


def _identity(facts: MachineFacts) -> Iterator[Finding]:
    """What a restart is told by: shared/local/boot.py."""
    if not facts.boot_id:
        yield Finding(
            MACHINE,
            "boot id",
            "warning",
            "the kernel tells none: after every start all weights are read again",
            "make /proc/sys/kernel/random/boot_id readable",
        )
    elif not facts.machine_id:
        yield Finding(
            MACHINE,
            "machine id",
            "note",
            "there is no /etc/machine-id: a container's host name stands for it",
            "give the container a host name that stays, or mount /etc/machine-id",
        )
    else:
        yield Finding(MACHINE, "identity", "ok", "a restart of the machine is told from one of the process")
