from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources.inbox import (
    Candidate,
    FileMark,
    Inbox,
    InboxEntry,
    InboxMemory,
    InboxOutcome,
    may_be_checkpoint,
)
from weightcast.publisher.daemon.sources.layouts import step_of
from weightcast.publisher.daemon.sources.source import LastContent, Memory
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.daemon.status import Failure

REQUEST = "0123456789abcdef"
ROOT = "a" * 64
DAMAGED = Failure(error="DamagedFile", message="cut short")


def rules(**settings: Any) -> PublisherSettings:
    return PublisherSettings(channel="/channel", local="/local", watch="/watch", **settings)  # type: ignore[arg-type]


def stored(entries: Mapping[str, InboxEntry]) -> bytes:
    return InboxMemory(entries=tuple(entries.values())).model_dump_json().encode()


def woken(inbox: Inbox) -> Inbox:
    """As after a restart."""
    memory = InboxMemory.model_validate_json(stored(inbox.entries), strict=True)
    return Inbox(inbox.settings, memory.by_name(""))


def seen(name: str, at: int = 0, *, finished: bool = True, content: int = 1, whole: bool = True) -> Candidate:
    weights = frozenset({FileMark("model.safetensors", content, 10, content)})
    files = weights | {FileMark("config.json", 9, 2, 9)}
    if whole:
        return Candidate(name, files, weights, at, finished)
    return Candidate(name, files, frozenset(), at, finished, DAMAGED)


def test_newest_of_several_is_chosen_and_older_ones_are_passed_over() -> None:
    inbox = Inbox(rules())
    looks = [seen("step_3", 3, content=3), seen("step_1", 1, content=1), seen("step_2", 2, content=2)]
    choice = inbox.choose(looks, 0.0)
    assert choice.chosen is looks[0] and {each.name for each in choice.passed} == {"step_1", "step_2"}
    inbox.begin(choice, 7, REQUEST)
    inbox.succeed("step_3", 8, ROOT)
    assert all(inbox.is_known(each.name, each.files) for each in looks)


def test_every_checkpoint_in_order_of_completion_whatever_the_names() -> None:
    inbox = Inbox(rules(every=True))
    looks = [seen("a", 3, content=3), seen("b", 1, content=1), seen("c", 2, content=2)]
    published = []
    while looks:
        choice = inbox.choose(looks, 0.0)
        assert choice.chosen is not None and choice.passed == ()
        inbox.begin(choice, len(published), REQUEST)
        inbox.succeed(choice.chosen.name, len(published) + 1, ROOT)
        published.append(choice.chosen.name)
        looks = [each for each in looks if not inbox.is_known(each.name, each.files)]
    assert published == ["b", "c", "a"]


def test_completed_in_one_tick_of_the_clock_numbers_in_names_decide() -> None:
    choice = Inbox(rules()).choose([seen("step_9", 1, content=1), seen("step_10", 1, content=2)], 0.0)
    assert choice.chosen is not None and choice.chosen.name == "step_10"


def test_what_is_written_in_its_place_needs_two_equal_looks() -> None:
    inbox = Inbox(rules(settle_seconds=2.0))
    look = seen("step_1", finished=False)
    assert inbox.choose([look], 10.0).chosen is None
    assert inbox.choose([look], 11.9).chosen is None
    assert inbox.choose([seen("step_1", finished=False, content=2)], 12.5).chosen is None
    assert inbox.choose([seen("step_1", finished=False, content=2)], 14.4).chosen is None
    choice = inbox.choose([seen("step_1", finished=False, content=2)], 14.5)
    assert choice.chosen is not None and choice.waiting == ()


def test_even_without_a_settle_time_one_look_is_not_enough() -> None:
    inbox = Inbox(rules(settle_seconds=0.0))
    assert inbox.choose([seen("step_1", finished=False)], 10.0).chosen is None
    assert inbox.choose([seen("step_1", finished=False)], 10.1).chosen is not None


def test_with_a_marker_only_the_marker_counts() -> None:
    inbox = Inbox(rules(marker="DONE", settle_seconds=0.0))
    old, new = seen("step_1", 1, finished=False), seen("step_2", 2, content=2)
    for now in (0.0, 100.0, 200.0):
        choice = inbox.choose([old], now)
        assert choice.chosen is None and "DONE" in choice.waiting[0].reason
    # It is not complete, so a newer one does not pass it over: its marker may still come.
    choice = inbox.choose([old, new], 300.0)
    assert choice.chosen is new and choice.passed == ()


def test_a_marker_older_than_the_weights_is_told_from_none() -> None:
    inbox = Inbox(rules(marker="DONE"))
    look = seen("step_1", finished=False)
    look = replace(look, files=look.files | {FileMark("DONE", 8, 0, 8)})
    choice = inbox.choose([look], 0.0)
    assert choice.chosen is None and choice.waiting[0].reason == "DONE is older than the weights"


def test_every_waits_for_an_older_one_that_only_has_to_settle() -> None:
    inbox = Inbox(rules(every=True, settle_seconds=1.0))
    old, new = seen("step_1", 1, finished=False), seen("step_2", 2, content=2)
    assert inbox.choose([old, new], 0.0).chosen is None
    assert inbox.choose([old, new], 1.0).chosen is old


def test_newest_passes_over_an_older_one_that_only_has_to_settle() -> None:
    inbox = Inbox(rules())
    old, new = seen("step_1", 1, finished=False), seen("step_2", 2, content=2)
    choice = inbox.choose([old, new], 0.0)
    assert choice.chosen is new and choice.passed == (old,)


def test_a_refused_newest_gives_way_to_the_next_newest() -> None:
    inbox = Inbox(rules())
    looks = [seen("step_1", 1, content=1), seen("step_2", 2, content=2)]
    inbox.begin(inbox.choose(looks, 0.0), 0, REQUEST)
    inbox.refuse(looks[1], DAMAGED)
    left = [each for each in looks if not inbox.is_known(each.name, each.files)]
    choice = inbox.choose(left, 0.0)
    assert choice.chosen is looks[0] and inbox.entries["step_2"].failure == DAMAGED


def test_refused_until_anything_in_it_changes() -> None:
    inbox = Inbox(rules())
    inbox.refuse(seen("step_1"), DAMAGED)
    assert inbox.is_known("step_1", seen("step_1").files)
    other_config = seen("step_1").weights | {FileMark("config.json", 9, 3, 10)}
    assert not inbox.is_known("step_1", other_config)


def test_files_beside_the_weights_make_no_new_checkpoint() -> None:
    inbox = Inbox(rules())
    inbox.begin(inbox.choose([seen("step_1")], 0.0), 0, REQUEST)
    inbox.succeed("step_1", 1, ROOT)
    assert inbox.is_known("step_1", seen("step_1").files | {FileMark("optimizer.pt", 5, 5, 5)})
    assert inbox.is_known("renamed", seen("step_1").files)
    assert not inbox.is_known("step_1", seen("step_1", content=2).files)


def test_a_rewritten_config_file_is_looked_at_when_all_is_still() -> None:
    """In place it may be the first file of a new save."""
    inbox = Inbox(rules(settle_seconds=1.0))
    old = seen("step_1", finished=False)
    inbox.adopt(old, 1, ROOT)
    inbox = woken(inbox)
    weights, config = old.weights, FileMark("config.json", 9, 3, 10)
    for files in (weights | {config}, old.files | {FileMark("tokenizer.json", 8, 3, 10)}, weights):
        assert not inbox.is_known("step_1", files)
    assert inbox.is_known("step_1", old.files | {FileMark("trainer_state.json", 8, 3, 10)})
    new = replace(old, files=weights | {config})
    assert [inbox.choose([new], now).chosen for now in (0.0, 59.0, 60.0)] == [None, None, new]
    assert Inbox(rules(), inbox.entries).choose([replace(new, finished=True)], 0.0).chosen is not None
    inbox.adopt(new, 1, ROOT)
    assert inbox.is_known("step_1", new.files) and not inbox.is_known("step_1", old.files)


def test_finished_and_damaged_is_refused_but_not_what_holds_no_weights() -> None:
    inbox = Inbox(rules())
    damaged, whole = seen("step_1", whole=False), seen("step_2", 2)
    choice = inbox.choose([damaged, whole], 0.0)
    assert choice.chosen is whole and choice.passed == choice.waiting == ()
    assert inbox.choose([damaged], 0.0).chosen is damaged, "to say what is wrong with it"
    logs = Candidate("logs", frozenset({FileMark("a.txt", 1, 1, 1)}), frozenset(), 0, True, DAMAGED)
    choice = inbox.choose([logs, seen("step_2", whole=False, finished=False)], 0.0)
    assert choice.chosen is None and {each.name for each in choice.waiting} == {"logs", "step_2"}


@pytest.mark.parametrize(("version", "known"), [(None, False), (5, True)])
def test_a_kill_while_publishing_is_judged_by_the_channel(version: int | None, known: bool) -> None:
    inbox = Inbox(rules())
    looks = [seen("step_1", 1, content=1), seen("step_2", 2, content=2)]
    inbox.begin(inbox.choose(looks, 0.0), 4, REQUEST)
    later = woken(inbox)
    asked: list[tuple[str, int]] = []

    def made_for(request: str, above: int) -> Any:
        asked.append((request, above))
        return None if version is None else SimpleNamespace(version=version, root=ROOT)

    assert later.resume(made_for) == (["step_2"] if known else [])
    assert asked == [(REQUEST, 4)]
    assert [later.is_known(each.name, each.files) for each in looks] == [known, known]


def test_memory_is_bounded_and_keeps_what_is_there() -> None:
    inbox = Inbox(rules())
    looks = [seen(f"step_{n}", n, content=n) for n in range(1, 5000)]
    inbox.ignore_existing(looks, None)
    inbox.forget_vanished(frozenset({"step_1"}))
    assert len(inbox.entries) == 4097 and {"step_1", "step_4999"} <= inbox.entries.keys()


def test_names() -> None:
    assert [may_be_checkpoint(name) for name in ("step_1", ".step_1", "step_1.tmp", "a\nb")] == [
        True,
        False,
        False,
        False,
    ]
    assert [step_of(n) for n in ("step_000120", "checkpoint-7", "final", "7b")] == [120, 7, None, None]


marks = st.builds(
    FileMark,
    st.sampled_from(["model.safetensors", "a", "ü"]),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 1 << 50),
    st.integers(-(1 << 63), 1 << 62),
    st.just(0) | st.integers(1, 1 << 62),
)
failures = st.builds(Failure, error=st.text(max_size=9), message=st.text(max_size=30))
digests = st.sampled_from(["", ROOT])
contents = st.builds(LastContent, version=st.none() | st.integers(0, 1 << 40), root=digests, sample=digests)
entries = st.builds(
    InboxEntry,
    st.text("abc_019é", min_size=1, max_size=8) | st.sampled_from([".", "a/b", "step_1/actor/hf"]),
    st.sampled_from(InboxOutcome),
    st.frozensets(marks, max_size=3),
    st.none() | st.integers(0, 1 << 40),
    st.just("") | st.just("other"),
    st.just("") | st.just(REQUEST),
    st.frozensets(marks, max_size=2),
    contents,
    st.none() | failures,
)


@given(st.lists(entries, max_size=5, unique_by=lambda entry: entry.name))
def test_memory_survives_its_file(some: list[InboxEntry]) -> None:
    data = InboxMemory(watch="/w", entries=tuple(some)).model_dump_json()
    assert InboxMemory.model_validate_json(data, strict=True).entries == tuple(some)


ONE = {"step_1": InboxEntry("step_1", InboxOutcome.PUBLISHED, frozenset({FileMark("m", 2, 3, 4, 5)}), 8)}


def test_memory_golden_bytes() -> None:
    assert stored(ONE) == (
        b'{"format":1,"watch":"","entries":[{"name":"step_1","outcome":"published","files":[["m",2,3,4,5]],'
        b'"version":8,"behind":"","request":"","beside":[],"content":{"version":null,"root":"","sample":""},'
        b'"failure":null,"options":""}]}'
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format":1', b'"format":2'),
        (b'"name":"step_1"', b'"name":"../step_1"'),
        (b'"name":"step_1"', b'"name":"a/../b"'),
        (b'"name":"step_1"', b'"name":"/step_1"'),
        (b'"name":"step_1"', b'"name":"a//b"'),
        (b'"name":"step_1"', b'"name":".."'),
        (b'"published"', b'"eaten"'),
        (b'[["m",2,3,4,5]]', b'[["m",2,3]]'),
        (b'[["m",2,3,4,5]]', b'[["m",2,3,true]]'),
        (b'[["m",2,3,4,5]]', b'[["../m",2,3,4]]'),
        (b'"version":8', b'"version":-1'),
        (b'"behind":""', b'"behind":"","beside":[["../m",2,3,4]]'),
        (b'"behind":""', b'"behind":"","content":{"version":8,"root":"x","sample":""}'),
        (b'"failure":null', b'"failure":{"error":1}'),
        (b'"version":8', b'"version":8,"version":9'),
        (b"}]}", b"}"),
        (b'"entries":[', b'"entries":[{"name":"step_1","outcome":"existing"},'),
    ],
)
def test_a_damaged_memory_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    packed = stored(ONE)
    assert old in packed
    path = tmp_path / "inbox.json"
    path.write_bytes(packed.replace(old, new))
    with pytest.raises(DamagedFile, match=r"inbox\.json|file name") as refused:
        Memory(path, InboxMemory(), 1 << 20, "remove the file")
    assert refused.value.remedy == "remove the file"


@pytest.mark.parametrize("consume", [True, False])
def test_what_was_consumed_is_forgotten_in_time(consume: bool) -> None:
    inbox = Inbox(rules(every=True, existing=False, consume=consume))
    inbox.ignore_existing([seen("before", content=5000)], None)
    for number in range(200):
        inbox.begin(inbox.choose([seen(f"step_{number}", content=number)], 0.0), number, REQUEST)
        inbox.succeed(f"step_{number}", number + 1, ROOT)
    inbox.refuse(seen("bad", whole=False), DAMAGED)
    inbox.forget_vanished(frozenset())
    kept = [n for n, entry in inbox.entries.items() if n.startswith("step_") and entry.files]
    assert {"before", "bad"} < set(inbox.entries) and kept[-1] == "step_199"
    assert len(kept) == (64 if consume else 200)


def test_a_checkpoint_with_a_hole_waits_60_times_as_long() -> None:
    """It may be sparse where its tensors are zero."""
    inbox, sparse = Inbox(rules(settle_seconds=1.0)), replace(seen("a", finished=False), hole="a has a hole")
    for now in (0.0, 2.0, 59.0):
        choice = inbox.choose([sparse], now)
        assert choice.chosen is None and choice.waiting[0].reason.startswith("a has a hole")
    assert inbox.choose([sparse], 60.0).chosen == sparse


def test_a_checkpoint_saved_over_file_by_file_waits_for_the_last_one() -> None:
    """Whole by its headers all the while. A writer that leaves files as they are is waited for longer."""
    inbox = Inbox(rules(settle_seconds=1.0))
    first, second = (FileMark(f"model-{n}.safetensors", n, 10, 1) for n in (1, 2))

    def look(*files: FileMark) -> Candidate:
        return Candidate("latest", frozenset(files), frozenset(files), 0, False)

    inbox.adopt(look(first, second), 1, ROOT)
    half = look(first._replace(inode=11), second)
    assert not inbox.is_known("latest", half.files)
    for now in (0.0, 2.0, 59.0):
        choice = inbox.choose([half], now)
        assert choice.chosen is None and "from before" in choice.waiting[0].reason
    assert inbox.choose([half], 60.0).chosen == half
    both = look(first._replace(inode=11), second._replace(inode=12))
    assert inbox.choose([both], 61.0).chosen is None
    assert inbox.choose([both], 62.0).chosen == both
    finished = replace(half, finished=True)
    assert Inbox(rules(), dict(inbox.entries)).choose([finished], 0.0).chosen == finished


def test_saved_over_in_part_a_marker_from_before_is_not_enough() -> None:
    inbox = Inbox(rules(marker="DONE", settle_seconds=1.0))
    first, second = (FileMark(f"model-{n}.safetensors", n, 10, 1) for n in (1, 2))
    done = FileMark("DONE", 3, 0, 1)

    def look(marker: FileMark, *weights: FileMark) -> Candidate:
        return Candidate("latest", frozenset({marker, *weights}), frozenset(weights), 0, True)

    inbox.adopt(look(done, first, second), 1, ROOT)
    later = woken(inbox)
    half = look(done, first._replace(inode=11), second)
    choice = later.choose([half], 0.0)
    assert choice.chosen is None and "from before" in choice.waiting[0].reason
    assert later.choose([half], 60.0).chosen == half
    marked = look(done._replace(mtime_ns=2), first._replace(inode=11), second)
    assert later.choose([marked], 61.0).chosen == marked


def test_what_was_consumed_long_ago_is_known_by_its_content() -> None:
    inbox = Inbox(rules(every=True, consume=True))
    for number in range(2000):
        inbox.begin(inbox.choose([seen(f"step_{number}", content=number)], 0.0), number, REQUEST)
        inbox.succeed(f"step_{number}", number + 1, f"{number:064x}")
    inbox.forget_vanished(frozenset())
    inbox = woken(inbox)
    assert len(inbox.entries) == 1024 and inbox.content("step_0") == LastContent()
    known = inbox.content("step_1500")
    assert (known.version, known.root) == (1501, f"{1500:064x}")
    again = seen("step_1500", content=1500)
    assert not inbox.is_known("step_1500", again.files) and inbox.consumable("step_1500") == frozenset()
