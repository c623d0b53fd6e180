"""Components of a run. `main` is the channel itself; each adapter and the draft model is a channel of its own
below it, which starts from zeros. `components.json` lists them: it is the commit point of adding and retiring
one. docs/FORMAT.md, Components."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import numpy as np
from blake3 import blake3

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, Untrusted, WeightcastError, WrongRun
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import UNKNOWN_KEY, Problem, faults, flaw
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.run_files import (
    DRAFT,
    FORMAT,
    Base,
    check_format,
    parse_base,
    run_id,
    starts_from_zeros,
    write_base,
)
from weightcast.shared.channel.signing import (
    SIGNATURE_LIMIT,
    PrivateKey,
    Trust,
    require_same,
    stated_by_components,
    stated_in,
    write_signature,
)
from weightcast.shared.channel.store import AlreadyExists, Changed, Store, read_if_there
from weightcast.shared.digest.checksums import hash_bytes, root
from weightcast.shared.files.strict_json import Members, parse_object, write_object

COMPONENTS, REGISTRY = "components", "components.json"
ADAPTER = "adapter/"
REGISTRY_LIMIT = 1 << 20
ComponentState = Literal["active", "retired"]
_TRIES = 20
_SIGNATURE = b',"signature":'
"""the last member; what is before it is signed"""
_NOT_LISTED = "hosts keep the components that they have; restore the file from a backup"


@dataclass(frozen=True)
class Component:
    """`name`: `adapter/NAME` or `draft`; `added`, `retired`: unix times on the writer's clock."""

    name: str
    state: ComponentState
    added: float
    retired: float | None = None

    @property
    def active(self) -> bool:
        return self.state == "active"


def check_name(name: str) -> str:
    """`name`, if a component can have it. Raises Refused."""
    if not starts_from_zeros(name):
        meant = f"did you mean {ADAPTER}{name}? " if starts_from_zeros(ADAPTER + name) else ""
        raise Refused(
            f"{name[:80]!r} is not the name of a component",
            remedy=f"{meant}give draft, or adapter/NAME: letters, digits and ._- "
            "(at most 64, no dot or dash first)",
        )
    return name


def component_store(store: Store, name: str) -> Store:
    """Where the channel of a component is. `store`: of the run's channel. Raises Refused for a bad name."""
    nested = store.within(f"{COMPONENTS}/{check_name(name)}")
    nested.component = name
    return nested


def open_component(channel: Channel, name: str, known: Channel | None = None) -> Channel:
    """The channel of a component, read with the trust of the run's channel. `known`: as of `Channel.open`.
    Raises what that does, NoChannel while it is being made, and WrongRun for the channel of another run."""
    file, _ = channel.require_ours()
    opened = Channel.open(component_store(channel.store, name), channel.trust, known)
    if opened.foreign:
        raise NoChannel.within(opened.place)
    found, _ = opened.require_ours()
    if found.run_id != file.run_id:
        raise WrongRun(
            f"{opened.place} is of run {found.run_id}, its channel of run {file.run_id}",
            remedy="restore the channel from one backup",
        )
    return opened


def read_components(channel: Channel) -> tuple[Component, ...]:
    """In the order of their names; none in a foreign channel. Raises DamagedFile and UnknownFormat, and
    Untrusted where the channel's keys did not sign them."""
    return read_registry(channel)[0]


def read_registry(channel: Channel) -> tuple[tuple[Component, ...], int]:
    """As `read_components`, with the number that was signed with them; 0 where nothing is checked."""
    if channel.file is None:
        return (), 0
    data = read_if_there(channel.store, REGISTRY, REGISTRY_LIMIT)
    return ((), 0) if data is None else _checked(channel, data)


def _checked(channel: Channel, data: bytes) -> tuple[tuple[Component, ...], int]:
    run, place, number = channel.require_ours()[0].run_id, channel.store.place(REGISTRY), 0
    if channel.trust is not None:
        text, signature = _split(data, place)
        if signature is None:
            raise Untrusted(f"{place} is not signed", remedy="sign it with `weightcast channel sign`")
        stated = channel.trust.check(signature, place, blake3(text).hexdigest())
        number = stated.version
        require_same(stated, stated_by_components(run, number, stated.time, stated.blake3), place)
    return parse_registry(data, run, place), number


def _split(data: bytes, what: str) -> tuple[bytes, bytes | None]:
    """The text that is signed, and the signature. Raises DamagedFile."""
    text, found, rest = data.partition(_SIGNATURE)
    if not found:
        return data, None
    members = Members(parse_object(b"{" + _SIGNATURE[1:] + rest, what), what)
    return text + b"}", members.text("signature", SIGNATURE_LIMIT).encode()


def parse_registry(data: bytes, run: str, what: str = REGISTRY) -> tuple[Component, ...]:
    """`run`: id of the channel's run. Raises UnknownFormat and DamagedFile."""
    members = Members(parse_object(data, what), what)
    check_format(members, what)
    if run_id(members) != run:
        raise DamagedFile(f"{what}: it is of run {run_id(members)!r}, its channel of run {run!r}")
    found = tuple(_component(row, what) for row in members.array("components"))
    names = [each.name for each in found]
    if names != sorted(set(names)):
        raise DamagedFile(f"{what}: its components are not sorted by name, or one is listed twice")
    return found


def _component(row: object, what: str) -> Component:
    members = Members(row, f"{what}: components")
    if not starts_from_zeros(members.text("name", 128)):
        raise members.bad("name", "adapter/NAME or draft")
    state = members.text("state", 32)
    if state not in get_args(ComponentState):
        raise members.bad("state", "active or retired")
    found = members.record(Component, absent=("retired",), state=state)
    if found.active != (found.retired is None):
        raise members.bad("retired", "a time if the component is retired, else null")
    return found


def write_registry(
    run: str, components: tuple[Component, ...], key: PrivateKey | None = None, number: int = 1
) -> bytes:
    """`number`: that is signed with it, higher than that of the one before."""
    rows = [asdict(each) for each in sorted(components, key=lambda each: each.name)]
    top = {"format": FORMAT, "run_id": run, "components": rows}
    if key is None:
        return write_object(top)
    stated = stated_by_components(run, number, time.time(), blake3(write_object(top)).hexdigest())
    return write_object({**top, "signature": write_signature(stated, key).decode()})


def sign_registry(channel: Channel, key: PrivateKey) -> None:
    """In place of the signature that is there."""
    data = read_if_there(channel.store, REGISTRY, REGISTRY_LIMIT)
    if data is not None:
        _write(channel, read_components(channel), key, data)


def add_component(channel: Channel, name: str, key: PrivateKey | None = None) -> Component:
    """Lists an active component; as it is where it is listed already. Raises Refused for a retired one."""

    def added(there: Component | None) -> Component:
        if there is not None and not there.active:
            raise _retired(name)
        return there or Component(check_name(name), "active", time.time())

    return _put(channel, name, added, key)


def retire_component(channel: Channel, name: str, key: PrivateKey | None = None) -> Component:
    """Raises Refused where it is not listed. A retired one stays as it is."""

    def ended(there: Component | None) -> Component:
        if there is None:
            raise _unknown(channel, name)
        return replace(there, state="retired", retired=time.time()) if there.active else there

    return _put(channel, name, ended, key)


def require_active(channel: Channel, name: str) -> None:
    """Raises Refused for a component that is not listed, or retired."""
    if not require_listed(channel, name).active:
        raise _retired(name)


def require_listed(channel: Channel, name: str) -> Component:
    """Raises Refused for a component that is not listed."""
    there = next((each for each in read_components(channel) if each.name == check_name(name)), None)
    if there is None:
        raise _unknown(channel, name)
    return there


def _unknown(channel: Channel, name: str) -> Refused:
    remedy = "check the name (`weightcast channel component log`), or `weightcast channel component add` it"
    return Refused(f"{channel.place} has no component {name}", remedy=remedy)


def _retired(name: str) -> Refused:
    other = "make a channel for a new run" if name == DRAFT else "add the adapter under another name"
    return Refused(f"{name} is retired", remedy=other)


def _put(
    channel: Channel, name: str, change: Callable[[Component | None], Component], key: PrivateKey | None
) -> Component:
    if key is not None and channel.trust is None:
        # what others wrote is not signed
        channel = replace(channel, trust=Trust.of([key.public]))
    for left in reversed(range(_TRIES)):
        data = read_if_there(channel.store, REGISTRY, REGISTRY_LIMIT)
        known = {} if data is None else {c.name: c for c in _checked(channel, data)[0]}
        found = change(known.get(name))
        if found == known.get(name):
            return found
        try:
            _write(channel, (*(known | {name: found}).values(),), key, data)
            return found
        except (AlreadyExists, Changed):
            if not left:
                raise
    raise AssertionError("unreachable")


def _write(
    channel: Channel, components: tuple[Component, ...], key: PrivateKey | None, before: bytes | None
) -> None:
    """`before`: what is there now. Raises AlreadyExists or Changed where it is not."""
    signature = None if before is None else _split(before, REGISTRY)[1]
    number = 1 if signature is None else stated_in(signature, REGISTRY).version + 1
    written = write_registry(channel.require_ours()[0].run_id, components, key, number)
    if before is None:
        channel.store.create(REGISTRY, written)
    else:
        channel.store.replace(REGISTRY, written, expected=before)


def all_faults(store: Store, advance: Advance | None = None, trust: Trust | None = None) -> list[Problem]:
    """As `faults`, of a channel and, if it is a run's, of its components, which their problems name."""
    problems = faults(store, advance, trust)
    try:
        run = Channel.open(store, trust)
    except WeightcastError:
        return problems
    try:
        names = [each.name for each in read_components(run)]
    except WeightcastError as error:
        found = flaw(error)
        meaning = UNKNOWN_KEY if found.remedy else _NOT_LISTED
        return [*problems, Problem(None, found.message, "channel", meaning=meaning, remedy=found.remedy)]
    for name in names:
        try:
            of_component = faults(component_store(store, name), advance, trust)
        except WeightcastError as error:
            of_component = [Problem(None, error.message, "channel")]
        problems += [replace(each, message=f"{name}: {each.message}") for each in of_component]
    return problems


def zero_base(run: str, component: str, tensors: TensorTable) -> Base:
    """Version 0 of a component: `tensors`, all bytes zero. Nobody needs a file for it."""
    table = TensorTable(tensors.specs, check_name(component))
    lanes_of = {size: hash_bytes(np.zeros(size, np.uint8)) for size in set(table.sizes.tolist())}
    lanes = np.array([lanes_of[spec.nbytes] for spec in table], np.uint64).reshape(-1, 2)
    return parse_base(write_base(Base(run, table, lanes, root(table, lanes), ())))
