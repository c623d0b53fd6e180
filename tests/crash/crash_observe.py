"""From disk and engines to what crash_model speaks of. Reads bytes and JSON; none of weightcast's code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from core_cases import read_checkpoint
from crash_model import AdapterSeen, Bytes, ChannelSeen, EngineSeen, LocalSeen, Truth, VersionSeen

INDEX = "model.safetensors.index.json"
_LOOKS = 20
OF_AN_ATTEMPT = re.compile(r"\d+-[0-9a-f]{8}\.")
"""how a name of an object store begins that one attempt at a version writes"""


def digest_of(tensors: Bytes) -> str:
    text = "".join(f"{name} {hashlib.sha256(tensors[name]).hexdigest()}\n" for name in sorted(tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def see_channel(channel: Path) -> ChannelSeen:
    """The pointer first: what it names must be there whenever it is read."""
    pointer = see_pointer(channel)
    versions = {}
    for entry in sorted(channel.glob("weight_v*")):
        number = entry.name.removeprefix("weight_v")
        if number.isdigit() and (entry / INDEX).exists():
            found = _see_standing(entry)
            if found is not None:
                versions[int(number)] = found
    claims = [int(path.stem) for path in (channel / "publishers").glob("*.json") if path.stem.isdigit()]
    base = blake3((channel / "base.json").read_bytes()).hexdigest()
    horizon = json.loads((channel / "channel.json").read_bytes())["horizon"]
    return ChannelSeen(base, pointer, versions, max(claims, default=0), horizon)


def see_adapters(channel: Path) -> dict[str, AdapterSeen]:
    """Of the registry, by names without `adapter/`. Raises ValueError for one that is not whole."""
    if not (channel / "components.json").exists():
        return {}
    found = {}
    for row in json.loads((channel / "components.json").read_bytes())["components"]:
        place = channel / "components" / row["name"]
        seen = see_channel(place)
        facts = {version: _facts_of(place, version) for version in seen.versions}
        belongs = {n: (each["main_version"], each["main_root"]) for n, each in facts.items() if each}
        found[row["name"].removeprefix("adapter/")] = AdapterSeen(row["state"] == "active", seen, belongs)
    return found


def see_roots(channel: Path) -> dict[int, str]:
    """Of the versions of main."""
    found = {0: json.loads((channel / "base.json").read_bytes())["root"]}
    names = (entry.name.removeprefix("weight_v") for entry in channel.glob("weight_v*"))
    for facts in (_facts_of(channel, int(name)) for name in names if name.isdigit()):
        found |= {facts["version"]: facts["root"]} if facts else {}
    return found


def _facts_of(channel: Path, version: int) -> dict[str, Any]:
    try:
        data = (channel / f"weight_v{version:06d}" / INDEX).read_bytes()
    except FileNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(data)["weightcast"]
    return found


def see_pointer(channel: Path) -> int:
    latest = channel / "latest"
    return int(latest.read_text()) if latest.exists() else 0


def see_step(channel: Path, version: int) -> int:
    """The training step of a committed version; 0 where there is none."""
    return _facts_of(channel, version).get("step") or 0


def _see_standing(directory: Path) -> VersionSeen | None:
    """Not in the moment in which a file beside it goes. None: pruned just now; the horizon, which is read
    last, says so."""
    for _ in range(_LOOKS):
        try:
            return _see_version(directory)
        except FileNotFoundError:
            if not directory.exists():
                return None
    return _see_version(directory)


def _see_version(directory: Path) -> VersionSeen:
    data = (directory / INDEX).read_bytes()
    facts = json.loads(data)["weightcast"]
    whole = all(_is(directory / name, size, digest) for name, size, digest in facts["files"])
    content, named = hashlib.sha256(data), {name for name, *_ in facts["files"]}
    for path in sorted(directory.iterdir()):
        # a kill leaves temporary files, and other attempts leave theirs, which nobody reads; what is
        # pruned just now is no file, and raises
        stray = OF_AN_ATTEMPT.match(path.name) and path.name not in named
        if not path.is_dir() and not path.name.startswith(".") and not stray:
            content.update(path.name.encode() + path.read_bytes())
    return VersionSeen(
        digest=blake3(data).hexdigest(),
        parent=facts["parent"],
        base_version=facts["base_version"],
        kind=facts["kind"],
        epoch=facts["epoch"],
        step=facts["step"] or 0,
        whole=whole,
        content=content.hexdigest(),
    )


def _is(path: Path, size: int, digest: str) -> bool:
    if not path.is_file() or path.is_symlink():
        return False
    data = path.read_bytes()
    return len(data) == size and blake3(data).hexdigest() == digest


def see_local(local: Path, *, tensors: bool = True) -> LocalSeen | None:
    """Raises FileNotFoundError and ValueError while a process writes there."""
    room = local / ".weightcast"
    if not (room / "state.json").exists():
        return None
    state = json.loads((room / "state.json").read_bytes())
    active = state["active"]
    steps = [*state["undo"], *([] if active is None else [active])]
    whole = tensors and state["phase"] not in ("seeding", "dirty")
    return LocalSeen(
        phase=state["phase"],
        version=state["position"]["version"],
        digest=state["position"]["digest"],
        tensors=read_checkpoint(local) if whole else {},
        between=None if active is None else (active["base"]["version"], active["target"]["version"]),
        journals=frozenset(path.stem for path in (room / "journal").iterdir()),
        named=frozenset(step["journal"] for step in steps),
        spool=sum(1 for _ in (room / "spool").rglob("*")),
        marks={name: (each["mark"], each["version"]) for name, each in state["engines"].items()},
        blocked=frozenset(each["version"] for each in state["blocked"]),
    )


def see_engine(facts: Mapping[str, Any], truth: Truth) -> EngineSeen:
    """`facts`: as the engines' process tells them, digests for bytes."""
    steps = {digest_of(one): number for number, one in enumerate(truth.steps)}
    served = [digest for digest in facts["served"] if digest not in steps]
    return EngineSeen(
        name=facts["name"],
        maps=facts["maps"],
        loaded=facts["loaded"],
        held=steps.get(facts["held"]),
        paused=facts["paused"],
        spoiled=facts["spoiled"] or bool(served),
        label=facts["label"],
        adapters=facts["adapters"],
        mixed=tuple((steps.get(held), adapters) for held, adapters in facts["mixed"]),
    )
