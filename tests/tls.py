"""A certificate authority of the test's own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """`file`: its certificate."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._key = directory, ec.generate_private_key(ec.SECP256R1())
        made = self._signed("authority", self._key).add_extension(x509.BasicConstraints(True, 0), True)
        self.file = directory / "authority.pem"
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, "authority")]
        builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1])
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - _DAY).not_valid_after(now + _DAY)

    def server(self, address: str) -> ssl.SSLContext:
        """Of a server with a certificate for an IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        made = self._signed("server", key).add_extension(name, False).sign(self._key, hashes.SHA256())
        file = self._directory / "server.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(file)
        return context
