"""Engines behind TLS, with a certificate authority of the test's own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from doubles import SGLangDouble, serve
from hosts import Mapping_, Site, on_disk

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.adapter import Adapter
from weightcast.subscriber.engines.base import BadEngineOption, parse_engine
from weightcast.subscriber.engines.kinds import open_engine


def certificate(directory: Path, address: str) -> tuple[Path, Path]:
    """Files with a self-signed certificate for an address, and with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def engine_at(
    stack: ExitStack, tmp_path: Path, options: Callable[[Path], str], address: str = "127.0.0.1"
) -> Adapter:
    """An adapter of an engine that speaks TLS with a certificate for `address`."""
    chain, key = certificate(tmp_path, address)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, key)
    url = stack.enter_context(serve(SGLangDouble(), tls=context))
    engine = open_engine(parse_engine(f"sglang={url}{options(chain)}", tmp_path), environ={"KEY": "secret"})
    stack.callback(engine.close)
    return engine


def test_a_known_authority_is_trusted(stack: ExitStack, tmp_path: Path) -> None:
    engine = engine_at(stack, tmp_path, lambda chain: f",ca={chain},api_key_env=KEY")
    assert engine.probe().label == "default"


@pytest.mark.parametrize("options", ["", ",api_key_env=KEY"])
def test_others_are_not(stack: ExitStack, tmp_path: Path, options: str) -> None:
    assert not engine_at(stack, tmp_path, lambda chain: options).probe().reachable


def test_nor_is_a_certificate_of_another_machine(stack: ExitStack, tmp_path: Path) -> None:
    engine = engine_at(stack, tmp_path, lambda chain: f",ca={chain}", address="192.0.2.1")
    assert not engine.probe().reachable


def test_anybody_is_believed_only_when_asked_for(stack: ExitStack, tmp_path: Path) -> None:
    assert engine_at(stack, tmp_path, lambda chain: ",verify=false").probe().label == "default"


def test_files_are_not_changed_under_an_engine_whose_certificate_is_no_longer_good(
    site: Site, tmp_path: Path
) -> None:
    """It maps the files and serves; it cannot be told of anything."""
    good, other = tmp_path / "good", tmp_path / "other"
    for directory in (good, other):
        directory.mkdir()
        certificate(directory, "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(good / "certificate.pem", good / "key.pem")
    run, engine = site.run(), Mapping_(site.root / "host")
    run.publish()
    url = site.stack.enter_context(serve(engine, tls=context))
    host = site.host(run, f"webhook={url},ca={good / 'certificate.pem'}")
    assert host.step().ready
    engine.seen.clear()

    context.load_cert_chain(other / "certificate.pem", other / "key.pem")
    run.publish()
    with pytest.raises(EngineFailed, match="not patched in"):
        host.step()
    assert on_disk(host.local) == run.digest(1) and engine.seen == []
    path = min(host.local.glob("model-*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = on_disk(host.local)
    with pytest.raises(EngineFailed, match="cannot be reached"):
        host.sync.rehash()
    assert on_disk(host.local) == damaged and engine.seen == []

    context.load_cert_chain(good / "certificate.pem", good / "key.pem")
    assert host.retry().ready and host.at(run, 2)
    assert engine.seen[0] == ("pause", damaged) and engine.seen[-1] == ("resume", run.digest(2))


@pytest.mark.parametrize(
    "text",
    [
        "sglang=https://a,verify=false,api_key_env=KEY",
        "sglang=https://a,verify=false,ca=/x",
        "sglang=https://a,verify=no",
        "sglang=https://a,ca=",
        "sglang=http://a,ca=/x",
        "sglang=http://a,verify=false",
        "sglang=http://a,deadline=0",
        "sglang=http://a,deadline=inf",
        "sglang=http://a,deadline=-1",
        "sglang=http://a,deadline=100000",
    ],
)
def test_what_is_wrong_is_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadEngineOption):
        parse_engine(text, tmp_path)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadEngineOption, match=str(path)):
        open_engine(parse_engine(f"sglang=https://a,ca={path}", tmp_path))
