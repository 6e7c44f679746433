"""Transport security of the gRPC port: ``--tls off|self-signed|DIR``.

Gateways speak TLS to an endpoint picker by default and do not verify it (PROTOCOLS section 1), hence ``self-signed``.
A folder holds ``tls.crt`` and ``tls.key``, as a mounted Kubernetes Secret does, and is read again when they change.
cryptography is imported where it is used: a router in plain text starts a tenth of a second earlier without it.
"""

import datetime
from ipaddress import ip_address
from pathlib import Path

import grpc

from dualmap_extproc.logs import get_logger

_LIFETIME = datetime.timedelta(days=3650)
_log = get_logger(__name__)


class TlsError(Exception):
    """What was given to ``--tls`` is no folder or holds no usable certificate; the message says what and why."""


def server_credentials(tls: str) -> grpc.ServerCredentials | None:
    """Return what the gRPC port shall be opened with; None for plain text. Raises TlsError."""
    if tls == "off":
        return None
    if tls == "self-signed":
        return grpc.ssl_server_credentials([self_signed()])
    if not Path(tls).is_dir():
        raise TlsError(f"--tls: {tls!r} is not accepted; give off, self-signed, or a folder with tls.crt and tls.key")
    files = CertificateFiles(Path(tls))
    initial = files.read()
    return grpc.dynamic_ssl_server_credentials(
        initial,
        files.changed,  # type: ignore[arg-type]  # grpc-stubs does not know that None means unchanged
        require_client_authentication=False,
    )


def self_signed() -> tuple[bytes, bytes]:
    """Make a key and a certificate for it that nobody vouches for; return both as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dualmap-router")])
    names = [x509.DNSName("localhost"), x509.DNSName("dualmap-router"), x509.IPAddress(ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


class CertificateFiles:
    """``tls.crt`` and ``tls.key`` of a folder, and whether they have changed since they were last read."""

    def __init__(self, folder: Path) -> None:
        self._certificate = folder / "tls.crt"
        self._key = folder / "tls.key"
        self._seen: tuple[int, ...] = ()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Return the pair as it is now. Raises TlsError."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        self._seen = self._stamps()
        key, certificate = (_bytes_of(path) for path in (self._key, self._certificate))
        try:
            private = serialization.load_pem_private_key(key, password=None)
            public = x509.load_pem_x509_certificate(certificate).public_key()
        except (ValueError, TypeError) as error:
            raise TlsError(f"{self._certificate.parent}: tls.crt and tls.key are no PEM pair: {error}") from None
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        if private.public_key().public_bytes(*form) != public.public_bytes(*form):
            raise TlsError(f"{self._key}: is not the key of {self._certificate}")
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the pair if it has changed, else None. gRPC asks at each handshake, on a thread of its own."""
        if self._stamps() == self._seen:
            return None
        try:
            return self.read()
        except TlsError as error:
            # Also met half-way through a replacement; the next handshake looks again at whatever comes next.
            _log.warning("certificate refused, the last good one serves on", reason=str(error))
            return None

    def _stamps(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in (self._certificate, self._key))
        except OSError:
            return ()


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from None
