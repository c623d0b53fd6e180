"""The publisher in process: one object per rank.

State that must survive lies in the channel and in the local checkpoint; after any error both are read again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, SupportsIndex

from weightcast.publisher.components import (
    Components,
    ComponentWeights,
    TrainedOn,
    component_local,
    drop_replaced,
    tensors_of,
    trained_on,
)
from weightcast.publisher.maintenance.orders import Held, OrderWatch, carry_out, is_carried_out, standing
from weightcast.publisher.maintenance.prune import keep_channel_file
from weightcast.publisher.maintenance.repair import Repairs, is_sound, repair
from weightcast.publisher.maintenance.upkeep import Upkeep, UpkeepOptions
from weightcast.publisher.publish.commit import Signer, put_pointer_right
from weightcast.publisher.publish.member import MemberRank
from weightcast.publisher.publish.publish import OwnerRank
from weightcast.publisher.publish.publish_job import (
    CommonOptions,
    Phases,
    PublishJob,
    PublishOptions,
    PublishReport,
    Until,
    Watching,
    WeightSource,
)
from weightcast.publisher.publish.stitch import StitchPointer, check_layout
from weightcast.publisher.ranks.rendezvous import Rank
from weightcast.publisher.resume import Resumed, position, resumed
from weightcast.publisher.submit import Handle, Hold, Submissions, WhenBusy
from weightcast.publisher.weights.config import (
    CONFIG,
    AdapterConfig,
    carried_bytes,
    changed_configs,
    check_config,
)
from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules, adapt
from weightcast.publisher.weights.given import whole_step
from weightcast.publisher.weights.tensors import CheckpointWeights, GivenWeights, NewWeights, refuse_local
from weightcast.shared.base.choices import Encoding, Layout
from weightcast.shared.base.elements import MAIN, TensorTable
from weightcast.shared.base.errors import NON_FINITE, Refused, on_error
from weightcast.shared.base.options import require_option
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim, Heart, claim, require_fences, this_process
from weightcast.shared.channel.components import open_component, require_active
from weightcast.shared.channel.directory_store import directory_of, mounted, open_store
from weightcast.shared.channel.pins import Rollback
from weightcast.shared.channel.rate import NO_RATE, Rate, Rates
from weightcast.shared.channel.run_files import Base, ChannelFile
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.update.sources import recorded_base
from weightcast.shared.files.paths import exists, require_no_overlap, require_places
from weightcast.shared.files.probes import CHANNEL_NEEDS, COMMIT_NEEDS, require

if TYPE_CHECKING:
    from weightcast.shared.daemon.fleet import FleetReader

_log = logging.getLogger("weightcast.publisher")


@dataclass(frozen=True, kw_only=True)
class PublisherOptions(CommonOptions):
    """Settings that most runs leave at their defaults."""

    take_over: bool = False
    """take the channel even if its owner seems alive"""
    unfenced: bool = False
    """accept a store without conditional writes: nothing then keeps a second publisher out"""
    take_over_seconds: float = 60.0
    """after this many silent seconds an owner counts as gone"""
    until: Until = "patched"
    """`out`: `publish` returns when the pointer names the version. Rank 0's local checkpoint follows in a
    thread; the next call waits for it, as `settle` does"""
    carry_config: bool = False
    """versions published from checkpoint directories carry tokenizer, chat template, generation and processor
    files that differ from the base's; hosts install them with the weights"""
    sign_key: str | Path | None = None
    """file with the key that signs every version; rank 0 alone needs it"""
    trusted_keys: Sequence[str | Path] = ()
    """further keys whose versions are continued, as text or files"""
    publish_rate: Rate = NO_RATE
    """limit for bytes written to the channel: `Rate(bytes_per_second)`; several publishers may share one"""
    visible_seconds: float = 30.0
    """how long files of the channel may stay invisible before they count as lost"""
    layout: Layout = "plain"
    """`stitch`: the channel is ROOT/updates, and Stitch's replicas follow ROOT too"""
    upkeep: UpkeepOptions | None = None
    """multi-step deltas, anchors and pruning by rank 0, in a thread that yields to publications"""
    upkeep_thread: bool = True
    """False: maintenance runs, and orders are carried out, only when a `RunPublisher` is asked to"""

    advance: Advance | None = None
    """called with the bytes done while the local checkpoint is seeded and catches up at `open`"""


DEFAULTS = PublisherOptions()


class Publisher:
    """Publishes versions of one run; one per rank. Not thread-safe.

    An adapter is published with `component="adapter/NAME"`, a draft model with `component="draft"`; the first
    version adds it to the run.

    Examples:
        >>> with Publisher.open("/shared/run", local="/var/lib/weightcast", base="/models/base") as publisher:
        ...     report = publisher.publish(model.state_dict(), step=1)
    """

    def __init__(
        self,
        updater: LocalUpdater,
        rank: Rank,
        setup: PublishOptions,
        options: PublisherOptions,
        claimed: Claim | None,
        upkeep: Upkeep | None = None,
    ) -> None:
        self._updater, self._claim, self._upkeep = updater, claimed, upkeep
        self._options = options
        self._trust, self._world_size = setup.signer.trust, rank.world_size
        self._rank, self._encoding = rank, setup.encoding
        self._owner = None if claimed is None else OwnerRank(updater, claimed, rank, setup)
        self._lone = None if claimed is None else OwnerRank(updater, claimed, Rank(0, 1), setup)
        """what rank 0 publishes without the other ranks"""
        self._member = MemberRank(updater, rank, setup)
        self._heart = None if claimed is None else Heart(claimed)
        self._closed = False
        self._submissions = Submissions(self._publish)
        self._turn = threading.RLock()
        """for whoever moves the local checkpoint: a publication, or the thread that carries out orders. Taken
        after submissions were drained"""
        self._watch: OrderWatch | None = None
        self.components: Components[Self] | None = None
        """None: it publishes a component itself"""
        self._of: Channel | None = None
        """the run's channel, where it publishes another component than `main`"""
        self._fleet: FleetReader | None = None

    @classmethod
    def open(
        cls,
        channel: str | Path | Store,
        *,
        local: str | Path,
        base: str | Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        encoding: Encoding = "fast",
        options: PublisherOptions | None = None,
        component: str = MAIN,
        **other: Never,
    ) -> Self:
        """Opens a channel as its publisher.

        Args:
            channel: A directory or URL, created by `init_channel` or `weightcast channel init`.
            local: This publisher's own local checkpoint, seeded from `base` when it is new. Ranks on one
                machine may share it.
            base: The checkpoint directory that the run starts from.
            rank: The number of this process.
            world_size: How many processes publish a version together.
            encoding: How deltas are encoded: `fast`, `small`, `xor` or `overwrite`.
            options: Settings that most runs leave at their defaults.
            component: `adapter/NAME` or `draft`: publishes this alone, and neither owns `main` nor keeps its
                weights. It must be in the run: `weightcast channel component add`.

        Raises:
            Refused: Another publisher owns the channel, `local` and `channel` overlap, or an argument has a
                value that it cannot have; `PublisherOptions` raises it too.
            WrongRun: `local` is another run's.
            Untrusted: No key known here signed the channel's base or newest version.
            TypeError: An argument belongs into `options`.
        """
        if other:
            known = [f"{name}=..." for name in other if name in PublisherOptions.__dataclass_fields__]
            hint = f": give options=PublisherOptions({', '.join(known)})" if known else ""
            raise TypeError(f"Publisher.open() has no argument {', '.join(other)}{hint}")
        require_option("encoding", encoding, Encoding)
        options = DEFAULTS if options is None else options
        require_option("options", options, PublisherOptions)
        if not 0 <= rank < world_size:
            raise Refused(
                f"rank {rank} with world_size {world_size}", remedy="give a rank from 0 to world_size - 1"
            )
        is_stitch = options.layout == "stitch"
        store = open_store(channel, Rates(publish=options.publish_rate), stitch=is_stitch)
        if is_stitch:
            extras = options.anchor_every > 0 or not (options.upkeep is None or options.upkeep.idle)
            check_layout(store.place(), encoding, extras)
        directory = mounted(store)
        if directory is not None:
            require_places(directory, Path(local))
            require_no_overlap("--local", Path(local), "--channel", directory)
        signer = Signer.load(options.sign_key, options.trusted_keys)
        if rank == 0:
            signer.check_owner(store)
        opened = Channel.open(store, signer.trust)
        opened.require_ours()
        if component != MAIN:
            require_active(opened, component)
            own, at = open_component(opened, component), component_local(Path(local), component)
            if rank == 0:
                drop_replaced(own, at)
            nested = cls.open(
                own.store,
                local=at,
                rank=rank,
                world_size=world_size,
                encoding=encoding,
                options=replace(options, carry_config=True),
            )
            nested._of = opened
            return nested
        base = recorded_base(opened) if base is None else base
        updater = LocalUpdater(
            store,
            Path(local),
            None if base is None else Path(base),
            UpdaterOptions(threads=options.threads, visible_seconds=options.visible_seconds, carries=False),
        )
        common = {each.name: getattr(options, each.name) for each in fields(CommonOptions)}
        setup = PublishOptions(**common, encoding=encoding, signer=signer)
        if rank != 0:
            publisher = cls(updater, Rank(rank, world_size), setup, options, None)
            return publisher._with_components(Path(local), signer)
        with contextlib.ExitStack() as undo:
            undo.callback(updater.close)
            first = not exists(updater.paths.state)
            if directory is not None:
                require("--channel", directory, CHANNEL_NEEDS if first else COMMIT_NEEDS)
            require_fences(store, unfenced=options.unfenced)
            updater.own()
            claimed = claim(
                store,
                this_process(),
                take_over=options.take_over,
                patience=options.take_over_seconds,
                above=updater.epoch,
            )
            if is_stitch:
                claimed.on_pointer = StitchPointer.of(store, opened.require_ours()[0].run_id).move
            upkeep = Upkeep(claimed, Path(local), options.upkeep or UpkeepOptions(), signer)
            keep = None if options.upkeep is None else upkeep.keep
            setup = replace(setup, free_space=upkeep.give_up, keep_journal=keep)
            publisher = cls(updater, Rank(0, world_size), setup, options, claimed, upkeep)
            undo.callback(publisher.close)
            publisher._with_components(Path(local), signer)
            publisher._recover(options.advance)
            keep_channel_file(store, Path(local))
            if options.upkeep is not None and options.upkeep_thread:
                publisher._work_in_background()
            if options.upkeep_thread:
                publisher._watch = OrderWatch(store, publisher._turn, publisher._obey_orders)
            undo.pop_all()
        return publisher

    def _with_components(self, local: Path, signer: Signer) -> Self:
        if self.store.component == MAIN:
            seconds = self._options.deadline_seconds
            self.components = Components(self.store, local, signer, self._rank, seconds, self._nested)
        return self

    def _nested(self, store: Store, local: Path) -> Self:
        if self._rank.number == 0:
            drop_replaced(Channel.open(store, self._trust), local)
        nested = type(self).open(
            store,
            local=local,
            rank=self._rank.number,
            world_size=self._rank.world_size,
            encoding=self._encoding,
            options=replace(self._options, carry_config=True),
        )
        nested._of = Channel.open(self.store, self._trust)
        return nested

    def component(self, name: str, tensors: Callable[[], TensorTable] | None = None) -> Self:
        """The publisher of an adapter of this run; `main` is this one, whatever it publishes. `tensors`: adds
        the adapter with them where the run has none of this name.

        Raises:
            Refused: A bad name, a retired adapter, one that the run does not have, or a channel that cannot
                have any.
        """
        if name in (MAIN, self.store.component):
            return self
        self._check_open()
        if self.components is None or self._options.layout == "stitch":
            raise Refused(
                f"{self.store.place()} cannot have the component {name}",
                remedy="give the channel of a run, with --layout plain",
            )
        return self.components.get(name, tensors)

    def retire(self, component: str) -> None:
        """Ends an adapter: nothing more is published to it, and hosts unload it. Its versions stay."""
        self._check_open()
        if self.components is not None and self._rank.number == 0:
            self.components.retire(component)

    def trained_on(self, version: SupportsIndex | None = None) -> TrainedOn:
        """What a version of an adapter names: a version of main, the newest if not given, and its root."""
        state, number = self._updater.state, None if version is None else operator.index(version)
        if self._of is not None:
            return trained_on(Channel.open(self._of.store, self._trust, self._of), number)
        if number is None and state is not None and state.position.version == self.version:
            return state.position.version, state.position.root
        return trained_on(Channel.open(self.store, self._trust), number)

    def _given(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        component: str,
        config: AdapterConfig,
    ) -> GivenWeights:
        own = self.store.component if component == MAIN else component
        if config is not None and own == MAIN:
            raise Refused("config= is not for main", remedy='give component="adapter/NAME" too')
        return GivenWeights(named_tensors, config, own)

    def _for(
        self, component: str, first: Callable[[], NewWeights], main_version: SupportsIndex | None
    ) -> tuple[Publisher, TrainedOn | None]:
        """Who publishes a component that begins with the weights `first`, and what they were trained on."""
        named = (component != MAIN or self._of is not None) and self._rank.number == 0
        # first of all: a version of main that is not there adds no component
        belongs = self.trained_on(main_version) if named else None
        own = component if self._of is None else self.store.component
        return self.component(component, lambda: tensors_of(first(), own)), belongs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close()
        if kind is None:
            self._submissions.raise_unseen()

    def close(self) -> None:
        """Waits for what was submitted. Used in `with`, its errors are raised at the end."""
        self._submissions.drain()
        if self._watch is not None:
            self._watch.stop()
        if self.components is not None:
            self.components.close()
        if self._upkeep is not None:
            self._upkeep.stop()
        if self._heart is not None:
            self._heart.stop()
        self._closed = True
        if self._claim is not None:
            # the next publisher waits a little longer when this cannot be told
            with contextlib.suppress(OSError):
                self._claim.release()
        self._updater.close()

    def __repr__(self) -> str:
        return f"<Publisher of {self.run_id} in {self.store.place()}: version {self.local_version}>"

    def _check_open(self) -> None:
        """A closed publisher gave its claim back: another one may own the channel."""
        if self._closed:
            raise Refused("this publisher is closed", remedy="open another, or publish inside its `with`")

    def _drained(self) -> None:
        """For calls that need the local checkpoint: what was submitted is done."""
        self._check_open()
        if self._watch is None or threading.current_thread() is not self._watch.thread:
            self._submissions.drain()

    @property
    def channel(self) -> Path:
        """The channel's directory. Raises Refused for one in an object store."""
        return directory_of(self.store)

    @property
    def store(self) -> Store:
        return self._updater.store

    @property
    def version(self) -> int:
        """The version that the pointer names, 0 before the first."""
        return Channel.open(self.store).pointed()

    @property
    def epoch(self) -> int:
        return 0 if self._claim is None else self._claim.epoch

    @property
    def run_id(self) -> str:
        return self.run[0].run_id

    @functools.cached_property
    def run(self) -> tuple[ChannelFile, Base]:
        """What the channel was made with, as it was first read here: neither changes in a run."""
        return Channel.open(self.store, self._trust).require_ours()

    @property
    def config_changed(self) -> tuple[str, ...]:
        """Config files of the last published checkpoint that differ from those that hosts have."""
        return () if self._owner is None else tuple(self._owner.configs)

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Files of the base that hosts do not get."""
        return self._updater.side_files.left_behind

    @property
    def local_version(self) -> int | None:
        state = self._updater.state
        return None if state is None else state.position.version

    def state_dict(self) -> dict[str, object]:
        """The position in the channel, for the trainer's checkpoint. Waits for submissions."""
        self._submissions.drain()
        return position(self.store)

    def load_state_dict(self, state: Mapping[str, object]) -> Resumed:
        """Checks that the checkpoint's weights were published in this channel. Publishes and undoes nothing:
        the next publication continues the chain.

        Returns:
            How far the channel went on since.

        Raises:
            WrongRun: The state is of another channel.
            Forked: The state is of another history of this channel.
            Refused: `state` is not a Publisher's.
        """
        return resumed(self.store, state)

    def _recover(self, advance: Advance | None = None) -> None:
        """Finishes a version that was committed and never pointed to, and brings the local checkpoint to the
        channel. Rank 0 does this by itself at `open` and before every publication."""
        self._drained()
        if self._owner is not None:
            self._owner.recover(advance)

    def publish(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any] | str | Path,
        *,
        step: SupportsIndex | None = None,
        advance: Advance | None = None,
        watching: Watching | None = None,
        component: str = MAIN,
        config: AdapterConfig = None,
        main_version: SupportsIndex | None = None,
    ) -> PublishReport:
        """Publishes the next version; as `submit(...).result()`.

        Args:
            named_tensors: (HF name, torch tensor on any device or numpy array). Unchanged until this returns.
                Of several ranks each gives the tensors that it holds. Or a directory, as of
                `publish_checkpoint`.
            component: `adapter/NAME` or `draft`, added at its first version. Tensors of an adapter: those of
                `peft.get_peft_model_state_dict(model)`; its directory is peft's. A draft model has
                its own names, and a complete HF directory.
            config: Of a component whose tensors are given: `peft_config.to_dict()` or peft's file; of
                a draft model `config.to_dict()` or its config.json. Required with the first version; later
                versions keep what they had.
            main_version: Of `main`, on which the component was trained; the newest if not given.
            step: The trainer's step, by which ranks know that they publish the same weights.
            advance: Called with the bytes done.
            watching: Called with the phases.

        Raises:
            WeightcastError: Nothing is published that was not fully verified. What is already committed (a
                hook failed, or NotInTime on a rank other than 0) is finished by the next call.
        """
        if isinstance(named_tensors, str | Path):
            if config is not None:
                raise Refused(
                    "config= was given with a directory", remedy="leave it out: the directory has its own"
                )
            return self.publish_checkpoint(
                named_tensors,
                step=step,
                advance=advance,
                watching=watching,
                component=component,
                main_version=main_version,
            )
        whole_step(step, self._world_size)
        # once: a second look at an iterator would see nothing
        read = functools.cache(lambda: self._given(named_tensors, component, config))
        publisher, belongs = self._for(component, read, main_version)
        return publisher._publish_weights(
            read, step=step, advance=advance, watching=watching, trained_on=belongs
        )

    def submit(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        step: SupportsIndex | None = None,
        when_busy: WhenBusy = "block",
        hold: Hold = "tensors",
        component: str = MAIN,
        config: AdapterConfig = None,
        main_version: SupportsIndex | None = None,
    ) -> Handle:
        """Begins the next version and lets the trainer go on. Iterators are consumed before this returns.

        Args:
            named_tensors: As in `publish`.
            step: As in `publish`.
            when_busy: `block`: waits until the previous submission is out and these tensors were compared;
                they may change then. `newest`: returns at once; call `handle.release()` before the tensors
                change. A queued submission is replaced by the next.
            hold: `copy`: copies what this process holds into host memory, in the run's precision, and
                returns: the tensors may change, whatever happens to channel and other ranks. Costs one copy,
                and as much memory until the comparison is done; twice with `newest`.
            component: As in `publish`; each component waits for its own submissions alone.
            config: As in `publish`.
            main_version: As in `publish`.

        Returns:
            A handle, whose `result()` is the report of `publish`.

        Raises:
            WeightcastError: What the previous submission raised if its `result()` was not called; this one is
                not taken then.
        """
        self._check_open()
        require_option("hold", hold, Hold)
        number = whole_step(step, self._world_size)
        weights = self._given(named_tensors, component, config)
        publisher, belongs = self._for(component, lambda: weights, main_version)
        lent = weights
        if hold == "copy":
            # not before the one in flight has let go of its own
            publisher._submissions.make_way(when_busy)
            lent = weights.copied()
        source = WeightSource(lambda: lent, lent=True, copied=hold == "copy")
        job = PublishJob(source, number, check_allowed=publisher._raise_held, trained_on=belongs)
        return publisher._submissions.submit(job, when_busy)

    def wait(
        self,
        version: SupportsIndex | Handle,
        *,
        min_hosts: int | None = None,
        fraction: float | None = None,
        timeout: float = 600.0,
        component: str = MAIN,
    ) -> list[str]:
        """Waits until hosts are ready and serve `version` or a later one. Hosts report this themselves in the
        channel, unauthenticated. Without `min_hosts` and `fraction` one host suffices.

        Args:
            version: A number, or a handle of `submit` for the version that it becomes.
            min_hosts: So many hosts.
            fraction: Of the hosts whose reports still change.
            timeout: In seconds.
            component: `adapter/NAME` or `draft`: waits until engines have loaded this version of it.

        Returns:
            Names of the hosts.

        Raises:
            NotInTime: Names the hosts that are behind.
        """
        # pydantic costs a fifth of a second that most publishers need not pay
        from weightcast.shared.daemon.fleet import FleetReader
        from weightcast.shared.daemon.wait import wait_for_version

        if isinstance(version, Handle):
            began = time.monotonic()
            version = version.result(timeout).version
            timeout -= time.monotonic() - began
        if not isinstance(version, SupportsIndex):
            raise Refused(
                f"version must be an integer or a handle, not {type(version).__name__}",
                remedy="give the version of a report, or the handle that submit returned",
            )
        if self._fleet is None:
            self._fleet = FleetReader(self.store, updates=0)
        number = operator.index(version)
        return wait_for_version(self._fleet.read, number, min_hosts, fraction, timeout, component=component)

    def publish_checkpoint(
        self,
        directory: str | Path,
        *,
        step: SupportsIndex | None = None,
        advance: Advance | None = None,
        watching: Watching | None = None,
        cast: bool = False,
        rename: Iterable[str] = (),
        drop: Iterable[str] = (),
        component: str = MAIN,
        main_version: SupportsIndex | None = None,
    ) -> PublishReport:
        """Publishes a complete HF checkpoint directory; with `component` one of peft.

        Args:
            directory: The checkpoint.
            step: The trainer's step.
            advance: Called with the bytes done.
            watching: Called with the phases.
            cast: Round floating-point tensors to the run's dtypes.
            rename: `A=B`: prefixes, or patterns with as many `*`.
            drop: Globs of tensors to leave out.
            component: As in `publish`.
            main_version: As in `publish`.

        Raises:
            Refused: The checkpoint does not fit the run, or changes while it is read.
        """
        whole_step(step, self._world_size)
        rules = ExportRules.of(cast, rename, drop)
        publisher, belongs = self._for(
            component, lambda: ComponentWeights(Path(directory), component), main_version
        )
        read = functools.partial(publisher._open_checkpoint, directory, rules)
        return publisher._publish_weights(
            read, step=step, advance=advance, watching=watching, trained_on=belongs
        )

    def _open_checkpoint(self, directory: str | Path, rules: ExportRules = NO_RULES) -> NewWeights:
        """A checkpoint directory as new weights of this run."""
        directory = Path(directory)
        refuse_local(directory, self._updater.paths.directory)
        if self._of is not None:
            return self._adapted(ComponentWeights(directory, self.store.component, self._of.base), rules)
        weights, local = CheckpointWeights(directory), self._updater.local
        own = self._updater.base_dir if local is None else local.checkpoint.directory
        with on_error(weights.close):
            check_config(directory / CONFIG, own, self.run[1].files)
            base = self.run[1] if local is None else local.base
            configs = changed_configs(weights.checkpoint, own, base)
            carry = carried_bytes(directory, configs) if self._options.carry_config else {}
            weights.facts = replace(weights.facts, configs=configs, carry=carry)
        return self._adapted(weights, rules)

    def _adapted(self, weights: NewWeights, rules: ExportRules) -> NewWeights:
        """`weights` as `rules` change them; closed where that is refused."""
        file, base = self.run
        with on_error(weights.close):
            return adapt(weights, rules, file, base.table)

    def settle(self) -> PublishReport | None:
        """Waits until the local checkpoint has followed the last version that was submitted or, with
        `until="out"`, published.

        Returns:
            The report of that version with all of its seconds.

        Raises:
            WeightcastError: An error not raised yet. The version is out, and the next call catches up.
        """
        for each in () if self.components is None else tuple(self.components.opened.values()):
            each.settle()
        return self._submissions.settle()

    def _raise_held(self) -> None:
        if self._of is not None:
            require_active(self._of, self.store.component)
        order = self._obey_orders()
        if order is not None:
            raise Held.by(order)

    def _publish(self, job: PublishJob) -> PublishReport:
        if self._owner is None:
            return self._member.publish(job)
        try:
            pause = None if self._upkeep is None else self._upkeep.throttle.publishing()
            with self._turn, pause or contextlib.nullcontext():
                report = self._owner.publish(job)
            if self._watch is not None and report.non_finite:
                names = ", ".join([*report.non_finite][:5])
                what = f"version {report.version} of {self.store.place()}"
                _log.warning("%s: elements became NaN or infinite in %s; %s", what, names, NON_FINITE)
            return report
        finally:
            # also when it failed: it may have lacked the room that upkeep makes
            if self._upkeep is not None:
                self._upkeep.wake()

    def _obey_orders(self, began: Callable[[Rollback], None] = lambda _: None) -> Rollback | None:
        """Carries out what was ordered, a repair and a rollback; an ordered anchor is left to the upkeep.
        Returns the order that holds publishing, if one does. The pointer is put where this publisher last had
        it, should another one have put it back. `began`: called with a rollback before it is carried out."""
        self._obey_repair()
        if self._claim is not None:
            put_pointer_right(self._claim)
        if self._upkeep is not None:
            self._upkeep.obey()
        channel = Channel.open(self.store)
        order = standing(channel)
        if order is None or self._lone is None:
            return order
        self._lone.recover()
        if not is_carried_out(channel):
            began(order)
            carry_out(self._lone, self._updater, channel, order)
            if self._upkeep is not None:
                self._upkeep.wake()
        return order

    def repair(self) -> Repairs:
        """Repairs the channel, which is read in full: damaged and lost files are written again from this
        publisher's journals, an anchor bridges lost deltas, files that no host can use move to `.trash`.

        Raises:
            Refused: On ranks other than 0.
        """
        self._drained()
        if self._claim is None or self._lone is None:
            raise Refused("only rank 0 repairs the channel", remedy="call it on rank 0")
        self._claim.check()
        lone = self._lone

        def write_anchor() -> int | None:
            return self.version if lone.write_anchor() else None

        with self._turn:
            if is_sound(self.store, trust=self._trust):
                return Repairs()
            local = self._updater.paths.directory
            return repair(self._claim, local, write_anchor, trust=self._trust)

    def _obey_repair(self) -> Repairs | None:
        """Repairs the channel if an operator ordered it (`weightcast channel repair`, `POST /v1/repair`)."""
        self._drained()
        if self._lone is None or not pins.is_ordered(self.store, "repair"):
            return None
        try:
            done = self.repair()
        except Refused:
            pins.end_order(self.store, "repair")
            raise
        pins.end_order(self.store, "repair")
        return done

    def _work_in_background(self) -> Upkeep | None:
        """From now on what is due is made in a thread. None on ranks other than 0."""
        self._check_open()
        if self._upkeep is not None:
            self._upkeep.start()
        return self._upkeep

    def write_anchor(self) -> bool:
        """Writes full weights of the current version next to it, for hosts without a base.

        Returns:
            False if they exist.
        """
        self._drained()
        if self._owner is None:
            raise Refused("only rank 0 writes anchors", remedy="call it on rank 0")
        with self._turn:
            return self._owner.write_anchor()

    def _publish_weights(
        self,
        read: Callable[[], NewWeights],
        *,
        step: SupportsIndex | None = None,
        advance: Advance | None = None,
        watching: Watching | None = None,
        request: str = "",
        trained_on: TrainedOn | None = None,
    ) -> PublishReport:
        """Publishes what `read` opens; it may be called twice, after what it gave was closed. `request`: 16
        hex digits, by which `made_for` finds the version; `trained_on`: of an adapter."""
        number, phase = whole_step(step, self._world_size), Phases(watching)
        job = PublishJob(WeightSource(read), number, phase, advance, request=request, trained_on=trained_on)
        self._drained()
        self._submissions.raise_unseen()
        if self._owner is not None and self._options.until == "out":
            return self._submissions.until_out(replace(job, check_allowed=self._raise_held))
        with self._turn:
            self._raise_held()
            return self._publish(job)
