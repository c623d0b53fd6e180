"""Adapters of a run on a host: they arrive under names of their own, over the main weights that they were
trained on, or the host says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from crashes import killed, killed_at, started
from doubles import Answer, Drop, serve_files
from hosts import VLLM, Host, Run, SGLang, Site
from in_process import Command

from weightcast.shared.base.failpoints import watch
from weightcast.shared.checkpoint.verify.hashing import Scrub
from weightcast.subscriber.status import AdapterStatus
from weightcast.subscriber.sync.adapters import GRACE_SECONDS

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MOST_KILLS = 60


def only(host: Host) -> AdapterStatus:
    [found] = host.status.adapters
    return found


def exported(host: Host) -> list[str]:
    return sorted(path.name for path in (host.local / "adapters").glob("*-v*"))


def expected(run: Run, *labels: str) -> dict[str, str]:
    return {label: run.adapters[label] for label in labels}


@pytest.mark.parametrize("engine_class", [VLLM, SGLang])
def test_versions_arrive_and_the_oldest_go(site: Site, run: Run, engine_class: type[VLLM | SGLang]) -> None:
    engine = engine_class()
    host = site.host(run, engine)
    assert host.step().adapters == ()
    labels = []
    for number in range(1, 5):
        labels.append(run.publish_adapter())
        assert host.step().ready
        assert only(host).state == "loaded" and only(host).loaded[0] == number
        host.clock.at += GRACE_SECONDS + 1
        host.step()
        assert engine.loaded == expected(run, *labels[-2:])
        assert exported(host) == [f"math-v{n:06d}" for n in range(max(1, number - 1), number + 1)]
    assert only(host) == AdapterStatus(
        name="math", version=4, target=4, main_version=0, loaded=(4, 3), state="loaded", ready=True
    )


def test_old_versions_stay_while_requests_may_use_them(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine, adapters_kept=1)
    labels = [run.publish_adapter()]
    host.step()
    labels.append(run.publish_adapter())
    host.step()
    host.clock.at += GRACE_SECONDS - 1
    host.step()
    assert engine.loaded == expected(run, *labels) and only(host).loaded == (2,)
    host.clock.at += 2
    host.step()
    assert engine.loaded == expected(run, labels[1])


@pytest.mark.parametrize("engine_class", [VLLM, SGLang])
def test_an_engine_without_lora_keeps_the_host_from_ready(
    site: Site, run: Run, engine_class: type[VLLM | SGLang]
) -> None:
    """Never silently without its adapter."""
    engine = engine_class()
    engine.lora = False
    host = site.host(run, engine)
    run.publish_adapter()
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert "adapter math" in reason
    assert only(host).state == "failed" and "--enable-lora" in only(host).remedy
    assert only(host).loaded == () and host.status.served_version == 0
    engine.restart()
    engine.lora = True
    assert host.step().ready and engine.loaded == expected(run, "math@1")


def test_an_adapter_never_fails_to_arrive_in_silence(site: Site, run: Run) -> None:
    """The list of adapters cannot be read, or a name that is asked for is not in it."""
    engine = VLLM()
    host = site.host(run, engine, adapters=("math", "mth"))
    run.publish_adapter()
    registry = run.channel / "components.json"
    whole = registry.read_bytes()
    registry.write_bytes(whole[:-9])
    assert not host.step().ready
    [reason] = host.status.not_ready_reasons
    assert reason.startswith("adapters:") and "components.json" in reason
    registry.write_bytes(whole)
    assert host.step().ready and engine.loaded == expected(run, "math@1")
    assert host.status.degraded == ("--adapters mth matches no adapter of the run",)


def test_a_stale_name_is_never_served(site: Site, run: Run, tmp_path: Path) -> None:
    """An engine that restarts with older adapters preloaded under the run's names, and a directory that was
    replaced."""
    engine = VLLM()
    host = site.host(run, engine)
    for _ in range(2):
        run.publish_adapter()
        host.step()
    engine.restart()
    directory = host.local / "adapters" / "math-v000001"
    engine.adapters["math@2"] = str(directory), run.adapters["math@1"]
    engine.adapters["math"] = str(tmp_path), "stale"
    engine.adapters["apart"] = str(tmp_path), "of somebody else"
    assert host.step().ready
    assert engine.loaded == {"apart": "of somebody else", **expected(run, "math@1", "math@2")}
    newest = directory.with_name("math-v000002")
    shutil.rmtree(newest)
    shutil.copytree(directory, newest)
    host.restart()
    engine.restart()
    engine.adapters["math@2"] = str(newest), run.adapters["math@1"]
    assert host.step().ready and engine.loaded["math@2"] == run.adapters["math@2"]


def test_an_engine_that_restarted_gets_all_that_is_kept(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    for _ in range(2):
        run.publish_adapter()
        host.step()
    engine.restart()
    assert host.step().ready
    assert engine.loaded == expected(run, "math@1", "math@2")


def test_a_new_subscriber_trusts_what_was_recorded(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    host.restart()
    assert host.step().ready and only(host).loaded == (1,)
    assert len(engine.of(LOAD)) == 1 and engine.of(UNLOAD) == []


def test_a_name_with_other_bytes_is_not_trusted(site: Site, run: Run, tmp_path: Path) -> None:
    """`math@1` has the bytes of version 1, whoever loaded something under this name before."""
    engine = VLLM()
    label = run.publish_adapter()
    engine.adapters[label] = str(tmp_path), "stale"
    host = site.host(run, engine)
    assert host.step().ready
    assert engine.loaded == expected(run, label)
    engine.adapters[label] = str(tmp_path), "stale"
    assert host.step().ready
    assert engine.loaded == expected(run, label)


def test_main_weights_that_move_take_the_adapters_with_them(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    assert host.step().ready
    run.publish()
    engine.calls.clear()
    assert not host.step().ready
    assert host.status.served_version == 1
    done = [path for path in engine.paths() if path in ("/pause", "/resume", UNLOAD, LOAD)]
    assert done == [UNLOAD, "/pause", "/resume"] and engine.loaded == {}
    assert only(host).state == "waiting"
    assert "main version 0, and this host has 1" in only(host).error
    assert only(host).remedy.startswith("publish the adapter over version 1,")
    label = run.publish_adapter()
    assert host.step().ready
    assert engine.loaded == expected(run, label) and exported(host) == ["math-v000002"]


def test_an_adapter_waits_for_its_main_weights(site: Site, run: Run) -> None:
    engine = VLLM()
    run.publish_adapter()
    host = site.host(run, engine, target="0")
    host.step()
    run.publish()
    run.publish_adapter()
    assert host.step().ready
    assert only(host).loaded == (1,) and only(host).state == "behind" and only(host).target == 2
    assert any("version 2 belongs to main version 1" in reason for reason in host.status.degraded)
    assert engine.loaded == expected(run, "math@1")


def test_drift_is_allowed_where_it_is_asked_for(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine, allow_base_drift=True)
    run.publish_adapter()
    host.step()
    run.publish()
    assert host.step().ready and host.status.served_version == 1
    assert engine.loaded == expected(run, "math@1") and engine.of(UNLOAD) == []


def test_a_flipped_bit_in_an_exported_file_is_found_at_the_start(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    label = run.publish_adapter()
    host.step()
    weights = host.local / "adapters" / "math-v000001" / "adapter_model.safetensors"
    flip(weights)
    host.restart()
    assert host.step().ready
    assert engine.digest_of(weights) == run.adapters[label]
    assert engine.loaded == expected(run, label)
    assert len(engine.of(UNLOAD)) == 1, "an engine may read its files again"


def flip(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-3] ^= 4
    weights.write_bytes(data)


@pytest.mark.parametrize("place", ["math-v000002", "math-v000001", ".follow/math"])
def test_background_verify_reads_adapters_too(site: Site, run: Run, place: str) -> None:
    engine = VLLM()
    host = site.host(run, engine, adapters_plain_names=True)
    labels = []
    for _ in range(2):
        labels.append(run.publish_adapter())
        assert host.step().ready
    scrub = Scrub(1 << 30, clock=host.clock)
    weights = host.local / "adapters" / place / "adapter_model.safetensors"
    flip(weights)
    for _ in range(4):
        host.clock.at += 1
        host.sync.verify_some(scrub)
    assert host.status.verify is not None and host.status.verify.faults == 1
    assert "adapter math" in host.status.verify.last_fault
    assert host.status.ready
    whole = labels[1:] if place == "math-v000001" else labels
    assert engine.loaded == {"math": run.adapters["math@2"], **expected(run, *whole)}
    assert exported(host) == [f"math-v{int(label[5:]):06d}" for label in whole]
    assert place == "math-v000001" or engine.digest_of(weights) == run.adapters["math@2"]
    assert len(engine.of(UNLOAD)) == {"math-v000002": 3, "math-v000001": 2, ".follow/math": 1}[place]


@pytest.mark.parametrize(
    "lost",
    [
        "",
        "adapters",
        "adapters/.follow",
        "adapters/math-v000002",
        "adapters/math-v000002/adapter_config.json",
        "adapters/math-v000002/adapter_model.safetensors",
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_deleted_under_a_running_host_comes_back(
    site: Site, run: Run, lost: str, restarts: bool
) -> None:
    """Of its local directory, or of an adapter; with the engine as it was, or started anew."""
    engine = VLLM()
    host = site.host(run, engine)
    for name in ("code", "math", "math"):
        run.publish_adapter(name)
        host.step()
    path = host.local / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    if restarts:
        engine.restart()
    host.step()
    host.clock.at += 61
    assert host.step().ready and [one.state for one in host.status.adapters] == ["loaded"] * 2
    newest = expected(run, "code@1", "math@2")
    assert engine.loaded.items() >= newest.items() and set(engine.loaded) <= {*newest, "math@1"}
    label = run.publish_adapter("math")
    assert host.step().ready and engine.loaded[label] == run.adapters[label]


def test_local_verify_and_repair_cover_adapters(site: Site, run: Run, weightcast: Command) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    host.sync.close()
    words = ("local", "verify", "--local", host.local, "--json")
    assert weightcast(*words).code == 0
    for place in ("math-v000001", ".follow/math"):
        flip(host.local / "adapters" / place / "adapter_model.safetensors")
    done = weightcast(*words)
    files = [fault["file"] for fault in done.json["faults"]]
    assert done.code == 3 and all(file.startswith("adapters/") for file in files) and len(files) >= 2
    done = weightcast(*words, "--repair", "--channel", run.channel, "--base", run.base_dir)
    assert done.code == 0 and done.json["intact"]
    host.start()
    assert host.step().ready and engine.loaded == expected(run, "math@1")
    host.sync.close()
    shutil.rmtree(host.local / "adapters" / "math-v000001")
    done = weightcast(*words)
    assert done.code == 3 and [fault["file"] for fault in done.json["faults"]] == ["adapters/math@1"]
    assert weightcast(*words, "--repair", "--channel", run.channel, "--base", run.base_dir).code == 0
    host.start()
    assert host.step().ready and engine.loaded == expected(run, "math@1")


def test_a_flipped_bit_in_what_is_followed_is_repaired_before_an_export(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    host.sync.close()
    weights = host.local / "adapters" / ".follow" / "math" / "adapter_model.safetensors"
    flip(weights)
    (host.local / "adapters" / "math-v000001" / "adapter_model.safetensors").unlink()
    host.start()
    host.step()
    host.clock.at += 61
    assert host.step().ready
    assert engine.loaded == expected(run, "math@1")


def test_a_copy_with_a_flipped_bit_is_not_exported(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    label = run.publish_adapter()
    spoiled = list[Path]()

    def spoil(name: str, where: Path | None) -> None:
        if name == "adapter.copied" and where is not None and not spoiled:
            weights = where / "adapter_model.safetensors"
            spoiled.append(weights)
            flip(weights)

    watch(spoil)
    try:
        assert not host.step().ready
    finally:
        watch(None)
    assert "expected" in only(host).error and engine.loaded == {}
    assert not (host.local / "adapters" / "math-v000001").exists()
    host.clock.at += 61
    assert host.step().ready and engine.loaded == expected(run, label)


def test_an_engine_in_doubt_gets_no_adapters(site: Site, run: Run) -> None:
    """Its main weights are not known to be those that the adapter was trained on."""
    engine = VLLM()
    host = site.host(run, engine)
    host.step()
    engine.script("/collective_rpc", *[engine.half_loaded] * 2)
    run.publish()
    label = run.publish_adapter()
    assert not host.step().ready
    assert engine.of(LOAD) == [] and only(host).loaded == ()
    assert host.retry().ready and engine.loaded == expected(run, label)


def test_a_rolling_reload_leaves_each_engine_its_own(site: Site, run: Run) -> None:
    """An engine that still serves the old main weights keeps the adapters that belong to them."""
    engines = VLLM(), VLLM()
    host = site.host(run, *engines, conduct={"order": "rolling"})
    run.publish_adapter()
    assert host.step().ready
    engines[0].script("/collective_rpc", *[engines[0].half_loaded] * 2)
    run.publish()
    label = run.publish_adapter()
    host.step()
    for engine in engines:
        if engine.held == run.digest(0) and not engine.paused:
            assert engine.loaded == expected(run, "math@1")
    assert host.retry().ready
    assert [engine.loaded for engine in engines] == [expected(run, label)] * 2


def test_a_retired_adapter_is_unloaded_and_deleted(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter("math")
    other = run.publish_adapter("code")
    host.step()
    assert len(engine.loaded) == 2
    run.retire("math")
    host.step()
    host.clock.at += GRACE_SECONDS + 1
    assert host.step().ready
    assert [one.name for one in host.status.adapters] == ["code"]
    assert engine.loaded == expected(run, other) and exported(host) == ["code-v000001"]
    assert not (host.local / "adapters" / ".follow" / "math").exists()


@pytest.mark.parametrize(
    ("patterns", "names"), [((), []), (("c*", "x"), ["code"]), (("*",), ["code", "math"])]
)
def test_patterns_choose_adapters(site: Site, run: Run, patterns: tuple[str, ...], names: list[str]) -> None:
    engine = VLLM()
    host = site.host(run, engine, adapters=patterns)
    for name in ("math", "code"):
        run.publish_adapter(name)
    assert host.step().ready
    assert sorted(one.name for one in host.status.adapters) == names
    assert sorted(engine.loaded) == [f"{name}@1" for name in names]


def test_adapters_that_are_switched_off_are_taken_away(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    host.sync.close()
    off = site.host(run, f"vllm={host.urls[0].partition('=')[2]}", adapters=())
    off.step()
    off.clock.at += GRACE_SECONDS + 1
    assert off.step().ready and off.status.adapters == ()
    assert engine.loaded == {} and exported(off) == []


def test_an_engine_that_is_full_is_named(site: Site, run: Run) -> None:
    engine = SGLang()
    engine.limits = {"max_loaded_loras": 1}
    host = site.host(run, engine)
    for name in ("math", "code"):
        run.publish_adapter(name)
    assert host.step().ready and len(engine.loaded) == 1
    [reason] = host.status.degraded
    assert "no room for adapter/" in reason
    assert "--max-loaded-loras" in json.dumps(host.status.by_name(), default=str)
    engine.restart()
    engine.limits = {"max_loaded_loras": 2}
    assert host.step().ready and len(engine.loaded) == 2


@pytest.mark.parametrize("engine_class", [VLLM, SGLang])
def test_an_adapter_that_cannot_fit_is_refused_before_it_is_loaded(
    site: Site, run: Run, engine_class: type[VLLM | SGLang]
) -> None:
    engine = engine_class()
    modules = "target_modules" if engine_class is VLLM else "lora_target_modules"
    engine.limits = {"max_lora_rank": 16, modules: ["k_proj", "o_proj"]}
    host = site.host(run, engine)
    run.publish_adapter("wide", r=8, rank_pattern={"o_proj": 32})
    run.publish_adapter("other", target_modules=["o_proj", "up_proj"])
    run.publish_adapter("fits", r=16, target_modules=["model.layers.0.q_proj", "o_proj"])
    assert host.step().ready, "it serves one of them"
    found = {one.name: f"{one.error}; {one.remedy}" for one in host.status.adapters}
    assert {reason.split(":")[0] for reason in host.status.degraded} == {"adapter wide", "adapter other"}
    assert "adapter/wide has rank 32, the engine was started with --max-lora-rank 16" in found["wide"]
    assert "adapter/other adapts gate_up_proj" in found["other"]
    assert len([path for path in engine.paths() if "lora" in path]) == 1
    assert engine.loaded == expected(run, "fits@1")
    engine.restart()
    engine.limits = {"max_lora_rank": 32}
    assert host.step().ready and len(engine.loaded) == 3


def test_an_engine_keeps_as_many_versions_as_it_has_room_for(site: Site, run: Run) -> None:
    engine = VLLM()
    engine.limits = {"max_cpu_loras": 3}
    host = site.host(run, engine)
    for name in ("math", "code"):
        for _ in range(2):
            run.publish_adapter(name)
            host.step()
            host.clock.at += GRACE_SECONDS + 1
    assert host.step().ready and engine.loaded == expected(run, "math@2", "code@2")


def test_a_full_engine_drops_no_version_that_requests_may_use(site: Site, run: Run) -> None:
    engine = SGLang()
    engine.most_adapters, engine.limits = 2, {"max_loaded_loras": 2}
    host = site.host(run, engine, adapters_kept=3)
    for _ in range(2):
        run.publish_adapter()
        host.step()
    engine.calls.clear()
    label = run.publish_adapter()
    assert host.step().ready and only(host).loaded == (2, 1)
    assert "no room for adapter/math" in only(host).error and "--max-loaded-loras" in only(host).remedy
    assert engine.loaded == expected(run, "math@1", "math@2")
    host.clock.at += GRACE_SECONDS + 1
    assert host.step().ready and engine.loaded == expected(run, "math@2", label)
    assert [path for path in engine.paths() if "lora" in path] == [
        "/unload_lora_adapter",
        "/load_lora_adapter",
    ]


def test_a_plain_name_moves_to_the_newest_version(site: Site, run: Run, tmp_path: Path) -> None:
    """Also an old adapter that somebody else loaded under it is never served as the run's."""
    engine = VLLM()
    engine.adapters["math"] = str(tmp_path), "stale"
    host = site.host(run, engine, adapters_plain_names=True)
    for number in range(1, 4):
        label = run.publish_adapter()
        assert host.step().ready
        assert engine.loaded["math"] == engine.loaded[label] == run.adapters[label], number
    host.clock.at += GRACE_SECONDS + 1
    host.step()
    assert engine.loaded == {"math": run.adapters[label], **expected(run, "math@2", "math@3")}
    host.restart()
    engine.calls.clear()
    assert host.step().ready and not [path for path in engine.paths() if "lora" in path]
    engine.script(LOAD, Answer(500, {"error": {"message": "refused"}}))
    run.publish_adapter()
    assert host.step().ready and engine.loaded["math"] == run.adapters[label]
    run.publish()
    assert not host.step().ready and engine.loaded == {}
    label = run.publish_adapter()
    assert host.step().ready and engine.loaded == {"math": run.adapters[label], **expected(run, label)}
    run.retire("math")
    host.step()
    assert "math" not in engine.loaded


def test_a_plain_name_that_was_not_loaded_is_loaded_later(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine, adapters_plain_names=True)
    label = run.publish_adapter()
    engine.script(LOAD, engine.behave, Answer(500, {"error": {"message": "no memory"}}))
    assert host.step().ready and "no memory" in only(host).error
    assert engine.loaded == expected(run, label)
    host.clock.at += 61
    assert host.step().ready and engine.loaded == {"math": run.adapters[label], label: run.adapters[label]}


def test_plain_names_are_refused_with_an_engine_that_cannot_move_them(
    site: Site, run: Run, weightcast: Command
) -> None:
    words = ("--channel", run.channel, "--local", site.root / "host", "--adapters-plain-names")
    done = weightcast("subscriber", "run", *words, "--engine", site.option(SGLang()))
    assert done.code == 2 and "--adapters-plain-names" in done.err and "--gate" in done.err


def test_a_refused_version_leaves_the_one_before(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    said = "LoRA rank 64 is greater than max_lora_rank 16."
    engine.script(LOAD, Answer(500, {"error": {"message": said}}))
    label = run.publish_adapter()
    assert host.step().ready and only(host).state == "failed"
    assert said in only(host).error and any(said in reason for reason in host.status.degraded)
    assert only(host).loaded == (1,)
    host.clock.at += 61
    assert host.step().ready and only(host).state == "loaded"
    assert engine.loaded[label] == run.adapters[label]


def test_a_load_without_an_answer_is_begun_anew(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    engine.script(LOAD, Drop(after=True))
    assert not host.step().ready
    host.clock.at += 61
    assert host.step().ready
    assert engine.loaded == expected(run, "math@1") and len(engine.of(UNLOAD)) == 1


def test_a_damaged_adapter_keeps_no_other_from_its_engines(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine, visible_seconds=0.1)
    run.publish_adapter("math")
    run.publish_adapter("code")
    for shard in (run.channel / "components" / "adapter" / "code").glob("weight_v000001/*.safetensors"):
        shard.write_bytes(b"x")
    assert host.step().ready
    by_name = {one.name: one for one in host.status.adapters}
    assert by_name["math"].state == "loaded" and by_name["code"].state == "failed"
    assert engine.loaded == expected(run, "math@1") and host.status.served_version == 0


def test_a_channel_that_is_gone_does_not_keep_adapters_from_an_engine(site: Site, run: Run) -> None:
    engine = VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    run.channel.rename(run.channel.with_name("away"))
    host.restart()
    engine.restart()
    for _ in range(2):
        with pytest.raises(Exception, match="channel"):
            host.step()
        assert host.status.last_error is not None
        assert host.status.last_error.remedy == "mount it, or correct --channel", (
            "made anew it is another run"
        )
    assert engine.loaded == expected(run, "math@1")
    run.channel.with_name("away").rename(run.channel)
    (run.channel / "components.json").rename(run.channel / "gone")
    assert host.step().ready and any("components.json is gone" in each for each in host.status.degraded)
    assert engine.loaded == expected(run, "math@1") and only(host).loaded == (1,)


@pytest.mark.parametrize("event", ["os.rename", "socket.connect", "shutil.rmtree"])
def test_killed_at_every_step_of_a_version(site: Site, event: str) -> None:
    """Before each rename, call to the engine and removal: of a version that replaces an older one."""
    run, engine = site.run(), VLLM()
    host = site.host(run, engine, adapters_kept=1)
    run.publish_adapter()
    host.step()
    host.clock.at += 1e6
    for number in range(1, MOST_KILLS):
        label = run.publish_adapter()
        host.sync.close()
        if not killed(lambda: all_steps(host), event, number):
            break
        host.start()
        all_steps(host)
        assert host.status.ready and only(host).state == "loaded"
        assert engine.loaded == expected(run, label)
        assert exported(host) == [f"math-v{len(run.adapters):06d}"]
    else:
        pytest.fail("never came to an end")
    assert number > 1


@pytest.mark.parametrize(
    "failpoint",
    ["copied", "exported", "loaded", "recorded", "unloaded", "deleting", "withdrawn"],
)
def test_killed_at_its_failpoints(site: Site, failpoint: str) -> None:
    run, engine = site.run(), VLLM()
    host = site.host(run, engine, adapters_kept=1)
    run.publish_adapter()
    host.step()
    if failpoint == "withdrawn":
        run.publish()
    label = run.publish_adapter()
    host.sync.close()
    assert killed_at(lambda: all_steps(host), f"adapter.{failpoint}")
    host.start()
    all_steps(host)
    assert host.status.ready and engine.loaded == expected(run, label)
    assert exported(host) == ["math-v000002"] and not engine.paused
    assert list((host.local / "adapters").glob("*.tmp")) == []


def all_steps(host: Host) -> None:
    """Until the version before is unloaded and deleted."""
    started(host)
    host.clock.at += GRACE_SECONDS + 1
    host.step()
    host.step()


@pytest.mark.parametrize("event", ["os.rename", "socket.connect"])
def test_killed_while_main_moves(site: Site, event: str) -> None:
    """No engine serves an adapter over main weights that it does not belong to."""
    run, engine = site.run(), VLLM()
    host = site.host(run, engine)
    run.publish_adapter()
    host.step()
    for number in range(1, MOST_KILLS):
        run.publish()
        host.sync.close()
        if not killed(lambda: started(host), event, number):
            break
        if engine.held == run.digest(len(run.versions) - 1):
            assert engine.loaded == {} or engine.paused, "left over other main weights"
        label = run.publish_adapter()
        host.start()
        host.step()
        assert host.step().ready and engine.loaded == expected(run, label)
    else:
        pytest.fail("never came to an end")
    assert number > 1


def test_a_single_sync_brings_adapters_too(site: Site, run: Run, weightcast: Command) -> None:
    engine = VLLM()
    run.publish_adapter()
    words = ["sync", "--channel", run.channel, "--base", run.base_dir, "--local", site.root / "host"]
    words += ["--engine", site.option(engine), "--json"]
    done = weightcast(*words)
    assert done.code == 0 and engine.loaded == expected(run, "math@1")
    [told] = done.json["adapters"]
    assert (told["state"], told["loaded"]) == ("loaded", [1])
    engine.restart()
    engine.lora = False
    done = weightcast(*words)
    assert done.code == 5 and "--enable-lora" in done.out
    words[-1] = "--adapters=none"
    assert weightcast(*words).code == 0
    done = weightcast(*words[:5], "--local", site.root / "apart")
    assert done.code == 0 and "holds 1" in done.out
    run.publish()
    done = weightcast(*words[:5], "--local", site.root / "apart")
    assert done.code == 5 and "remedy: publish the adapter over version 1, retire it, or give" in done.err


def test_adapters_come_over_http_too(site: Site, run: Run) -> None:
    """Where every look is a request, the run's components are looked for every ten seconds."""
    with serve_files(run.channel) as url:
        engine = VLLM()
        host = site.host(run, engine, channel=url)
        assert host.step().adapters == ()
        run.publish_adapter()
        host.clock.at += 11
        assert host.step().ready and engine.loaded == expected(run, "math@1")
        run.publish_adapter()
        assert host.step().ready and engine.loaded == expected(run, "math@1", "math@2")
