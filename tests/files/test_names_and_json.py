from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.files.paths import file_name
from weightcast.shared.files.strict_json import Members, parse_object, write_object


@pytest.mark.parametrize(
    "name", ["model-00000-of-00001.safetensors", "a", "..a", ".hidden", "ä", "a b", "x" * 255]
)
def test_plain_file_names(name: str) -> None:
    assert file_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/etc/passwd",
        "../up",
        "a\0b",
        "a\nb",
        "\x7f",
        "\x85",
        "x" * 256,
        "ä" * 128,
        "\ud800",
    ],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DamagedFile, match="not a plain file name"):
        file_name(name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"b":2,"a":3}}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":[{"b":-1E+0400}]}',
        b'{"a":' + b"9" * 400 + b".5}",
        b'{"a":' + b"9" * 250 + b"e60}",
        b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a":' + b'{"]":[' * 32 + b"]}" * 32 + b"}",
        b'{"a":' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"a":1}x',
        b"\xff{}",
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"\\uDfff":1}',
        b'{"a":"' + b"\n" + b'"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_json_with_no_or_two_meanings_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedFile, match=r"^the file: not"):
        parse_object(data, "the file")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1.7976931348623157e308,"b":-1e-999,"c":"1e999"}',
        '{"a":' + "[" * 63 + "]" * 63 + "}",
        '{"a":' + "[" * 62 + '"' + "[{" * 200 + '\\"]"' + "]" * 62 + ',"b":[' + "[]," * 200 + "{}]}",
    ],
)
def test_the_largest_number_and_the_deepest_nesting_are_taken(text: str) -> None:
    assert parse_object(text.encode(), "file") == json.loads(text)


def test_escaped_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a":"\\ud83d\\ude00"}', "f") == {"a": "😀"}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_objects_come_back(value: dict[str, object]) -> None:
    assert parse_object(write_object(value), "f") == value


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_our_error(data: bytes) -> None:
    with contextlib.suppress(DamagedFile):
        assert parse_object(data, "f") == json.loads(data)


GOOD = {
    "text": "a",
    "hex": "0f",
    "int": 3,
    "float": 1.5,
    "bool": True,
    "list": ["x"],
    "map": {"a": "b"},
    "no": None,
}


def test_members_of_the_right_type() -> None:
    members = Members(GOOD, "f")
    assert members.text("text") == "a"
    assert members.hex("hex", 2) == "0f"
    assert members.integer("int") == 3
    assert members.number("int") == 3.0
    assert members.number("float") == 1.5
    assert members.boolean("bool") is True
    assert members.texts("list") == ("x",)
    assert members.text_map("map") == {"a": "b"}
    assert members.is_null("no") and not members.is_null("absent")


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("text", 1),
        ("text", "a\nb"),
        ("text", "x" * 2000),
        ("integer", True),
        ("integer", 1.0),
        ("integer", -1),
        ("integer", 1 << 63),
        ("integer", "1"),
        ("number", "1"),
        ("number", float("inf")),
        ("number", 10**400),
        ("number", False),
        ("boolean", 1),
        ("array", {}),
        ("object", []),
        ("texts", ["a", 1]),
        ("text_map", {"a": 1}),
    ],
)
def test_members_of_another_type_are_refused(method: str, value: object) -> None:
    with pytest.raises(DamagedFile, match=r"^f: 'key' must be"):
        getattr(Members({"key": value}, "f"), method)("key")
    with pytest.raises(DamagedFile):
        getattr(Members({}, "f"), method)("key")


@pytest.mark.parametrize("value", ["0F", "0", "0g", 12, "0f0"])
def test_hex_is_lowercase_and_of_one_length(value: object) -> None:
    with pytest.raises(DamagedFile):
        Members({"key": value}, "f").hex("key", 2)
