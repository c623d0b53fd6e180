"""Named places at which a test stops, disturbs or merely counts a process.

Nothing happens there unless code inside the process called `watch`. No module of weightcast does, and no
environment variable, setting or file leads to it (a test reads every module), so that a daemon in service
passes each place at the price of one comparison. tests/crash is who calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

Watcher = Callable[[str, Path | None], None]
"""Called with the name of a failpoint, in the thread that passes it, and the file or directory concerned."""

FAILPOINTS: Mapping[str, str] = {
    "file.begun": "a small file is about to be made: nothing is written",
    "file.written": "its bytes are in a temporary file, not synced",
    "file.synced": "they are durable under the temporary name",
    "file.renamed": "it has its name; the directory is not synced",
    "file.linked": "the same, for a file that must not have existed",
    "directory.synced": "names made or changed in a directory are durable",
    "lock.wanted": "a lock is about to be taken",
    "lock.taken": "the lock is held",
    "lock.released": "the lock is free again",
    "shard.written": "a shard of a version has all its bytes, not synced",
    "shard.synced": "it is durable",
    "part.begun": "a rank found its attempt and has written nothing",
    "part.written": "its shard is there, without its draft",
    "part.left": "its draft is there; rank 0 may commit",
    "attempt.begun": "the directory of an attempt at a version is there, empty",
    "publish.recovered": "what was left behind is finished, nothing is written",
    "publish.assembled": "all parts are there; nothing else",
    "version.begun": "among the parts is a directory for the version, empty",
    "version.moved": "one of its shards is in it",
    "publish.proven": "the version's files were staged as a host would; it has no index",
    "index.allowed": "it has index and signature; the epoch was compared for the last time before its name",
    "pointer.allowed": "the same before the pointer: the version is there",
    "pointer.moved": "the fleet sees the version; the publisher's local checkpoint is behind",
    "trash.moved": "leftovers are in the trash, not deleted",
    "trash.deleted": "they are deleted",
    "hook.begun": "a hook's command runs",
    "hook.ended": "it has ended; nothing follows from that yet",
    "anchor.begun": "a directory for the anchor is there, empty, under a name of its own",
    "anchor.copied": "one of its weight files has all its bytes, not synced",
    "anchor.synced": "it is durable",
    "anchor.written": "all its files are durable, it has no index",
    "anchor.committed": "it has its index and its name",
    "skip.begun": "a directory for a multi-step delta is there, empty, under a name of its own",
    "skip.written": "its shard is durable and proven, it has no index",
    "skip.committed": "it has its index and its name",
    "history.linked": "an update's journal has a second name, for multi-step deltas, alone",
    "history.kept": "its step and index are stored with it",
    "prune.horizon": "the horizon is raised, no version has gone",
    "prune.moved": "a version is in the trash; others may follow",
    "prune.emptying": "a version in the trash has no index any more, its shards are there",
    "prune.deleted": "it is deleted; others may still be",
    "upkeep.idle": "no maintenance is due any more",
    "journal.begun": "a journal has its header",
    "journal.record": "one of its records is written",
    "journal.complete": "it has its footer; no state names it",
    "journal.removed": "a journal that no state names any more was removed",
    "fetch.begun": "a shard's file is in the spool, empty",
    "fetch.copied": "a shard is in the spool, its digest not compared",
    "patch.begun": "the state says `patching`, no word is written",
    "patch.record": "the words of one record are written (or written back)",
    "patch.written": "all words are written; the state still says `patching`",
    "patch.recorded": "the state says the new version, and names the journal where it may have to be undone",
    "undo.begun": "the state says `undoing`, no word is written back",
    "undo.written": "all words are written back; the state still says `undoing`",
    "undo.recorded": "the state says the old version; the journal is still there",
    "undo.forgotten": "the state names no undo; the journals are still there",
    "replay.written": "a killed step's words are written again, not hashed",
    "repair.noted": "the state says `dirty` and which version is meant; nothing is written",
    "repair.built": "the right words of damaged tensors are in the spool",
    "repair.written": "they are written, not read back",
    "seed.checked": "the source was compared, nothing is written",
    "seed.stray": "a file of an earlier run was removed",
    "seed.allocated": "a weight file has its size and no bytes",
    "seed.copied": "it has its bytes, not synced",
    "seed.synced": "it is durable",
    "seed.hashed": "what was written was read back; the state still says `seeding`",
    "spool.removed": "a fetched shard was removed",
    "spool.dropped": "the shards of a staged version were removed",
    "engine.looked": "the engines said what they are",
    "engine.staged": "a patch for the engines' memory is written; no engine has seen it",
    "engine.checked": "engines have checked it; they serve, and the local checkpoint is as before",
    "engine.noted": "the state names an engine that is about to be paused, or is in doubt",
    "engine.paused": "an engine is paused, on the weights from before",
    "engine.patched": "an engine that mmaps its weights is paused on patched files",
    "engine.applied": "an engine answered to a patch of its memory; it is paused",
    "engine.reloaded": "an engine answered to its reload",
    "engine.read-back": "it was asked which version it holds",
    "engine.resumed": "it serves again; the state still says `pausing`",
    "engine.recorded": "the state has the outcome",
    "group.prepared": "every host of a group has a version staged, nothing is written",
    "group.still": "a follower holds a version under the shared lock; its leader does not know",
    "group.held": "all followers hold; the leader has not patched, or is about to reload",
    "group.stood": "an engine took a version and all hosts held; it is paused",
    "group.released": "the followers are free again",
    "refused.blocked": "a refused version is blocked, nothing is undone",
    "refused.served": "the version before it is served again",
    "inbox.looked": "what was left behind is finished; the watched directory is about to be looked at",
    "inbox.chosen": "a watched checkpoint is noted as being published",
    "inbox.published": "it is out; the note still says that it is being published",
    "inbox.aside": "a published checkpoint was renamed, to compare it before it is deleted",
    "inbox.buried": "it is what was published, and was renamed to be deleted",
    "inbox.deleted": "it is deleted",
}
"""Every failpoint, and what lies behind a process that dies there."""

_watcher: Watcher | None = None


def failpoint(name: str, where: Path | str | None = None) -> None:
    """Marks a place; `name` stands in FAILPOINTS. Raises what a test has asked for, normally nothing."""
    if _watcher is not None:
        _watcher(name, None if where is None else Path(where))


def watch(watcher: Watcher | None) -> None:
    """Only for tests: from now on `watcher` is called at every failpoint of this process."""
    global _watcher
    _watcher = watcher
