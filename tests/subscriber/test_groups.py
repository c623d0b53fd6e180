"""Orders, leases and grants of an engine group, by the routes that daemons use; time is a number."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
from disk_errors import watched
from doubles import Answer, Call, Double
from groups import Host
from hosts import Clock, Run, Site
from hosts import Host as Steps
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from weightcast.shared.base.errors import EngineFailed, Refused, RetryLater
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index
from weightcast.shared.checkpoint.state.state import LocalState, Position
from weightcast.shared.checkpoint.verify.hashing import Scrub
from weightcast.shared.daemon.settings import BadSettings, load_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.groups.client import MemberClient
from weightcast.subscriber.groups.lead import GroupPace, Lead
from weightcast.subscriber.groups.messages import (
    HOLD_PATH,
    RELEASE_PATH,
    Hold,
    HoldState,
    Order,
    OrderPhase,
    Release,
)
from weightcast.subscriber.sync.group_follower import GroupFollower, Post

AT = Position(7, "d7", "r7", 1, b"")
NEXT = Position(8, "d8", "r8", 1, b"")
STATE = LocalState("run", AT)
ORDER = Order("boss", 5, "hold", 7, "run", "d7", "r7", seconds=10.0)
QUICK = GroupPace(lease=1.0, deadline=5.0, patience=0.2)


def post(clock: Clock) -> Post:
    return Post(lambda: None, clock)


def held(one: Post, order: Order = ORDER) -> Hold:
    one.take(order)
    wanted = one.wanted()
    assert wanted is not None
    one.answer(wanted, "held")
    return one.hold()


def test_a_lease_runs_from_the_last_renewal() -> None:
    clock = Clock()
    one = post(clock)
    grant = held(one).grant
    clock.at += 9
    assert one.take(ORDER).grant == grant and one.hold().seconds_left == 10
    clock.at += 9.5
    assert one.hold().state == "held"
    clock.at += 0.5
    assert one.hold().state == "free" and one.wanted() is None and one.hold().grant == ""


def test_what_is_held_again_has_another_grant() -> None:
    clock = Clock()
    one = post(clock)
    first = held(one)
    before = one.wanted()
    clock.at += 10
    assert one.take(ORDER).state == "working", "the same order, after its lease: all anew"
    again = one.wanted()
    assert before is not None and again is not None and again is not before
    one.answer(before, "held")
    assert one.hold().state == "working", "an answer to what is over"
    one.answer(again, "held")
    assert one.hold().grant not in ("", first.grant)


@pytest.mark.parametrize(
    ("late", "taken"),
    [
        (replace(ORDER, term=4, version=6), False),
        (replace(ORDER, phase="prepare"), False),
        (replace(ORDER, leader="other", term=99), False),
        (ORDER, True),
        (replace(ORDER, term=6, version=8), True),
    ],
)
def test_what_comes_late_or_from_elsewhere_is_not_taken(late: Order, taken: bool) -> None:
    one = post(Clock())
    held(one)
    answer = one.take(late)
    assert answer.answers(late) is taken
    assert taken or (answer.state == "held" and answer.version == 7)


def test_a_release_ends_its_own_term_only() -> None:
    one = post(Clock())
    held(one)
    assert one.release(Release("boss", 4, True)).state == "held"
    assert one.release(Release("other", 5, True)).state == "held"
    assert one.take_served() is None
    assert one.release(Release("boss", 5, True)).state == "free"
    assert (one.take_served(), one.take_served()) == ("d7", None)
    assert one.take(ORDER).state == "free", "a renewal that was on its way"
    assert one.take(replace(ORDER, leader="other", term=0)).state == "working"


acts = st.one_of(
    st.tuples(
        st.just("take"),
        st.sampled_from(("boss", "other")),
        st.integers(0, 3),
        st.sampled_from(("prepare", "hold")),
    ),
    st.tuples(st.just("release"), st.sampled_from(("boss", "other")), st.integers(0, 3)),
    st.tuples(st.just("pass"), st.floats(0, 15)),
    st.tuples(st.just("answer"), st.sampled_from(("held", "prepared", "failed", "refused"))),
)


@given(st.lists(acts, max_size=40))
@settings(max_examples=200)
def test_a_grant_seen_twice_was_held_in_between(sequence: list[tuple[object, ...]]) -> None:
    """And nothing was ordered, or let go, meanwhile."""
    clock = Clock()
    one = post(clock)
    seen: dict[str, int] = {}
    for moment, act in enumerate(sequence):
        before = one.wanted()
        _do(one, clock, act)
        if before is not one.wanted():
            broken = [grant for grant, last in seen.items() if last < moment]
            assert one.hold().grant not in broken
            seen = dict.fromkeys(seen, -1)
        grant = one.hold().grant
        if grant:
            assert seen.get(grant, 0) != -1
            seen[grant] = moment
        assert (one.hold().state == "free") is (one.wanted() is None)


def _do(one: Post, clock: Clock, act: tuple[object, ...]) -> None:
    match act:
        case ("take", str(leader), int(term), ("prepare" | "hold") as phase):
            one.take(Order(leader, term, phase, term, "run", "d", "r", seconds=10.0))
        case ("release", str(leader), int(term)):
            one.release(Release(leader, term, True))
        case ("pass", float(seconds)):
            clock.at += seconds
        case ("answer", ("held" | "prepared" | "failed" | "refused") as state):
            wanted = one.wanted()
            if wanted is not None:
                one.answer(wanted, state)


@dataclass
class Twin:
    """A member without a host: carries out what comes at once, and fails as a test wants."""

    url: str = "http://twin"
    away: bool = False
    says: HoldState | None = None
    lies_elsewhere: bool = False
    post: Post = field(default_factory=lambda: Post(lambda: None))
    orders: list[Order] = field(default_factory=list)
    released: list[bool] = field(default_factory=list)

    def order(self, order: Order) -> Hold:
        self._reach()
        self.orders.append(order)
        self.post.take(order)
        wanted = self.post.wanted()
        if wanted is not None and self.post.hold().state == "working":
            at = Position(wanted.version, wanted.digest, wanted.root, 1, b"")
            self.post.is_at(replace(at, root="x") if self.lies_elsewhere else at)
            done: HoldState = "held" if wanted.phase == "hold" else "prepared"
            self.post.answer(wanted, done if self.says is None else self.says, "so it is")
        return self.post.hold()

    def release(self, release: Release) -> Hold:
        self._reach()
        self.released.append(release.served)
        return self.post.release(release)

    def look(self) -> Hold:
        self._reach()
        return self.post.look()

    def close(self) -> None:
        pass

    def _reach(self) -> None:
        if self.away:
            raise EngineFailed(f"{self.url} is away")


def lead(*members: object) -> Lead:
    return Lead(members, name="boss", pace=QUICK, wait=lambda seconds: None)


@contextmanager
def holding(*members: Twin) -> Iterator[Lead]:
    one = lead(*members)
    with one.gathering(7, STATE):
        one.await_prepared()
        one.hold(AT)
        yield one


def test_a_reload_under_a_hold_counts() -> None:
    twins = [Twin("http://a"), Twin("http://b")]
    with holding(*twins) as one:
        grants = one.standing()
        one.stood(grants)
        one.serves()
        assert set(grants) == {"http://a", "http://b"} and not one.hindered
    assert all(twin.released == [True] for twin in twins)
    assert [order.phase for order in twins[0].orders][:2] == ["prepare", "hold"]
    assert all(twin.post.hold().state == "free" for twin in twins)


def expire(twin: Twin) -> None:
    twin.post.release(Release("boss", twin.orders[-1].term))


def go_away(twin: Twin) -> None:
    twin.away = True


def forget(twin: Twin) -> None:
    twin.post = Post(lambda: None)


@pytest.mark.parametrize("fate", [expire, go_away, forget])
def test_a_member_that_let_go_makes_the_reload_not_count(fate: Callable[[Twin], None]) -> None:
    twin = Twin()
    with holding(Twin("http://b"), twin) as one:
        grants = one.standing()
        fate(twin)
        with pytest.raises(EngineFailed, match="did not hold the version"):
            one.stood(grants)
        assert one.hindered
    assert True not in twin.released


def test_a_hold_that_was_lost_is_taken_again_for_the_next_attempt() -> None:
    twin = Twin()
    with holding(twin) as one:
        grants = one.standing()
        forget(twin)
        with pytest.raises(EngineFailed):
            one.stood(grants)
        again = one.standing()
        assert again != grants
        one.stood(again)


@pytest.mark.parametrize(
    ("twin", "error", "told"),
    [
        (Twin(away=True), RetryLater, "is away"),
        (Twin(says="refused"), Refused, "so it is"),
        (Twin(says="failed"), RetryLater, "so it is"),
    ],
)
def test_nothing_goes_on_without_every_member(twin: Twin, error: type[Exception], told: str) -> None:
    one = Lead([Twin("http://b"), twin], name="boss", pace=replace(QUICK, deadline=5.0))
    with pytest.raises(error, match=told), one.gathering(7, STATE):
        one.await_prepared()


def test_a_member_of_other_bytes_is_not_held() -> None:
    twin = Twin(lies_elsewhere=True)
    one = Lead([twin], name="boss", pace=replace(QUICK, deadline=0.3))
    with pytest.raises(RetryLater, match="not at version 7"), one.gathering(7, STATE):
        one.hold(AT)


def test_a_leader_that_restarts_outdoes_its_own_terms() -> None:
    twin = Twin()
    held(twin.post, replace(ORDER, term=900, seconds=1000.0))
    with holding(twin) as one:
        assert one.standing()
    assert twin.orders[-1].term > 900


class Answers(Double):
    """A member behind its real API."""

    term: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin()

    def behave(self, call: Call) -> Answer:
        if call.path == RELEASE_PATH:
            hold = self.twin.release(Release(**call.body))
        else:
            hold = self.twin.order(Order(**call.body))
        return Answer(200, asdict(hold) | ({} if self.term is None else {"term": self.term}))


@pytest.mark.parametrize("term", [1 << 62, 1 << 61])
def test_a_term_that_no_leader_comes_to_is_named_and_not_outdone(site: Site, term: int) -> None:
    odd = Answers()
    odd.term = term
    url = site.serve(odd)
    one = lead(Twin("http://b"), MemberClient(url, None, 5.0))
    with pytest.raises(RetryLater, match=f"{url}: it answers with term {term}"), one.gathering(7, STATE):
        one.await_prepared()
    odd.term = None
    with one.gathering(7, STATE):
        one.await_prepared()
        one.hold(AT)
        assert set(one.standing()) == {"http://b", url}
    assert max(order.term for order in odd.twin.orders) < 100
    one.close()


def test_another_version_is_another_term() -> None:
    twin = Twin()
    with holding(twin) as one:
        term = twin.orders[-1].term
        one.hold(NEXT)
        assert (twin.orders[-1].version, twin.orders[-1].term > term) == (8, True)


def test_looking_tells_who_is_elsewhere() -> None:
    here, there, away = Twin("http://here"), Twin("http://there"), Twin("http://away", away=True)
    here.post.is_at(AT)
    there.post.is_at(NEXT)
    assert not lead(here).look(AT).astray
    seen = lead(here, there, away).look(AT)
    assert seen.astray and seen.differs and "http://away" in seen.troubles[0]
    there.post.is_at(replace(AT, version=6))
    seen = lead(here, there).look(AT)
    assert seen.astray and not seen.differs


def test_a_group_of_one_waits_for_nobody() -> None:
    one, before = lead(), threading.active_count()
    with one.gathering(7, STATE):
        one.await_prepared()
        one.hold(AT)
        assert one.standing() == {} and threading.active_count() == before
        one.stood({})
    assert not one.look(AT).troubles


TOKEN = "correct-horse"
GOOD = {"leader": "boss", "term": 1, "phase": "prepare", "version": 0, "seconds": 5.0}


def test_the_door_of_a_follower(site: Site) -> None:
    run = site.run()
    follower = Host(
        run, site.root / "follower", site.stack, group_follower=True, token=TOKEN, verify_rate=0
    ).start()
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for method, path in (("GET", HOLD_PATH), ("POST", HOLD_PATH), ("POST", RELEASE_PATH)):
        assert follower.call(method, path, json=GOOD).status_code == 401
    wrong: list[dict[str, object]] = [
        {"seconds": 0}, {"seconds": 1e9}, {"seconds": None}, {"version": -1}, {"phase": "patch"},
        {"leader": ""}, {"leader": "x" * 301}, {"more": 1}, {"term": 1 << 70},
    ]  # fmt: skip
    for change in wrong:
        assert follower.call("POST", HOLD_PATH, json=GOOD | change, headers=bearer).status_code == 422
    free = follower.call("GET", HOLD_PATH, headers=bearer).json()
    assert (free["state"], free["local_version"]) == ("free", None), "it does nothing of its own accord"
    assert not (follower.local / "config.json").exists()
    taken = follower.call("POST", HOLD_PATH, json=GOOD | {"run_id": "other"}, headers=bearer).json()
    assert taken["version"] == 0
    wait_until(lambda: follower.status.group.state in ("refused", "free"))
    assert not (follower.local / "config.json").exists(), "another run's leader moves nothing"


def test_only_a_follower_has_the_route(site: Site) -> None:
    host = Host(site.run(), site.root / "host", site.stack).start()
    assert host.call("POST", HOLD_PATH, json=GOOD).status_code in (404, 405)
    leader = Host(
        host.run, site.root / "leader", site.stack, group_member=(host.url,), group_lease=1.0
    ).start()
    wait_until(lambda: leader.status.last_error is not None or leader.status.degraded)
    wait_until(lambda: "is not a follower" in str((leader.status.last_error, leader.status.degraded)))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"group_follower": True, "engine": ("sglang=http://127.0.0.1:1",)}, "leader"),
        ({"group_follower": True, "group_member": ("http://127.0.0.1:1",)}, "leader"),
        ({"group_member": ("http://127.0.0.1:1", "http://127.0.0.1:1")}, "twice"),
        ({"group_member": ("http://10.0.0.7:8341",)}, "token"),
        ({"group_member": ("ftp://127.0.0.1",)}, "http://HOST:PORT"),
        ({"group_member": ("http://user:secret@127.0.0.1",)}, "http://HOST:PORT"),
        ({"group_member": ("http://127.0.0.1/x?y",)}, "http://HOST:PORT"),
        ({"group_lease": 0.0}, "group_lease"),
    ],
)
def test_settings_that_make_no_group(flags: dict[str, object], told: str) -> None:
    with pytest.raises(BadSettings, match=told) as refusal:
        load_settings(SubscriberSettings, {"channel": "C", "local": "L", **flags})
    assert "secret" not in str(refusal.value)


def ordered(run: Run, phase: OrderPhase, version: int, term: int) -> Order:
    channel = Channel.open(open_store(run.channel))
    pointer, base = channel.pointer(), channel.base
    assert pointer is not None and base is not None and channel.file is not None
    index = channel.index(pointer, version, base.table)
    assert isinstance(index, Index)
    return Order("boss", term, phase, version, channel.file.run_id, index.digest, index.root, seconds=60.0)


def test_an_order_is_answered_whatever_goes_wrong(site: Site) -> None:
    run = site.run()
    run.publish()
    host: Steps = site.host(run, group_follower=True)
    orders = Post(lambda: None)
    orders.take(ordered(run, "prepare", 1, 1))

    def fail(name: str, path: Path | None) -> None:
        if name == "engine.looked":
            raise ZeroDivisionError

    with watched(fail), pytest.raises(ZeroDivisionError):
        GroupFollower(host.sync, orders).step()
    assert (orders.hold().state, orders.hold().reason) == ("failed", "ZeroDivisionError")


def test_what_was_prepared_is_prepared_again_where_a_repair_came_between(site: Site) -> None:
    run = site.run()
    run.publish()
    host: Steps = site.host(run, group_follower=True)
    for phase in ("prepare", "hold"):
        host.step(ordered(run, phase, 1, 1))
    run.publish()
    host.step(ordered(run, "prepare", 2, 2))
    assert host.sync.is_prepared and host.state.position.version == 1
    [weights] = host.local.glob("model-00001*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    clock = Clock()
    scrub = Scrub(1 << 20, clock=clock)
    clock.at += 10
    host.sync.verify_some(scrub)
    assert scrub.status.faults == 1
    host.step(ordered(run, "hold", 2, 2))
    assert host.at(run, 2)
