"""Small wrappers around envoy_data_plane's messages, shared by the modules that write one part of Envoy each."""

import ipaddress
from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.core.v3 import Address as EnvoyAddress
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import Endpoint, LbEndpoint
from envoy_data_plane.google.protobuf import Any

from dualmap_extproc.envoy.config.settings import Address

# The body limit of CONTRACT (16 MiB). Envoy keeps a request's whole body until the router has chosen: below this a
# BUFFERED body gets 413 from Envoy, and a body to be retried against the second candidate would be lost.
BUFFER_BYTES = 16 * 1024 * 1024


def packed(message: betterproto2.Message) -> Any:
    """Wrap a message as ``typed_config`` wants it, its type beside it."""
    return Any.pack(message)


def extension(name: str, message: betterproto2.Message) -> TypedExtensionConfig:
    """Name one of Envoy's extensions and give it its configuration."""
    return TypedExtensionConfig(name=name, typed_config=packed(message))


def socket_address(address: Address) -> EnvoyAddress:
    """Write an address to listen on or to connect to; the IPv6 wildcard takes IPv4 connections too."""
    return EnvoyAddress(
        socket_address=SocketAddress(
            address=address.host, port_value=address.port, ipv4_compat=_is_ipv6_wildcard(address)
        )
    )


def endpoint_at(address: Address) -> LbEndpoint:
    """Write one endpoint of a cluster."""
    return LbEndpoint(endpoint=Endpoint(address=socket_address(address)))


def grpc_to(cluster: str, *, timeout: timedelta | None = None) -> GrpcService:
    """Name the cluster a gRPC client of Envoy calls; ``timeout`` is the call's, none for the long-lived ones."""
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=cluster), timeout=timeout)


def _is_ipv6_wildcard(address: Address) -> bool:
    return address.is_ip and ipaddress.ip_address(address.host) == ipaddress.IPv6Address("::")
