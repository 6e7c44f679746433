"""The Envoy configuration of llm-d-router's stand-alone chart, with its message modes, limits and timeouts.

llm-d-router's chart `llm-d-router-standalone` runs Envoy beside the picker and without a gateway's control plane. The
destination header alone selects the engine (cluster type ORIGINAL_DST), so a list of endpoints is not possible.
"""

from typing import Any

_EXT_PROC = "envoy.filters.http.ext_proc"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_DESTINATION = "x-gateway-destination-endpoint"
# Buffers of the listener, and HTTP/2 windows for clients and the picker.
_BUFFER_BYTES = 32 << 10
_STREAM_WINDOW_BYTES = 64 << 10
_CONNECTION_WINDOW_BYTES = 1 << 20
_MANY = 40000
_PARTS = ("header", "trailer")


def bootstrap(picker: tuple[str, int]) -> dict[str, Any]:
    """Return Envoy's bootstrap with one listener on a free port; ``picker`` is the address of a picker with TLS."""
    return {
        "admin": {"address": _address("127.0.0.1", 0)},
        "static_resources": {"listeners": [_listener()], "clusters": [_engines(), _picker(*picker)]},
    }


def _listener() -> dict[str, Any]:
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "original_destination_cluster",
            "timeout": "86400s",
            "idle_timeout": "86400s",
            "upgrade_configs": [{"upgrade_type": "websocket"}],
        },
        "typed_per_filter_config": {_EXT_PROC: {"@type": _type("config.route.v3.FilterConfig"), "config": {}}},
    }
    manager = {
        "@type": _type("extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "http",
        "route_config": {"virtual_hosts": [{"name": "engines", "domains": ["*"], "routes": [route]}]},
        "http_filters": [_ext_proc(), _router()],
        "http2_protocol_options": {
            "max_concurrent_streams": 100,
            "initial_stream_window_size": _STREAM_WINDOW_BYTES,
            "initial_connection_window_size": _CONNECTION_WINDOW_BYTES,
        },
        "use_remote_address": True,
        "normalize_path": True,
        "merge_slashes": True,
        "server_header_transformation": "PASS_THROUGH",
        "common_http_protocol_options": {"headers_with_underscores_action": "REJECT_REQUEST"},
        "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
    }
    return {
        "name": "engines",
        "address": _address("127.0.0.1", 0),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _ext_proc() -> dict[str, Any]:
    modes = {f"{direction}_{part}_mode": "SEND" for direction in ("request", "response") for part in _PARTS}
    bodies = {f"{direction}_body_mode": "FULL_DUPLEX_STREAMED" for direction in ("request", "response")}
    return {
        "name": _EXT_PROC,
        "typed_config": {
            "@type": _type("extensions.filters.http.ext_proc.v3.ExternalProcessor"),
            "grpc_service": {
                "envoy_grpc": {"cluster_name": "ext_proc", "authority": "localhost:9002"},
                "timeout": "10s",
            },
            "processing_mode": {**modes, **bodies},
            "message_timeout": "1000s",
        },
    }


def _router() -> dict[str, Any]:
    config = {"@type": _type("extensions.filters.http.router.v3.Router"), "suppress_envoy_headers": True}
    return {"name": "envoy.filters.http.router", "typed_config": config}


def _engines() -> dict[str, Any]:
    return {
        "name": "original_destination_cluster",
        "type": "ORIGINAL_DST",
        "connect_timeout": "1000s",
        "lb_policy": "CLUSTER_PROVIDED",
        "circuit_breakers": {
            "thresholds": [{"max_connections": _MANY, "max_pending_requests": _MANY, "max_requests": _MANY}]
        },
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION},
    }


def _picker(address: str, port: int) -> dict[str, Any]:
    windows = {
        "initial_stream_window_size": _STREAM_WINDOW_BYTES,
        "initial_connection_window_size": _CONNECTION_WINDOW_BYTES,
    }
    return {
        "name": "ext_proc",
        "type": "STATIC",
        "connect_timeout": "86400s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": _MANY,
                    "max_pending_requests": _MANY,
                    "max_requests": _MANY,
                    "max_retries": 1024,
                }
            ]
        },
        # The health check uses the ext_proc port and the name of the ext_proc service.
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "10s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 2,
                "reuse_connection": True,
                "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
                "tls_options": {"alpn_protocols": ["h2"]},
            }
        ],
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": _type("extensions.transport_sockets.tls.v3.UpstreamTlsContext"),
                "common_tls_context": {"validation_context": {}},
            },
        },
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {
                "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
                "explicit_http_config": {"http2_protocol_options": windows},
            }
        },
        "load_assignment": {
            "cluster_name": "ext_proc",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(address, port)}}]}],
        },
    }


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.{name}"


def _address(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}
