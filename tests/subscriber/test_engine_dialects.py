"""Each adapter against a server that answers as the engine does."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from pathlib import Path

import pytest
from doubles import (
    TRICKLES,
    Answer,
    Double,
    Drop,
    Hang,
    SGLangDouble,
    Trickle,
    VLLMDouble,
    WebhookDouble,
    nobody,
    serve,
)

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.adapter import Adapter
from weightcast.subscriber.engines.base import (
    Done,
    Intact,
    NotSent,
    Suspect,
    Timeouts,
    parse_engine,
)
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.wire import REPLY_LIMIT

QUICK = Timeouts(connect=5, probe=5, control=5, drain=1, reload=5)
IMPATIENT = dataclasses.replace(QUICK, reload=0.2, drain=0.1)


class Stage:
    """Opens doubles and adapters; `local` is a checkpoint with the content `v8`."""

    def __init__(self, stack: ExitStack, local: Path) -> None:
        self._stack = stack
        self.local = local
        (local / "weights").write_text("v8")

    def engine(self, kind: str, double: Double, options: str = "", timeouts: Timeouts = QUICK) -> Adapter:
        return self.at(kind, self._stack.enter_context(serve(double)), options, timeouts)

    def at(self, kind: str, url: str, options: str = "", timeouts: Timeouts = QUICK) -> Adapter:
        engine = open_engine(
            parse_engine(f"{kind}={url}{options}", self.local),
            run_id=lambda: "run-1",
            timeouts=timeouts,
            environ={"KEY": "s3cret"},
        )
        self._stack.callback(engine.close)
        return engine

    def absent(self, kind: str) -> Adapter:
        return self.at(kind, self._stack.enter_context(nobody()))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, tmp_path)


def reload(engine: Adapter) -> Done | Intact | Suspect:
    engine.probe()
    return engine.reload(engine.spec.path, "8")


# All three


DOUBLES = {"sglang": SGLangDouble, "vllm": VLLMDouble, "webhook": WebhookDouble}
RELOADS = {"sglang": "/update_weights_from_disk", "vllm": "/collective_rpc", "webhook": "/hook"}
KINDS = sorted(DOUBLES)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(stage: Stage, kind: str, options: str = "", timeouts: Timeouts = QUICK) -> tuple[Adapter, Double]:
    double = DOUBLES[kind]()
    return stage.engine(kind, double, ("/hook" if kind == "webhook" else "") + options, timeouts), double


def test_a_good_round_loads_the_files_and_shows_the_label(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind)
    engine.pause()
    assert double.paused
    assert reload(engine) == Done()
    assert engine.read_back("8") == "label"
    engine.resume()
    assert (double.held, double.label, double.paused) == ("v8", "8", False)
    facts = engine.probe()
    assert (facts.reachable, facts.label, facts.process) == (True, "8", double.started)


def test_a_restart_shows_in_the_process(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind)
    before = engine.probe().process
    double.restart()
    assert engine.probe().process != before


LOOKS = {
    "sglang": ("/metrics", "/model_info", "/get_model_info", "/get_weight_version"),
    "vllm": ("/is_paused", "/weight_info", "/metrics", "/version"),
    "webhook": ("/hook",),
}


@pytest.mark.parametrize(
    ("kind", "status"),
    # a receiver of webhooks need not tell anything with 200
    [("sglang", 200), ("vllm", 200), *product(KINDS, (301, 302, 404, 500, 502, 503))],
)
def test_what_answers_in_the_place_of_an_engine_is_none(stage: Stage, kind: str, status: int) -> None:
    engine, double = opened(stage, kind)
    assert engine.probe().reachable
    for path in LOOKS[kind]:
        double.script(path, Answer(status, b"<html>"))
    facts = engine.probe()
    assert not facts.reachable and str(status) in facts.hindrance
    assert kind == "webhook" or facts.remedy
    assert engine.probe().reachable


def test_a_server_of_another_kind_is_not_blamed_for_its_age(stage: Stage) -> None:
    engine, double = opened(stage, "sglang")
    double.script("/pause_generation", Answer(404))
    with pytest.raises(EngineFailed) as failed:
        engine.pause()
    assert "check that it is SGLang" in failed.value.remedy


def test_an_absent_engine_was_sent_nothing(stage: Stage, kind: str) -> None:
    engine = stage.absent(kind)
    facts = engine.probe()
    assert (facts.reachable, facts.absent) == (False, True)
    assert isinstance(reload(engine), Intact)
    with pytest.raises(NotSent, match=r"127\.0\.0\.1:\d+.*cannot be reached"):
        engine.pause()


def test_a_silent_engine_is_not_absent(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind, timeouts=dataclasses.replace(QUICK, probe=0.1))
    for path in ("/metrics", "/is_paused", "/hook"):
        double.script(path, Hang())
    facts = engine.probe()
    assert (facts.reachable, facts.absent) == (False, False)


@contextmanager
def full_queue(address: str = "127.0.0.1") -> Iterator[str]:
    """A URL whose process accepts no connection more, as one that hangs."""
    with socket.socket() as listening, ExitStack() as waiting:
        listening.bind((address, 0))
        listening.listen(0)
        for _ in range(3):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
        yield f"http://{address}:{listening.getsockname()[1]}"


@contextmanager
def no_tls() -> Iterator[str]:
    """A URL whose process fails every handshake, as one with a certificate that has expired."""
    with serve(WebhookDouble()) as url:
        yield url.replace("http:", "https:")


@contextmanager
def no_way() -> Iterator[str]:
    """A URL to which the machine knows no way."""
    yield "http://255.255.255.255:9"


UNREACHED = {"a full queue": full_queue, "no TLS": no_tls, "no way": no_way}


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, "") for kind in KINDS), ("sglang", ",via=live"), ("vllm", ",via=live")]
)
@pytest.mark.parametrize("unreached", UNREACHED.values(), ids=UNREACHED)
def test_only_a_refused_connection_says_that_nobody_is_there(
    stage: Stage, kind: str, unreached: Callable[[], AbstractContextManager[str]], options: str
) -> None:
    with unreached() as url:
        engine = stage.at(kind, url, options, dataclasses.replace(QUICK, connect=0.1))
        facts = engine.probe()
        assert (facts.reachable, facts.absent) == (False, False)
        with pytest.raises(NotSent, match="cannot be reached"):
            engine.pause()


@pytest.mark.parametrize("beside", ["127.0.0.2", "127.0.0.3"])
def test_nobody_is_there_only_where_each_address_refuses(
    stage: Stage, kind: str, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver tells two addresses; at 127.0.0.2 a process listens and hangs."""
    with full_queue("127.0.0.2") as url:
        port = int(url.rpartition(":")[2])
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in (beside, "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        engine = stage.at(kind, f"http://engine:{port}", timeouts=dataclasses.replace(QUICK, connect=0.1))
        facts = engine.probe()
    assert (facts.reachable, facts.absent) == (False, beside == "127.0.0.3")


def test_a_reload_without_an_answer_is_suspect_and_is_not_sent_again(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind, timeouts=IMPATIENT)
    engine.probe()
    double.script(RELOADS[kind], Hang())
    outcome = engine.reload(engine.spec.path, "8")
    assert isinstance(outcome, Suspect) and "did not answer within" in outcome.reason
    assert len([call for call in double.of(RELOADS[kind]) if call.method == "POST"]) == 1


@pytest.mark.parametrize("act", TRICKLES.values(), ids=TRICKLES)
def test_an_answer_that_does_not_end_has_a_deadline_as_a_whole(stage: Stage, kind: str, act: Trickle) -> None:
    engine, double = opened(stage, kind, timeouts=IMPATIENT)
    engine.probe()
    double.script(RELOADS[kind], act)
    outcome = engine.reload(engine.spec.path, "8")
    assert isinstance(outcome, Suspect) and "did not answer within 0.2 s" in outcome.reason


@pytest.mark.parametrize(
    "act", [Drop(), Drop(after=True), Answer(500), Answer(503), Answer(422), Answer(301)]
)
def test_a_reload_that_may_have_begun_is_suspect(stage: Stage, kind: str, act: Answer | Drop) -> None:
    engine, double = opened(stage, kind)
    engine.probe()
    double.script(RELOADS[kind], act)
    assert isinstance(engine.reload(engine.spec.path, "8"), Suspect)
    assert len([call for call in double.of(RELOADS[kind]) if call.method == "POST"]) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_reload_stopped_in_front_of_the_handler_leaves_the_weights(
    stage: Stage, kind: str, status: int
) -> None:
    engine, double = opened(stage, kind)
    engine.probe()
    double.script(RELOADS[kind], Answer(status))
    outcome = engine.reload(engine.spec.path, "8")
    assert isinstance(outcome, Intact) and str(status) in outcome.reason


@pytest.mark.parametrize(
    "body",
    [b"", b"OK", b"[]", b"null", b'{"success": true', b'{"success": true, "success": true}', b'{"ok": 1}'],
)
def test_a_200_that_does_not_say_success_is_suspect(stage: Stage, kind: str, body: bytes) -> None:
    engine, double = opened(stage, kind)
    engine.probe()
    double.script(RELOADS[kind], Answer(200, body))
    assert isinstance(engine.reload(engine.spec.path, "8"), Suspect)


def test_an_endless_reply_is_cut_off(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind)
    engine.probe()
    double.script(RELOADS[kind], Answer(200, b" " * (REPLY_LIMIT + 1)))
    outcome = engine.reload(engine.spec.path, "8")
    assert isinstance(outcome, Suspect) and "more than" in outcome.reason


def test_redirects_are_not_followed(stage: Stage, kind: str) -> None:
    elsewhere = SGLangDouble()
    engine, double = opened(stage, kind)
    with serve(elsewhere) as url:
        for path in ("/pause_generation", "/pause", "/hook"):
            double.script(path, Answer(307, {}, {"Location": f"{url}/pause_generation"}))
        with pytest.raises(EngineFailed, match="307"):
            engine.pause()
    assert elsewhere.calls == []


@pytest.mark.parametrize("place", ["http:x", "data:,x", "//[::1", "http://a:b/"])
def test_a_redirect_that_leads_nowhere_is_an_answer(stage: Stage, kind: str, place: str) -> None:
    """The request was carried out, for all that is known."""
    engine, double = opened(stage, kind)
    engine.probe()
    double.script(RELOADS[kind], Answer(307, {}, {"Location": place}))
    outcome = engine.reload(engine.spec.path, "8")
    assert isinstance(outcome, Suspect) and "answered 307" in outcome.reason


def test_a_dropped_pause_is_sent_once_more(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind)
    for path in ("/pause_generation", "/pause", "/hook"):
        double.script(path, Drop())
    engine.pause()
    assert double.paused and len(double.paths()) == 2
    for path in ("/continue_generation", "/resume", "/hook"):
        double.script(path, Drop(), Drop())
    with pytest.raises(EngineFailed, match="broke the connection"):
        engine.resume()
    assert len(double.paths()) == 4


def test_a_failed_pause_or_resume_names_the_engine_and_a_remedy(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind)
    for path in ("/pause_generation", "/pause", "/continue_generation", "/resume", "/hook"):
        double.script(path, *[Answer(500, b"\x1b[31mbad\n")] * 2)
    for step in (engine.pause, engine.resume):
        with pytest.raises(EngineFailed, match=r"127\.0\.0\.1") as failed:
            step()
        assert failed.value.remedy and failed.value.message.isprintable()


def test_the_key_goes_to_the_engine_and_nowhere_else(stage: Stage, kind: str) -> None:
    engine, double = opened(stage, kind, ",api_key_env=KEY")
    reload(engine)
    assert {call.headers["authorization"] for call in double.calls} == {"Bearer s3cret"}
    assert "s3cret" not in repr(engine.spec)


# SGLang


@pytest.mark.parametrize(
    ("policy", "modes"), [("recompute", ["retract"]), ("abort", ["abort"]), ("wait", [])]
)
def test_sglang_policies(stage: Stage, policy: str, modes: list[str]) -> None:
    double = SGLangDouble()
    engine = stage.engine("sglang", double, f",policy={policy}")
    engine.pause()
    assert [call.body["mode"] for call in double.of("/pause_generation")] == modes


def test_sglang_update_says_everything_that_defaults_badly(stage: Stage) -> None:
    double = SGLangDouble()
    reload(stage.engine("sglang", double))
    assert double.of("/update_weights_from_disk")[0].body == {
        "model_path": str(stage.local),
        "load_format": None,
        "weight_version": "8",
        "abort_all_requests": False,
        "flush_cache": True,
    }


def test_sglang_missing_directory_keeps_the_weights(stage: Stage) -> None:
    double = SGLangDouble()
    engine = stage.engine("sglang", double, ",path=/not/there")
    assert isinstance(reload(engine), Intact)
    assert double.held == "seed"


def test_sglang_refusal_without_a_known_label_proves_nothing(stage: Stage) -> None:
    engine = stage.engine("sglang", SGLangDouble(), ",path=/not/there")
    assert isinstance(engine.reload("/not/there", "8"), Suspect)


@pytest.mark.parametrize("what", ["updated_but_not_flushed", "half_loaded"])
def test_sglang_400_with_changed_weights_is_suspect(stage: Stage, what: str) -> None:
    double = SGLangDouble()
    double.script("/update_weights_from_disk", getattr(double, what))
    assert isinstance(reload(stage.engine("sglang", double)), Suspect)


def test_sglang_one_rank_that_refuses_does_not_speak_for_the_others(stage: Stage) -> None:
    double = SGLangDouble()
    message = "Failed to get weights iterator: x. | Succeeded to update model weights."
    double.script("/update_weights_from_disk", Answer(400, double.reply(False, message)))
    assert isinstance(reload(stage.engine("sglang", double)), Suspect)


def test_sglang_a_refusal_whose_label_moved_is_suspect(stage: Stage) -> None:
    double = SGLangDouble()
    engine = stage.engine("sglang", double)
    engine.probe()
    double.label = "other"
    double.script(
        "/update_weights_from_disk", Answer(400, double.reply(False, "Failed to get weights iterator"))
    )
    assert isinstance(engine.reload("/x", "8"), Suspect)


def test_sglang_success_false_with_200_is_suspect(stage: Stage) -> None:
    double = SGLangDouble()
    double.script("/update_weights_from_disk", Answer(200, double.reply(False, "Succeeded")))
    assert isinstance(reload(stage.engine("sglang", double)), Suspect)


@pytest.mark.parametrize("label", ["default", "7", "", 8, ["8"], "8" * 1000])
def test_sglang_other_label_is_a_failure(stage: Stage, label: object) -> None:
    double = SGLangDouble()
    double.script("/model_info", Answer(200, {"weight_version": label}))
    with pytest.raises(EngineFailed):
        stage.engine("sglang", double).read_back("8")


@pytest.mark.parametrize(
    ("missing", "confirmed"),
    [
        ({"/model_info"}, "label"),
        ({"/model_info", "/get_model_info"}, "label"),
        ({"/model_info", "/get_model_info", "/get_weight_version"}, "status-only"),
    ],
)
def test_sglang_older_releases_are_read_back_from_older_routes(
    stage: Stage, missing: set[str], confirmed: str
) -> None:
    double = SGLangDouble()
    double.missing = missing
    engine = stage.engine("sglang", double)
    assert reload(engine) == Done()
    assert engine.read_back("8") == confirmed


def test_sglang_relabel_aborts_no_request(stage: Stage) -> None:
    double = SGLangDouble()
    engine = stage.engine("sglang", double)
    assert engine.relabel("9") == "label"
    assert double.label == "9"
    assert double.of("/update_weight_version")[0].body == {"new_version": "9", "abort_all_requests": False}
    double.missing = {"/update_weight_version"}
    assert engine.relabel("10") == "status-only"


def test_sglang_that_answers_500_about_itself_is_there_all_the_same(stage: Stage) -> None:
    double = SGLangDouble()
    double.script("/model_info", Answer(500))
    facts = stage.engine("sglang", double).probe()
    assert facts.reachable and facts.label is None


def test_metrics_may_be_off(stage: Stage) -> None:
    double = SGLangDouble()
    double.missing = {"/metrics"}
    facts = stage.engine("sglang", double).probe()
    assert facts.reachable and facts.process is None


# vLLM


@pytest.mark.parametrize(("policy", "mode"), [("recompute", "keep"), ("abort", "abort"), ("wait", "wait")])
def test_vllm_policies_always_clear_the_cache(stage: Stage, policy: str, mode: str) -> None:
    double = VLLMDouble()
    stage.engine("vllm", double, f",policy={policy}").pause()
    assert double.of("/pause")[0].query == {"mode": mode, "clear_cache": "true"}


def test_vllm_reload_always_names_the_path(stage: Stage) -> None:
    double = VLLMDouble()
    reload(stage.engine("vllm", double))
    body = double.of("/collective_rpc")[0].body
    assert (body["method"], body["kwargs"]) == ("reload_weights", {"weights_path": str(stage.local)})
    assert body["timeout"] == QUICK.reload


def test_vllm_missing_directory_is_suspect(stage: Stage) -> None:
    double = VLLMDouble()
    outcome = reload(stage.engine("vllm", double, ",path=/not/there"))
    assert isinstance(outcome, Suspect) and double.broken


@pytest.mark.parametrize("results", [[], None, [None, "error"], [None, {"error": "x"}], [False], "null", {}])
def test_vllm_every_worker_must_have_loaded(stage: Stage, results: object) -> None:
    double = VLLMDouble()
    double.script("/collective_rpc", Answer(200, {"results": results}))
    assert isinstance(reload(stage.engine("vllm", double)), Suspect)


def test_vllm_without_labels_is_confirmed_by_status_only(stage: Stage) -> None:
    double = VLLMDouble()
    double.missing = {"/update_weight_version", "/weight_info"}
    engine = stage.engine("vllm", double)
    assert reload(engine) == Done()
    assert engine.read_back("8") == "status-only"
    assert engine.relabel("9") == "status-only"
    assert engine.probe().label is None


def test_vllm_whose_label_cannot_be_set_is_suspect(stage: Stage) -> None:
    double = VLLMDouble()
    double.script("/update_weight_version", Answer(500))
    assert isinstance(reload(stage.engine("vllm", double)), Suspect)


def server_info(device: str, **model: object) -> Answer:
    return Answer(200, {"vllm_config": {"device_config": {"device": device}, "model_config": model}})


INT8, FP8 = (
    f'{{"config_groups": {{"group_0": {{"weights": {{"type": "{kind}"}}}}}}}}' for kind in ("int", "float")
)


def reloads(double: Double) -> int:
    return sum(call.path == "/collective_rpc" for call in double.calls)


@pytest.mark.parametrize(
    "config", ['{"tie_word_embeddings": true}', '{"text_config": {"tie_word_embeddings": true}}']
)
def test_vllm_on_a_cpu_is_not_reloaded_with_tied_embeddings(stage: Stage, config: str) -> None:
    (stage.local / "config.json").write_text(config)
    double = VLLMDouble()
    double.script("/server_info", server_info("cpu", word_embeddings_untied_by_checkpoint=False))
    engine = stage.engine("vllm", double)
    outcome = reload(engine)
    assert (
        isinstance(outcome, Intact) and "tied embeddings" in outcome.reason and "via=live" in outcome.reason
    )
    assert reloads(double) == 0 and engine.probe().unfit


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"num_experts": 4, "tie_word_embeddings": false}', "via=live"),
        ('{"text_config": {"n_routed_experts": 8}}', "via=live"),
        (f'{{"quantization_config": {INT8}, "tie_word_embeddings": false}}', "int8"),
    ],
)
def test_vllm_on_a_cpu_is_not_reloaded_with_packed_layers(stage: Stage, config: str, said: str) -> None:
    (stage.local / "config.json").write_text(config)
    double = VLLMDouble()
    double.script("/server_info", server_info("cpu", word_embeddings_untied_by_checkpoint=True))
    outcome = reload(stage.engine("vllm", double))
    assert isinstance(outcome, Intact) and said in outcome.reason
    assert reloads(double) == 0


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        ('{"num_experts": 4}', server_info("cuda")),
        (f'{{"quantization_config": {INT8}}}', server_info("cuda")),
        (f'{{"quantization_config": {FP8}, "tie_word_embeddings": false}}', server_info("cpu")),
        ('{"num_experts": null, "n_routed_experts": 0, "tie_word_embeddings": false}', server_info("cpu")),
        ('{"tie_word_embeddings": true}', server_info("cuda")),
        ('{"tie_word_embeddings": true}', server_info("cpu", word_embeddings_untied_by_checkpoint=True)),
        ('{"tie_word_embeddings": true}', Answer(404, {})),
        ('{"tie_word_embeddings": true}', Answer(200, {"vllm_config": "a text"})),
        ('{"tie_word_embeddings": false, "scale": Infinity}', server_info("cpu")),
        ("no JSON", server_info("cpu")),
    ],
)
def test_vllm_elsewhere_is_reloaded(stage: Stage, config: str, answer: Answer) -> None:
    (stage.local / "config.json").write_text(config)
    double = VLLMDouble()
    double.script("/server_info", answer)
    assert reload(stage.engine("vllm", double)) == Done()
    assert reloads(double) == 1


def test_vllm_that_does_not_say_what_it_runs_on_is_left_alone(stage: Stage) -> None:
    (stage.local / "config.json").write_text('{"tie_word_embeddings": true}')
    double = VLLMDouble()
    double.script("/server_info", Hang(), Hang())
    engine = stage.engine("vllm", double, timeouts=dataclasses.replace(QUICK, control=0.2))
    assert isinstance(reload(engine), Intact)
    assert reloads(double) == 0


def test_vllm_that_fails_to_say_what_it_runs_on_is_left_alone(stage: Stage) -> None:
    """As vLLM does where its environment has neither pip nor uv."""
    double = VLLMDouble()
    double.script("/server_info", *[Answer(500)] * 4)
    engine = stage.engine("vllm", double)
    outcome, facts = reload(engine), engine.probe()
    assert isinstance(outcome, Intact) and "/server_info?config_format=json answered 500" in outcome.reason
    assert facts.unfit and "install pip" in facts.remedy and reloads(double) == 0


def test_vllm_other_label_is_a_failure(stage: Stage) -> None:
    double = VLLMDouble()
    double.label = "7"
    with pytest.raises(EngineFailed, match="'7'"):
        stage.engine("vllm", double).read_back("8")


def test_vllm_outside_dev_mode_is_told_how_to_start(stage: Stage) -> None:
    double = VLLMDouble()
    double.missing = {"/pause", "/collective_rpc", "/is_paused", "/weight_info"}
    engine = stage.engine("vllm", double)
    with pytest.raises(EngineFailed, match="VLLM_SERVER_DEV_MODE=1"):
        engine.pause()
    assert engine.probe().reachable and engine.probe().paused is None


def test_vllm_tells_its_release_and_whether_it_is_paused(stage: Stage) -> None:
    engine = stage.engine("vllm", VLLMDouble())
    engine.pause()
    facts = engine.probe()
    assert (facts.paused, facts.software) == (True, "0.32.0")


def test_vllm_relabel(stage: Stage) -> None:
    double = VLLMDouble()
    assert stage.engine("vllm", double).relabel("9") == "label"
    assert double.label == "9"


# Webhook


def test_webhook_says_what_and_for_whom(stage: Stage) -> None:
    double = WebhookDouble()
    engine = stage.engine("webhook", double, "/hook?token=1,name=left,policy=wait")
    engine.pause()
    reload(engine)
    engine.resume()
    common = {"engine": "left", "run_id": "run-1", "policy": "wait", "path": str(stage.local)}
    assert [call.body for call in double.calls if call.method == "POST"] == [
        {"phase": "pause", "version": None, "label": None, **common},
        {"phase": "reload", "version": 8, "label": "8", **common},
        {"phase": "resume", "version": 8, "label": "8", **common},
    ]
    assert {call.query["token"] for call in double.calls} == {"1"}


@pytest.mark.parametrize(
    ("echo", "confirmed"), [("version", "label"), ("label", "label"), (None, "status-only")]
)
def test_webhook_is_confirmed_by_what_it_repeats(stage: Stage, echo: str | None, confirmed: str) -> None:
    double = WebhookDouble()
    double.echo = echo
    engine = stage.engine("webhook", double, "/hook")
    assert reload(engine) == Done()
    assert engine.read_back("8") == confirmed
    assert engine.relabel("9") == "status-only"


@pytest.mark.parametrize(
    "shown", [{"version": 7}, {"label": "7"}, {"version": 8, "label": "7"}, {"version": True}]
)
def test_webhook_that_repeats_another_version_has_failed(stage: Stage, shown: dict[str, object]) -> None:
    double = WebhookDouble()
    engine = stage.engine("webhook", double, "/hook")
    engine.probe()
    double.script("/hook", Answer(202, {"ok": True, **shown}))
    assert engine.reload("/x", "8") == Done()
    with pytest.raises(EngineFailed):
        engine.read_back("8")


def test_webhook_that_repeats_true_has_not_repeated_version_1(stage: Stage) -> None:
    double = WebhookDouble()
    engine = stage.engine("webhook", double, "/hook")
    double.script("/hook", Answer(200, {"ok": True, "version": True}))
    assert engine.reload("/x", "1") == Done()
    with pytest.raises(EngineFailed):
        engine.read_back("1")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(200, {"ok": False}), Suspect),
        (Answer(200, {"ok": True, "success": False}), Suspect),
        (Answer(200, {"ok": False, "intact": True}), Intact),
        (Answer(400, {"ok": False, "intact": True}), Intact),
        (Answer(200, {"intact": True}), Suspect),
        (Answer(204, b""), Suspect),
    ],
)
def test_webhook_refusals(stage: Stage, answer: Answer, outcome: type[object]) -> None:
    double = WebhookDouble()
    engine = stage.engine("webhook", double, "/hook")
    engine.probe()
    double.script("/hook", answer)
    assert isinstance(engine.reload("/x", "8"), outcome)


def test_webhook_that_says_no_to_a_pause_is_not_paused(stage: Stage) -> None:
    double = WebhookDouble()
    double.script("/hook", Answer(200, {"ok": False}))
    with pytest.raises(EngineFailed):
        stage.engine("webhook", double, "/hook").pause()


def test_webhook_without_a_get_is_reachable(stage: Stage) -> None:
    double = WebhookDouble()
    double.script("/hook", Answer(405))
    facts = stage.engine("webhook", double, "/hook").probe()
    assert facts.reachable and facts.label is None
