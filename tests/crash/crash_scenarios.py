"""Ways to a kill and back: each scenario brings a process to a failpoint and sees how everything recovers."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from core_cases import flip, write_checkpoint
from crash_model import channel_violations
from crash_observe import see_local, see_pointer
from crash_power import Durable, Loss, another_boot
from crash_processes import Child, NotReached, Order, fork, wait_for
from crash_world import World

from weightcast.publisher import Publisher, PublisherOptions
from weightcast.shared.checkpoint.state.state import Boot

Side = Literal["publisher", "host", "member", "rank 1"]
"""rank 0 is a publisher like any other"""
RANDOM = "at a random moment"
Place = Literal["standing", "new", "shared"]
"""of the rank that dies: its own local checkpoint, none (a new machine), or both ranks have rank 0's"""
RANK_SECONDS = 3.0
SHARE_OF_LAUNCHERS = 0.7
"""of the deaths of a rank after which the other is killed too; else it waits for RANK_SECONDS"""
VERSIONS_BESIDE = 4
"""anchors, wider deltas and pruning are due every few versions"""
SETTLE_SECONDS = 40.0
ON_ITS_WAY_SECONDS = 0.05


@dataclass
class Run:
    """One use of a scenario. `order`: where to strike; its key RANDOM: anywhere, a little later. `rows`: what
    the victim passed where it could have been struck."""

    world: World
    order: Order
    rng: random.Random
    struck: bool = False
    seconds: float = 0.0
    """from the strike until everything was settled"""
    rows: Mapping[str, int] = field(default_factory=dict)
    others: int = 0
    """processes killed on the way, at random moments"""
    violations: list[str] = field(default_factory=list)

    @property
    def by_moment(self) -> bool:
        return self.order.key == RANDOM

    @property
    def trap(self) -> Order:
        return Order() if self.by_moment else self.order

    def check(self, found: list[str]) -> None:
        self.violations += found

    def strike(self, victim: Child, settled: Callable[[], bool], seconds: float = 20.0) -> bool:
        """Waits until the victim was struck, or all is settled without. True when it has ended."""
        if self.by_moment:
            time.sleep(self.rng.uniform(0.0, 0.35))
            self.struck = not victim.ended
            victim.kill()
            return True
        try:
            wait_for(lambda: victim.wire.fired or victim.ended or settled(), "struck or settled", seconds)
        except NotReached as error:
            self.check([str(error), victim.words()[-1500:]])
        self.struck = victim.wire.fired
        if self.struck and self.order.action == "kill":
            wait_for(lambda: victim.ended, "killed")
        elif not self.struck:
            victim.wire.order(Order())
            # it may have read its order in the moment in which all was settled
            time.sleep(ON_ITS_WAY_SECONDS)
            self.struck = victim.ended
        elif self.order.then:
            with contextlib.suppress(NotReached):
                wait_for(lambda: victim.ended, "killed after the error", 1.5)
            victim.wire.order(Order())
        elif self.order.action == "error":
            with contextlib.suppress(NotReached):
                wait_for(lambda: victim.ended or settled(), "ended by the error, or settled", seconds)
        return victim.ended

    def settle(self, **options: Any) -> None:
        began = time.monotonic()
        self.check(self.world.settle(**options))
        self.seconds = time.monotonic() - began


BESIDE = re.compile(r"^(anchor|skip|prune|upkeep)\.| (anchor|skip)( index)?$")
IN_A_GROUP = re.compile(r"^(group|engine|patch|undo)\.")
"""the others lie on the way of every host"""
BEFORE_A_PUBLISHER = (
    "",
    "version.moved",
    "file.linked index",
    "pointer.moved",
    "patch.record",
    "patch.begun",
)
BEFORE_A_HOST = ("", "patch.record", "patch.begun", "journal.complete", "undo.forgotten", "engine.paused")
"""where the one before is killed; empty: at a random moment"""


def _killed_at_work(
    run: Run, first: Child, places: Sequence[str], work: Callable[[], object] | None = None
) -> None:
    """After its work was laid before it."""
    place = run.rng.choice(places)
    if place:
        first.wire.order(Order(place, run.rng.choice((1, 1, 2, 5))))
    (work or run.world.hand_over)()
    with contextlib.suppress(NotReached):
        wait_for(lambda: first.ended, "killed", 0.6 if place else run.rng.uniform(0.0, 0.3))
    first.kill()
    run.others += 1
    run.check(run.world.violations_now())


def passed(victim: Child, before: Mapping[str, int], *, beside: bool = False) -> dict[str, int]:
    """`beside`: rows of what is made beside the versions, in a thread of its own, else the others."""
    counts = {row: count - before.get(row, 0) for row, count in victim.wire.counts.items()}
    return {row: count for row, count in counts.items() if bool(BESIDE.search(row)) == beside}


def publish(run: Run) -> None:
    """A running publisher is handed a checkpoint."""
    world = run.world
    victim = _running(world, "publisher")
    before = victim.wire.counts
    victim.wire.order(run.trap)
    world.hand_over()
    ended = run.strike(victim, world.published)
    run.rows = passed(victim, before)
    if ended:
        run.check(world.violations_now())
        world.start_publisher()
    run.settle()


def start_publisher(run: Run) -> None:
    """A publisher starts on what another left that was killed at work."""
    world = run.world
    first = _running(world, "publisher")
    _killed_at_work(run, first, BEFORE_A_PUBLISHER)
    victim = world.start_publisher(run.trap)
    ended = run.strike(victim, world.published)
    run.rows = passed(victim, {})
    if ended:
        run.check(world.violations_now())
        world.start_publisher()
    run.settle()


def make_beside(run: Run) -> None:
    """A running publisher makes anchors and deltas from older versions, and prunes."""
    world = run.world
    victim = _running(world, "publisher")
    before = victim.wire.counts
    ended = False
    for _ in range(VERSIONS_BESIDE if run.order.key else 2 * VERSIONS_BESIDE):
        _age_the_trash(world)
        looked = victim.wire.counts.get("upkeep.idle", 0)
        victim.wire.order(replace(run.trap, nth=1))
        world.hand_over()
        ended = run.strike(victim, partial(_all_is_made, world, victim, looked))
        if run.struck or ended:
            break
    run.rows = passed(victim, before, beside=True)
    if ended:
        run.check(world.violations_now())
        world.start_publisher()
    run.settle()


def _all_is_made(world: World, publisher: Child, looked: int) -> bool:
    """What was due beside the version too."""
    return publisher.wire.counts.get("upkeep.idle", 0) > looked and world.published()


def _age_the_trash(world: World) -> None:
    """What was pruned lies there since the boot, so that it is deleted."""
    note = world.root / "pruned.json"
    graves = (world.channel.glob(f"{at}.trash/*.pruned") for at in ("", "components/adapter/*/"))
    for grave in (each for found in graves for each in found):
        note.write_text(json.dumps({"boot": Boot.here().boot_id, "seconds": 0.0}))
        with contextlib.suppress(FileNotFoundError):
            note.rename(grave / note.name)  # whole, whoever reads it meanwhile


def follow(run: Run) -> None:
    """A running subscriber sees a new version."""
    world = run.world
    victim = _running(world, "host")
    before = victim.wire.counts
    victim.wire.order(run.trap)
    world.hand_over()
    ended = run.strike(victim, lambda: world.published() and world.followed(see_pointer(world.channel)))
    run.rows = passed(victim, before)
    if ended:
        run.check(world.violations_now())
        world.start_host()
    run.settle()


def follow_in_group(run: Run, side: Side) -> None:
    """The hosts of an engine group see a new version; the one that leads, or the other, is struck."""
    world = run.world
    leader, victim = _running(world, "host"), _running(world, side)
    before, released = victim.wire.counts, leader.wire.counts.get("group.released", 0)
    victim.wire.order(run.trap)
    world.hand_over()

    def settled() -> bool:
        free = leader.wire.counts.get("group.released", 0) > released
        return free and world.published() and world.followed(see_pointer(world.channel))

    ended = run.strike(victim, settled)
    run.rows = {row: count for row, count in passed(victim, before).items() if IN_A_GROUP.search(row)}
    if ended:
        run.check(world.violations_now())
        _start(world, side)
    run.settle()


def _start(world: World, side: Side) -> Child:
    return world.start_member() if side == "member" else world.start_host()


def start_host(run: Run) -> None:
    """A subscriber starts some versions behind, on what another left that was killed at work."""
    world = run.world
    first = _running(world, "host")
    _killed_at_work(run, first, BEFORE_A_HOST)
    for _ in range(run.rng.choice((0, 0, 2))):
        world.hand_over()
    wait_for(world.published, "published")
    left = see_local(world.local, tensors=False)
    if left is not None:
        world.behind = min((left.version, *(left.between or ())))
    victim = world.start_host(run.trap)
    ended = run.strike(victim, lambda: world.followed(see_pointer(world.channel)))
    run.rows = passed(victim, {})
    if ended:
        run.check(world.violations_now())
        world.start_host()
    run.settle()


OF_ADAPTERS = re.compile(r"^(adapter|component)\.| (adapter|registry)\b")
"""the others lie on the way of every publisher and host"""
BEFORE_A_PUBLISHER_OF_ADAPTERS = (
    "",
    "component.described adapter",
    "component.made adapter",
    "file.renamed registry",
    "attempt.begun adapter",
    "pointer.moved adapter",
    "patch.record adapter",
    "inbox.published",
)
BEFORE_A_HOST_OF_ADAPTERS = (
    "",
    "patch.record adapter",
    "adapter.copied adapter",
    "adapter.exported adapter",
    "adapter.loaded",
    "adapter.recorded",
    "adapter.withdrawn",
    "adapter.unloaded",
)


def _of_adapters(rows: Mapping[str, int]) -> dict[str, int]:
    return {row: count for row, count in rows.items() if OF_ADAPTERS.search(row)}


def _moves(run: Run) -> None:
    """A save of adapters, while main may move too."""
    if run.rng.random() < 0.6:
        run.world.hand_over()
    run.world.hand_over_adapters()


def _all_published(world: World) -> bool:
    return world.published() and world.adapters_published()


def _all_followed(world: World) -> bool:
    return _all_published(world) and world.followed(see_pointer(world.channel)) and world.adapters_followed()


def _of_a_running(
    run: Run, side: Side, work: Callable[[], object], settled: Callable[[World], bool], beside: bool = False
) -> None:
    """It is struck at what it does for adapters."""
    world = run.world
    victim = _running(world, side)
    before = victim.wire.counts
    victim.wire.order(run.trap)
    work()
    ended = run.strike(victim, lambda: settled(world))
    run.rows = _of_adapters(passed(victim, before, beside=beside))
    if ended:
        run.check(world.violations_now())
        world.start_publisher() if side == "publisher" else world.start_host()
    run.settle()


def publish_adapters(run: Run) -> None:
    _of_a_running(run, "publisher", run.world.hand_over_adapters, _all_published)


def add_adapter(run: Run) -> None:
    run.world.replace_adapter()
    _of_a_running(run, "publisher", partial(_moves, run), _all_published)


def prune_adapters(run: Run) -> None:
    """A running publisher makes what is due beside the versions of adapters."""
    world, victim = run.world, _running(run.world, "publisher")
    looked = victim.wire.counts.get("upkeep.idle", 0)

    def work() -> None:
        for _ in range(VERSIONS_BESIDE):
            _age_the_trash(world)
            world.hand_over_adapters()
            with contextlib.suppress(NotReached):
                wait_for(lambda: victim.ended or _all_published(world), "published", 10.0)

    def settled(world: World) -> bool:
        # after each of its three channels
        return victim.wire.counts.get("upkeep.idle", 0) > looked + 2 and _all_published(world)

    _of_a_running(run, "publisher", work, settled, beside=True)


def retire_adapter(run: Run) -> None:
    """The command is struck, and given again."""
    world = run.world
    victim = world.retire(run.trap)
    ended = run.strike(victim, lambda: victim.ended)
    run.rows = _of_adapters(passed(victim, {}))
    if run.struck and ended:
        run.check(world.violations_now())
    world.replace_adapter()
    world.hand_over_adapters()
    run.settle()


def follow_adapters(run: Run) -> None:
    def work() -> None:
        run.world.hand_over()
        run.world.hand_over_adapters()

    _of_a_running(run, "host", work, _all_followed)


def replace_adapter(run: Run) -> None:
    """A running subscriber sees that an adapter is retired, and another one."""

    def work() -> None:
        run.world.replace_adapter()
        run.world.hand_over_adapters()

    _of_a_running(run, "host", work, _all_followed)


def start_with_adapters(run: Run, side: Side) -> None:
    """On what another left that was killed at work on adapters."""
    world, publishes = run.world, side == "publisher"
    places = BEFORE_A_PUBLISHER_OF_ADAPTERS if publishes else BEFORE_A_HOST_OF_ADAPTERS
    if publishes:
        world.replace_adapter()
    _killed_at_work(run, _running(world, side), places, partial(_moves, run))
    if not publishes:
        wait_for(lambda: _all_published(world), "published")
        left = see_local(world.local, tensors=False)
        if left is not None:
            world.behind = min((left.version, *(left.between or ())))
    victim = world.start_publisher(run.trap) if publishes else world.start_host(run.trap)
    settled = _all_published if publishes else _all_followed
    ended = run.strike(victim, lambda: settled(world))
    run.rows = _of_adapters(passed(victim, {}))
    if ended:
        run.check(world.violations_now())
        world.start_publisher() if publishes else world.start_host()
    run.settle()


def lose_engine(run: Run) -> None:
    """An engine's process ends and another begins while a running subscriber is at any step; that goes on."""
    world = run.world
    run.order = replace(run.order, action="stop")
    victim = _running(world, "host")
    before = victim.wire.counts
    victim.wire.order(run.trap)
    world.hand_over()
    run.strike(victim, lambda: world.published() and world.followed(see_pointer(world.channel)))
    run.rows = passed(victim, before)
    if run.struck:
        wait_for(lambda: victim.stopped, "suspended")
        world.tell_engines("restart")
        victim.signal(signal.SIGCONT)
        # the state says that the process before serves, until it is looked at again
        wait_for(lambda: all(one.loaded for one in world.tell_engines("see")), "loaded", SETTLE_SECONDS)
    run.settle()


def seed(run: Run) -> None:
    """A subscriber without a local checkpoint, or with the files of an earlier run."""
    world = run.world
    _end(_running(world, "host"))
    if run.rng.random() < 0.5:
        shutil.rmtree(world.local)
    else:
        (world.local / ".weightcast" / "state.json").unlink()
    world.local.mkdir(exist_ok=True)
    (world.local / ".weightcast").mkdir(exist_ok=True)
    shutil.copy(world.base / "config.json", world.local / "stray.json")
    victim = world.start_host(run.trap)
    world.seeds = 1
    ended = run.strike(victim, lambda: world.followed(see_pointer(world.channel)))
    run.rows = passed(victim, {})
    if ended:
        run.check(world.violations_now())
        world.start_host()
    run.settle()


def lose_power_of_host(run: Run) -> None:
    """A subscriber's machine goes down at work, its engines with it, and comes up with what was synced."""
    world = run.world
    _end(_running(world, "host"))
    record = world.root / "syncs"
    durable = Durable.of(world.local)
    victim = world.start_host(run.trap, record)
    world.hand_over()
    ended = run.strike(victim, lambda: world.published() and world.followed(see_pointer(world.channel)))
    run.rows = passed(victim, {})
    if not ended:
        _end(victim)
    durable.learn(record)
    Loss(durable, run.rng, run.rng.random() < 0.4).strike(world.local)
    world.tell_engines("restart")
    durable.close()
    shutil.rmtree(record)
    another_boot(world.local)
    world.seeds = 1
    world.start_host()
    run.settle()


def lose_power_of_publisher(run: Run) -> None:
    """The publisher's machine goes down at work, and with it the disk that holds the channel, unless
    that is in a bucket. No host has seen what is lost."""
    world = run.world
    _end(_running(world, "host"))
    _end(_running(world, "publisher"))
    record = world.root / "syncs"
    kept = [world.pub, *([] if world.in_bucket else [world.channel])]
    durable = Durable.of(*kept)
    victim = world.start_publisher(run.trap, record)
    world.hand_over()
    ended = run.strike(victim, world.published)
    run.rows = passed(victim, {})
    if not ended:
        _end(victim)
    durable.learn(record)
    loss = Loss(durable, run.rng, run.rng.random() < 0.4)
    for each in kept:
        loss.strike(each)
    durable.close()
    shutil.rmtree(record)
    another_boot(world.pub)
    run.check(_lost_channel(world))
    world.start_publisher()
    world.start_host()
    run.settle()


def _lost_channel(world: World) -> list[str]:
    """Whatever was lost: what the channel shows is whole, and what was settled before is there."""
    channel = world.see()
    found = channel_violations(channel, world.before)
    world.before = channel
    return found


def repair(run: Run) -> None:
    """A subscriber starts on a local checkpoint in which a tensor was changed by somebody else."""
    world = run.world
    _end(_running(world, "host"))
    names = [name for name, one in world.models[0].items() if len(one.data)]
    flip(world.local, run.rng.choice(names))
    victim = world.start_host(run.trap)
    ended = run.strike(victim, world.mended)
    run.rows = passed(victim, {})
    if ended:
        world.start_host()
    wait_for(world.mended, "mended", SETTLE_SECONDS)
    run.settle()


def refuse(run: Run) -> None:
    """The engines refuse a version: it is undone and blocked; the next one is taken."""
    world = run.world
    victim = _running(world, "host")
    old = see_pointer(world.channel)
    before = victim.wire.counts
    world.tell_engines("refuse")
    victim.wire.order(run.trap)
    world.hand_over()
    ended = run.strike(victim, lambda: world.published() and _stepped_back(world, old) and _is_idle(world))
    run.rows = passed(victim, before)
    if ended:
        run.check(world.violations_now())
        world.start_host()
    run.check(_refused(world, old))
    world.tell_engines("accept")
    world.hand_over()
    # two versions ahead, the full weights of the second may be fewer bytes than both steps
    world.seeds = 1
    run.settle()


def _stepped_back(world: World, old: int) -> bool:
    local = see_local(world.local, tensors=False)
    return local is not None and see_pointer(world.channel) in local.blocked and world.followed(old)


def _refused(world: World, old: int) -> list[str]:
    """The host serves the version before, ready and degraded."""
    try:
        wait_for(lambda: world.published() and _stepped_back(world, old), "stepped back", SETTLE_SECONDS)
        wait_for(lambda: _is_idle(world), "idle")
    except NotReached as error:
        return [f"did not recover: {error}", *([] if world.host is None else [world.host.words()])]
    found = world.settle(version=old)
    local, status = see_local(world.local), _status(world)
    if local is None or world.see().pointer not in local.blocked:
        found.append(f"blocked: {None if local is None else sorted(local.blocked)}")
    facts = [status.get(fact) for fact in ("ready", "served_version")]
    if facts != [True, old] or not status.get("blocked"):
        found.append(f"not ready, degraded, on version {old}: {facts}, {status.get('not_ready_reasons')}")
    return found


def _is_idle(world: World) -> bool:
    """Its step has ended: the files are as they shall be before it has."""
    return bool(_status(world)["state"] == "idle")


def _status(world: World) -> dict[str, Any]:
    """The subscriber's, or that it does not answer yet."""
    try:
        port = int((world.root / "host.port").read_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=10) as reply:
            found: dict[str, Any] = json.loads(reply.read())
    except OSError:
        return {"state": "away"}
    return found


def disturbed(act: Callable[[Run], None]) -> Callable[[Run], None]:
    """A disk error in place of a kill: once or for a while, a kill some steps later, or neither. Daemons that
    end by it are started again, as by their unit."""

    def act_on_errors(run: Run) -> None:
        run.order = _as_error(run)
        world = run.world
        world.disturbed, before = True, world.children
        try:
            act(run)
        finally:
            world.disturbed = False
        run.check([text for child in dict.fromkeys((*before, *world.children)) for text in child.crashes()])

    return act_on_errors


def _as_error(run: Run) -> Order:
    then, lasting = run.rng.choice(((0, 0), (0, run.rng.randint(1, 12)), (run.rng.randint(1, 20), 0)))
    number = run.rng.choice((errno.EIO, errno.ENOSPC))
    return replace(run.order, action="error", errno=number, then=then, lasting=lasting)


def birth(run: Run) -> None:
    """The first start of a publisher makes channel and local checkpoint. The world is new."""
    world = run.world
    world.hand_over()
    victim = world.start_publisher(run.trap)
    ended = run.strike(victim, world.published)
    run.rows = passed(victim, {})
    if ended:
        run.check(world.violations_now())
        world.start_publisher()
    run.settle(host=False)


def first_host(run: Run) -> None:
    """The first start of a subscriber, on a channel with versions. The world is new."""
    world = run.world
    world.start_publisher()
    for _ in range(run.rng.choice((1, 3))):
        world.hand_over()
    wait_for(world.published, "published")
    victim = world.start_host(run.trap)
    world.seeds = 1
    ended = run.strike(victim, lambda: world.followed(see_pointer(world.channel)))
    run.rows = passed(victim, {})
    if ended:
        run.check(world.violations_now())
        world.start_host()
    run.settle()


def take_over(run: Run) -> None:
    """The owner is suspended; another publishes; the old owner wakes up."""
    world = run.world
    run.order = replace(run.order, action="stop")
    victim = _running(world, "publisher")
    before = victim.wire.counts
    victim.wire.order(run.trap)
    world.hand_over()
    run.strike(victim, world.published)
    run.rows = passed(victim, before)
    if run.struck:
        run.check(_another_publishes(world))
        victim.signal(signal.SIGCONT)
        _let_end(victim)
        run.check(world.violations_now(stale_pointer=True))
    else:
        _end(victim)
    world.start_publisher()
    world.hand_over()
    run.settle()


def _another_publishes(world: World) -> list[str]:
    """On a machine of its own, knowing nothing of the owner's local checkpoint."""
    step = world.train()
    other = world.root / "other"
    child = fork(
        lambda: world.publish_once(other, step, take_over=True, encoding=world.shape.encoding),
        world.root / "other.log",
    )
    wait_for(lambda: child.ended, "taken over", SETTLE_SECONDS)
    found = [] if child.exit_code == 0 else [f"the new owner failed: {child.words()}"]
    channel = world.see()
    at = channel.versions.get(channel.pointer)
    if at is None or at.step != step:
        found.append(f"the new owner's version is not the newest: pointer {channel.pointer}")
    return found + world.violations_now()


def _let_end(victim: Child) -> None:
    """Time to find out that it was superseded; a publisher with nothing to do does not notice."""
    try:
        wait_for(lambda: victim.ended, "ended", 0.7)
    except NotReached:
        _end(victim)


def ranks(run: Run, who: int, place: Place) -> None:
    """Two ranks publish one version; one of them dies. No daemons run in this world."""
    world = run.world
    step = _ready_for_ranks(world, who, place)
    shared = place == "shared"
    children = [_rank(world, step, n, shared, run.trap if n == who else Order()) for n in (0, 1)]
    victim = children[who]
    run.strike(victim, lambda: all(child.ended for child in children))
    run.rows = passed(victim, {})
    other = children[1 - who]
    if run.struck and run.rng.random() < SHARE_OF_LAUNCHERS and not other.ended:
        other.kill()
        run.others += 1
    for child in children:
        wait_for(lambda child=child: child.ended, "both ranks ended", SETTLE_SECONDS)  # type: ignore[misc]
    run.check(world.violations_now())
    began = time.monotonic()
    run.check(_ranks_again(world, step, shared))
    run.seconds = time.monotonic() - began


def _ready_for_ranks(world: World, who: int, place: Place) -> int:
    """The next step to publish; the rank's local checkpoint is there and one version behind, or is not."""
    if not (world.channel / "channel.json").exists():
        world.make_channel()
    locals_ = (world.pub, _rank1_local(world))
    if place == "new":
        shutil.rmtree(locals_[who], ignore_errors=True)
    pointer = see_pointer(world.channel)
    behind = [each for each in locals_ if _version_of(each) != pointer]
    if place == "standing" and (pointer == 0 or behind):
        step = world.train()
        _prepare_ranks(world, step)
        found = _ranks_again(world, step, shared=False)
        if found:
            raise NotReached(f"no version that both ranks stand at: {found}")
    step = world.train()
    _prepare_ranks(world, step)
    return step


def _version_of(local: Path) -> int | None:
    seen = see_local(local, tensors=False)
    return None if seen is None or seen.phase != "clean" else seen.version


def _rank1_local(world: World) -> Path:
    return world.root / "rank1-local"


def _prepare_ranks(world: World, step: int) -> None:
    names = list(world.models[step])
    for number in (0, 1):
        mine = {name: world.models[step][name] for name in names[number::2]}
        write_checkpoint(world.root / f"rank{number}", mine)


def _rank(
    world: World, step: int, number: int, shared: bool, order: Order, seconds: float = RANK_SECONDS
) -> Child:
    local = world.pub if shared or number == 0 else _rank1_local(world)

    def role() -> None:
        with Publisher.open(
            world.address,
            local=local,
            base=world.base,
            rank=number,
            world_size=2,
            options=PublisherOptions(deadline_seconds=seconds),
            encoding=world.shape.encoding,  # type: ignore[arg-type]
        ) as publisher:
            publisher.publish_checkpoint(world.root / f"rank{number}", step=step)

    return fork(role, world.root / f"rank{number}.log", order)


def _ranks_again(world: World, step: int, shared: bool) -> list[str]:
    """As a trainer tries again, until both say that it is out."""
    children: list[Child] = []
    for _ in range(4):
        children = [_rank(world, step, n, shared, Order(), SETTLE_SECONDS) for n in (0, 1)]
        for child in children:
            wait_for(lambda child=child: child.ended, "both ranks ended", 2 * SETTLE_SECONDS)  # type: ignore[misc]
        if all(child.exit_code == 0 for child in children):
            break
    else:
        return [f"did not recover: {child.words()[-1500:]}" for child in children]
    found = world.violations_now()
    channel, local = world.see(), see_local(world.pub)
    at = channel.versions.get(channel.pointer)
    if at is None or at.step != step or local is None or local.version != channel.pointer:
        found.append(f"step {step} is not at the pointer {channel.pointer}")
    return found


def _running(world: World, side: Side) -> Child:
    child = {"publisher": world.publisher, "member": world.member}.get(side, world.host)
    if child is None or child.ended:
        raise NotReached(f"no {side} runs: {'' if child is None else child.words()}")
    return child


def _end(child: Child) -> None:
    child.signal(signal.SIGTERM)
    try:
        wait_for(lambda: child.ended, "ended on SIGTERM", 20.0)
    except NotReached:
        child.kill()
        raise


@dataclass(frozen=True)
class Scenario:
    """`new`: it needs a world of its own; `daemons`: publisher and host run already; `engines`: only
    these; `keep_versions`: older ones are pruned, None: as the world is drawn; `member`: the engines' group
    has two hosts."""

    act: Callable[[Run], None]
    side: Side
    new: bool = False
    daemons: bool = True
    engines: tuple[str, ...] | None = None
    keep_versions: int | None = None
    member: bool = False
    adapters: bool = False
    shards: int | None = None
    """files of weights, None: as the world is drawn; one file has no local index"""
    moments: bool = True
    """also struck at random moments"""


SCENARIOS: Mapping[str, Scenario] = {
    "publish": Scenario(publish, "publisher"),
    "start publisher": Scenario(start_publisher, "publisher"),
    "make beside": Scenario(make_beside, "publisher", keep_versions=3, moments=False),
    "follow": Scenario(follow, "host"),
    "patch engines": Scenario(follow, "host", engines=("live",)),
    "lose engine": Scenario(lose_engine, "host", engines=("live",), moments=False),
    "start host": Scenario(start_host, "host"),
    "seed": Scenario(seed, "host"),
    "repair": Scenario(repair, "host"),
    "refuse": Scenario(refuse, "host", engines=("copy",)),
    "refuse patch": Scenario(refuse, "host", engines=("live",)),
    "group: leader follows": Scenario(
        lambda run: follow_in_group(run, "host"), "host", engines=("copy",), member=True
    ),
    "group: member follows": Scenario(
        lambda run: follow_in_group(run, "member"), "member", engines=("copy",), member=True
    ),
    "first publisher": Scenario(birth, "publisher", new=True, daemons=False),
    "first host": Scenario(first_host, "host", new=True, daemons=False, shards=2),
    "rank 0 dies": Scenario(lambda run: ranks(run, 0, "standing"), "publisher", daemons=False),
    "rank 0 on a new machine": Scenario(
        lambda run: ranks(run, 0, "new"), "publisher", daemons=False, shards=2
    ),
    "rank 1 dies": Scenario(lambda run: ranks(run, 1, "standing"), "rank 1", daemons=False),
    "rank 1 on a new machine": Scenario(lambda run: ranks(run, 1, "new"), "rank 1", daemons=False, shards=2),
    "rank 1 shares a local checkpoint": Scenario(
        lambda run: ranks(run, 1, "shared"), "rank 1", daemons=False
    ),
    **{
        name: Scenario(act, side, engines=("copy",), keep_versions=3, adapters=True)
        for name, act, side in (
            ("publish adapters", publish_adapters, "publisher"),
            ("add adapter", add_adapter, "publisher"),
            ("prune adapters", prune_adapters, "publisher"),
            ("retire adapter", retire_adapter, "publisher"),
            ("follow adapters", follow_adapters, "host"),
            ("replace adapter", replace_adapter, "host"),
            ("start publisher of adapters", partial(start_with_adapters, side="publisher"), "publisher"),
            ("start host of adapters", partial(start_with_adapters, side="host"), "host"),
        )
    },
    "take over": Scenario(take_over, "publisher", moments=False),
    "power of host": Scenario(lose_power_of_host, "host"),
    "power of publisher": Scenario(lose_power_of_publisher, "publisher"),
    "disturb publisher": Scenario(disturbed(publish), "publisher", moments=False),
    "disturb host": Scenario(disturbed(follow), "host", moments=False),
}
STOPPED_OR_DISTURBED = ("take over", "lose engine", "disturb publisher", "disturb host")
"""not by kills"""
DISTURBED: Mapping[str, Scenario] = {
    name: replace(scenario, act=disturbed(scenario.act), moments=False)
    for name, scenario in SCENARIOS.items()
    if name not in STOPPED_OR_DISTURBED
}
"""every way with disk errors in place of kills"""
