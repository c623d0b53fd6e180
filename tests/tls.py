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

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._signed(name, self._key).add_extension(x509.BasicConstraints(True, 0), True)
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, days: int = 1) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, self._name)]
        builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1])
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - 3 * _DAY).not_valid_after(now + days * _DAY)

    def issue(self, name: str, address: str = "127.0.0.1", days: int = 1) -> Path:
        """A file with a certificate for an IP address and gates.example, valid for so many days, and its
        key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("gates.example")]
        also = x509.SubjectAlternativeName(names)
        made = self._signed(name, key, days).add_extension(also, False).sign(self._key, hashes.SHA256())
        file = self._directory / f"{name}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
        return file

    def server(self, address: str) -> ssl.SSLContext:
        """Of a server with a certificate for an IP address."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.issue("server", address))
        return context
