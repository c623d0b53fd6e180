"""`--engine` options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.base.errors import USAGE
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.engines.base import (
    BadEngineOption,
    EngineSpec,
    Timeouts,
    parse_engine,
    parse_engines,
)
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.groups.client import MOST_SECONDS

LOCAL = Path("/weights/local")
ROOT = Path(__file__).parents[2]


def test_the_short_form_has_defaults() -> None:
    assert parse_engine("sglang=http://127.0.0.1:30000/", LOCAL) == EngineSpec(
        "sglang",
        "http://127.0.0.1:30000",
        "/weights/local",
        "sglang@127.0.0.1:30000",
        "recompute",
        True,
        None,
    )


def test_every_option_is_read() -> None:
    text = (
        "vllm=https://[::1]:8000/base,path=/models/a,b,via=reload,policy=abort,name=left,"
        "copies=false,api_key_env=ENGINE_KEY"
    )
    assert parse_engine(text, LOCAL) == EngineSpec(
        "vllm", "https://[::1]:8000/base", "/models/a,b", "left", "abort", False, "ENGINE_KEY"
    )


def test_webhooks_map_files_unless_told_otherwise() -> None:
    assert not parse_engine("webhook=http://h/x?y=1", LOCAL).copies_weights
    assert parse_engine("webhook=http://h/x,copies=true", LOCAL).copies_weights


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("vllm=HTTPS://h:8000/", "https://h:8000"),
        ("sglang=Http://H", "http://H"),
        ("webhook=HTTP://h/x?y=1", "http://h/x?y=1"),
        ("webhook=http://h/x?", "http://h/x"),
    ],
)
def test_a_url_is_written_in_one_way(text: str, url: str) -> None:
    assert parse_engine(text, LOCAL).url == url


def test_certificates_are_checked_for_a_scheme_in_any_case(tmp_path: Path) -> None:
    with pytest.raises(BadEngineOption, match="cannot be read"):
        open_engine(parse_engine(f"vllm=HTTPS://h,ca={tmp_path / 'none'}", LOCAL))


def test_a_relative_local_checkpoint_is_told_as_an_absolute_path() -> None:
    assert parse_engine("vllm=http://h", Path("local")).path == str(Path.cwd() / "local")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sglang",
        "tgi=http://h",
        "sglang=",
        "sglang=h:80",
        "sglang=ftp://h",
        "sglang=http://",
        "sglang=http://h:99999",
        "sglang=http://h:x",
        "sglang=http://h/a b",
        "sglang=http://[::1",
        "sglang=http://user:secret@h",
        "sglang=http://user:secret@a..b",
        "sglang=http://a..b:8000",
        "sglang=http://[v1.x]:8000",
        "sglang=http://h/\udcff",
        "sglang=http://h?x=1",
        "sglang=http://h?",
        "sglang=http://h#",
        "webhook=http://h#x",
        "sglang=http://h,via=both",
        "sglang=http://h,policy=keep",
        "sglang=http://h,copies=yes",
        "sglang=http://h,path=relative",
        "sglang=http://h,path=",
        "sglang=http://h,name=../x",
        "sglang=http://h,name=a b",
        "sglang=http://h,api_key_env=A-B",
        "sglang=http://h,color=red",
        "sglang=http://h,policy=wait,policy=wait",
    ],
)
def test_what_is_wrong_is_a_usage_error_that_lists_the_kinds(text: str) -> None:
    with pytest.raises(BadEngineOption, match="kinds: sglang, vllm, webhook") as refused:
        parse_engine(text, LOCAL)
    assert refused.value.exit_code == USAGE
    assert "secret" not in str(refused.value)


def test_a_relative_path_is_told_as_such() -> None:
    with pytest.raises(BadEngineOption, match="path='relative' must be absolute"):
        parse_engine("webhook=http://h,path=relative", LOCAL)


def test_engines_that_copy_weights_may_be_patched_in_memory() -> None:
    assert parse_engine("vllm=http://h,via=live", LOCAL).via == "live"
    assert parse_engine("vllm=http://h", LOCAL).via == "reload"


@pytest.mark.parametrize("text", ["vllm=http://h,via=live,copies=false", "webhook=http://h,via=live"])
def test_others_are_not(text: str) -> None:
    with pytest.raises(BadEngineOption, match="via=live is for"):
        parse_engine(text, LOCAL)


def test_an_engine_on_this_host_may_be_fed_from_memory() -> None:
    spec = parse_engine("vllm=http://127.0.0.1:1,via=ipc,devices=GPU-a,MIG-b/1/0,buffer=2GiB,name=x", LOCAL)
    assert (spec.via, spec.devices, spec.buffer, spec.name) == ("ipc", ("GPU-a", "MIG-b/1/0"), 2 << 30, "x")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("vllm=http://10.0.0.7:1,via=ipc", "needs an engine on this host"),
        ("vllm=http://127.0.0.1:1,via=ipc,copies=false", "via=ipc is for"),
        ("webhook=http://127.0.0.1:1,via=ipc", "via=ipc is for"),
        ("vllm=http://127.0.0.1:1,via=ipc,buffer=0", "buffer='0' is not valid"),
        ("vllm=http://127.0.0.1:1,via=ipc,devices=a b", "devices='a b' is not valid"),
        ("vllm=http://127.0.0.1:1,via=live,buffer=2GiB", "are for via=ipc"),
    ],
)
def test_what_cannot_be_fed_from_memory_is_named(text: str, fault: str) -> None:
    with pytest.raises(BadEngineOption, match=fault):
        parse_engine(text, LOCAL)


@given(st.text(max_size=60))
def test_any_text_is_an_engine_or_a_usage_error(tail: str) -> None:
    try:
        spec = parse_engine(f"sglang=http://h{tail}", LOCAL)
    except BadEngineOption:
        return
    assert spec.url.startswith("http://") and spec.path.startswith("/")


def test_two_engines_need_two_names() -> None:
    with pytest.raises(BadEngineOption, match="vllm@h:1"):
        parse_engines(["vllm=http://h:1", "vllm=http://h:1/x"], LOCAL)
    assert len(parse_engines(["vllm=http://h:1", "vllm=http://h:1/x,name=second"], LOCAL)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sglang=http://h:1", "sglang=http://h:1,name=b"),
        ("sglang=http://h:1", "vllm=http://h:1"),
        ("sglang=http://h:1", "sglang=http://H.:1/"),
        ("sglang=http://h", "sglang=http://h:80"),
        ("sglang=https://h", "sglang=http://h:443"),
        ("sglang=http://127.0.0.1:1", "sglang=http://localhost:1"),
        ("sglang=http://127.0.0.1:1", "sglang=http://[::1]:1"),
        ("sglang=http://127.0.0.1:1", "sglang=http://127.1:1"),
        ("sglang=http://127.0.0.1:1", "sglang=http://0.0.0.0:1"),
        ("sglang=http://10.0.0.1:1", "sglang=http://[::ffff:10.0.0.1]:1"),
        ("webhook=http://h:1/a", "webhook=http://h:1//%61/./,name=b"),
    ],
)
def test_one_engine_is_given_once(one: str, other: str) -> None:
    with pytest.raises(BadEngineOption, match="two --engine options are one engine"):
        parse_engines([one, other], LOCAL)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sglang=http://127.0.0.1:1", "sglang=http://127.0.0.2:1"),
        ("sglang=http://h:1", "sglang=http://h:2"),
        ("webhook=http://h/a", "webhook=http://h/a?x=1,name=b"),
        ("webhook=http://h/a", "webhook=http://h/b,name=b"),
    ],
)
def test_engines_at_other_addresses_are_others(one: str, other: str) -> None:
    assert len(parse_engines([one, other], LOCAL)) == 2


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}, {"KEY": "a\nb"}, {"KEY": "ü"}])
def test_a_key_that_is_not_there_is_refused_without_showing_it(environ: dict[str, str]) -> None:
    spec = parse_engine("sglang=http://h,api_key_env=KEY", LOCAL)
    with pytest.raises(BadEngineOption, match="variable KEY"):
        open_engine(spec, environ=environ)


def test_the_times_in_the_documents_are_those_that_are_kept() -> None:
    table = (ROOT / "docs" / "engines.md").read_text().partition("## Times")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE))
    kept, deadline = Timeouts(), SubscriberSettings.model_fields["engine_deadline"].default
    assert kept.connect == kept.probe and told["connect, look"] == f"{kept.probe:g}"
    assert told["pause, resume, label"].startswith(f"{kept.control:g};")
    assert told["pause, resume, label"].endswith(f" {kept.drain:g}")
    assert told["a group member's answer"].startswith(f"{MOST_SECONDS:g},")
    assert told["reload"].startswith(f"`--engine-deadline`, {deadline:g};")
    assert told["reload"].endswith(f" {kept.drain:g} more") and kept.reload == deadline


def test_all_faults_of_an_option_are_named_at_once() -> None:
    with pytest.raises(BadEngineOption, match=r"kind '127.0.0.1:8811'; unknown option 'vi'") as refused:
        parse_engine("127.0.0.1:8811,vi=live", LOCAL)
    assert "did you mean via?" in refused.value.remedy and len(refused.value.remedy) < 200
