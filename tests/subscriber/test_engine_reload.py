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

from weightcast.shared.checkpoint.state.state import Mark
from weightcast.subscriber.engines.base import HeldWeights, Timeouts, parse_engine
from weightcast.subscriber.engines.host import HostEngine, RetryPace
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.reload import EngineReload, abandon_all, pause_together, reload_order
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
        self.suspects: set[str] = set()
        self.serving: frozenset[str] = frozenset()
        self.sleeps: list[float] = []
        self.now = 0.0

    def engine(
        self,
        kind: str,
        double: Double | None,
        options: str = "",
        reload: float = PATIENCE,
        other: float = PATIENCE,
        name: str = "",
    ) -> HostEngine:
        url = self._stack.enter_context(nobody() if double is None else serve(double))
        spec = parse_engine(f"{kind}={url}/,name={name or kind}{options}", self.local)
        timeouts = Timeouts(other, other, other, other, reload)
        engine = HostEngine(open_engine(spec, timeouts=timeouts, environ={}), pace=self.pace())
        self._stack.callback(engine.adapter.close)
        return engine

    def patch(self) -> None:
        self.weights.write_text("v8")

    def note(self, name: str, mark: Mark) -> None:
        self.marks.append((name, mark.value))

    def record(self, result: EngineResult) -> EngineResult:
        if result.state in ("served", "refused"):
            self.marks.append((result.name, result.state))
        return result

    def reload_of(self, engine: HostEngine) -> EngineReload:
        return EngineReload(engine, 8, self)  # type: ignore[arg-type]

    def reload(self, engine: HostEngine, suspect: bool = False) -> EngineResult:
        self.suspects = {engine.name} if suspect else set()
        one = self.reload_of(engine)
        return self.record(one.pause() or one.reload())

    def patch_under(
        self, *engines: HostEngine, patch: Callable[[], None] | None = None
    ) -> tuple[EngineResult, ...]:
        """As `Reload` does it. Engines that do not all pause: their results, and nothing is patched."""
        paused: list[EngineReload] = []
        results = pause_together([self.reload_of(engine) for engine in engines], paused)
        if not results:
            (patch or self.patch)()
            results = [self.record(one.reload(patched=True)) for one in reversed(paused)]
        return tuple(results)

    def pace(self) -> RetryPace:
        return RetryPace(sleep=self.sleep, clock=self.clock, jitter=lambda: 0.5)

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
    note = host.note
    host.note = lambda name, mark: seen.append(double.paused) or note(name, mark)  # type: ignore[method-assign]
    result = host.reload(engine)
    assert did(double) == [PAUSE[kind], RELOAD[kind], RESUME[kind]]
    assert host.noted() == ["pausing", "served"]
    assert seen == [False], "noted before the pause"
    assert (double.held, double.label, double.paused) == ("v8", "8", False)
    assert (result.state, result.confirmed_by, result.attempts) == ("served", "label", 1)
    assert result.process == double.started
    seconds = [result.phases[phase] for phase in ("pause", "reload", "read_back", "resume")]
    assert min(seconds) > 0
    assert result.pause_seconds is not None and result.pause_seconds >= sum(seconds)


def test_an_engine_that_maps_files_is_patched_inside_its_pause(host: Host) -> None:
    double = WebhookDouble()
    paused: list[bool] = []

    def patch() -> None:
        paused.append(double.paused)
        host.patch()

    [result] = host.patch_under(host.engine("webhook", double), patch=patch)
    assert paused == [True]
    assert double.phases() == ["pause", "reload", "resume"]
    assert (result.state, double.held) == ("served", "v8")
    assert result.phases["patch"] > 0


def test_wait_means_no_pause_but_a_continue_all_the_same(host: Host) -> None:
    double = SGLangDouble()
    host.patch()
    assert host.reload(host.engine("sglang", double, ",policy=wait")).state == "served"
    assert did(double) == ["/update_weights_from_disk", "/continue_generation"]


def test_an_old_release_without_labels_is_served_by_status(host: Host) -> None:
    double = VLLMDouble()
    double.missing = {"/update_weight_version", "/weight_info", "/metrics"}
    result = host.reload(host.engine("vllm", double))
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
    result = host.reload(host.engine(kind, double))
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
    result = host.reload(host.engine(kind, double))
    assert (result.state, result.attempts, result.pause_seconds) == ("failed", 3, None)
    assert result.reason
    assert host.noted() == ["pausing", "suspect"]
    assert double.paused and not double.resumed_broken


def test_no_attempt_begins_after_the_deadline(host: Host) -> None:
    double = VLLMDouble()
    fail_reloads(double, "vllm", lambda _: Answer(500), 99)
    assert host.reload(host.engine("vllm", double, ",deadline=1")).attempts == 2


def test_a_hanging_reload_is_suspect_and_its_late_answer_counts_for_nothing(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(RELOAD[kind], Hang(), Hang(), Hang())
    result = host.reload(host.engine(kind, double, reload=0.05))
    assert (result.state, result.attempts) == ("failed", 3)
    double.release()
    assert host.noted() == ["pausing", "suspect"]
    assert RESUME[kind] not in did(double)


def test_a_noted_suspect_is_not_resumed_by_a_refusal(host: Host) -> None:
    double = SGLangDouble()
    engine = host.engine("sglang", double, ",path=/not/there")
    result = host.reload(engine, suspect=True)
    assert (result.state, host.noted()) == ("failed", ["suspect"])
    assert "/continue_generation" not in did(double)


def test_a_noted_suspect_that_does_not_pause_is_left_alone(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(PAUSE[kind], Answer(500))
    assert host.reload(host.engine(kind, double), suspect=True).state == "failed"
    assert did(double) == [PAUSE[kind]]


def test_a_refusal_after_a_doubtful_reload_does_not_clear_the_doubt(host: Host) -> None:
    double = SGLangDouble()
    refusal = Answer(400, double.reply(False, "Failed to get weights iterator: x."))
    double.script("/update_weights_from_disk", double.half_loaded, refusal, refusal)
    result = host.reload(host.engine("sglang", double))
    assert (result.state, result.attempts) == ("failed", 3)
    assert double.paused and not double.resumed_broken


def test_a_restart_during_the_reload_is_noticed(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()

    def restart(call: Call) -> Answer:
        double.started = "1800000000.0"
        return double.behave(call)

    double.script(RELOAD[kind], restart)
    result = host.reload(host.engine(kind, double))
    assert result.state == "suspect"
    assert host.noted() == ["pausing", "suspect"]


# Refusals that leave the old weights in service


def test_a_refused_reload_resumes_on_the_weights_from_before(host: Host) -> None:
    double = SGLangDouble()
    result = host.reload(host.engine("sglang", double, ",path=/not/there"))
    assert (result.state, result.attempts) == ("refused", 1)
    assert host.noted() == ["pausing", "refused"]
    assert (double.held, double.paused) == ("seed", False)


def test_an_engine_that_does_not_pause_is_resumed_and_not_reloaded(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(PAUSE[kind], Answer(500))
    result = host.reload(host.engine(kind, double))
    assert (result.state, result.attempts) == ("refused", 0)
    assert did(double) == [PAUSE[kind], RESUME[kind]]
    assert host.noted() == ["pausing", "refused"]


def test_mapped_files_that_were_patched_leave_no_weights_from_before(host: Host) -> None:
    double = WebhookDouble()
    fail_reloads(double, "webhook", lambda _: Answer(200, {"ok": False, "intact": True}), 99)
    [result] = host.patch_under(host.engine("webhook", double))
    assert result.state == "failed"
    assert double.paused


def test_good_weights_that_do_not_resume_stay_noted_as_pausing(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.script(RESUME[kind], *[Answer(500)] * 3)
    engine = host.engine(kind, double)
    assert host.reload(engine).state == "failed"
    assert host.noted() == ["pausing"]
    assert engine.resume_if_it_names(EIGHT)
    assert not double.paused


def test_an_absent_engine_is_marked_for_a_reload(host: Host, kind: str) -> None:
    result = host.reload(host.engine(kind, None))
    assert (result.state, result.attempts, host.noted()) == ("failed", 0, ["suspect"])


@pytest.mark.parametrize("kind", ["vllm"])
def test_an_engine_too_busy_to_answer_is_not_kept_paused_by_a_later_refusal(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    engine = host.engine(kind, double, other=IMPATIENCE)
    double.script("/is_paused", Hang())
    assert (host.reload(engine).state, host.noted()) == ("failed", [])
    double.release()
    double.script(RELOAD[kind], Answer(404))
    assert host.reload(engine).state == "refused"
    assert not double.paused and host.noted() == ["pausing", "refused"]


# Patches that fail


def paused_for_a_patch(host: Host, *doubles: Double) -> list[EngineReload]:
    paused: list[EngineReload] = []
    assert pause_together([host.reload_of(host.engine("webhook", each)) for each in doubles], paused) == []
    return paused


def test_a_failed_patch_keeps_an_engine_paused_that_maps_the_files(host: Host) -> None:
    double = WebhookDouble()
    abandon_all(paused_for_a_patch(host, double), OSError("disk full"), written=True)
    assert double.phases() == ["pause"]
    assert host.noted() == ["pausing", "suspect"]


def test_a_patch_that_wrote_nothing_resumes_also_mapped_files(host: Host) -> None:
    double = WebhookDouble()
    abandon_all(paused_for_a_patch(host, double), OSError("another owner"), written=False)
    assert double.phases() == ["pause", "resume"]
    assert host.noted() == ["pausing"]


def test_each_engine_is_given_up_whatever_becomes_of_the_others(host: Host) -> None:
    doubles = WebhookDouble(), WebhookDouble()
    paused = paused_for_a_patch(host, *doubles)
    paused[1].engine.resume = lambda: 1 / 0  # type: ignore[method-assign, return-value, assignment]
    with pytest.raises(ZeroDivisionError):
        abandon_all(paused, OSError("another owner"), written=False)
    assert [double.phases() for double in doubles] == [["pause", "resume"], ["pause"]]


# All engines that map the files


def test_all_engines_that_map_the_files_are_paused_around_one_patch(host: Host) -> None:
    doubles = [WebhookDouble(), WebhookDouble(), WebhookDouble()]
    paused: list[list[bool]] = []

    def patch() -> None:
        paused.append([double.paused for double in doubles])
        host.patch()

    results = host.patch_under(*(host.engine("webhook", double) for double in doubles), patch=patch)
    assert paused == [[True, True, True]]
    assert [result.state for result in results] == ["served"] * 3
    assert all(double.held == "v8" and not double.paused for double in doubles)


def test_engines_resume_in_the_reverse_order_of_their_pauses(host: Host) -> None:
    engines = [host.engine("webhook", WebhookDouble(), name=name) for name in "ab"]
    assert [result.name for result in host.patch_under(*engines)] == ["b", "a"]
    assert host.marks == [("a", "pausing"), ("b", "pausing"), ("b", "served"), ("a", "served")]


def test_nothing_is_patched_when_one_that_maps_the_files_does_not_pause(host: Host) -> None:
    willing, unwilling, later = WebhookDouble(), WebhookDouble(), WebhookDouble()
    unwilling.refuses_to_pause = True
    results = host.patch_under(*(host.engine("webhook", double) for double in (willing, unwilling, later)))
    assert [result.state for result in results] == ["refused", "refused"]
    assert "was not paused" in results[1].reason
    assert host.weights.read_text() == "v7"
    assert (willing.paused, unwilling.paused, later.phases()) == (False, False, [])


def test_an_absent_engine_does_not_keep_a_host_from_patching(host: Host) -> None:
    healthy = WebhookDouble()
    results = host.patch_under(host.engine("webhook", None), host.engine("webhook", healthy))
    assert sorted(result.state for result in results) == ["failed", "served"]
    assert healthy.held == "v8"


def test_files_that_map_are_not_patched_beside_a_silent_engine(host: Host) -> None:
    double = WebhookDouble()
    double.script("/", Hang())
    [result] = host.patch_under(host.engine("webhook", double, other=IMPATIENCE))
    assert (result.state, host.noted()) == ("failed", ["suspect"])
    assert host.weights.read_text() == "v7"


def test_each_of_all_engines_has_its_own_deadline(host: Host) -> None:
    doubles = WebhookDouble(), WebhookDouble()
    for double in doubles:
        fail_reloads(double, "webhook", lambda _: Answer(500), 99)
    options = "", ",deadline=1"
    engines = [host.engine("webhook", *each) for each in zip(doubles, options, strict=True)]
    assert sorted(result.attempts for result in host.patch_under(*engines)) == [2, 3]


def test_suspects_come_last(host: Host) -> None:
    engines = [host.engine("vllm", VLLMDouble()), host.engine("sglang", SGLangDouble())]
    assert [engine.name for engine in reload_order(engines, {"vllm"})] == ["sglang", "vllm"]


# At start


def test_a_kill_between_read_back_and_resume_only_needs_the_resume(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.label, double.paused = "8", True
    assert host.engine(kind, double).resume_if_it_names(EIGHT)
    assert not double.paused


def test_an_engine_that_names_other_weights_is_not_resumed_before_a_reload(host: Host, kind: str) -> None:
    double = DOUBLES[kind]()
    double.label, double.paused = "7", True
    assert not host.engine(kind, double).resume_if_it_names(EIGHT)
    assert double.paused


def test_what_does_not_answer_at_start_needs_a_reload(host: Host, kind: str) -> None:
    assert not host.engine(kind, None).resume_if_it_names(EIGHT)
    double = DOUBLES[kind]()
    double.label = "8"
    double.script(RESUME[kind], Answer(500))
    assert not host.engine(kind, double).resume_if_it_names(EIGHT)
