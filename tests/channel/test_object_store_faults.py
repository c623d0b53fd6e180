"""Faults of an object store: a real S3 server behind a proxy that injects them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_faults import Fault, HttpFaults, http_faults
from s3_gateway import Gateway

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.object_store import ObjectStore, open_object_store
from weightcast.shared.channel.store import AlreadyExists, Changed, Unavailable

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(s3: Gateway) -> Iterator[HttpFaults]:
    with http_faults(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(bucket: str, proxy: HttpFaults, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return open_object_store(f"{bucket}/run")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_recovers_is_asked_again(store: ObjectStore, proxy: HttpFaults, status: int) -> None:
    store.create("latest", b"000001")
    proxy.faults = [Fault("status", "GET", "latest", times=2, status=status)]
    assert store.read("latest", 10) == b"000001"
    assert proxy.count("GET", "latest") == 3


def test_a_body_that_is_cut_is_read_again(store: ObjectStore, proxy: HttpFaults) -> None:
    data = bytes(range(256)) * 1000
    store.create("shard", data)
    proxy.faults = [Fault("cut", "GET", "shard", times=2)]
    assert b"".join(store.pieces("shard")) == data


@pytest.mark.parametrize("kind", ["lose", "repeat", "refuse"])
def test_a_pointer_whose_answer_was_lost_is_read_back(
    store: ObjectStore, proxy: HttpFaults, kind: str
) -> None:
    store.create("latest", b"000001")
    proxy.faults = [Fault(kind, "PUT", "latest")]  # type: ignore[arg-type]
    store.replace("latest", b"000002", expected=b"000001")
    assert store.read("latest", 10) == b"000002" and proxy.faults[0].hits == 1


def test_a_pointer_that_somebody_else_replaced_stays(store: ObjectStore, proxy: HttpFaults) -> None:
    store.create("latest", b"000001")

    def overtaken() -> None:
        store.replace("latest", b"000009")

    with pytest.raises(Changed):
        store.replace("latest", b"000002", expected=b"000001", allowed=overtaken)
    assert store.read("latest", 10) == b"000009"


def test_a_stale_read_replaces_nothing(store: ObjectStore, proxy: HttpFaults) -> None:
    store.create("latest", b"000001")
    assert store.read("latest", 10) == b"000001"
    store.replace("latest", b"000002", expected=b"000001")
    proxy.faults = [Fault("stale", "GET", "latest")]
    with pytest.raises(Changed):
        store.replace("latest", b"000003", expected=b"000001")
    assert store.read("latest", 10) == b"000002"


@pytest.mark.parametrize("kind", ["lose", "repeat"])
def test_a_commit_whose_answer_was_lost_is_a_commit(store: ObjectStore, proxy: HttpFaults, kind: str) -> None:
    proxy.faults = [Fault(kind, "PUT", "index.json")]  # type: ignore[arg-type]
    store.commit("weight_v000001/1-ab", "weight_v000001", "index.json", b"{}")
    assert store.read("weight_v000001/index.json", 10) == b"{}"
    with pytest.raises(AlreadyExists):
        store.commit("weight_v000001/2-cd", "weight_v000001", "index.json", b"{ }")


@pytest.mark.parametrize("status", [409, 412])
def test_an_object_that_is_said_to_exist_and_does_not_is_put_later(
    store: ObjectStore, proxy: HttpFaults, status: int
) -> None:
    proxy.faults = [Fault("status", "PUT", "index.json", status=status)]
    with pytest.raises(Unavailable, match="refused to create"):
        store.commit("weight_v000001/1-ab", "weight_v000001", "index.json", b"{}")
    store.commit("weight_v000001/1-ab", "weight_v000001", "index.json", b"{}")
    assert store.read("weight_v000001/index.json", 10) == b"{}" and proxy.faults[0].hits == 1


def test_a_server_that_is_gone_is_named(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with http_faults("http://127.0.0.1:9") as gone:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gone.endpoint)
        there = open_object_store("s3://bucket/run")
    with pytest.raises(Unavailable, match="cannot be reached") as raised:
        there.read("latest", 10)
    assert raised.value.message.startswith("s3://bucket/run/latest") and raised.value.remedy


def test_no_error_repeats_a_credential(
    store: ObjectStore, s3: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-key")
    wrong = open_object_store(store.place())
    with pytest.raises(Unavailable, match="denied") as raised:
        wrong.read("latest", 10)
    assert s3.access_key not in raised.value.message and "not-the-secret-key" not in raised.value.message


def test_a_bucket_that_does_not_exist_is_named(store: ObjectStore) -> None:
    there = open_object_store("s3://weightcast-has-no-such-bucket/run")
    with pytest.raises(Unavailable, match=r"weightcast-has-no-such-bucket.*does not exist"):
        there.create("latest", b"000001")


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(Refused, match="credentials") as raised:
        open_object_store("s3://user:secret@bucket/run")
    assert "secret" not in raised.value.message
