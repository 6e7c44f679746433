"""Makes Envoy's listener with the connection manager, the removal of reserved headers, and the routes to the pools.

Envoy answers 4xx to invalid requests (a broken request line, headers too large, CONNECT). For an invalid chunked body,
Envoy closes the connection without an answer.
"""

from collections.abc import Sequence
from datetime import timedelta

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from dualmap.pools.claims import addressed_pools
from dualmap_extproc.envoy.config.extensions import extension, packed, socket_address
from dualmap_extproc.envoy.config.http.access_log import access_logs
from dualmap_extproc.envoy.config.http.filters import ext_proc_enabled, http_filters
from dualmap_extproc.envoy.config.http.paths import allowed_paths, refused_methods
from dualmap_extproc.envoy.config.http.replies import METHOD_NOT_ALLOWED, PATH_NOT_FOUND, direct, local_replies
from dualmap_extproc.envoy.config.settings import EnvoySettings
from dualmap_extproc.names import CLUSTER_HEADER, NO_RETRY_HEADER, ONLY_POOL, RESERVED_HEADER_PREFIXES, cluster_name

# The longest time without any byte in a request or its response. A long response that is not streamed sends no byte
# until its end.
IDLE_TIMEOUT = timedelta(hours=1)

# The longest time in which an HTTP/2 client must read the rest of an answer after Envoy has received the whole answer.
# Envoy reports the end of the request only afterwards. Envoy does not restart this time while the client reads. The
# rest may have 8 MB, so the client must read at least 67 kB a second.
_FLUSH_TIMEOUT = timedelta(minutes=2)

# The longest time without a request on a connection, for the headers of a request, and for a whole request with its
# body. The request timeout ends with the body, so queued requests and long answers do not count.
_CONNECTION_IDLE_TIMEOUT = timedelta(minutes=15)
_HEADERS_TIMEOUT = timedelta(seconds=10)
_REQUEST_TIMEOUT = timedelta(minutes=1)

# The most data that Envoy reads from a connection at once. ``overload`` can stop a client only between two reads. With
# 16 MiB, 40 clients exceeded a limit of 256 MiB by 160 MiB. With this size, they stayed 80 MiB below the limit.
_CONNECTION_BUFFER_BYTES = 256 * 1024
_STREAMS_PER_CONNECTION = 100
_STREAM_WINDOW_BYTES = 64 * 1024
_CONNECTION_WINDOW_BYTES = 1024 * 1024

_UNAVAILABLE = 503
_ROUTES = "pools"


def listener(settings: EnvoySettings) -> Listener:
    """Return the listener for HTTP/1 and HTTP/2 clients."""
    manager = Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=packed(_connection_manager(settings))
    )
    return Listener(
        name="requests",
        address=socket_address(settings.listen),
        per_connection_buffer_limit_bytes=_CONNECTION_BUFFER_BYTES,
        filter_chains=[FilterChain(filters=[manager])],
    )


def _connection_manager(settings: EnvoySettings) -> HttpConnectionManager:
    """Return the connection manager.

    HTTP/1 trailers stay disabled, because retries of a request with trailers send the body twice, and STREAMED requests
    with trailers hang. HTTP/2 has no such option; ``routes`` handles HTTP/2 trailers. HTTP/1.0 clients may omit the
    host.
    """
    return HttpConnectionManager(
        stat_prefix="requests",
        codec_type=HttpConnectionManagerCodecType.AUTO,
        http_protocol_options=Http1ProtocolOptions(
            enable_trailers=False, accept_http_10=True, default_host_for_http_10="dualmap"
        ),
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=_STREAMS_PER_CONNECTION,
            initial_stream_window_size=_STREAM_WINDOW_BYTES,
            initial_connection_window_size=_CONNECTION_WINDOW_BYTES,
        ),
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=_CONNECTION_IDLE_TIMEOUT),
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.REJECT_REQUEST,
        stream_idle_timeout=IDLE_TIMEOUT,
        stream_flush_timeout=_FLUSH_TIMEOUT,
        request_headers_timeout=_HEADERS_TIMEOUT,
        request_timeout=_REQUEST_TIMEOUT,
        early_header_mutation_extensions=[extension("envoy.http.early_header_mutation.header_mutation", _removals())],
        http_filters=http_filters(settings),
        access_log=access_logs(settings),
        local_reply_config=local_replies(settings),
        route_config=routes(settings),
    )


def _removals() -> HeaderMutation:
    """Return the mutation that removes reserved headers of clients before any filter runs.

    Without this removal, a client could choose a member by the router's headers while Envoy fails open. A client could
    also change retries and timeouts by Envoy's own headers.
    """
    return HeaderMutation(
        mutations=[
            Mutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix)))
            for prefix in (*RESERVED_HEADER_PREFIXES, "x-envoy-")
        ]
    )


def routes(settings: EnvoySettings) -> RouteConfiguration:
    """Return the routes: to the cluster that the router names, to that for requests without a pick, or to an error.

    Envoy answers 404 to all paths that are not allowed, and 405 to methods that engines do not serve at an inference
    path. Envoy does so also while it fails open, and does not call a router.

    The router may name a cluster that Envoy does not have yet, or has already removed. Envoy rejects a request to an
    absent cluster, because no other pool serves the model (``replies``). With several pools, Envoy also rejects a
    request for which the router names no cluster, because only a router can find the right pool.

    Envoy 1.40 sends a body twice if it keeps a copy for retries while ext_proc still forwards the body. Envoy sends a
    body twice while it fails open, and for requests with trailers. For requests with trailers, the router therefore
    selects the route without retries.
    """
    named = HeaderMatcher(name=CLUSTER_HEADER, present_match=True)
    unrepeatable = HeaderMatcher(name=NO_RETRY_HEADER, present_match=True)
    found = [
        *(_refused(match, methods) for methods, match in refused_methods(settings.allow_paths).items()),
        _route(settings, [named, unrepeatable], RouteAction(cluster_header=CLUSTER_HEADER)),
        _route(settings, [named], RouteAction(cluster_header=CLUSTER_HEADER, retry_policy=_retry_policy())),
        _route(settings, [], RouteAction(cluster=_unpicked(settings))),
        Route(match=RouteMatch(prefix="/"), direct_response=direct(PATH_NOT_FOUND)),
    ]
    return RouteConfiguration(name=_ROUTES, virtual_hosts=[VirtualHost(name=_ROUTES, domains=["*"], routes=found)])


def _refused(match: RouteMatch, methods: Sequence[str]) -> Route:
    """Return the route that answers 405 and names the allowed methods (RFC 9110 section 15.5.6)."""
    allow = HeaderValueOption(header=HeaderValue(key="allow", value=", ".join(methods)))
    return Route(match=match, direct_response=direct(METHOD_NOT_ALLOWED), response_headers_to_add=[allow])


def _route(settings: EnvoySettings, headers: list[HeaderMatcher], action: RouteAction) -> Route:
    match = allowed_paths(settings.allow_paths)
    match.headers = headers
    action.timeout = timedelta(0)
    action.idle_timeout = IDLE_TIMEOUT
    return Route(
        match=match,
        request_body_buffer_limit=settings.body_bytes,
        request_headers_to_remove=[CLUSTER_HEADER, NO_RETRY_HEADER],
        route=action,
        typed_per_filter_config=ext_proc_enabled(),
    )


def _unpicked(settings: EnvoySettings) -> str:
    """Return the cluster of requests without a pick: that of the only pool with clients, or one without hosts."""
    addressed = addressed_pools(settings.pools)
    return cluster_name(addressed[0].namespace, addressed[0].name) if len(addressed) == 1 else ONLY_POOL


def _retry_policy() -> RetryPolicy:
    """Return the policy that retries once, at the pick's second candidate or, without a pick, at another host.

    Envoy retries if the first host is unreachable, fails before its response begins, or answers 503 (full or starting).
    A retry is safe, because an engine keeps no state of a request except cached blocks. With one retry, a request that
    crashes engines crashes at most two engines.
    """
    return RetryPolicy(
        retry_on="connect-failure,refused-stream,reset,retriable-status-codes",
        retriable_status_codes=[_UNAVAILABLE],
        num_retries=1,
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=packed(PreviousHostsPredicate())
            )
        ],
        host_selection_retry_max_attempts=3,
    )
