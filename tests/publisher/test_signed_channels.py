"""Signed channels: who may write to one may stop a host, but not feed it. Real keys, publishers and hosts."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel_paths import Layout
from core_cases import Model, bytes_of, flip, read_checkpoint, snapshot, some_changed, write_checkpoint
from publisher_cases import Place, make_place

from weightcast.publisher import init_channel
from weightcast.publisher.channel_repair import sign_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import Refused, Untrusted, WeightcastError
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.layout import write_pointer
from weightcast.shared.channel.signing import PrivateKey, Trust, load_private_key, write_private_key
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.cli.main import run as weightcast

SIG = f"{INDEX_NAME}.sig"


def new_key(path: Path) -> Path:
    write_private_key(path, PrivateKey.generate())
    return path


def trust_in(*keys: Path) -> Trust:
    return Trust.of([load_private_key(key).public for key in keys])


@dataclass
class Signed:
    """A signed run, its models by version, and a host that trusts its key."""

    place: Place
    key: Path
    models: list[Model]
    trust: Trust

    @property
    def layout(self) -> Layout:
        return Layout(self.place.channel)

    def publish(self, **options: Any) -> int:
        rng = np.random.default_rng(len(self.models))
        self.models.append(some_changed(self.models[-1], rng))
        return self.place.publish(self.models[-1], sign_key=self.key, **options)

    @contextlib.contextmanager
    def host(self, name: str = "host", base: Path | None = None) -> Iterator[LocalUpdater]:
        updater = self.place.follow(self.place.root / name, base)
        try:
            yield updater
        finally:
            updater.close()

    def step(self, name: str = "host", base: Path | None = None) -> int:
        """One step of a host; the version that it is at."""
        with self.host(name, base) as updater:
            updater.update_to(Channel.open(open_store(self.place.channel), self.trust))
            assert updater.local is not None
            return updater.local.state.position.version

    def holds(self, version: int, name: str = "host") -> bool:
        return read_checkpoint(self.place.root / name) == bytes_of(self.models[version])

    def refused(self, name: str = "host", base: Path | None = None) -> WeightcastError:
        """The host's step fails for good, and leaves its files and version as they were."""
        local = self.place.root / name
        before = snapshot(local) if local.exists() else {}
        with pytest.raises(Refused) as raised:
            self.step(name, base)
        after = snapshot(local) if local.exists() else {}
        assert {path: digest for path, digest in after.items() if path in before} == before
        assert raised.value.exit_code == 3 and raised.value.remedy
        return raised.value


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    key = new_key(tmp_path / "publisher.key")
    place = make_place(tmp_path, sign_key=key)
    return Signed(place, key, [place.model], trust_in(key))


def test_hosts_follow_what_their_key_signed(signed: Signed) -> None:
    assert signed.publish() == 1
    assert signed.publish(anchor_every=2) == 2
    assert signed.step() == 2 and signed.holds(2)
    assert signed.publish() == 3
    assert signed.step() == 3 and signed.holds(3)
    layout = signed.layout
    for path in (layout.base_json, layout.index(1), layout.anchor_dir(2) / INDEX_NAME):
        assert path.with_name(f"{path.name}.sig").is_file()
    assert verify(Channel.open(open_store(signed.place.channel), signed.trust)) == []
    position = json.loads((signed.place.host / ".weightcast/state.json").read_bytes())["position"]
    assert signed.trust.signer(position["digest"]) == next(iter(signed.trust.keys))
    # readers without keys see a channel like any other
    signed.place.arrives(signed.models[3], 3, signed.place.root / "careless")


def test_a_host_may_start_from_a_signed_anchor_alone(signed: Signed) -> None:
    signed.publish(anchor_every=1)
    assert signed.step("without", signed.place.root / "no-base") == 1 and signed.holds(1, "without")
    updater = LocalUpdater(open_store(signed.place.channel), signed.place.host, None)
    try:
        updater.update_to(Channel.open(open_store(signed.place.channel), signed.trust))
    finally:
        updater.close()
    assert signed.holds(1) and not (signed.place.host / SIG).exists()


def test_unsigned_versions_are_refused(signed: Signed, tmp_path: Path) -> None:
    signed.publish()
    signed.step()
    signed.publish()
    (signed.layout.version_dir(2) / SIG).unlink()
    assert "is not signed" in signed.refused().message
    assert signed.holds(1)
    problems = verify(Channel.open(open_store(signed.place.channel), signed.trust))
    assert [problem.version for problem in problems] == [2] and "not signed" in problems[0].message

    plain = make_place(tmp_path / "plain")
    with pytest.raises(Untrusted, match=r"base\.json is not signed"):
        Channel.open(open_store(plain.channel), signed.trust)


def test_a_key_that_is_not_trusted_is_refused(signed: Signed, tmp_path: Path) -> None:
    signed.publish()
    signed.trust = trust_in(new_key(tmp_path / "other.key"))
    error = signed.refused()
    assert load_private_key(signed.key).public.id in error.message and not signed.place.host.exists()


@pytest.mark.parametrize("what", ["index", "signature", "base"])
def test_altered_files_are_refused(signed: Signed, what: str) -> None:
    signed.publish()
    signed.step()
    signed.publish()
    directory = signed.layout.version_dir(2)
    path = {
        "index": directory / INDEX_NAME,
        "signature": directory / SIG,
        "base": signed.layout.base_json,
    }[what]
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"version":2', b'"version":9').replace(b"run-under", b"run-other"))
    if what == "signature":
        path.write_bytes(data.replace(b'\\"epoch\\":', b'\\"epoch\\":7'))
    assert path.read_bytes() != data
    assert "altered" in signed.refused().message
    assert signed.holds(1)
    path.write_bytes(data)
    assert signed.step() == 2 and signed.holds(2)


def test_a_forger_without_the_key_cannot_publish(signed: Signed, tmp_path: Path) -> None:
    """Everything but the key: shards, index and roots that fit, signed by the forger's own key."""
    signed.publish()
    signed.step()
    forger = new_key(tmp_path / "forger.key")
    sign_channel(open_store(signed.place.channel), load_private_key(forger))
    evil = some_changed(signed.models[-1], np.random.default_rng(666))
    signed.place.publish(evil, local=tmp_path / "evil", sign_key=forger, take_over=True)
    assert "not trusted here" in signed.refused().message
    assert signed.holds(1)


def test_another_run_signed_by_the_same_key_is_refused(signed: Signed, tmp_path: Path) -> None:
    signed.publish()
    signed.step()
    other = Place(tmp_path / "other", signed.place.model)
    write_checkpoint(other.base, other.model)
    init_channel(other.channel, other.base, sign_key=signed.key, run_id="another-run")
    for seed in (5, 6):
        other.publish(some_changed(other.model, np.random.default_rng(seed)), sign_key=signed.key)
    shutil.copytree(Layout(other.channel).version_dir(2), signed.layout.version_dir(2))
    write_pointer(open_store(signed.place.channel), 2)
    assert "another-run" in signed.refused().message
    for names in (("base.json", "base.json.sig"), ("channel.json",)):
        for name in names:
            shutil.copy(other.channel / name, signed.place.channel / name)
        assert "another-run" in signed.refused().message
    assert signed.holds(1)


def test_an_older_version_in_a_newer_place_is_refused(signed: Signed) -> None:
    for _ in range(3):
        signed.publish()
    signed.step()
    shutil.copytree(signed.layout.version_dir(2), signed.layout.version_dir(4))
    write_pointer(open_store(signed.place.channel), 4)
    signed.refused()
    assert signed.holds(3)


def test_an_anchor_does_not_pass_as_a_main_index(signed: Signed) -> None:
    """It would begin a new chain that nobody published."""
    signed.publish()
    signed.step()
    signed.publish(anchor_every=2)
    directory = signed.layout.version_dir(2)
    kept = directory.with_name("kept")
    directory.rename(kept)
    shutil.copytree(kept / "anchor", directory)
    assert "for another place: main" in signed.refused().message
    assert signed.holds(1)


def test_an_anchor_of_another_version_is_refused(signed: Signed) -> None:
    signed.publish(anchor_every=1)
    signed.publish(anchor_every=1)
    anchor = signed.layout.anchor_dir(2)
    shutil.rmtree(anchor)
    shutil.copytree(signed.layout.anchor_dir(1), anchor)
    with pytest.raises(Untrusted, match="another place: main"):
        Channel.open(open_store(signed.place.channel), signed.trust).anchor(2, signed_table(signed))
    assert any(p.version == 2 for p in verify(Channel.open(open_store(signed.place.channel), signed.trust)))


def test_a_signed_delta_from_an_older_version_is_taken_and_a_swapped_one_is_not(signed: Signed) -> None:
    for _ in range(3):
        signed.publish()
    signed.models.append(some_changed(signed.models[-1], np.random.default_rng(44)))
    upkeep = UpkeepOptions(skip_span=4, anchor_every=4)
    shutil.rmtree(signed.place.channel)
    shutil.rmtree(signed.place.pub)
    init_channel(signed.place.channel, signed.place.base, sign_key=signed.key)
    with signed.place.publisher(sign_key=signed.key, upkeep=upkeep) as publisher:
        for model in signed.models[1:]:
            publisher.publish_checkpoint(signed.place.new(model))
        publisher.make_due()
    channel, table = Channel.open(open_store(signed.place.channel), signed.trust), signed_table(signed)
    directory = signed.layout.from_dir(4, 0)
    for beside in (directory, signed.layout.from_dir(4, 2), signed.layout.anchor_dir(4)):
        assert (beside / SIG).is_file()
    assert verify(channel) == [] and channel.skip(4, 0, table) is not None
    assert signed.step() == 4 and signed.holds(4)

    shutil.rmtree(directory)
    shutil.copytree(signed.layout.from_dir(2, 0), directory)
    with pytest.raises(Untrusted, match="another place: main"):
        channel.skip(4, 0, table)
    (directory / SIG).unlink()
    with pytest.raises(Untrusted, match="not signed"):
        channel.skip(4, 0, table)
    assert [problem.version for problem in verify(channel)] == [4]
    assert signed.step("new") == 4 and signed.holds(4, "new")
    shutil.rmtree(directory)
    sign_channel(open_store(signed.place.channel), load_private_key(signed.key))
    assert verify(channel) == []


def signed_table(signed: Signed) -> Any:
    return Channel.open(open_store(signed.place.channel)).require_ours()[1].table


def test_a_rolled_back_pointer_moves_nobody_back(signed: Signed) -> None:
    for _ in range(3):
        signed.publish()
    assert signed.step() == 3
    write_pointer(open_store(signed.place.channel), 1)
    with pytest.raises(Refused, match="latest names version 1"):
        signed.step()
    assert signed.holds(3)
    # nor does it help to make the host forget its bytes
    with signed.host() as updater:
        updater.load(Channel.open(open_store(signed.place.channel), signed.trust))
        updater.mark_dirty("told by a test")
    flip(signed.place.host, next(name for name, data in bytes_of(signed.place.model).items() if data))
    with pytest.raises(Refused, match="version 3 was applied here before"):
        signed.step()
    write_pointer(open_store(signed.place.channel), 3)
    assert signed.step() == 3 and signed.holds(3)


def test_two_histories_of_one_run_are_refused(signed: Signed, tmp_path: Path) -> None:
    """The publisher went back to a backup: both histories are signed, and hosts of the first stay there."""
    signed.publish()
    backup = {name: tmp_path / f"{name}-backup" for name in ("channel", "pub")}
    for name, copy in backup.items():
        shutil.copytree(signed.place.root / name, copy)
    signed.publish()
    assert signed.step() == 2
    for name, copy in backup.items():
        shutil.rmtree(signed.place.root / name)
        shutil.copytree(copy, signed.place.root / name)
    signed.models[1:] = [signed.models[1]]
    first = read_checkpoint(signed.place.host)
    signed.models.append(some_changed(signed.models[1], np.random.default_rng(99)))
    signed.place.publish(signed.models[2], sign_key=signed.key, take_over=True)
    assert "differs from the local version" in signed.refused().message
    signed.publish(take_over=True)
    assert "continues another version 2" in signed.refused().message
    assert read_checkpoint(signed.place.host) == first
    shutil.rmtree(signed.place.host)
    assert signed.step() == 3 and signed.holds(3)


def test_without_channel_json_nothing_is_followed(signed: Signed) -> None:
    signed.publish()
    signed.layout.channel_json.unlink()
    with pytest.raises(Untrusted, match=r"no channel\.json"):
        Channel.open(open_store(signed.place.channel), signed.trust)


def test_a_link_is_no_signature(signed: Signed) -> None:
    signed.publish()
    path = signed.layout.version_dir(1) / SIG
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    signed.refused()


def test_shards_that_only_fit_the_sums_are_refused(signed: Signed) -> None:
    """Lanes find accidents; only BLAKE3 stands against somebody who chose the bytes."""
    signed.publish(anchor_every=1)
    anchor = signed.layout.anchor_dir(1)
    (anchor / "config.json").write_text('{"auto_map": "evil"}')
    updater = LocalUpdater(open_store(signed.place.channel), signed.place.host, None)
    with contextlib.closing(updater), pytest.raises(Refused):
        updater.update_to(Channel.open(open_store(signed.place.channel), signed.trust))
    (anchor / "config.json").write_text("{}")
    (anchor / "modeling.py").write_text("raise SystemExit")
    shard = next(anchor.glob("*.safetensors"))
    data = shard.read_bytes()
    # the header alone differs: every tensor's bytes are right
    assert b'"format":"pt"' in data
    shard.write_bytes(data.replace(b'"format":"pt"', b'"format":"xx"'))
    updater = LocalUpdater(open_store(signed.place.channel), signed.place.host, None)
    with contextlib.closing(updater), pytest.raises(Refused, match=r"with BLAKE3 \w+, its index lists"):
        updater.update_to(Channel.open(open_store(signed.place.channel), signed.trust))
    shard.write_bytes(data)
    updater = LocalUpdater(open_store(signed.place.channel), signed.place.host, None)
    with contextlib.closing(updater):
        updater.update_to(Channel.open(open_store(signed.place.channel), signed.trust))
    assert signed.holds(1) and not (signed.place.host / "modeling.py").exists()


def test_log_and_show_say_who_signed(signed: Signed, capsys: pytest.CaptureFixture[str]) -> None:
    signed.publish()
    key = load_private_key(signed.key).public
    where = ["--channel", str(signed.place.channel), "--trusted-key", str(key), "--json"]
    last = len(signed.models) - 1
    assert weightcast(["channel", "log", *where]) == 0
    rows = json.loads(capsys.readouterr().out)["versions"]
    assert {row["signed_by"] for row in rows} == {key.id}
    assert weightcast(["channel", "show", str(last), *where]) == 0
    assert json.loads(capsys.readouterr().out)["signed_by"] == key.id
    (signed.layout.version_dir(last) / SIG).unlink()
    assert weightcast(["channel", "log", *where]) == 3
    row = json.loads(capsys.readouterr().out)["versions"][-1]
    assert row["signed_by"] is None and "not signed" in row["problem"]
    assert weightcast(["channel", "show", str(last), *where]) == 3
    assert "not signed" in capsys.readouterr().out
    assert weightcast(["channel", "log", *where[:2]]) == 0, "without keys nothing is checked"


@pytest.mark.parametrize("signs", ["the whole channel", "the newest version"])
def test_verify_asks_for_a_key_that_it_lacks(
    signed: Signed, tmp_path: Path, signs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    signed.publish()
    old, new = signed.key, new_key(tmp_path / "new.key")
    given, other = (old, new) if signs == "the newest version" else (new, old)
    publics = {key: str(load_private_key(key).public) for key in (old, new)}
    signed.key = new
    signed.publish(trusted_keys=[publics[old]])
    signed.publish(trusted_keys=[publics[old]])
    verify_with = ["channel", "verify", "--channel", str(signed.place.channel), "--trusted-key"]
    assert weightcast([*verify_with, publics[given]]) == 3
    said = capsys.readouterr().out
    assert f"signed by key {load_private_key(other).public.id}, which is not trusted here" in said
    assert "\nremedy: add it to --trusted-key" in said and "repair" not in said
    assert "others follow" in said and "starts from" not in said
    assert weightcast([*verify_with, publics[given], "--trusted-key", publics[other]]) == 0


def test_a_publisher_without_the_key_keeps_out_of_a_signed_channel(signed: Signed) -> None:
    before = snapshot(signed.place.channel)
    with pytest.raises(Refused, match="is signed"):
        signed.place.publish(signed.models[0])
    with pytest.raises(Refused, match="no signing key"):
        signed.place.publish(signed.models[0], trusted_keys=[str(load_private_key(signed.key).public)])
    assert snapshot(signed.place.channel) == before


def test_a_publisher_continues_only_versions_of_keys_it_trusts(signed: Signed, tmp_path: Path) -> None:
    signed.publish()
    successor = new_key(tmp_path / "successor.key")
    model = some_changed(signed.models[-1], np.random.default_rng(4))
    with pytest.raises(Untrusted, match="not trusted here"):
        signed.place.publish(model, sign_key=successor)
    public = load_private_key(signed.key).public
    assert signed.place.publish(model, sign_key=successor, trusted_keys=[str(public)]) == 2
    signed.models.append(model)
    assert "not trusted here" in signed.refused().message
    signed.trust = trust_in(signed.key, successor)
    assert signed.step() == 2 and signed.holds(2)
    # the newest version is nobody's that is known
    (signed.layout.version_dir(2) / SIG).unlink()
    with pytest.raises(Untrusted, match="is not signed"):
        signed.place.publish(model, sign_key=successor, trusted_keys=[str(public)])
    assert not signed.layout.version_dir(3).exists()


def test_a_planted_version_is_not_finished(signed: Signed) -> None:
    """An index above the pointer that nobody signed is not taken for one that a killed publisher left."""
    signed.publish()
    signed.publish()
    (signed.layout.version_dir(2) / SIG).unlink()
    write_pointer(open_store(signed.place.channel), 1)
    shutil.rmtree(signed.place.pub)
    assert signed.publish() == 3
    signed.models.insert(2, signed.models[2])
    assert signed.step() == 3 and signed.holds(3 + 1)


def test_a_signature_without_an_index_is_a_leftover(signed: Signed) -> None:
    """What a kill between the two leaves behind."""
    signed.publish()
    directory = signed.layout.version_dir(2)
    directory.mkdir()
    (directory / SIG).write_bytes(b"{}")
    assert signed.publish() == 2
    assert signed.step() == 2 and signed.holds(2)


def test_a_channel_begun_without_a_key_is_signed_later(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    models = [place.model]
    for seed in (1, 2):
        models.append(some_changed(models[-1], np.random.default_rng(seed)))
        place.publish(models[-1], anchor_every=2)
    key = new_key(tmp_path / "late.key")
    signed = Signed(place, key, models, trust_in(key))
    assert signed.refused().message.endswith("is not signed")
    assert sign_channel(open_store(place.channel), load_private_key(key)) == 2
    assert verify(Channel.open(open_store(place.channel), signed.trust)) == []
    assert signed.step() == 2 and signed.holds(2)
    assert signed.publish() == 3 and signed.step() == 3

    replaced = new_key(tmp_path / "next.key")
    assert sign_channel(open_store(place.channel), load_private_key(replaced)) == 3
    signed.trust = trust_in(replaced)
    assert signed.step() == 3 and signed.step("new") == 3
    signed.key = replaced
    assert signed.publish() == 4 and signed.step() == 4


def test_what_is_damaged_is_not_signed(signed: Signed) -> None:
    signed.publish()
    shard = next(signed.layout.version_dir(1).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = snapshot(signed.place.channel)
    with pytest.raises(Refused, match="is not signed"):
        sign_channel(open_store(signed.place.channel), load_private_key(signed.key))
    assert snapshot(signed.place.channel) == before


def test_init_again_asks_for_the_same_key(signed: Signed, tmp_path: Path) -> None:
    place = signed.place
    assert init_channel(place.channel, place.base, sign_key=signed.key).run_id == "run-under-test"
    with pytest.raises(Untrusted):
        init_channel(place.channel, place.base, sign_key=new_key(tmp_path / "other.key"))


def test_ranks_meet_in_a_signed_channel(signed: Signed, tmp_path: Path) -> None:
    """Rank 0 alone has the key."""
    from concurrent.futures import ThreadPoolExecutor

    from publisher_cases import as_numpy, numpy_model

    place = make_place(tmp_path / "ranks", numpy_model(np.random.default_rng(3)), sign_key=signed.key)
    new = some_changed(place.model, np.random.default_rng(8))
    names = sorted(new)

    def rank(number: int) -> int:
        mine = {name: as_numpy(new[name]) for name in names[number::2]}
        options: dict[str, Any] = {"rank": number, "world_size": 2, "local": place.root / f"pub-{number}"}
        options |= {"sign_key": signed.key} if number == 0 else {}
        with place.publisher(deadline_seconds=30, **options) as publisher:
            return publisher.publish(mine, step=1).version

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [1, 1]
    run = Signed(place, signed.key, [place.model, new], signed.trust)
    assert run.step() == 1 and run.holds(1)
