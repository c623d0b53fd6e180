"""Config files of an export that are not the base's are reported, once per change; hosts keep the base's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemonkit import Daemon, Places, base_tensors, changed, files_of, rename_in
from in_process import Command
from waiting import wait_until

from weightcast.publisher import Publisher, init_channel

FILES: dict[str, str] = {
    "config.json": '{"eos_token_id": 1, "architectures": ["A"]}',
    "tokenizer.json": '{"vocab": 1}',
    "tokenizer_config.json": '{"chat_template": "T", "x": 1}',
    "generation_config.json": '{"transformers_version": "4.1", "top_p": 0.9}',
    "additional_chat_templates/tool.jinja": "tools",
    "processor/preprocessor_config.json": '{"size": 1}',
    "tokenizer.model": "m",
    "README.md": "card",
}


def export(directory: Path, seed: int, files: dict[str, str] | None = None) -> Path:
    written = files_of(changed(base_tensors(), seed))
    for name, data in {**written, **FILES, **(files or {})}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return directory


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places.made(tmp_path)
    for name, text in FILES.items():
        (places.base / name).parent.mkdir(exist_ok=True)
        (places.base / name).write_text(text)
    return places


@pytest.fixture
def publisher(places: Places) -> Iterator[Publisher]:
    init_channel(places.channel, places.base)
    with Publisher.open(places.channel, local=places.local, base=places.base) as publisher:
        yield publisher


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"eos_token_id": 2, "architectures": ["A"]}'),
        ("tokenizer.json", '{"vocab": 2}'),
        ("tokenizer_config.json", '{"chat_template": "U", "x": 1}'),
        ("generation_config.json", '{"transformers_version": "4.1", "top_p": 0.8}'),
        ("additional_chat_templates/tool.jinja", "other"),
        ("additional_chat_templates/new.jinja", "new"),
        ("processor/preprocessor_config.json", '{"size": 2}'),
        ("tokenizer.model", "n"),
        ("chat_template.jinja", "V"),
        ("added_tokens.json", "{}"),
        ("generation_config.json", "not JSON"),
    ],
)
def test_a_changed_file_is_reported(publisher: Publisher, tmp_path: Path, name: str, text: str) -> None:
    report = publisher.publish_checkpoint(export(tmp_path / "new", 1, {name: text}))
    assert report.config_changed == publisher.config_changed == (name,)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"README.md": "another card", "trainer_state.json": "{}", "config.json": '{"architectures": ["B"]}'},
        {"generation_config.json": '{"top_p": 0.9,\n "transformers_version": "5.0"}'},
        {"chat_template.jinja": "T", "tokenizer_config.json": '{"x": 1, "tokenizer_file": "/a"}'},
    ],
)
def test_what_libraries_write_anew_is_no_change(
    publisher: Publisher, tmp_path: Path, files: dict[str, str]
) -> None:
    assert publisher.publish_checkpoint(export(tmp_path / "new", 1, files)).config_changed == ()


def test_an_export_without_the_files_is_no_change(publisher: Publisher, tmp_path: Path) -> None:
    new = export(tmp_path / "new", 1)
    for name in FILES:
        (new / name).unlink()
    assert publisher.publish_checkpoint(new).config_changed == ()


def test_it_is_reported_once_per_change(publisher: Publisher, tmp_path: Path) -> None:
    said = []
    for step, text in enumerate(["a", "a", "b", FILES["tokenizer.json"], "b"]):
        new = export(tmp_path / str(step), step + 1, {"tokenizer.json": text})
        said.append(publisher.publish_checkpoint(new).config_changed)
    assert said == [("tokenizer.json",), (), ("tokenizer.json",), (), ("tokenizer.json",)]


def test_publish_names_the_files_and_a_remedy(places: Places, weightcast: Command, tmp_path: Path) -> None:
    init_channel(places.channel, places.base)
    command = ("--channel", places.channel, "--local", places.local, "--base", places.base)
    new = export(tmp_path / "new", 1, {"tokenizer.json": "x"})
    code, out, _ = weightcast("publish", new, *command)
    assert code == 0 and "tokenizer.json (hosts keep the base's" in " ".join(out.split())
    new = export(tmp_path / "newer", 2, {"tokenizer.json": "x"})
    assert json.loads(weightcast("publish", new, *command, "--json")[1])["config_changed"] == [
        "tokenizer.json"
    ]


def test_the_daemon_says_it_for_watched_and_named_checkpoints(places: Places) -> None:
    daemon = Daemon.start(places, "--log-format", "json").ready()
    try:
        asked = export(places.watch / ".asked", 1, {"tokenizer.json": "x"})
        assert daemon.post("/v1/publish", {"checkpoint": str(asked)}).status_code < 300
        wait_until(lambda: daemon.get("/v1/status").json()["version"] == 1)
        status = daemon.get("/v1/status").json()
        assert status["publications"][0]["config_changed"] == status["config_changed"] == ["tokenizer.json"]
        rename_in(places.watch / "step_2", changed(base_tensors(), 2))
        wait_until(lambda: daemon.get("/v1/status").json()["version"] == 2)
        assert daemon.get("/v1/status").json()["config_changed"] == []
    finally:
        daemon.kill()
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    said = [line for line in lines if line["event"].startswith("config changed")]
    assert [(line["level"], line["files"], line["version"]) for line in said] == [
        ("warning", ["tokenizer.json"], 1)
    ]
