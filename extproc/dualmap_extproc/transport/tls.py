"""Transport security of the gRPC and access log ports: ``--tls off|self-signed|DIR`` and ``--tls-client-ca FILE``.

By default, gateways use TLS to an endpoint picker and do not verify its certificate. For such gateways, ``self-signed``
is sufficient. A folder contains ``tls.crt`` and ``tls.key``, as a mounted Kubernetes Secret does. With a client CA,
clients need a certificate that this CA signed. The router reads the three files again when they change.

Functions import the package cryptography only when they need it, because the import takes 0.1 s.
"""

import asyncio
import datetime
import os
import ssl
import threading
import time
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import grpc

from dualmap_edge.logs import get_logger

if TYPE_CHECKING:
    from cryptography import x509

ALPN: Final = "h2"
"""The protocol that clients must negotiate."""
_LIFETIME = datetime.timedelta(days=3650)
_CERTIFICATE_BEGINS = b"-----BEGIN CERTIFICATE-----"
# The pause after a change of certificates. A gRPC handshake creates its TLS object microseconds after it has requested
# the certificate.
_SETTLED_S = 0.05
# The longest wait for the certificate that another router presents.
_PRESENTED_S = 1.0
_log = get_logger(__name__)

# A private key and its certificate chain, both PEM.
Pair: TypeAlias = tuple[bytes, bytes]


class TlsError(Exception):
    """The option ``--tls`` or ``--tls-client-ca`` is invalid; the message names the option or file, and the fault."""


def server_certificates(tls: str, client_ca: Path | None = None, *, option: str = "--tls") -> "Certificates | None":
    """Return the certificates of the router's ports, or None without TLS.

    With ``client_ca`` (a file of PEM certificates), clients need a certificate that one of these CAs signed. Raises
    TlsError.
    """
    if tls == "off":
        if client_ca is not None:
            raise TlsError("--tls-client-ca: requires TLS; also give --tls self-signed or --tls DIR")
        return None
    if tls == "self-signed":
        return Certificates(self_signed(), client_ca, option)
    if Path(tls).is_dir():
        return Certificates(Path(tls), client_ca, option)
    raise TlsError(f"--tls: {tls!r} is not accepted; give off, self-signed, or a folder with tls.crt and tls.key")


def peer_security(tls: str, client_ca: Path | None = None) -> "PeerSecurity | None":
    """Return how this router connects to the other routers, which have the same options; None without TLS."""
    return None if tls == "off" else PeerSecurity(None if tls == "self-signed" else Path(tls), client_ca)


class PeerSecurity:
    """Makes the credentials of connections to the other routers from the current files of ``folder`` and ``client_ca``.

    The routers share one certificate, or have certificates of one authority: the client CA, else ``ca.crt`` beside the
    certificate, else the certificate itself is trusted. Without ``folder``, each router has a self-signed certificate,
    which nothing verifies: the connection is encrypted, and the routers verify each other by their common key.
    """

    def __init__(self, folder: Path | None, client_ca: Path | None) -> None:
        self._folder = folder
        self._client_ca = client_ca

    async def __call__(self, host: str, port: int) -> tuple[grpc.ChannelCredentials, str]:
        """Return the credentials for an address, and the name in the other router's certificate.

        Raises TlsError or OSError.
        """
        return await asyncio.to_thread(self._credentials, host, port)

    def _credentials(self, host: str, port: int) -> tuple[grpc.ChannelCredentials, str]:
        if self._folder is None:
            presented = ssl.get_server_certificate((host, port), timeout=_PRESENTED_S).encode()
            return grpc.ssl_channel_credentials(presented), _first_name(presented)
        own = _bytes_of(self._folder / "tls.crt")
        beside = self._folder / "ca.crt"
        if self._client_ca is not None:
            roots, key = _bytes_of(self._client_ca), _bytes_of(self._folder / "tls.key")
            return grpc.ssl_channel_credentials(roots, key, own), _first_name(own)
        return grpc.ssl_channel_credentials(_bytes_of(beside) if beside.exists() else own), _first_name(own)


def _first_name(chain: bytes) -> str:
    """Return the first DNS name of a certificate, else its first IP address. Raises TlsError without either."""
    from cryptography import x509

    certificate = _certificates(chain, "--tls: tls.crt")[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    found = names.get_values_for_type(x509.DNSName) + [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    if not found:
        raise TlsError("--tls: tls.crt has neither a DNS name nor an IP address, so routers cannot verify each other")
    # Any name that a wildcard covers will do.
    return found[0].replace("*", "router", 1)


def self_signed() -> Pair:
    """Return a new private key and its self-signed certificate, both as PEM."""
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
    """The current certificate and client CA of the ports. If the files are invalid, the last valid content applies.

    ``pair`` is a key with its certificates, or a folder with tls.key and tls.crt. The constructor raises TlsError for
    invalid files.

    Both transports request the certificates at every handshake, on any thread. The class compares the contents of
    files, not time stamps. To read three small files costs less than a handshake, and works with the symbolic links of
    a mounted Secret.
    """

    def __init__(self, pair: Pair | Path, client_ca: Path | None, option: str = "--tls") -> None:
        self._pair = pair
        self._option = option
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._refused = ""
        self._current = _loaded(*self._read(), option)

    def for_port(self) -> grpc.ServerCredentials:
        """Return the gRPC credentials of one port, which report each change to gRPC once."""
        given = self.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            current = self.current()
            if current is given:
                return None
            # gRPC 1.85 frees the old configuration even if another handshake still needs it, which crashes the process.
            # In a test with a change at each handshake, the crash occurred within a thousand handshakes. During this
            # call, gRPC holds a lock that stops further handshakes. Handshakes that have passed the lock no longer need
            # the old configuration after the pause.
            time.sleep(_SETTLED_S)
            given = current
            return current.configuration()

        return grpc.dynamic_ssl_server_credentials(
            given.configuration(),
            changed,  # type: ignore[arg-type] # grpc-stubs does not declare None, which means unchanged
            require_client_authentication=self._client_ca is not None,
        )

    def current(self) -> "Loaded":
        """Read the files and return the last valid ones; log a repeated fault only once."""
        with self._lock:
            try:
                contents = self._read()
                if contents != (self._current.pair, self._current.client_ca):
                    self._current = _loaded(*contents, self._option)
                    _log.info("Loaded changed certificate files")
                self._refused = ""
            except TlsError as error:
                # This error also occurs while files are being replaced. The next handshake reads the files again.
                if str(error) != self._refused:
                    _log.warning("Rejected certificate files, keeping the last valid certificates", reason=str(error))
                self._refused = str(error)
            return self._current

    def _read(self) -> tuple[Pair, bytes | None]:
        pair = self._pair
        if isinstance(pair, Path):
            pair = _bytes_of(pair / "tls.key"), _bytes_of(pair / "tls.crt")
        return pair, None if self._client_ca is None else _bytes_of(self._client_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The valid content of the files, and the context of connections that use it."""

    pair: Pair
    client_ca: bytes | None
    context: ssl.SSLContext

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the content for gRPC."""
        return grpc.ssl_server_certificate_configuration([self.pair], self.client_ca)


def _loaded(pair: Pair, client_ca: bytes | None, option: str) -> Loaded:
    """Check the content of the files, also as gRPC does only at a handshake. Raises TlsError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    key, chain = pair
    certificates = _certificates(chain, f"{option}: tls.crt")
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    try:
        own = serialization.load_pem_private_key(key, password=None).public_key().public_bytes(*form)
        certified = certificates[0].public_key().public_bytes(*form)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{option}: tls.key or tls.crt has no valid key: {error}") from None
    if own != certified:
        raise TlsError(f"{option}: tls.key is not the key of tls.crt")
    if client_ca is not None:
        _certificates(client_ca, "--tls-client-ca")
    try:
        return Loaded(pair=pair, client_ca=client_ca, context=_context(pair, client_ca))
    except ssl.SSLError as error:
        raise TlsError(f"{option} or --tls-client-ca: OpenSSL rejects the files: {error}") from None


def _context(pair: Pair, client_ca: bytes | None) -> ssl.SSLContext:
    """Return the context of the HTTP/2 server's connections. Raises ssl.SSLError."""
    from cryptography.hazmat.primitives.serialization import Encoding

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    # Python loads a certificate's key only from a file. This file exists only in memory, and ends with the block.
    with os.fdopen(os.memfd_create("dualmap-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(b"\n".join(pair))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # As in gRPC, each certificate of the file is an authority, also without the authority that signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        authorities = _certificates(client_ca, "--tls-client-ca")
        context.load_verify_locations(cadata=b"".join(each.public_bytes(Encoding.DER) for each in authorities))
    return context


def names_of(certificate: bytes) -> tuple[bytes, ...]:
    """Return the names in a client's certificate (DER), as gRPC's ``peer_identities`` does.

    These are the alternative names, or the common name of a certificate without alternative names.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    read = x509.load_der_x509_certificate(certificate)
    try:
        alternative = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        alternative = x509.SubjectAlternativeName([])
    shown = (x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier, x509.IPAddress)
    names = tuple(str(name.value).encode() for name in alternative if isinstance(name, shown))
    common = read.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return names or tuple(str(name.value).encode() for name in common[:1])


def _certificates(content: bytes, name: str) -> "list[x509.Certificate]":
    """Return the PEM certificates of a file. Raises TlsError, also for a truncated certificate.

    gRPC would ignore a truncated last certificate.
    """
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise TlsError(f"{name}: the file has no PEM certificate: {error}") from None
    if len(found) < content.count(_CERTIFICATE_BEGINS):
        raise TlsError(f"{name}: the file ends in the middle of a certificate")
    return found


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from None
