"""Config files that versions carry: hosts have those of their version, whatever way they came to it."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from crashes import killed, started
from doubles import Answer
from hosts import Host, Run, SGLang, Site

from weightcast.publisher import PublisherOptions, init_channel
from weightcast.publisher.maintenance.orders import order_rollback
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.channel import pins
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index
from weightcast.shared.checkpoint.verify.inspect import inspect, require_loadable
from weightcast.shared.cli.local import repair_local

TOKENIZER, TEMPLATE, TOOL = "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"
NAMES = (TOKENIZER, TEMPLATE, TOOL)
UPDATE = "/update_weights_from_disk"
Files = dict[str, str]


class Carrying(Run):
    """Its versions carry config files. `expected`: those of each version's hosts."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.expected: list[Files] = [{TOKENIZER: "base", TOOL: "base"}]
        self.stack = stack
        super().__init__(root, stack)
        self.close()
        shutil.rmtree(self.channel)
        shutil.rmtree(root / "publisher")
        put(self.base_dir, self.expected[0])
        init_channel(self.channel, self.base_dir)
        self.reopen()

    def reopen(self) -> None:
        self._publisher = self.stack.enter_context(
            RunPublisher.open(
                self.channel,
                local=self.root / "publisher",
                base=self.base_dir,
                options=PublisherOptions(
                    upkeep_thread=False, upkeep=UpkeepOptions(skip_span=4), carry_config=True
                ),
            )
        )

    def carry(self, files: Files, expected: Files | None = None, *, anchor: bool = False) -> int:
        put(self.root / f"given{len(self.versions)}", files)
        self.expected.append(self.expected[-1] | (files if expected is None else expected))
        return self.publish(anchor=anchor)


def put(directory: Path, files: Files) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def files_of(directory: Path) -> Files:
    return {name: (directory / name).read_text() for name in NAMES if (directory / name).exists()}


class Engine(SGLang):
    """Notes the config files at each reload."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Files] = []

    def load(self, directory: str) -> bool:
        self.read.append(files_of(Path(directory)))
        return super().load(directory)


@pytest.fixture
def run(site: Site) -> Carrying:
    run = Carrying(site.root / "run", site.stack)
    run.carry({})
    run.carry({TOKENIZER: "two", TOOL: "two"})
    run.carry({TEMPLATE: "three"})
    return run


def settled(run: Carrying, host: Host, version: int) -> None:
    assert host.at(run, version)
    assert files_of(host.local) == run.expected[version]
    assert inspect(host.local).faults == []
    require_loadable(host.local)


def test_each_version_has_its_files_before_the_engine_reads_it(site: Site) -> None:
    run, engine = Carrying(site.root / "run", site.stack), Engine()
    host = site.host(run, engine)
    host.step()
    for files in ({}, {TOKENIZER: "two"}, {TEMPLATE: "three"}, {}, {TOKENIZER: "base"}):
        version = run.carry(files)
        assert host.step().ready
        settled(run, host, version)
        assert engine.read[-1] == run.expected[version]
    assert host.status.carried == (TEMPLATE,)
    assert verify(Channel.open(open_store(run.channel))) == []


def test_a_host_that_joins_late_or_goes_back_has_those_of_its_version(run: Carrying, site: Site) -> None:
    run.carry({}, anchor=True)
    run.make_due()
    late = site.host(run, name="late")
    late.step()
    settled(run, late, 4)
    for version in (2, 3, 1, 4):
        host = site.host(run, name=f"at-{version}", target=str(version))
        host.step()
        settled(run, host, version)


def test_a_host_far_behind_takes_a_wide_delta_and_the_newest_files(run: Carrying, site: Site) -> None:
    host = site.host(run, name="behind", target="2")
    host.step()
    for text in ("a", "b"):
        run.carry({TOKENIZER: text})
    run.carry({}), run.carry({}), run.carry({})
    run.make_due()
    host.sync.close()
    ahead = site.host(run, name="behind")
    ahead.step()
    settled(run, ahead, 8)


def test_exports_without_files_and_publishers_without_the_option_keep_them(run: Carrying, site: Site) -> None:
    run.close()
    with RunPublisher.open(run.channel, local=run.root / "publisher", base=run.base_dir) as plain:
        new = run.versions[-1].changed(9)
        report = plain.publish_checkpoint(new.write(run.root / "plain"))
        run.versions.append(new)
        run.expected.append(run.expected[-1])
    assert set(report.carried) == set(NAMES)
    host = site.host(run)
    host.step()
    settled(run, host, 4)


def test_a_rollback_of_the_channel_carries_the_older_files(run: Carrying, site: Site) -> None:
    host = site.host(run)
    host.step()
    order_rollback(open_store(run.channel), 1)
    run._publisher.obey_orders()
    pins.resume(open_store(run.channel))
    host.step()
    assert host.state.position.version == 4
    assert files_of(host.local) == run.expected[1]


def test_a_version_that_engines_refuse_takes_its_files_with_it(run: Carrying, site: Site) -> None:
    engine = Engine()
    host = site.host(run, engine)
    host.step()
    run.carry({TOKENIZER: "bad"})
    engine.script(UPDATE, Answer(400, SGLang.reply(False, "Failed to get weights iterator: no.")))
    host.step()
    settled(run, host, 3)
    assert engine.read[-1] == run.expected[3]


@pytest.mark.parametrize("event", ["os.rename", "os.remove"])
def test_killed_at_every_replacement_of_a_file(site: Site, event: str) -> None:
    run, engine = Carrying(site.root / "run", site.stack), Engine()
    host = site.host(run, engine)
    host.step()
    kills = 0
    for number in range(1, 40):
        texts = {TOKENIZER: f"t{number}", TEMPLATE: f"c{number}", TOOL: f"o{number}"}
        version = run.carry(texts if number % 2 else {TOKENIZER: "base", TOOL: "base"})
        host.sync.close()
        if not killed(lambda: started(host), event, number):
            break
        kills += 1
        try:
            state = require_loadable(host.local)
            assert files_of(host.local) == run.expected[state.position.version]
        except RetryLater:
            pass  # an engine that starts now waits for the next step
        host.restart()
        assert host.step().ready
        settled(run, host, version)
        assert engine.read[-1] == run.expected[version]
    assert kills >= 3


def test_a_changed_or_lost_carried_file_is_repaired(run: Carrying, site: Site) -> None:
    host = site.host(run)
    host.step()
    host.sync.close()
    (host.local / TOKENIZER).write_text("somebody else's")
    (host.local / TEMPLATE).unlink()
    assert {fault.file for fault in inspect(host.local).faults} == {TOKENIZER, TEMPLATE}
    repair_local(host.local, run.channel, run.base_dir, 1)
    settled(run, host, 3)


def test_a_lost_state_learns_its_files_from_the_channel(run: Carrying, site: Site) -> None:
    host = site.host(run)
    host.step()
    host.sync.close()
    (host.local / ".weightcast" / "carried.json").write_bytes(b"{")
    shutil.rmtree(host.local / ".weightcast" / "carried")
    (host.local / TOKENIZER).write_text("somebody else's")
    host.restart()
    host.step()
    settled(run, host, 3)


def test_a_publisher_has_copies_of_what_the_channel_lost(run: Carrying, site: Site) -> None:
    lost = run.channel / "weight_v000003" / "carried" / TOKENIZER
    lost.unlink()
    assert any(TOKENIZER in problem.message for problem in verify(Channel.open(open_store(run.channel))))
    run.carry({})
    host = site.host(run)
    host.step()
    settled(run, host, 4)


def test_a_damaged_carried_file_is_no_part_of_a_host(run: Carrying, site: Site) -> None:
    host = site.host(run, name="first", target="2", visible_seconds=0.1)
    host.step()
    host.sync.close()
    (run.channel / "weight_v000003" / "carried" / TEMPLATE).write_text("eerht")
    host = site.host(run, name="first", visible_seconds=0.1)
    with pytest.raises(DamagedFile, match=TEMPLATE):
        host.step()
    settled(run, host, 2)


@pytest.mark.parametrize(
    "name", ["../up.json", ".hidden.json", "config.json", "model.py", "model.safetensors.index.json"]
)
def test_an_index_that_carries_anything_else_is_refused(run: Carrying, site: Site, name: str) -> None:
    path = run.channel / "weight_v000003" / "model.safetensors.index.json"
    members = json.loads(path.read_bytes())
    members["weightcast"]["carried"][0][0] = name
    path.write_text(json.dumps(members))
    host = site.host(run, visible_seconds=0.1)
    with pytest.raises(Refused, match=r"carry|file name"):
        host.step()


def test_engines_that_read_files_at_their_start_alone_are_named(run: Carrying, site: Site) -> None:
    engine = Engine()
    host = site.host(run, engine)
    host.step()
    host.step()
    run.carry({TOKENIZER: "new"})
    host.step()
    assert host.status.engines_to_restart == (host.status.engines[0].name,)


def test_the_same_weights_with_another_tokenizer_are_not_the_same_content(run: Carrying) -> None:
    """Of the version that they are compared with, whatever newer ones carry."""
    run.carry({TOKENIZER: "new"})
    publisher = run._publisher
    channel, (_, base) = Channel.open(publisher.store), publisher.run
    pointer = channel.pointer()
    assert pointer is not None
    index = channel.index(pointer, 3, base.table)
    assert isinstance(index, Index)
    for number, (text, same) in enumerate([("two", True), ("other", False), ("base", False)]):
        export = run.versions[3].write(run.root / f"again{number}")
        put(export, {TOKENIZER: text})
        assert publisher.has_content(lambda at=export: publisher.open_checkpoint(at), 3, index.root) is same  # type: ignore[misc]


def test_a_version_that_changes_files_alone_is_reloaded(run: Carrying, site: Site) -> None:
    engine = Engine()
    host = site.host(run, engine)
    host.step()
    put(run.root / "given4", {TOKENIZER: "alone"})
    run.expected.append(run.expected[3] | {TOKENIZER: "alone"})
    run.publish(run.versions[3])
    assert host.step().ready
    settled(run, host, 4)
    assert engine.read[-1] == run.expected[4]
