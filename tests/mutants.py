"""Bugs that the tests must catch: python tests/mutants.py [NAME ...]

Each is planted into a copy of the tree, where the tests named next to it have to fail. It exits with 1 if one
survives. `tests/test_mutants.py` sees to it that every bug can still be planted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "publisher", "subscriber")


@dataclass(frozen=True)
class Mutant:
    """`file` with `new` in place of `old`, which is there once."""

    file: str
    old: str
    new: str
    tests: str

    def planted(self) -> str:
        """The file's text with the bug."""
        text = (ROOT / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.file}: {self.old!r} is there {text.count(self.old)} times"
        return text.replace(self.old, self.new)


MUTANTS = {
    "digest of a fetched file ignored": Mutant(
        "shared/checkpoint/update/fetch.py",
        "size != record.size or digest.hexdigest() != record.blake3",
        "size != record.size",
        "tests/local/test_preparing.py",
    ),
    "delta of another history taken": Mutant(
        "shared/checkpoint/update/plan.py",
        "return link.parent is None or link.parent == here.digest",
        "return True",
        "tests/local/test_plan.py",
    ),
    "files not looked at before the lock": Mutant(
        "shared/checkpoint/update/patch.py",
        "    require_files(local)\n    local.check_alone()",
        "    require_files(local)",
        "tests/local/test_swapped_files.py",
    ),
    "swapped files taken for the mapped ones": Mutant(
        "shared/checkpoint/update/patch.py",
        'failpoint("patch.written", local.directory)\n    require_files(local)',
        'failpoint("patch.written", local.directory)',
        "tests/local/test_swapped_files.py",
    ),
    "refused versions are repaired towards": Mutant(
        "shared/checkpoint/update/patch.py",
        "if position.digest not in blocked) or known",
        ") or known",
        "tests/local/test_state.py",
    ),
    "statement of another place accepted": Mutant(
        "shared/channel/signing.py",
        "    if different:\n",
        "    if False:\n",
        "tests/channel/test_signing.py tests/subscriber/test_signed_hosts.py",
    ),
    "newer owner overlooked": Mutant(
        "shared/channel/claims.py",
        "if newest > self.epoch:",
        "if newest > self.epoch + 1:",
        "tests/channel/test_claims.py tests/publisher/test_epochs.py",
    ),
    "one version too few kept": Mutant(
        "publisher/maintenance/retention.py",
        "pointer - retention.keep_versions + 1",
        "pointer - retention.keep_versions + 2",
        "tests/publisher/test_retention_rules.py tests/publisher/test_pruning.py",
    ),
    "hosts that are behind forgotten": Mutant(
        "publisher/maintenance/retention.py",
        "return max(1, min([first, *behind]))",
        "return max(1, first)",
        "tests/publisher/test_retention_rules.py",
    ),
    "engine of another run believed": Mutant(
        "subscriber/engines/rules.py",
        "return facts.held is None or facts.held == weights",
        "return facts.held is None or facts.held.version == weights.version",
        "tests/subscriber/test_host_rules.py",
    ),
    "restarted engine counts as served": Mutant(
        "subscriber/engines/rules.py",
        "            (facts.process, served_process),\n",
        "",
        "tests/subscriber/test_host_rules.py tests/subscriber/test_engine_restarts.py",
    ),
    "version too old admitted by the gate": Mutant(
        "subscriber/gate/conditions.py",
        "return version >= self._least(target)",
        "return version >= self._least(target) - 1",
        "tests/subscriber/test_gate.py",
    ),
    "answer during an update not widened": Mutant(
        "subscriber/gate/traffic.py",
        "call.low, call.high = min(call.low, toward), max(call.high, toward)",
        "pass",
        "tests/subscriber/test_traffic.py",
    ),
    "host that fails stays eligible": Mutant(
        "subscriber/gateway/hosts.py",
        "        host.version = None\n        if now",
        "        if now",
        "tests/subscriber/test_gateway.py",
    ),
    "pointer moved before the version is committed": Mutant(
        "publisher/publish/commit.py",
        "store.commit(draft, name, INDEX_NAME, data, allowed)",
        "write_pointer(store, index.version), store.commit(draft, name, INDEX_NAME, data, allowed)",
        "tests/publisher/test_core_crashes.py tests/publisher/test_publishing_through_stores.py",
    ),
}


def survives(mutant: Mutant) -> bool:
    """Whether its tests pass. Without numba: nothing is compiled anew for it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        tree = Path(place) / "tree"
        for package in (*PACKAGES, "tests", "docs", "examples", "deploy"):
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns(".pytest_cache"))
        for name in ("pyproject.toml", "Makefile", "README.md"):
            shutil.copy(ROOT / name, tree / name)
        (tree / mutant.file).write_text(mutant.planted())
        links = tree / "path" / "weightcast"
        links.mkdir(parents=True)
        for package in PACKAGES:
            (links / package).symlink_to(tree / package)
        for name in ("client.py", "integrations"):
            (links / name).symlink_to(tree / "shared" / "top" / name)
        run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
        done = subprocess.run(
            run,
            cwd=tree,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree / "path")},
        )
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(f"    {failed[0] if failed else 'all tests passed'}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Plants all bugs, or those named."""
    names = sys.argv[1:] or list(MUTANTS)
    survivors = []
    for name in names:
        print(name, flush=True)
        if survives(MUTANTS[name]):
            survivors.append(name)
    print(f"{len(names) - len(survivors)} of {len(names)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
