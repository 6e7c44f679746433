"""Makes Envoy's TLS configuration for routers and access log sinks: the TLS socket, and the discovery files.

Envoy reads the certificate files named in its bootstrap once, at its start (measured with 1.40). Envoy reads files
named in a discovery file (SDS) again when a file is moved into their folder. The renewal of a certificate is such a
move: a rename, or a change of a mounted Kubernetes Secret. ``app.envoy_config`` writes the discovery files.
"""

from pathlib import Path, PurePosixPath

from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    DataSource,
    PathConfigSource,
    TransportSocket,
    WatchedDirectory,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CertificateValidationContextTrustChainVerification,
    CommonTlsContext,
    SdsSecretConfig,
    Secret,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryResponse

from dualmap_extproc.envoy.config.extensions import packed
from dualmap_extproc.envoy.config.settings import Tls

CLIENT_SECRET = "dualmap-client-certificate"
CA_SECRET = "dualmap-router-ca"


def tls_socket(tls: Tls) -> TransportSocket:
    """Return a TLS socket.

    Without a CA, the socket accepts any certificate, as gateways do, because a router's certificate may be self-signed.
    """
    context = CommonTlsContext(alpn_protocols=["h2"])
    if tls.certificate is not None and tls.key is not None:
        if tls.sds is None:
            context.tls_certificates = [_certificate(tls.certificate, tls.key)]
        else:
            context.tls_certificate_sds_secret_configs = [_discovered(tls.sds, CLIENT_SECRET)]
    if tls.ca is None:
        context.validation_context = CertificateValidationContext(
            trust_chain_verification=CertificateValidationContextTrustChainVerification.ACCEPT_UNTRUSTED
        )
    elif tls.sds is None:
        context.validation_context = _trust(tls.ca)
    else:
        context.validation_context_sds_secret_config = _discovered(tls.sds, CA_SECRET)
    return TransportSocket(
        name="envoy.transport_sockets.tls", typed_config=packed(UpstreamTlsContext(common_tls_context=context))
    )


def discovery_files(tls: Tls) -> dict[Path, DiscoveryResponse]:
    """Return the files for the folder ``tls.sds``: one per secret, because Envoy rejects a file with two secrets."""
    if tls.sds is None:
        return {}
    secrets = []
    if tls.certificate is not None and tls.key is not None:
        certificate = _certificate(tls.certificate, tls.key)
        certificate.watched_directory = _folder_of(tls.certificate)
        secrets.append(Secret(name=CLIENT_SECRET, tls_certificate=certificate))
    if tls.ca is not None:
        trust = _trust(tls.ca)
        trust.watched_directory = _folder_of(tls.ca)
        secrets.append(Secret(name=CA_SECRET, validation_context=trust))
    return {_file(tls.sds, secret.name): DiscoveryResponse(resources=[packed(secret)]) for secret in secrets}


def _certificate(certificate: str, key: str) -> TlsCertificate:
    return TlsCertificate(certificate_chain=DataSource(filename=certificate), private_key=DataSource(filename=key))


def _trust(ca: str) -> CertificateValidationContext:
    return CertificateValidationContext(trusted_ca=DataSource(filename=ca))


def _folder_of(path: str) -> WatchedDirectory:
    """Return a watch of the file's folder: a mounted Secret changes by a rename of ``..data``, not of the file."""
    return WatchedDirectory(path=str(PurePosixPath(path).parent))


def _discovered(folder: Path, secret: str) -> SdsSecretConfig:
    source = ConfigSource(
        resource_api_version=ApiVersion.V3, path_config_source=PathConfigSource(path=str(_file(folder, secret)))
    )
    return SdsSecretConfig(name=secret, sds_config=source)


def _file(folder: Path, secret: str) -> Path:
    return folder / f"{secret}.yaml"
