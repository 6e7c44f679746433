"""Certificates for tests: certificate authorities and signed certificates. The validity begins some minutes in the
past, because clocks may differ.
"""

import datetime
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SINCE = datetime.timedelta(minutes=5)
LIFETIME = datetime.timedelta(days=1)


class Authority:
    """A certificate authority with its own key; ``pem`` is the authority's certificate."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._key.public_key()).issuer_name(self._name)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        # Real authorities also have this extension. BoringSSL needs it to distinguish two authorities of the same name
        # in one file.
        key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._signed_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)
        builder = builder.add_extension(key_id, critical=False)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def pair(self, name: str = "localhost") -> tuple[bytes, bytes]:
        """Sign a certificate for 127.0.0.1 and a DNS name; return key and certificate as PEM."""
        return self.pair_of(name, (x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))))

    def pair_of(self, name: str, names: Sequence[x509.GeneralName]) -> tuple[bytes, bytes]:
        """Sign a certificate with a common name and these alternative names; return key and certificate as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, key.public_key()).issuer_name(self._name)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(self._signed_by, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private, certificate.public_bytes(serialization.Encoding.PEM)


def write_pair(folder: Path, pair: tuple[bytes, bytes]) -> Path:
    """Write a pair as ``tls.key`` and ``tls.crt``, and replace each file atomically by a rename; return the folder."""
    folder.mkdir(exist_ok=True)
    for name, content in zip(("tls.key", "tls.crt"), pair, strict=True):
        fresh = folder / f"{name}.new"
        fresh.write_bytes(content)
        fresh.rename(folder / name)
    return folder


def mount_pair(folder: Path, pair: tuple[bytes, bytes], *, version: int) -> Path:
    """Write a pair like the kubelet's mount of a Secret: links through ``..data``, which a rename replaces."""
    folder.mkdir(exist_ok=True)
    write_pair(folder / f"..version-{version}", pair)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(f"..version-{version}")
    fresh.rename(folder / "..data")
    for name in ("tls.key", "tls.crt"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    return folder


def _builder(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SINCE)
        .not_valid_after(now + LIFETIME)
    )
