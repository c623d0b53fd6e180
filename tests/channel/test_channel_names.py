from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import (
    Pointer,
    TornPointer,
    anchor_key,
    attempts_key,
    claim_key,
    index_key,
    multi_step_key,
    read_pointer,
    report_key,
    version_name,
    version_of,
    write_pointer,
)


def test_names_of_versions() -> None:
    assert version_name(7) == "weight_v000007"
    assert version_name(1_234_567) == "weight_v1234567"
    assert version_of("weight_v000000") == 0


@given(st.integers(0, 10**15 - 1))
def test_version_names_come_back(version: int) -> None:
    assert version_of(version_name(version)) == version


@pytest.mark.parametrize(
    "name",
    [
        "weight_v7",
        "weight_v0000007",
        "weight_v00000\u0667",
        "weight_v000007.parts",
        "weight_v-00007",
        "xweight_v000007",
        "",
    ],
)
def test_other_names_are_no_versions(name: str) -> None:
    assert version_of(name) is None


def test_keys() -> None:
    found = [index_key(8), attempts_key(8), multi_step_key(8, 0), anchor_key(8), claim_key(3)]
    assert found == [
        "weight_v000008/model.safetensors.index.json",
        "weight_v000008.parts",
        "weight_v000008/from_v000000",
        "weight_v000008/anchor",
        "publishers/3.json",
    ]


@pytest.mark.parametrize("host", ["node-1.example", "../../etc", "a/b", "..", "", "x" * 300, "nöde", "a\0b"])
def test_reports_stay_in_their_directory(host: str) -> None:
    directory, _, name = report_key(host, "/local").partition("/")
    assert directory == "hosts" and "/" not in name
    assert name.endswith(".json") and not name.startswith(".")


def test_two_subscribers_of_one_machine_have_two_reports() -> None:
    assert report_key("h", "/a") != report_key("h", "/b")
    assert report_key("h", "/a") == "hosts/h-d37c8aa1.json"


def test_the_pointer_comes_back(tmp_path: Path) -> None:
    assert read_pointer(open_store(tmp_path)) is None
    for version in (0, 7, 999_999, 1_000_000):
        write_pointer(open_store(tmp_path), version)
        assert read_pointer(open_store(tmp_path)) == Pointer(version)
    write_pointer(open_store(tmp_path), 7)
    assert (tmp_path / "latest").read_bytes() == b"000007"


@pytest.mark.parametrize(
    ("content", "version", "run"),
    [
        (b"000007", 7, None),
        (b"000007\n", 7, None),
        (b" 1234567 ", 1234567, None),
        (b"run-1/weight_v000007", 7, "run-1"),
        (b"run-1/weight_v1000000\n", 1_000_000, "run-1"),
    ],
)
def test_both_dialects(tmp_path: Path, content: bytes, version: int, run: str | None) -> None:
    (tmp_path / "latest").write_bytes(content)
    prefix = "" if run is None else "updates"
    assert read_pointer(open_store(tmp_path)) == Pointer(version, run, prefix)


@pytest.mark.parametrize("content", [b"", b"\n", b"0", b"00000", b"run-1/weight_v", b"run-1/weight_v00000"])
def test_a_torn_pointer_is_read_again_later(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(TornPointer):
        read_pointer(open_store(tmp_path))
    assert issubclass(TornPointer, RetryLater)


@pytest.mark.parametrize(
    "content",
    [
        b"seven",
        b"-00007",
        b"0000007",
        b"000007 000008",
        b"000007\0",
        b"weight_v000007",
        b"../weight_v000007",
        b"a/b/weight_v000007",
        b"/weight_v000007",
        b"run/000007",
        "\u0660\u0660\u0660\u0660\u0660\u0667".encode(),
        b"\xff" * 6,
        b"0" * 4097,
        b"9" * 16,
    ],
)
def test_other_content_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(DamagedFile):
        read_pointer(open_store(tmp_path))


def test_a_pointer_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"000009")
    (tmp_path / "latest").symlink_to("secret")
    with pytest.raises(DamagedFile):
        read_pointer(open_store(tmp_path))
