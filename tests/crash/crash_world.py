"""One run under the harness: trainer, publisher, host and engines, all real, all small.

`World` starts and ends processes, waits until they are done, and compares what it sees with crash_model.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import (
    Model,
    Tensor,
    all_changed,
    bytes_of,
    every_dtype,
    much_changed,
    pack,
    some_changed,
    write_checkpoint,
)
from crash_engines import run_engines
from crash_model import (
    AdapterSeen,
    ChannelSeen,
    EngineSeen,
    LocalSeen,
    Settled,
    Truth,
    belonging_violations,
    channel_violations,
    engine_violations,
    local_violations,
    mixing_violations,
    settled_adapters,
    settled_violations,
)
from crash_observe import (
    digest_of,
    see_adapters,
    see_channel,
    see_engine,
    see_local,
    see_pointer,
    see_roots,
    see_step,
)
from crash_power import record_syncs
from crash_processes import CRASHED, Child, NotReached, Order, fork, wait_for
from opening import open_publisher
from ports import free_port
from s3_copy import BucketCopy

from weightcast.publisher import init_channel
from weightcast.publisher.daemon.daemon import run_publisher
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.channel.channel import Channel, look
from weightcast.shared.channel.components import retire_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import version_name
from weightcast.shared.daemon.logs import setup_logs
from weightcast.subscriber.daemon.daemon import run_subscriber
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.sync import adapters as adapters_of_hosts

MARKER = "complete"
POLL_SECONDS = 0.05
GROUP_LEASE = 3.0
MANY = 1000
LOOKS = 2
"""steps that a process has begun before it counts as settled"""


@dataclass(frozen=True)
class Shape:
    """What a world is made of; drawn from the seed."""

    encoding: str = "fast"
    engines: tuple[str, ...] = ("copy", "map")
    shards: int = 2
    anchor_every: int = 3
    hook: str | None = None
    keep_versions: int | None = None
    member: bool = False
    """a second host, whose local checkpoint the engines read too"""
    adapters: bool = False
    """two are published, one of which is replaced by another name now and then"""

    @classmethod
    def drawn(cls, rng: random.Random) -> Shape:
        return cls(
            rng.choice(("fast", "fast", "small", "xor", "overwrite")),
            rng.choice((("copy",), ("map",), ("live",), ("copy", "map"), ("live", "map"))),
            rng.choice((1, 2)),
            rng.choice((1, 2, 3)),
            rng.choice((None, "true")),
            rng.choice((None, 3)),
        )


class World:
    """`bucket`: the URL of the one that the channel is in; empty: it is in a directory."""

    def __init__(self, root: Path, seed: int, shape: Shape, bucket: str = "") -> None:
        self.root, self.shape = root, shape
        place = root / "channel"
        self.address = f"{bucket}/{root.parent.name}/{root.name}/channel" if bucket else str(place)
        self._copy = BucketCopy.of(self.address, place) if bucket else None
        self._random = np.random.default_rng(seed)
        self.models: list[Model] = [every_dtype(self._random)]
        self.truth = Truth([bytes_of(self.models[0])])
        self.before: ChannelSeen | None = None
        self.publisher: Child | None = None
        self.host: Child | None = None
        self.member: Child | None = None
        self._member_port = free_port() if shape.member else 0
        self.disturbed = False
        """errors are caused: a daemon that ends by one is started again, seeding is begun again"""
        self.seeds = 0
        """of the host, that are called for until it is settled the next time"""
        self.behind: int | None = None
        """where a host starts that may take an anchor, if that is fewer bytes than the deltas from there"""
        self._seeds_seen = 0
        self.adapters: dict[str, Truth] = {}
        """by name without `adapter/`; all have the same steps"""
        self.extra = 0
        """number of the one that is replaced"""
        self._adapter_steps = 0
        self._of_adapters: dict[str, ChannelSeen] = {}
        root.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.base, self.models[0], files=shape.shards)
        self.watch.mkdir()
        self._engines, self.options = self._start_engines()

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def channel(self) -> Path:
        """Of one in a bucket: a copy as of now."""
        return self.root / "channel" if self._copy is None else self._copy.refresh()

    @property
    def in_bucket(self) -> bool:
        return self._copy is not None

    @property
    def watch(self) -> Path:
        return self.root / "watch"

    @property
    def pub(self) -> Path:
        return self.root / "publisher"

    @property
    def local(self) -> Path:
        return self.root / "host"

    @property
    def member_local(self) -> Path:
        return self.root / "member"

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(each for each in (self.publisher, self.host, self.member) if each is not None)

    def _start_engines(self) -> tuple[Any, tuple[str, ...]]:
        ours, theirs = multiprocessing.Pipe()
        local, kinds = self.local, self.shape.engines
        others = (self.member_local,) if self.shape.member else ()
        self._engine_process = fork(
            lambda: run_engines(local, kinds, theirs, others), self.root / "engines.log"
        )
        theirs.close()
        return ours, tuple(ours.recv())

    def close(self) -> None:
        for child in (*self.children, self._engine_process):
            child.signal(signal.SIGCONT)
            child.kill()
        self._engines.close()
        if self._copy is not None:
            self._copy.close()

    def rest(self) -> None:
        """Nobody polls while other worlds are at work."""
        for child in self.children:
            child.signal(signal.SIGSTOP)

    def wake(self) -> None:
        for child in self.children:
            child.signal(signal.SIGCONT)

    # what the outside world does

    def train(self) -> int:
        """The trainer's next checkpoint, as bytes only."""
        changes = (all_changed, _half_or_most_changed, some_changed, some_changed)
        change = changes[int(self._random.integers(0, 4))]
        model = change(self.models[-1], self._random)
        self.models.append(model)
        self.truth.steps.append(bytes_of(model))
        return self.truth.newest

    def hand_over(self) -> int:
        """The next checkpoint comes to lie, complete, in the watched directory."""
        step = self.train()
        unfinished = self.root / "unfinished"
        write_checkpoint(unfinished, self.models[step], files=self.shape.shards)
        (unfinished / MARKER).touch()
        unfinished.rename(self.watch / f"step_{step:06d}")
        return step

    def hand_over_adapters(self) -> None:
        """The next save of peft: the default adapter with the other one below it."""
        self._adapter_steps += 1
        unfinished = self.root / "unfinished-adapters"
        for name, place in (("default", unfinished), (self.extra_name, unfinished / self.extra_name)):
            tensors = {
                f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": Tensor(
                    "F32", shape, self._random.integers(0, 256, 4 * 4 * 24, np.uint8)
                )
                for part, shape in (("A", (4, 24)), ("B", (24, 4)))
            }
            zeros = {each: bytes(len(one.data)) for each, one in tensors.items()}
            truth = self.adapters.setdefault(name, Truth([zeros]))
            truth.steps += [{}] * (self._adapter_steps - len(truth.steps)) + [bytes_of(tensors)]
            place.mkdir()
            (place / "adapter_model.safetensors").write_bytes(pack(tensors))
            (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
            (place / MARKER).touch()
        unfinished.rename(self.watch / f"checkpoint-{self._adapter_steps:06d}")

    @property
    def extra_name(self) -> str:
        return f"extra-{self.extra}"

    def retire(self, order: Order | None = None) -> Child:
        """As the command does."""
        name, address = f"adapter/{self.extra_name}", self.address
        role = lambda: retire_component(Channel.open(open_store(address)), name)  # noqa: E731
        return fork(role, self.root / "retire.log", order)

    def replace_adapter(self) -> None:
        """Retires one; the next save has another."""
        retired = self.retire()
        wait_for(lambda: retired.ended, "retired")
        self.extra += 1

    def tell_engines(self, order: str) -> list[EngineSeen]:
        self._engines.send(order)
        return [see_engine(facts, self.truth) for facts in self._engines.recv()]

    # processes

    def start_publisher(self, order: Order | None = None, record: Path | None = None) -> Child:
        """`record`: where its syncs are written down."""
        settings = PublisherSettings(
            channel=self.address,  # type: ignore[arg-type]
            base=self.base,
            local=self.pub,
            watch=self.watch,
            marker=MARKER,
            every=True,
            existing=True,
            consume=True,
            threads=1,
            encoding=self.shape.encoding,  # type: ignore[arg-type]
            anchor_every=self.shape.anchor_every,
            keep_versions=self.shape.keep_versions,
            host_versions=0,
            post_write=self.shape.hook,
            port=0,
            poll_seconds=POLL_SECONDS,
        )

        def run() -> None:
            _boot_was_days_ago()
            if record is not None:
                record_syncs(record)
            setup_logs()
            run_publisher(settings)

        self.publisher = fork(run, self.root / "publisher.log", order)
        return self.publisher

    def start_host(self, order: Order | None = None, record: Path | None = None) -> Child:
        group = {"group_member": (self._member_url,)} if self.shape.member else {}
        settings = self._host_settings(self.local, "host", engine=self.options, **group)

        def run() -> None:
            # no gate counts requests here
            adapters_of_hosts.GRACE_SECONDS = 0.1
            if record is not None:
                record_syncs(record)
            setup_logs()
            run_subscriber(settings)

        self._seeds_seen = 0
        (self.root / "host.port").unlink(missing_ok=True)
        self.host = fork(run, self.root / "host.log", order)
        return self.host

    def start_member(self, order: Order | None = None) -> Child:
        settings = self._host_settings(
            self.member_local, "member", group_follower=True, port=self._member_port
        )

        def run() -> None:
            setup_logs()
            run_subscriber(settings)

        self.member = fork(run, self.root / "member.log", order)
        return self.member

    @property
    def _member_url(self) -> str:
        return f"http://127.0.0.1:{self._member_port}"

    def _host_settings(self, local: Path, name: str, **more: Any) -> SubscriberSettings:
        values: dict[str, Any] = {
            "channel": self.address,
            "base": self.base,
            "local": local,
            "threads": 1,
            # needs a directory
            "pre_read": None if self.in_bucket else self.shape.hook,
            "port": 0,
            "port_file": self.root / f"{name}.port",
            "poll_seconds": POLL_SECONDS,
            "visible_deadline": 5.0,
            "engine_deadline": 10.0,
            "group_lease": GROUP_LEASE,
            "group_deadline": 10.0,
        }
        return SubscriberSettings(**(values | more))

    def publish_once(self, local: Path, step: int, **options: Any) -> None:
        """Another publisher, in process, for a step that was trained."""
        given = write_checkpoint(self.root / f"given-{local.name}", self.models[step], files=2)
        with open_publisher(self.address, local=local, base=self.base, **options) as publisher:
            publisher.publish_checkpoint(given, step=step)

    def make_channel(self) -> None:
        made = fork(lambda: init_channel(self.address, self.base), self.root / "init.log")
        wait_for(lambda: made.exit_code == 0, "made")

    # looks

    def see(self) -> ChannelSeen:
        return see_channel(self.channel)

    def published(self) -> bool:
        """The newest checkpoint is out, and the publisher has nothing left to do."""
        return not self.unpublished()

    def unpublished(self) -> str:
        """What the publisher has still to do."""
        if self.publisher is not None and self.publisher.wire.counts.get("inbox.looked", 0) < LOOKS:
            return "it is starting"
        if not (self.channel / "latest").exists():
            return "there is no pointer"
        # a save of adapters leaves its directory, empty
        waiting = sorted(path.name for path in self.watch.rglob("*") if path.is_file())
        if waiting:
            return f"in the watched directory: {waiting}"
        pointer = see_pointer(self.channel)
        if see_step(self.channel, pointer) != self.truth.newest:
            return f"the pointer {pointer} is not of step {self.truth.newest}"
        local = see_local(self.pub, tensors=False)
        if local is None or (local.phase, local.version) != ("clean", pointer):
            return f"local checkpoint: {local}"
        if local.journals - local.named:
            return f"journals that no state names: {local.journals - local.named}"
        parts = sorted(path.name for path in self.channel.glob("*.parts"))
        return f"left in the channel: {parts}" if parts else ""

    def adapters_published(self) -> bool:
        seen = see_adapters(self.channel)
        return all(
            name in seen and not self._unpublished_adapter(name, seen[name])
            for name in self.adapters
            if name in ("default", self.extra_name)
        )

    def _unpublished_adapter(self, name: str, adapter: AdapterSeen) -> str:
        at = adapter.channel.pointer
        if adapter.active and (not at or adapter.channel.versions[at].step != self.adapters[name].newest):
            return f"{name}: the pointer {at} is not of step {self.adapters[name].newest}"
        local = see_local(self.published_adapter(name), tensors=False)
        if adapter.active and (local is None or (local.phase, local.version) != ("clean", at)):
            return f"{name}: local checkpoint: {local}"
        parts = list((self.channel / "components" / "adapter" / name).glob("*.parts"))
        return f"{name}: left in the channel: {parts}" if adapter.active and parts else ""

    def published_adapter(self, name: str) -> Path:
        return self.pub / ".weightcast" / "components" / "adapter" / name

    def adapters_followed(self) -> bool:
        return not self._unsettled_adapters()

    def _unsettled_adapters(self) -> list[str]:
        seen, channel, room = see_adapters(self.channel), self.see(), self.local / "adapters"
        found = [text for name, each in seen.items() if (text := self._unpublished_adapter(name, each))]
        for engine in self.tell_engines("see"):
            found += settled_adapters(self.truth, channel, seen, engine)
        for name, adapter in seen.items():
            left = [*room.glob(f"{name}-v*"), *(room / ".follow").glob(name)]
            if not adapter.active and left:
                found.append(f"left of {name}: {sorted(path.name for path in left)}")
        return [*found, *(f"a draft: {path.name}" for path in room.glob("*.tmp"))]

    def _adapter_violations(self) -> list[str]:
        """At every moment; of local checkpoints where nobody writes."""
        if not self.adapters:
            return []
        try:
            seen, channel = see_adapters(self.channel), self.see()
        except ValueError as error:
            return [f"the registry is not whole: {error}"]
        found = belonging_violations(seen, see_roots(self.channel))
        for name, adapter in seen.items():
            texts = channel_violations(adapter.channel, self._of_adapters.get(name))
            self._of_adapters[name] = adapter.channel
            truth = self.adapters[name]
            places = (
                (self.publisher, self.published_adapter(name)),
                (self.host, self.local / "adapters" / ".follow" / name),
            )
            for child, place in places:
                if child is None or child.ended:
                    texts += local_violations(truth, adapter.channel, see_local(place))
            found += [f"{name}: {text}" for text in texts]
        digests = {
            name: {step: digest_of(one) for step, one in enumerate(truth.steps)}
            for name, truth in self.adapters.items()
        }
        for engine in self.tell_engines("see"):
            found += mixing_violations(self.truth, channel, seen, digests, engine)
        return found

    def followed(self, version: int) -> bool:
        if self.shape.member:
            member = see_local(self.member_local, tensors=False)
            if member is None or (member.phase, member.version) != ("clean", version):
                return False
            if member.journals != member.named:  # its way back may stay until the next version
                return False
        local = see_local(self.local, tensors=False)
        if local is None or (local.phase, local.version) != ("clean", version) or local.journals:
            return False
        if self.host is not None and self.host.wire.counts.get("engine.looked", 0) < LOOKS:
            return False
        return all(local.marks.get(kind) == ("served", version) for kind in self.shape.engines)

    def mended(self) -> bool:
        """The host's bytes are those of the version that its state names."""
        local = see_local(self.local)
        if local is None or local.phase != "clean":
            return False
        return self.truth.steps[see_step(self.channel, local.version)] == local.tensors

    def violations_now(self, *, stale_pointer: bool = False) -> list[str]:
        """Right after a kill. What a process that lives writes meanwhile is looked at when it is done."""
        if not (self.channel / "channel.json").exists():
            return []
        channel = self.see()
        found = channel_violations(channel, self.before, stale_pointer=stale_pointer)
        self.before = channel
        if self.publisher is None or self.publisher.ended:
            found += [f"publisher: {text}" for text in self._local_violations(channel, see_local(self.pub))]
        if self.member is not None and self.member.ended:
            found += [
                f"member: {text}" for text in self._local_violations(channel, see_local(self.member_local))
            ]
        if self.host is None or self.host.ended:
            local = see_local(self.local)
            found += [f"host: {text}" for text in self._local_violations(channel, local)]
            found += engine_violations(self.truth, channel, local, self.tell_engines("see"))
        return found + self._adapter_violations()

    def _local_violations(self, channel: ChannelSeen, local: LocalSeen | None) -> list[str]:
        return local_violations(self.truth, channel, local)

    def settle(self, *, host: bool = True, version: int | None = None, seconds: float = 40.0) -> list[str]:
        """Waits until both sides have nothing left to do. `version`: where hosts stay if that is not the
        pointer."""
        try:
            self._until(self.published, ("publisher",), "published", seconds)
            at = self.see().pointer if version is None else version
            if host:
                self._until(lambda: self.followed(at), ("host", "member"), "followed", seconds)
            if self.adapters:
                self._until(self.adapters_published, ("publisher",), "adapters published", seconds)
            if host and self.adapters:
                self._until(self.adapters_followed, ("host",), "adapters followed", seconds)
        except NotReached as error:
            left = self._unsettled_adapters() if self.adapters else []
            return [f"did not recover: {error}", self.unpublished(), *left, *self.violations_now()]
        channel = self.see()
        found = channel_violations(channel, self.before)
        self.before = channel
        seeds = MANY if self.disturbed and self.seeds else self.seeds
        if self.behind is not None and self._anchor_is_shorter(self.behind, at):
            seeds = max(seeds, 1)
        wanted = Settled(channel.pointer, self.truth.newest, at, seeds)
        locals_: Mapping[str, LocalSeen | None] = {"publisher": see_local(self.pub)}
        engines: list[EngineSeen] = []
        if host:
            locals_ = {**locals_, "host": see_local(self.local)}
            if self.shape.member:
                locals_ = {**locals_, "member": self._see_member()}
            engines = self.tell_engines("see")
        found += settled_violations(self.truth, channel, locals_, engines, wanted, self._new_seeds())
        self.seeds, self.behind = 0, None
        found += self._adapter_violations()
        return found + (self._engine_violations(channel, engines) if host else [])

    def _see_member(self) -> LocalSeen | None:
        """Not in the moment in which it forgets its way back."""
        seen = see_local(self.member_local)
        for _ in range(20):
            if seen is None or seen.journals == seen.named:
                break
            time.sleep(POLL_SECONDS)
            seen = see_local(self.member_local)
        return seen

    def _anchor_is_shorter(self, version: int, to: int) -> bool:
        """Whether an anchor takes fewer bytes than the deltas from `version` on, or one of them is gone."""
        deltas = 0
        for later in range(version + 1, to + 1):
            shown = look(open_store(self.channel / version_name(later)))
            if shown is None:
                return True
            deltas += shown.nbytes
            if shown.anchor is not None and shown.anchor <= deltas:
                return True
        return False

    def _new_seeds(self) -> int:
        """Of the host's process that runs now, since it was last settled."""
        if self.host is None:
            return 0
        before, self._seeds_seen = self._seeds_seen, self.host.wire.counts.get("seed.checked", 0)
        return self._seeds_seen - before

    def _engine_violations(self, channel: ChannelSeen, engines: list[EngineSeen]) -> list[str]:
        return engine_violations(self.truth, channel, see_local(self.local), engines)

    def _until(self, condition: Any, sides: Sequence[str], what: str, seconds: float) -> None:
        def done() -> bool:
            for side in sides:
                self._require_alive(side, what)
            return bool(condition())

        try:
            wait_for(done, what, seconds)
        except NotReached as error:
            child = getattr(self, sides[0])
            words = "" if child is None or child.ended else f"\n{child.words()[-1500:]}"
            raise NotReached(f"{error}{words}") from None

    def _require_alive(self, side: str, what: str) -> None:
        child: Child | None = getattr(self, side)
        if child is None or not child.ended:
            return
        if not self.disturbed or child.exit_code in (None, 0, CRASHED):
            raise NotReached(f"{what}: the {side} ended ({child.status}): {child.words()[-1500:]}")
        getattr(self, f"start_{side}")()


def _half_or_most_changed(model: Model, rng: np.random.Generator) -> Model:
    """So that journals have masks, or all words."""
    return much_changed(model, rng, rng.permutation((0.5, 0.95)).tolist())


def _boot_was_days_ago() -> None:
    """To this process: what lies in the trash since the boot is due, whenever the machine was started."""
    read = time.clock_gettime
    time.clock_gettime = lambda clock: read(clock) + 2 * 86_400 * (clock == time.CLOCK_BOOTTIME)


@contextmanager
def world(root: Path, seed: int, shape: Shape | None = None) -> Iterator[World]:
    """Removed at the end."""
    made = World(root, seed, Shape.drawn(random.Random(seed)) if shape is None else shape)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root)
