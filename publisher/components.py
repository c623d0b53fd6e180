"""Adapters and draft of a run as its publisher has them: a publisher of each nested channel, opened when
first needed; what a version of them carries and names besides its weights."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from weightcast.publisher.publish.commit import Signer
from weightcast.publisher.ranks.rendezvous import Rank, looks
from weightcast.publisher.weights.config import (
    carried_bytes,
    config_of,
    digest_of,
    is_config,
    read_bytes,
    read_config,
)
from weightcast.publisher.weights.match import AS_PEFT_SAVES, OF_A_MODEL, bare_name
from weightcast.publisher.weights.tensors import CheckpointWeights, NewWeights
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import NotInTime, Refused, on_error
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.components import (
    COMPONENTS,
    Component,
    add_component,
    check_name,
    component_store,
    open_component,
    read_components,
    require_active,
    retire_component,
    zero_base,
)
from weightcast.shared.channel.directory_store import mounted
from weightcast.shared.channel.layout import BASE_JSON, CHANNEL_JSON, index_key, read_pointer
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    Base,
    ChannelFile,
    is_adapter,
    is_carriable,
    parse_base,
    write_base,
    write_channel_file,
)
from weightcast.shared.channel.signing import PrivateKey, signature_key, stated_by_base, write_signature
from weightcast.shared.channel.store import AlreadyExists, Store
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.verify.inspect import sound_state
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import ADAPTER_MODEL

TrainedOn = tuple[int, str]
"""a version of main, and its root"""


class _Publisher(Protocol):
    @property
    def version(self) -> int: ...

    @property
    def run(self) -> tuple[ChannelFile, Base]: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=_Publisher)


def component_local(local: Path, name: str) -> Path:
    """The publisher's own local checkpoint of a component. `local`: of the run's publisher."""
    return LocalPaths(local).room / COMPONENTS / name


def tensors_of(weights: NewWeights, component: str) -> TensorTable:
    """Of a component that begins with these weights: names as peft saves them. Raises Refused for names of a
    model with adapters in it, and without a configuration."""
    with contextlib.closing(weights):
        specs = [spec._replace(name=bare_name(spec.name)) for spec in weights.table]
    for spec in specs:
        if OF_A_MODEL.search(spec.name):
            raise Refused(f"{spec.name} is not a name in an adapter's file", remedy=AS_PEFT_SAVES)
    if config_of(component) not in (weights.facts.configs or {}):
        raise Refused(
            f"{component} has no {config_of(component)} yet", remedy="give config= with the first version"
        )
    return TensorTable.of(specs)


def tensors_in(directory: Path, component: str) -> TensorTable:
    """As `tensors_of`, of a directory."""
    return tensors_of(ComponentWeights(directory, component), component)


def init_component(
    run: Channel,
    name: str,
    tensors: Callable[[], TensorTable],
    key: PrivateKey | None = None,
    *,
    replaces: bool = True,
) -> None:
    """Makes the channel of a component with these tensors, then lists it: the commit point. What a kill left
    before is made again. `replaces`: an adapter without versions gets these tensors in place of others.
    Raises Refused for a retired one, and where another publisher has the one to be replaced."""
    file, _ = run.require_ours()
    store = component_store(run.store, name)
    listed = any(each.name == name for each in read_components(run))
    if store.stat(CHANNEL_JSON) is None and not listed:
        root = mounted(run.store)
        if root is not None:
            durable.make_within(root, f"{COMPONENTS}/{name}/{BASE_JSON}")
        _write_base(store, zero_base(file.run_id, name, tensors()), key)
        failpoint("component.described", store.place())
        with contextlib.suppress(AlreadyExists):
            store.create(CHANNEL_JSON, write_channel_file(ChannelFile(file.run_id, time.time())))
        failpoint("component.made", store.place())
    elif replaces and is_adapter(name) and read_pointer(store) is None and not store.stat(index_key(1)):
        base = zero_base(file.run_id, name, tensors())
        if not same_tensors(parse_base(store.read(BASE_JSON, BASE_LIMIT)).table, base.table):
            if listed:
                require_active(run, name)
            claimed = claim(store, this_process(), take_over=False)
            _write_base(store, base, key)
            claimed.release()
    add_component(run, name, key)
    failpoint("component.listed", store.place())


def _write_base(store: Store, base: Base, key: PrivateKey | None) -> None:
    """The base last: where it is as wanted, its signature is too."""
    if key is None:
        store.delete(signature_key(BASE_JSON))
    else:
        store.replace(signature_key(BASE_JSON), write_signature(stated_by_base(base, time.time()), key))
    store.replace(BASE_JSON, write_base(base))


def same_tensors(one: TensorTable, other: TensorTable) -> bool:
    return set(one.specs) == set(other.specs)


def drop_replaced(component: Channel, local: Path) -> None:
    """Deletes the publisher's local checkpoint of a version 0 that other tensors replaced: zeros."""
    state, base = sound_state(LocalPaths(local)), component.base
    if state is None or base is None or state.position.version or component.pointed():
        return
    if state.position.root != base.root:
        shutil.rmtree(local)


@dataclass
class Components(Generic[P]):
    """`store`, `local`: of the run's publisher; `open`: a publisher of a component's store and local
    checkpoint."""

    store: Store
    local: Path
    signer: Signer
    rank: Rank
    seconds: float
    """ranks wait for each other this long"""
    open: Callable[[Store, Path], P]
    opened: dict[str, P] = field(default_factory=dict)

    def get(self, name: str, tensors: Callable[[], TensorTable] | None = None) -> P:
        """`tensors`: of its first publication, where it may be added by rank 0; the other ranks wait for
        that. Raises Refused for a retired component, and for one that is not there and not added."""
        there = self.opened.get(name)
        if there is not None and tensors is not None and self._is_replaced(there, tensors):
            self.drop(name)
        if name not in self.opened:
            self._require_listed(check_name(name), tensors)
            own = component_local(self.local, name)
            self.opened[name] = self.open(component_store(self.store, name), own)
        return self.opened[name]

    def _is_replaced(self, there: P, tensors: Callable[[], TensorTable]) -> bool:
        return self._replaces and not (there.version or same_tensors(there.run[1].table, tensors()))

    @property
    def _replaces(self) -> bool:
        """Of several ranks none knows whether rank 0 gives all tensors."""
        return self.rank.world_size == 1

    def _require_listed(self, name: str, tensors: Callable[[], TensorTable] | None) -> None:
        for _ in looks(time.monotonic() + self.seconds):
            run = Channel.open(self.store, self.signer.trust)
            if tensors is not None and self.rank.number == 0:
                init_component(run, name, tensors, self.signer.key, replaces=self._replaces)
            if tensors is None or any(each.name == name for each in read_components(run)):
                return require_active(run, name)
        raise NotInTime(f"rank 0 did not add {name} in time", remedy="check that rank 0 publishes it too")

    def retire(self, name: str) -> None:
        retire_component(Channel.open(self.store, self.signer.trust), check_name(name), self.signer.key)
        self.drop(name)

    def drop(self, name: str) -> None:
        """Gives the claim of a component back, if it is open."""
        if name in self.opened:
            self.opened.pop(name).close()

    def close(self) -> None:
        for name in tuple(self.opened):
            self.drop(name)


def trained_on(run: Channel, version: int | None) -> TrainedOn:
    """`version`: of main; None: the newest. Raises Refused for one that is not in the channel."""
    at = run.pointed() if version is None else version
    if at == 0:
        return 0, run.require_ours()[1].root
    index = None if not 0 < at <= run.pointed() else run.own_index(at)
    if index is None:
        raise Refused(
            f"version {at} of main is not in {run.place}", remedy="`weightcast channel log` lists versions"
        )
    return at, index.root


def facts_of(run: Channel, component: Component) -> dict[str, Any]:
    """With its newest version; None where nothing is published yet."""
    nested = open_component(run, component.name)
    version = nested.pointed()
    index = nested.own_index(version) if version else None
    return {
        **vars(component),
        "version": version,
        "main_version": None if index is None else index.main_version,
        "main_root": None if index is None else index.main_root,
        "step": None if index is None else index.step,
        "bytes": None if index is None else index.totals.delta_bytes,
        "full_bytes": nested.require_ours()[1].table.nbytes,
    }


class ComponentWeights(CheckpointWeights):
    """Directory of an adapter, as peft saves it, or of a draft model. It carries its configuration, and
    tokenizer and chat template where they are not the run's."""

    def __init__(
        self, directory: Path, component: str, run: Base | None = None, *, follow_links: bool = True
    ) -> None:
        """`run`: the base of main."""
        super().__init__(directory, follow_links=follow_links, adapter=is_adapter(component))
        with on_error(self.close):
            names, config = [path.name for path in self.checkpoint.other_files], config_of(component)
            misses = is_adapter(component) and self.checkpoint.weight_files[0].name != ADAPTER_MODEL
            if misses or config not in names:
                raise Refused(
                    f"{directory} has no {ADAPTER_MODEL if misses else config}",
                    remedy="save it with save_pretrained",
                )
            read_config(directory / config)
            known = {} if run is None else {record.name: record.blake3 for record in run.all_files}
            wanted = [name for name in names if is_config(name) and is_carriable(name)]
            digests = {n: digest_of(read_bytes(directory / n)) for n in (config, *wanted)}
            configs = {n: digest for n, digest in digests.items() if n == config or digest != known.get(n)}
            carry = carried_bytes(directory, configs, component)
            self.facts = replace(self.facts, configs=configs, carry=carry)
