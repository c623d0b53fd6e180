"""The order of a reload, and what an engine and the notes look like after each way it can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doubles import (
    Answer,
    Call,
    Double,
    Drop,
    Hang,
    SGLangDouble,
    VLLMDouble,
    WebhookDouble,
    nobody,
    serve,
)

from weightcast.subscriber.engines.base import Engine, HeldWeights, Timeouts, parse_engine
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.reload_one import (
    AlignMark,
    NotPatched,
    RetryPace,
    align,
    align_all,
    resume_if_it_names,
)
from weightcast.subscriber.engines.rules import EngineResult

DOUBLES: dict[str, Callable[[], Double]] = {
    "sglang": SGLangDouble,
    "vllm": VLLMDouble,
    "webhook": WebhookDouble,
}
PAUSE = {"sglang": "/pause_generation", "vllm": "/pause", "webhook": "/"}
RELOAD = {"sglang": "/update_weights_from_disk", "vllm": "/collective_rpc", "webhook": "/"}
RESUME = {"sglang": "/continue_generation", "vllm": "/resume", "webhook": "/"}
LOOKING = ("/update_weight_version",)
EIGHT = HeldWeights(8, "r")
PATIENCE = 60.0
IMPATIENCE = 2.0
"""seconds, for engines that do not answer"""


class Host:
    """Engines over a local checkpoint whose `weights` file holds `v7` and becomes `v8` by `patch`."""

    def __init__(self, stack: ExitStack, local: Path) -> None:
        self._stack = stack
        self.weights = local / "weights"
        self.weights.write_text("v7")
        self.local = local
        self.marks: list[tuple[str, str]] = []
        self.sleeps: list[float] = []
        self.now = 0.0

    def engine(
        self,
        kind: str,
        double: Double | None,
        options: str = "",
        reload: float = PATIENCE,
        other: float = PATIENCE,
    ) -> Engine:
        url = self._stack.enter_context(nobody() if double is None else serve(double))
        spec = parse_engine(f"{kind}={url}/,name={kind}{options}", self.local)
        timeouts = Timeouts(other, other, other, other, reload)
        engine = open_engine(spec, timeouts=timeouts, environ={})
        self._stack.callback(engine.close)
        return engine

    def patch(self) -> None:
        self.weights.write_text("v8")

    def mark(self, name: str, mark: AlignMark) -> None:
        self.marks.append((name, mark))

    def align(
        self,
        engine: Engine,
        before_reload: Callable[[], None] | None = None,
        suspect: bool = False,
        total: float = 600,
    ) -> EngineResult:
        return align(
            engine,
            8,
            marks=lambda mark: self.mark(engine.spec.name, mark),
            before_reload=before_reload,
            suspect=suspect,
            pace=self.pace(total),
        )

    def pace(self, total: float = 600) -> RetryPace:
        return RetryPace(sleep=self.sleep, clock=self.clock, jitter=lambda: 0.5, total=total)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def noted(self) -> list[str]:
        return [mark for _, mark in self.marks]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(stack, tmp_path)


@pytest.fixture(params=["sglang", "vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def did(double: Double) -> list[str]:
    return [path for path in double.paths() if path not in LOOKING]


# The good order


def test_an_engine_is_noted_paused_reloaded_read_back_resumed_noted(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    seen: list[bool] = []
    engine = host.engine(kind, double)
    host.patch()
    result = align(
        engine,
        8,
        marks=lambda mark: seen.append(double.paused) or host.mark(kind, mark),
        pace=host.pace(),
    )
    assert did(double) == [PAUSE[kind], RELOAD[kind], RESUME[kind]]
    assert host.noted() == ["pausing", "served"]
    assert seen == [False, False], "noted before the pause and after the resume"
    assert (double.held, double.label, double.paused) == ("v8", "8", False)
    assert (result.state, result.confirmed_by, result.attempts) == ("served", "label", 1)
    assert result.process == double.started
    phases = result.phases
    assert min(phases.pause, phases.reload, phases.read_back, phases.resume) > 0
    assert result.pause_seconds is not None
    assert result.pause_seconds >= phases.pause + phases.reload + phases.read_back + phases.resume


def test_an_engine_that_maps_files_is_patched_inside_its_pause(host: Host) -> None:
    double = WebhookDouble()
    paused: list[bool] = []

    def patch() -> None:
        paused.append(double.paused)
        host.patch()

    result = host.align(host.engine("webhook", double), patch)
    assert paused == [True]
    assert double.phases() == ["pause", "reload", "resume"]
    assert (result.state, result.patched, double.held) == ("served", True, "v8")


def test_wait_means_no_pause_but_a_continue_all_the_same(host: Host) -> None:
    double = SGLangDouble()
    host.patch()
    assert host.align(host.engine("sglang", double, ",policy=wait")).state == "served"
    assert did(double) == ["/update_weights_from_disk", "/continue_generation"]


def test_an_old_release_without_labels_is_served_by_status(host: Host) -> None:
    double = VLLMDouble()
    double.missing = {"/update_weight_version", "/weight_info", "/metrics"}
    result = host.align(host.engine("vllm", double))
    assert (result.state, result.confirmed_by, result.process) == ("served", "status-only", None)


# Suspects


FAULTS: list[tuple[str, Callable[[Double], object]]] = [
    ("sglang", lambda double: double.updated_but_not_flushed),  # type: ignore[attr-defined]
    ("sglang", lambda double: double.half_loaded),  # type: ignore[attr-defined]
    ("sglang", lambda double: double.label_stays),  # type: ignore[attr-defined]
    ("sglang", lambda _: Answer(200, {"success": False, "message": "", "num_paused_requests": 0})),
    ("sglang", lambda _: Drop(after=True)),
    ("vllm", lambda double: double.half_loaded),  # type: ignore[attr-defined]
    ("vllm", lambda _: Answer(200, {"results": [None, "error"]})),
    ("vllm", lambda _: Drop()),
    ("webhook", lambda _: Answer(200, {"ok": False})),
    ("webhook", lambda _: Answer(200, {"ok": True, "version": 7})),
]


def fail_reloads(double: Double, kind: str, fault: Callable[[Double], object], times: int) -> None:
    act = fault(double)
    if kind != "webhook":
        double.script(RELOAD[kind], *[act] * times)  # type: ignore[list-item]
        return
    honest = double.behave
    left = iter(range(times))

    def behave(call: Call) -> Answer:
        fails = call.method == "POST" and call.body["phase"] == "reload" and next(left, None) is not None
        return act if fails else honest(call)  # type: ignore[return-value]

    double.behave = behave  # type: ignore[method-assign]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_a_suspect_stays_paused_and_a_good_reload_brings_it_back(
    host: Host, kind: str, fault: Callable[[Double], object]
) -> None:
    double = DOUBLES[kind]()
    fail_reloads(double, kind, fault, 2)
    host.patch()
    result = host.align(host.engine(kind, double))
    assert (result.state, result.attempts) == ("served", 3)
    assert host.noted() == ["pausing", "suspect", "served"]
    assert host.sleeps == [0.5, 1.0]
    assert (double.held, double.paused, double.resumed_broken) == ("v8", False, False)


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_attempts_are_bounded_and_a_failed_engine_is_not_resumed(
    host: Host, kind: str, fault: Callable[[Double], object]
) -> None:
    double = DOUBLES[kind]()
    fail_reloads(double, kind, fault, 99)
    result = host.align(host.engine(kind, double))
    assert (result.state, result.attempts, result.pause_seconds) == ("failed", 3, None)
    assert result.reason
    assert host.noted() == ["pausing", "suspect"]
    assert double.paused and not double.resumed_broken


def test_no_attempt_begins_after_the_deadline(host: Host) -> None:
    double = VLLMDouble()
    fail_reloads(double, "vllm", lambda _: Answer(500), 99)
    assert host.align(host.engine("vllm", double), total=1.0).attempts == 2


def test_a_hanging_reload_is_suspect_and_its_late_answer_counts_for_nothing(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(RELOAD[kind], Hang(), Hang(), Hang())
    result = host.align(host.engine(kind, double, reload=0.05))
    assert (result.state, result.attempts) == ("failed", 3)
    double.release()
    assert host.noted() == ["pausing", "suspect"]
    assert RESUME[kind] not in did(double)


def test_a_noted_suspect_is_not_resumed_by_a_refusal(host: Host) -> None:
    double = SGLangDouble()
    engine = host.engine("sglang", double, ",path=/not/there")
    result = host.align(engine, suspect=True)
    assert (result.state, host.noted()) == ("failed", ["suspect"])
    assert "/continue_generation" not in did(double)


def test_a_noted_suspect_that_does_not_pause_is_left_alone(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(PAUSE[kind], Answer(500))
    assert host.align(host.engine(kind, double), suspect=True).state == "failed"
    assert did(double) == [PAUSE[kind]]


def test_a_refusal_after_a_doubtful_reload_does_not_clear_the_doubt(host: Host) -> None:
    double = SGLangDouble()
    refusal = Answer(400, double.reply(False, "Failed to get weights iterator: x."))
    double.script("/update_weights_from_disk", double.half_loaded, refusal, refusal)
    result = host.align(host.engine("sglang", double))
    assert (result.state, result.attempts) == ("failed", 3)
    assert double.paused and not double.resumed_broken


def test_a_restart_during_the_reload_is_noticed(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()

    def restart(call: Call) -> Answer:
        double.started = "1800000000.0"
        return double.behave(call)

    double.script(RELOAD[kind], restart)
    result = host.align(host.engine(kind, double))
    assert result.state == "suspect"
    assert host.noted() == ["pausing", "suspect"]


# Refusals that leave the old weights in service


def test_a_refused_reload_resumes_on_the_weights_from_before(host: Host) -> None:
    double = SGLangDouble()
    result = host.align(host.engine("sglang", double, ",path=/not/there"))
    assert (result.state, result.attempts) == ("refused", 1)
    assert host.noted() == ["pausing", "refused"]
    assert (double.held, double.paused) == ("seed", False)


def test_an_engine_that_does_not_pause_is_resumed_and_not_reloaded(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(PAUSE[kind], Answer(500))
    result = host.align(host.engine(kind, double))
    assert (result.state, result.attempts) == ("refused", 0)
    assert did(double) == [PAUSE[kind], RESUME[kind]]
    assert host.noted() == ["pausing", "refused"]


def test_mapped_files_that_were_patched_leave_no_weights_from_before(host: Host) -> None:
    double = WebhookDouble()
    fail_reloads(double, "webhook", lambda _: Answer(200, {"ok": False, "intact": True}), 99)
    result = host.align(host.engine("webhook", double), host.patch)
    assert (result.state, result.patched) == ("failed", True)
    assert double.paused


def test_good_weights_that_do_not_resume_stay_noted_as_pausing(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(RESUME[kind], *[Answer(500)] * 3)
    engine = host.engine(kind, double)
    assert host.align(engine).state == "failed"
    assert host.noted() == ["pausing"]
    assert resume_if_it_names(engine, EIGHT)
    assert not double.paused


def test_an_absent_engine_is_marked_for_a_reload(host: Host, kind: str) -> None:
    result = host.align(host.engine(kind, None))
    assert (result.state, result.attempts, host.noted()) == ("failed", 0, ["suspect"])


@pytest.mark.parametrize("kind", ["vllm"])
def test_an_engine_too_busy_to_answer_is_not_kept_paused_by_a_later_refusal(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    engine = host.engine(kind, double, other=IMPATIENCE)
    double.script("/is_paused", Hang())
    assert (host.align(engine).state, host.noted()) == ("failed", [])
    double.release()
    double.script(RELOAD[kind], Answer(404))
    assert host.align(engine).state == "refused"
    assert not double.paused and host.noted() == ["pausing", "refused"]


# Patches that fail


def broken_patch() -> None:
    raise OSError("disk full")


def refused_patch() -> None:
    raise NotPatched("another owner")


def test_a_failed_patch_resumes_an_engine_with_copies(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    with pytest.raises(OSError, match="disk full"):
        host.align(host.engine(kind, double), broken_patch)
    assert did(double) == [PAUSE[kind], RESUME[kind]]
    assert host.noted() == ["pausing", "refused"]


def test_a_failed_patch_keeps_an_engine_paused_that_maps_the_files(host: Host) -> None:
    double = WebhookDouble()
    with pytest.raises(OSError, match="disk full"):
        host.align(host.engine("webhook", double), broken_patch)
    assert double.phases() == ["pause"]
    assert host.noted() == ["pausing", "suspect"]


def test_a_patch_that_wrote_nothing_resumes_also_mapped_files(host: Host) -> None:
    double = WebhookDouble()
    with pytest.raises(NotPatched):
        host.align(host.engine("webhook", double), refused_patch)
    assert double.phases() == ["pause", "resume"]
    assert host.noted() == ["pausing", "refused"]


# All engines of a host


def test_all_engines_follow_one_patch(host: Host) -> None:
    doubles = {kind: DOUBLES[kind]() for kind in DOUBLES}
    engines = [host.engine(kind, double) for kind, double in doubles.items()]
    alignment = align_all(engines, 8, patch=host.patch, marks=host.mark, pace=host.pace())
    assert alignment.patched
    assert [result.state for result in alignment.results] == ["served"] * 3
    assert {double.held for double in doubles.values()} == {"v8"}


def test_engines_with_copies_serve_while_the_files_are_patched(host: Host) -> None:
    double = SGLangDouble()
    paused: list[bool] = []
    align_all(
        [host.engine("sglang", double)],
        8,
        patch=lambda: paused.append(double.paused),
        marks=host.mark,
        pace=host.pace(),
    )
    assert paused == [False]


def test_all_engines_that_map_the_files_are_paused_around_one_patch(host: Host) -> None:
    doubles = [WebhookDouble(), WebhookDouble(), WebhookDouble()]
    paused: list[list[bool]] = []

    def patch() -> None:
        paused.append([double.paused for double in doubles])
        host.patch()

    engines = [host.engine("webhook", double) for double in doubles]
    alignment = align_all(engines, 8, patch=patch, marks=host.mark, pace=host.pace())
    assert paused == [[True, True, True]]
    assert [result.state for result in alignment.results] == ["served"] * 3
    assert all(double.held == "v8" and not double.paused for double in doubles)


def test_nothing_is_patched_when_one_that_maps_the_files_does_not_pause(host: Host) -> None:
    willing, unwilling, copying = WebhookDouble(), WebhookDouble(), SGLangDouble()
    unwilling.refuses_to_pause = True
    engines = [
        host.engine("webhook", willing),
        host.engine("webhook", unwilling),
        host.engine("sglang", copying),
    ]
    alignment = align_all(engines, 8, patch=host.patch, marks=host.mark, pace=host.pace())
    assert not alignment.patched
    assert [result.state for result in alignment.results] == ["refused", "refused"]
    assert host.weights.read_text() == "v7"
    assert (willing.paused, unwilling.paused, copying.paths()) == (False, False, [])


def test_an_absent_engine_does_not_keep_a_host_from_patching(host: Host) -> None:
    healthy = WebhookDouble()
    engines = [host.engine("webhook", None), host.engine("webhook", healthy)]
    alignment = align_all(engines, 8, patch=host.patch, marks=host.mark, pace=host.pace())
    assert alignment.patched
    assert sorted(result.state for result in alignment.results) == ["failed", "served"]
    assert healthy.held == "v8"


def test_files_that_map_are_not_patched_beside_a_silent_engine(host: Host) -> None:
    double = WebhookDouble()
    double.script("/", Hang())
    engine = host.engine("webhook", double, other=IMPATIENCE)
    alignment = align_all([engine], 8, patch=host.patch, marks=host.mark, pace=host.pace())
    assert not alignment.patched
    assert host.weights.read_text() == "v7"


def test_each_of_all_engines_has_its_own_deadline(host: Host) -> None:
    doubles = WebhookDouble(), WebhookDouble()
    for double in doubles:
        fail_reloads(double, "webhook", lambda _: Answer(500), 99)
    options = "", ",deadline=1"
    engines = [host.engine("webhook", *each) for each in zip(doubles, options, strict=True)]
    alignment = align_all(engines, 8, patch=host.patch, marks=host.mark, pace=host.pace())
    assert sorted(result.attempts for result in alignment.results) == [2, 3]


def test_suspects_come_last(host: Host) -> None:
    engines = [host.engine("vllm", VLLMDouble()), host.engine("sglang", SGLangDouble())]
    alignment = align_all(engines, 8, patch=None, marks=host.mark, suspects={"vllm"}, pace=host.pace())
    assert [result.name for result in alignment.results] == ["sglang", "vllm"]


def test_a_host_without_engines_only_patches(host: Host) -> None:
    alignment = align_all([], 8, patch=host.patch, marks=host.mark)
    assert (alignment.patched, alignment.results) == (True, ())
    assert host.weights.read_text() == "v8"


# At start


def test_a_kill_between_read_back_and_resume_only_needs_the_resume(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.label, double.paused = "8", True
    assert resume_if_it_names(host.engine(kind, double), EIGHT)
    assert not double.paused


def test_an_engine_that_names_other_weights_is_not_resumed_before_a_reload(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.label, double.paused = "7", True
    assert not resume_if_it_names(host.engine(kind, double), EIGHT)
    assert double.paused


def test_what_does_not_answer_at_start_needs_a_reload(host: Host, kind: str) -> None:
    assert not resume_if_it_names(host.engine(kind, None), EIGHT)
    double = DOUBLES[kind]()
    double.label = "8"
    double.script(RESUME[kind], Answer(500))
    assert not resume_if_it_names(host.engine(kind, double), EIGHT)
