"""Transport security of the gRPC and access log ports: ``--tls off|self-signed|DIR`` and ``--tls-client-ca FILE``.

Gateways speak TLS to an endpoint picker by default and do not verify it (PROTOCOLS section 1), hence ``self-signed``.
A folder holds ``tls.crt`` and ``tls.key``, as a mounted Kubernetes Secret does. With a client CA the ports are only for
who shows a certificate that it signed. All three files are read again when they change; ``server`` binds the ports.
cryptography is imported where it is used: a router in plain text starts a tenth of a second earlier without it.
"""

import datetime
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import grpc

from dualmap_edge.logs import get_logger

if TYPE_CHECKING:
    from cryptography import x509

_LIFETIME = datetime.timedelta(days=3650)
_CERTIFICATE_BEGINS = b"-----BEGIN CERTIFICATE-----"
# A gRPC handshake that has asked for the certificate makes its TLS object of it within microseconds.
_SETTLED_S = 0.05
_log = get_logger(__name__)

# A private key and the chain of certificates for it, both PEM.
Pair: TypeAlias = tuple[bytes, bytes]


class TlsError(Exception):
    """``--tls`` or ``--tls-client-ca`` is no good: the message says which option or file, and what is wrong with it."""


def server_credentials(tls: str, client_ca: Path | None = None) -> Callable[[], grpc.ServerCredentials] | None:
    """Return what makes the credentials of one gRPC port, to be called once for each port; None for plain text.

    With ``client_ca`` (a file of PEM certificates) a client must show a certificate that one of them signed.
    Raises TlsError.
    """
    if tls == "off":
        if client_ca is not None:
            raise TlsError("--tls-client-ca: means nothing in plain text; give --tls self-signed or --tls DIR too")
        return None
    if tls == "self-signed":
        return Certificates(self_signed(), client_ca).for_port
    if Path(tls).is_dir():
        return Certificates(Path(tls), client_ca).for_port
    raise TlsError(f"--tls: {tls!r} is not accepted; give off, self-signed, or a folder with tls.crt and tls.key")


def self_signed() -> Pair:
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


class Certificates:
    """What the ports show and whom they trust: as the files say now, or as they said when they were last good.

    ``pair`` is the pair itself or a folder that holds it as tls.key and tls.crt. Raises TlsError for files that are no
    good to begin with.

    gRPC asks at every handshake, on threads of its own. Contents are compared, not time stamps: three small files cost
    less than a handshake, and neither clocks nor the links of a mounted Secret need be understood.
    """

    def __init__(self, pair: Pair | Path, client_ca: Path | None) -> None:
        self._pair = pair
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._refused = ""
        self._contents = self._read()
        self._configuration = _configuration(*self._contents)

    def for_port(self) -> grpc.ServerCredentials:
        """Make the credentials of one port: gRPC wants to hear of a change once, and each port must hear of it."""
        given = self.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            current = self.current()
            if current is given:
                return None
            # gRPC 1.85 frees what it had while another handshake may be about to use it, which ends the process (seen
            # within a thousand handshakes when each brought a change). It holds a lock around this call that keeps
            # further handshakes out, and those that are past it are done with it after the pause.
            time.sleep(_SETTLED_S)
            given = current
            return current

        return grpc.dynamic_ssl_server_credentials(
            given,
            changed,  # type: ignore[arg-type]  # grpc-stubs does not know that None means unchanged
            require_client_authentication=self._client_ca is not None,
        )

    def current(self) -> grpc.ServerCertificateConfiguration:
        """Look at the files and return the last good configuration; a reason to refuse them is logged once in a row."""
        with self._lock:
            try:
                contents = self._read()
                if contents != self._contents:
                    self._configuration = _configuration(*contents)
                    self._contents = contents
                    _log.info("changed certificate files taken up")
                self._refused = ""
            except TlsError as error:
                # Also met half-way through a replacement; the next handshake looks again at whatever comes next.
                if str(error) != self._refused:
                    _log.warning("certificate files refused, the last good ones serve on", reason=str(error))
                self._refused = str(error)
            return self._configuration

    def _read(self) -> tuple[Pair, bytes | None]:
        pair = self._pair
        if isinstance(pair, Path):
            pair = _bytes_of(pair / "tls.key"), _bytes_of(pair / "tls.crt")
        return pair, None if self._client_ca is None else _bytes_of(self._client_ca)


def _configuration(pair: Pair, client_ca: bytes | None) -> grpc.ServerCertificateConfiguration:
    """Check everything that gRPC would only complain of at a handshake. Raises TlsError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    key, chain = pair
    certificates = _certificates(chain, "--tls: tls.crt")
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        own = serialization.load_pem_private_key(key, password=None).public_key().public_bytes(*form)
        certified = certificates[0].public_key().public_bytes(*form)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"--tls: tls.key or tls.crt holds no usable key: {error}") from None
    if own != certified:
        raise TlsError("--tls: tls.key is not the key of tls.crt")
    if client_ca is not None:
        _certificates(client_ca, "--tls-client-ca")
    return grpc.ssl_server_certificate_configuration([pair], client_ca)


def _certificates(content: bytes, name: str) -> "list[x509.Certificate]":
    """Read PEM certificates; refuse a file that ends within one, of which gRPC would take the rest. Raises TlsError."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise TlsError(f"{name}: no certificate in PEM: {error}") from None
    if len(found) < content.count(_CERTIFICATE_BEGINS):
        raise TlsError(f"{name}: ends in the middle of a certificate")
    return found


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from None
