"""The contents of generated Secrets: an authority, certificates that it signs, a Redis password, and a hash key.

Each function returns what a Secret must contain, given what it contains now. Valid content is kept as it is. A
certificate is replaced when half of its lifetime has passed. The authority keeps its key when its certificate is
replaced, so that certificates of before and after verify each other: a replacement interrupts nothing.

Functions import the package cryptography only when they need it, because the import takes 0.1 s.
"""

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeAlias

from dualmap_operator.settings import SecretKind

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

Content: TypeAlias = Mapping[str, bytes]
"""A Secret's values by key."""

AUTHORITY_LIFETIME: Final = timedelta(days=3650)
CERTIFICATE_LIFETIME: Final = timedelta(days=730)
# Clocks of machines differ slightly, and a certificate that is not yet valid is rejected.
_VALID_SINCE: Final = timedelta(hours=1)
_CERTIFICATE: Final = "tls.crt"
_KEY: Final = "tls.key"
_AUTHORITY: Final = "ca.crt"
_PASSWORD: Final = "password"
_HASH_KEY: Final = "key"
_PASSWORD_BYTES: Final = 32


def authority(content: Content, now: datetime) -> Content:
    """Return the authority's certificate and key. A valid key is kept, also for a new certificate."""
    key = _key(content)
    certificate = _certificate(content)
    if key is not None and certificate is not None and _is_of(certificate, key) and _is_young(certificate, now):
        return content
    key = key or _new_key()
    return _pair(_signed_authority(key, now), key)


def certificate(content: Content, signer: Content, kind: SecretKind, names: Sequence[str], now: datetime) -> Content:
    """Return a certificate for ``names`` with its key, and the certificate of the authority ``signer``.

    A server's certificate is also accepted from a client, because the routers connect to each other with mutual TLS. A
    client's certificate is not accepted from a server.
    """
    from cryptography.exceptions import InvalidSignature

    by, by_key = _certificate(signer), _key(signer)
    if by is None or by_key is None:
        raise ValueError("the authority has no valid certificate and key")
    key, found = _key(content), _certificate(content)
    if key is not None and found is not None and content.get(_AUTHORITY) == signer[_CERTIFICATE]:
        try:
            found.verify_directly_issued_by(by)
            wanted = _is_young(found, now) and _names(found) == list(names) and _purposes(found) == _purposes_of(kind)
            if _is_of(found, key) and wanted:
                return content
        except (ValueError, TypeError, InvalidSignature):
            pass  # Another authority signed it.
    key = _new_key()
    return {**_pair(_signed(key, kind, names, by, by_key, now), key), _AUTHORITY: signer[_CERTIFICATE]}


def redis(content: Content) -> Content:
    """Return a password, and the line of Redis's configuration that requires it."""
    password = content.get(_PASSWORD) or secrets.token_urlsafe(_PASSWORD_BYTES).encode()
    return {_PASSWORD: password, "redis.conf": b"requirepass " + password + b"\n"}


def hash_key(content: Content) -> Content:
    """Return the key of the routers' hashes of prompts (``dualmap router --hash-key-file``)."""
    return {_HASH_KEY: content.get(_HASH_KEY) or secrets.token_urlsafe(_PASSWORD_BYTES).encode()}


def _signed_authority(key: "EllipticCurvePrivateKey", now: datetime) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    name = _name("dualmap authority")
    return (
        _builder(name, name, key, now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _signed(
    key: "EllipticCurvePrivateKey",
    kind: SecretKind,
    names: Sequence[str],
    by: "x509.Certificate",
    by_key: "EllipticCurvePrivateKey",
    now: datetime,
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    return (
        _builder(_name(f"dualmap {kind}"), by.subject, key, now, CERTIFICATE_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_purposes_of(kind)), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(each) for each in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by_key.public_key()), critical=False)
        .sign(by_key, hashes.SHA256())
    )


def _builder(
    subject: "x509.Name", issuer: "x509.Name", key: "EllipticCurvePrivateKey", now: datetime, lifetime: timedelta
) -> "x509.CertificateBuilder":
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID_SINCE)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pair(certificate: "x509.Certificate", key: "EllipticCurvePrivateKey") -> dict[str, bytes]:
    from cryptography.hazmat.primitives import serialization

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {_CERTIFICATE: certificate.public_bytes(serialization.Encoding.PEM), _KEY: private}


def _key(content: Content) -> "EllipticCurvePrivateKey | None":
    """Return the content's key, or None if it has none that can be used."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(content.get(_KEY, b""), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _certificate(content: Content) -> "x509.Certificate | None":
    """Return the content's certificate, or None if it has none that can be read."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(content.get(_CERTIFICATE, b""))
    except ValueError:
        return None


def _is_of(certificate: "x509.Certificate", key: "EllipticCurvePrivateKey") -> bool:
    return certificate.public_key() == key.public_key()


def _is_young(certificate: "x509.Certificate", now: datetime) -> bool:
    """Return whether less than half of the certificate's lifetime has passed."""
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return since <= now < since + (until - since) / 2


def _purposes_of(kind: SecretKind) -> "list[x509.ObjectIdentifier]":
    """Return what a certificate may be used for."""
    from cryptography.x509.oid import ExtendedKeyUsageOID

    client = [ExtendedKeyUsageOID.CLIENT_AUTH]
    return [ExtendedKeyUsageOID.SERVER_AUTH, *client] if kind is SecretKind.SERVER else client


def _purposes(certificate: "x509.Certificate") -> "list[x509.ObjectIdentifier]":
    from cryptography import x509

    try:
        return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return []


def _names(certificate: "x509.Certificate") -> list[str]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return found.get_values_for_type(x509.DNSName)
