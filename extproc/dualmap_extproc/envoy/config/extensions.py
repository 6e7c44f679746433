"""Small wrappers around envoy_data_plane's messages, shared by the modules that make the configuration."""

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

# The data that Envoy buffers for a connection to a router or an engine.
BUFFER_BYTES = 16 * 1024 * 1024


def packed(message: betterproto2.Message) -> Any:
    """Return a message with its type, for ``typed_config``."""
    return Any.pack(message)


def extension(name: str, message: betterproto2.Message) -> TypedExtensionConfig:
    """Return an extension of Envoy with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=packed(message))


def socket_address(address: Address) -> EnvoyAddress:
    """Return an address to listen on or to connect to; the IPv6 wildcard accepts IPv4 connections too."""
    return EnvoyAddress(
        socket_address=SocketAddress(
            address=address.host, port_value=address.port, ipv4_compat=_is_ipv6_wildcard(address)
        )
    )


def endpoint_at(address: Address) -> LbEndpoint:
    """Return one endpoint of a cluster."""
    return LbEndpoint(endpoint=Endpoint(address=socket_address(address)))


def grpc_to(cluster: str, *, timeout: timedelta | None = None) -> GrpcService:
    """Return the gRPC service of a cluster; ``timeout`` limits a call (None: a call without a limit)."""
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=cluster), timeout=timeout)


def _is_ipv6_wildcard(address: Address) -> bool:
    return address.is_ip and ipaddress.ip_address(address.host) == ipaddress.IPv6Address("::")
