"""What is legal: rules over what was seen on disk and in engines, without IO and without weightcast's code.

`Truth` is the trainer's side: which checkpoint (by the number of its training step) has which bytes. Every
rule answers with violations as texts; an empty list is a legal state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Bytes = Mapping[str, bytes]
"""tensor name to its bytes"""


@dataclass
class Truth:
    """`steps[0]` is the base."""

    steps: list[Bytes]

    def step_of(self, found: Bytes) -> int | None:
        return next((n for n, one in enumerate(self.steps) if one == found), None)

    @property
    def newest(self) -> int:
        return len(self.steps) - 1


@dataclass(frozen=True)
class VersionSeen:
    """A version directory with an index. `whole`: all files that it names are there with their digests;
    `content`: digest over all its files; `step` 0 stands for none."""

    digest: str
    parent: str
    base_version: int
    kind: str
    epoch: int
    step: int
    whole: bool
    content: str


@dataclass(frozen=True)
class ChannelSeen:
    """`pointer` 0: none yet."""

    base_digest: str
    pointer: int
    versions: Mapping[int, VersionSeen]
    epoch: int
    """the highest that was claimed"""
    horizon: int = 0
    """versions below may be gone"""


@dataclass(frozen=True)
class LocalSeen:
    """A local checkpoint. `between`: versions that the step under way leads from and to; `journals`: ids on
    disk; `named`: ids that the state names; `marks`: engine to (mark, version)."""

    phase: str
    version: int
    digest: str
    tensors: Bytes
    between: tuple[int, int] | None = None
    journals: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    spool: int = 0
    marks: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    blocked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EngineSeen:
    """`held`: the step whose bytes it has, None when these are no step's (or none were ever loaded).
    `maps`: it has what lies on disk."""

    name: str
    maps: bool
    loaded: bool
    held: int | None
    paused: bool
    spoiled: bool
    """it served at some time with weights that were half loaded or being written"""
    label: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """by name in the engine: digest of the tensors"""
    mixed: tuple[tuple[int | None, Mapping[str, str]], ...] = ()
    """steps of main weights, and the adapters that requests could use over them"""


@dataclass(frozen=True)
class AdapterSeen:
    """A listed component. `belongs`: by version the main version, and its root, that it names."""

    active: bool
    channel: ChannelSeen
    belongs: Mapping[int, tuple[int, str]]


def step_at(truth: Truth, channel: ChannelSeen, version: int) -> int | None:
    """The training step behind a version; 0 for the base."""
    if version == 0:
        return 0
    found = channel.versions.get(version)
    return None if found is None or not 0 < found.step <= truth.newest else found.step


def channel_violations(
    channel: ChannelSeen, before: ChannelSeen | None = None, *, stale_pointer: bool = False
) -> list[str]:
    """At every moment. `stale_pointer`: a suspended publisher woke behind its last check: its pointer may be
    one that was true before."""
    return [
        *_pointer_violations(channel, before, stale_pointer),
        *_chain_violations(channel),
        *(_history_violations(channel, before) if before is not None else ()),
    ]


def _pointer_violations(channel: ChannelSeen, before: ChannelSeen | None, stale: bool) -> list[str]:
    found = []
    if channel.horizon > channel.pointer > 0:
        found.append(f"the horizon {channel.horizon} is above the pointer {channel.pointer}")
    if channel.pointer and channel.pointer not in channel.versions:
        found.append(f"the pointer names {channel.pointer}, which has no index")
    if before is not None and channel.pointer < before.pointer and not stale:
        found.append(f"the pointer went back from {before.pointer} to {channel.pointer}")
    above = [version for version in channel.versions if version > channel.pointer]
    if len(above) > 1 and not stale:
        found.append(f"{len(above)} versions are committed above the pointer {channel.pointer}")
    return found


def _chain_violations(channel: ChannelSeen) -> list[str]:
    found = []
    epoch = 0
    for number in sorted(channel.versions):
        version = channel.versions[number]
        if not version.whole:
            found.append(f"version {number} is committed and not whole")
        if version.epoch < epoch:
            found.append(f"version {number} has epoch {version.epoch} after {epoch}")
        if version.epoch > channel.epoch:
            found.append(f"version {number} has epoch {version.epoch}, which nobody claimed")
        epoch = max(epoch, version.epoch)
        found += _link_violations(channel, number, version)
    return found


def _link_violations(channel: ChannelSeen, number: int, version: VersionSeen) -> list[str]:
    if version.kind == "anchor":
        return []
    if version.base_version != number - 1:
        return [f"version {number} starts from {version.base_version}"]
    if number - 1 < channel.horizon and number - 1 not in channel.versions:
        return []
    if number == 1:
        parent = channel.base_digest
    elif number - 1 in channel.versions:
        parent = channel.versions[number - 1].digest
    else:
        return [f"version {number} is committed without version {number - 1}"]
    return [] if version.parent == parent else [f"version {number} does not continue version {number - 1}"]


def _history_violations(channel: ChannelSeen, before: ChannelSeen) -> list[str]:
    found = []
    for number, version in before.versions.items():
        now = channel.versions.get(number)
        if now is None:
            if number >= channel.horizon:
                found.append(f"version {number} is gone, the horizon is {channel.horizon}")
        elif now.content != version.content:
            found.append(f"version {number} was changed after it was committed")
    return found


def local_violations(truth: Truth, channel: ChannelSeen, local: LocalSeen | None) -> list[str]:
    """At every moment; None: nothing was ever seeded."""
    if local is None or local.phase in ("seeding", "dirty"):
        return []
    found = []
    missing = local.named - local.journals
    if missing and local.phase != "clean":
        found.append(f"the state names journals that are gone: {sorted(missing)}")
    if _is_pruned(channel, min((local.version, *(local.between or ())))):
        return found
    if local.version > 0:
        version = channel.versions.get(local.version)
        if version is None or version.digest != local.digest:
            found.append(f"the state names a version {local.version} that the channel does not have")
            return found
    return found + _bytes_violations(truth, channel, local)


def _is_pruned(channel: ChannelSeen, version: int) -> bool:
    """Nothing can be said of its bytes any more."""
    return 0 < version < channel.horizon and version not in channel.versions


def _bytes_violations(truth: Truth, channel: ChannelSeen, local: LocalSeen) -> list[str]:
    if local.phase == "clean":
        step = step_at(truth, channel, local.version)
        if step is None:
            return [f"version {local.version} is of no step of the trainer"]
        if truth.steps[step] != local.tensors:
            other = truth.step_of(local.tensors)
            return [f"state: clean at version {local.version} (step {step}), bytes: those of step {other}"]
        return []
    if local.between is None:
        return [f"phase {local.phase} without a step"]
    steps = [step_at(truth, channel, version) for version in local.between]
    if None in steps:
        return [f"phase {local.phase} between versions {local.between} that the channel does not have"]
    first, second = (truth.steps[step] for step in steps if step is not None)
    torn = [name for name, data in local.tensors.items() if not _mixed(data, first[name], second[name])]
    return [f"{name} holds bytes of neither version of the step {local.between}" for name in torn]


def _mixed(data: bytes, first: bytes, second: bytes) -> bool:
    if len(data) != len(first):
        return False
    return all(a in (b, c) for a, b, c in zip(data, first, second, strict=True))


def engine_violations(
    truth: Truth, channel: ChannelSeen, local: LocalSeen | None, engines: Sequence[EngineSeen]
) -> list[str]:
    """At every moment."""
    found = []
    for engine in engines:
        found += _serving_violations(engine, local)
        if engine.loaded and not engine.maps:
            found += _copy_violations(truth, channel, local, engine)
    return found


def _serving_violations(engine: EngineSeen, local: LocalSeen | None) -> list[str]:
    found = []
    mark = None if local is None else local.marks.get(engine.name, (None, None))[0]
    if engine.spoiled:
        found.append(f"{engine.name} served weights that were not whole")
    if engine.paused and mark not in ("pausing", "suspect"):
        found.append(f"{engine.name} is paused, and the state says {mark}")
    torn = local is not None and local.phase in ("patching", "undoing")
    if engine.maps and engine.loaded and torn and not engine.paused and engine.held is None:
        found.append(f"{engine.name} maps files that are being written, and serves")
    return found


def _copy_violations(
    truth: Truth, channel: ChannelSeen, local: LocalSeen | None, engine: EngineSeen
) -> list[str]:
    if engine.held is None:
        return [f"{engine.name} holds bytes of no version"]
    if local is None or local.phase in ("seeding", "dirty"):
        return []
    mark, version = local.marks.get(engine.name, ("", None))
    if mark != "served" or version is None or _is_pruned(channel, version):
        return []
    if step_at(truth, channel, version) != engine.held:
        return [f"the state says that {engine.name} serves version {version}; it holds step {engine.held}"]
    if version > max((local.version, *(local.between or ()))):
        return [f"{engine.name} serves version {version}, newer than the local checkpoint's {local.version}"]
    return []


@dataclass(frozen=True)
class Settled:
    """Where everything must be once nothing happens any more. `version`: what hosts hold; `seeds`: how often
    a host may have been seeded since the kill."""

    pointer: int
    step: int
    version: int
    seeds: int = 0


def belonging_violations(adapters: Mapping[str, AdapterSeen], roots: Mapping[int, str]) -> list[str]:
    """At every moment. `roots`: of the versions of main that are there."""
    return [
        f"{name}@{version} names version {main} of main with another root"
        for name, adapter in adapters.items()
        for version, (main, root) in adapter.belongs.items()
        if roots.get(main, root) != root
    ]


def mixing_violations(
    truth: Truth,
    channel: ChannelSeen,
    adapters: Mapping[str, AdapterSeen],
    digests: Mapping[str, Mapping[int, str]],
    engine: EngineSeen,
) -> list[str]:
    """At every moment. `digests`: of the tensors of each adapter, by step."""
    found = []
    for held, loaded in engine.mixed:
        for label, digest in loaded.items():
            name, _, number = label.partition("@")
            adapter = adapters.get(name)
            version = None if adapter is None else adapter.channel.versions.get(int(number))
            if adapter is None or version is None:
                if adapter is None or int(number) >= adapter.channel.horizon:
                    found.append(f"{engine.name} has {label}, which was never published")
                continue
            if digests[name].get(version.step) != digest:
                found.append(f"{engine.name} has other bytes than those of {label}")
            main = step_at(truth, channel, adapter.belongs[int(number)][0])
            if main is not None and main != held:
                found.append(f"{engine.name} offered {label} of main step {main} over step {held}")
    return found


def settled_adapters(
    truth: Truth, channel: ChannelSeen, adapters: Mapping[str, AdapterSeen], engine: EngineSeen
) -> list[str]:
    """Names in the engine once nothing happens any more: the newest of each active adapter, where it belongs
    to the main weights."""
    found = []
    for name, adapter in adapters.items():
        versions = {int(label.partition("@")[2]) for label in engine.adapters if label.startswith(f"{name}@")}
        at = adapter.channel.pointer
        fits = bool(at) and step_at(truth, channel, adapter.belongs[at][0]) == engine.held
        if adapter.active and fits and max(versions, default=0) != at:
            found.append(f"{engine.name} has versions {sorted(versions)} of {name}, not {at}")
        elif not (adapter.active and fits) and versions:
            found.append(f"{engine.name} keeps versions {sorted(versions)} of {name}")
    return found


def settled_violations(
    truth: Truth,
    channel: ChannelSeen,
    locals_: Mapping[str, LocalSeen | None],
    engines: Sequence[EngineSeen],
    wanted: Settled,
    seeds: int,
) -> list[str]:
    found = []
    if channel.pointer != wanted.pointer:
        found.append(f"the pointer is at {channel.pointer}, not at {wanted.pointer}")
    if step_at(truth, channel, channel.pointer) != wanted.step and wanted.version == wanted.pointer:
        found.append(f"version {channel.pointer} is not of step {wanted.step}")
    for name, local in locals_.items():
        at = channel.pointer if name == "publisher" else wanted.version
        found += [f"{name}: {text}" for text in _rest_violations(truth, channel, local, at)]
    host = locals_.get("host")
    if host is not None and host.named:
        found.append(f"host: keeps journals although its engines serve: {sorted(host.named)}")
    for engine in engines:
        found += _aligned_violations(truth, channel, engine, wanted.version)
    if seeds > wanted.seeds:
        found.append(f"seeded {seeds} times where {wanted.seeds} were needed: the journal suffices")
    return found


def _rest_violations(truth: Truth, channel: ChannelSeen, local: LocalSeen | None, version: int) -> list[str]:
    if local is None:
        return ["nothing is seeded"]
    if (local.phase, local.version) != ("clean", version):
        return [f"{local.phase} at version {local.version}, not at {version}"]
    found = []
    if local.journals != local.named or local.spool:
        strays = sorted(local.journals ^ local.named)
        found.append(f"journals that are not those of the state: {strays}, in the spool: {local.spool}")
    return found + local_violations(truth, channel, local)


def _aligned_violations(truth: Truth, channel: ChannelSeen, engine: EngineSeen, version: int) -> list[str]:
    found = []
    step = step_at(truth, channel, version)
    if engine.paused:
        found.append(f"{engine.name} is still paused")
    if engine.held != step:
        found.append(f"{engine.name} holds step {engine.held}, not {step}")
    if engine.label and engine.label != str(version):
        found.append(f"{engine.name} calls its weights {engine.label}, not {version}")
    return found
