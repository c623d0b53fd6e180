"""Hosts with trusted keys: what they tell, what engines keep, and the whole way through the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from channel_paths import Layout
from hosts import Host, Run, SGLang, Site, on_disk
from in_process import Command

from weightcast.shared.base.errors import Refused, Untrusted
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.signing import PrivateKey, Trust, write_private_key
from weightcast.subscriber.sync.options import parse_target


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    key = PrivateKey.generate()
    write_private_key(tmp_path / "run.key", key)
    return key


def signature(run: Run, version: int) -> Path:
    return Layout(run.channel).version_dir(version) / f"{INDEX_NAME}.sig"


def at_one(site: Site, key: PrivateKey, trust: Trust | None) -> tuple[Run, Host, SGLang]:
    run, engine = site.run(sign_key=site.root / "run.key"), SGLang()
    host = site.host(run, engine, trust=trust)
    run.publish()
    assert host.step().ready
    return run, host, engine


def test_a_host_tells_whose_word_its_version_is(site: Site, key: PrivateKey) -> None:
    _, host, _ = at_one(site, key, Trust.of([key.public]))
    assert host.status.signed == f"verified by {key.public.id}"
    host.restart()
    assert host.status.signed == ""
    host.step()
    assert host.status.signed == f"verified by {key.public.id}"


def test_without_keys_it_tells_that_nothing_is_checked(site: Site, key: PrivateKey) -> None:
    run, host, _ = at_one(site, key, None)
    run.publish()
    signature(run, 2).unlink()
    assert host.step().ready and host.at(run, 2)
    assert host.status.signed == "not checked"


def test_a_forged_version_leaves_the_old_one_in_service(site: Site, key: PrivateKey) -> None:
    run, host, engine = at_one(site, key, Trust.of([key.public]))
    engine.calls.clear()
    run.publish()
    kept = signature(run, 2).read_bytes()
    signature(run, 2).write_bytes(kept.replace(b'\\"version\\":2', b'\\"version\\":3'))
    with pytest.raises(Untrusted, match="altered or forged"):
        host.step()
    assert host.at(run, 1) and engine.held == run.digest(1)
    status = host.status
    assert status.ready and status.served_version == 1
    assert status.last_error is not None and status.last_error.error == "Untrusted"
    assert len(status.degraded) == 1 and "altered or forged" in status.degraded[0]
    assert status.signed == f"verified by {key.public.id}"

    host.options = dataclasses.replace(host.options, trust=Trust.of([key.public]))
    host.restart()
    with pytest.raises(Untrusted):
        host.step()
    assert host.status.ready and engine.held == run.digest(1)
    assert host.status.signed == f"verified by {key.public.id}", "its index is read again for what it carries"

    signature(run, 2).write_bytes(kept)
    assert host.step().ready and host.at(run, 2) and host.status.degraded == ()


def test_a_rewound_pointer_is_an_error_and_engines_keep_serving(site: Site, key: PrivateKey) -> None:
    run, host, engine = at_one(site, key, Trust.of([key.public]))
    run.publish()
    assert host.step().ready
    engine.calls.clear()
    Layout(run.channel).latest.write_text("000001")
    with pytest.raises(Refused, match=r"rewound: latest names version 1.*version 2 was applied") as told:
        host.step()
    assert "--target" in told.value.remedy
    assert host.at(run, 2) and engine.held == run.digest(2)
    status = host.status
    assert status.ready and status.served_version == 2 and "rewound" in status.degraded[0]
    assert status.last_error is not None and "rewound" in status.last_error.message

    host.options = dataclasses.replace(host.options, target=parse_target("1"))
    host.restart()
    assert host.step().ready and host.at(run, 1) and engine.held == run.digest(1)


def test_sync_tells_of_a_rewound_pointer(
    tmp_path: Path, site: Site, key: PrivateKey, weightcast: Command
) -> None:
    run = site.run(sign_key=tmp_path / "run.key")
    run.publish()
    run.publish()
    host = tmp_path / "host"
    sync = ("sync", "--channel", run.channel, "--local", host, "--base", run.base_dir)
    keys = ("--trusted-key", str(key.public))
    assert weightcast(*sync, *keys)[0] == 0
    Layout(run.channel).latest.write_text("000001")
    before = on_disk(host)
    code, _, err = weightcast(*sync, *keys)
    assert code == 3 and "latest names version 1" in " ".join(err.split()) and on_disk(host) == before
    code, out, _ = weightcast(*sync)
    assert code == 0 and "rewound: latest names version 1" in " ".join(out.split())
    assert on_disk(host) == before
    assert "latest names version 1" in json.loads(weightcast(*sync, "--json")[1])["degraded"][0]
    assert weightcast(*sync, *keys, "--target", 1)[0] == 0 and on_disk(host) != before


def test_what_is_fetched_ahead_is_checked_too(site: Site, key: PrivateKey) -> None:
    run = site.run(sign_key=site.root / "run.key")
    host = site.host(run, trust=Trust.of([key.public]), fetch_ahead=True)
    run.publish()
    host.step()
    run.publish()
    run.publish()
    signature(run, 3).unlink()
    with pytest.raises(Refused):
        host.step()
    assert host.at(run, 1)


def test_from_keygen_to_a_verified_host(tmp_path: Path, site: Site, weightcast: Command) -> None:
    plain = site.run("plain")
    channel, host, private = tmp_path / "channel", tmp_path / "host", tmp_path / "made.key"
    code, public, _ = weightcast("keygen", "--out", private)
    assert code == 0
    code, out, _ = weightcast(
        *("channel", "init", "--channel", channel, "--base", plain.base_dir, "--sign-key", private, "--json")
    )
    key_id = json.loads(out)["signed_by"]
    new = plain.base.changed(1).write(tmp_path / "new")
    publish = ("publish", new, "--channel", channel, "--local", tmp_path / "pub", "--base", plain.base_dir)
    code, out, _ = weightcast(*publish, "--json")
    assert code == 3 and "--sign-key" in json.loads(out)["remedy"]
    assert weightcast(*publish, "--sign-key", private)[0] == 0

    sync = ("sync", "--channel", channel, "--local", host, "--base", plain.base_dir, "--json")
    code, out, _ = weightcast(*sync, "--trusted-key", f"{private}.pub")
    status = json.loads(out)
    assert code == 0 and (status["local_version"], status["signed"]) == (1, f"verified by {key_id}")
    assert weightcast("channel", "verify", "--channel", channel, "--trusted-key", public.strip())[0] == 0

    before = on_disk(host)
    (channel / "weight_v000001" / f"{INDEX_NAME}.sig").unlink()
    code, out, _ = weightcast(*sync, "--trusted-key", f"{private}.pub")
    assert (code, json.loads(out)["error"]) == (3, "Untrusted") and on_disk(host) == before
    code, out, _ = weightcast("channel", "verify", "--channel", channel, "--trusted-key", public.strip())
    assert code == 3 and "is not signed" in out
    assert weightcast("channel", "verify", "--channel", channel)[0] == 0

    code, out, _ = weightcast("channel", "sign", "--channel", channel, "--sign-key", private, "--json")
    assert code == 0 and json.loads(out)["signed_by"] == key_id
    assert weightcast(*sync, "--trusted-key", f"{private}.pub")[0] == 0


def test_keys_from_the_environment(
    tmp_path: Path, site: Site, key: PrivateKey, weightcast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = site.run(sign_key=tmp_path / "run.key")
    run.publish()
    other = PrivateKey.generate().public
    sync = ("sync", "--channel", run.channel, "--local", tmp_path / "host", "--base", run.base_dir, "--json")
    monkeypatch.setenv("WEIGHTCAST_TRUSTED_KEY", str(other))
    assert json.loads(weightcast(*sync)[1])["error"] == "Untrusted"
    assert weightcast("channel", "verify", "--channel", run.channel)[0] == 3
    monkeypatch.setenv("WEIGHTCAST_TRUSTED_KEY", f"{other} {key.public}")
    assert json.loads(weightcast(*sync)[1])["signed"] == f"verified by {key.public.id}"
    assert weightcast("channel", "verify", "--channel", run.channel)[0] == 0


@pytest.mark.parametrize("wrong", ["ed25519:AAAA", "", "/nowhere/key"])
def test_a_wrong_key_is_an_error_and_never_no_key(
    tmp_path: Path, site: Site, weightcast: Command, wrong: str
) -> None:
    run = site.run()
    run.publish()
    sync = ("sync", "--channel", run.channel, "--local", tmp_path / "host", "--base", run.base_dir)
    assert weightcast(*sync, "--trusted-key", wrong)[0] == 3
    assert weightcast("channel", "verify", "--channel", run.channel, "--trusted-key", wrong)[0] == 3
    assert not (tmp_path / "host").exists()


def test_a_publisher_that_trusts_signs(
    tmp_path: Path, site: Site, key: PrivateKey, weightcast: Command
) -> None:
    run = site.run()
    directories = ("--channel", run.channel, "--base", run.base_dir, "--local", tmp_path / "pub")
    code, _, err = weightcast("publisher", "run", *directories, "--trusted-key", str(key.public))
    assert code == 2 and "sign_key" in err


def test_the_list_of_adapters_is_signed_and_never_goes_back(site: Site, key: PrivateKey) -> None:
    """A host keeps its adapters, whatever is put in the list's place."""
    run, host, engine = at_one(site, key, Trust.of([key.public]))
    registry = run.channel / "components.json"
    run.publish_adapter("math")
    host.step()
    one = registry.read_bytes()
    run.publish_adapter("code")
    assert host.step().ready and engine.loaded.keys() == {"math@1", "code@1"}
    two = registry.read_bytes()
    for forged, word in (
        (b'{"format":1,"run_id":"x","components":[]}', "is not signed"),
        (two.replace(b'"active"', b'"retired"').replace(b'"retired":null', b'"retired":7'), "altered"),
        (one, "is number 1; number 2 was read before"),
        (b"", "is gone"),
    ):
        registry.unlink(missing_ok=True)
        if forged:
            registry.write_bytes(forged)
        for _ in range(2):
            assert host.step().ready and any(word in each for each in host.status.degraded)
            assert engine.loaded.keys() == {"math@1", "code@1"}
            host.restart()
    registry.write_bytes(two)
    run.retire("code")
    host.step()
    host.clock.at += 1e6
    host.step()
    assert not host.status.degraded and engine.loaded.keys() == {"math@1"}
