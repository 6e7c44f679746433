"""Envoy's listener: the connection manager, what it takes off clients' requests, and the routes to the pools.

Requests that are none (a broken request line, headers too large, CONNECT...) are answered 4xx by Envoy; only chunks
that break off the chunked coding within a body end in a closed connection without an answer.
"""

from datetime import timedelta

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import Http1ProtocolOptions
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
    HttpConnectionManagerServerHeaderTransformation,
    Rds,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from dualmap.pools.pool import Pool
from dualmap_extproc.envoy.config.extensions import BUFFER_BYTES, extension, packed, socket_address
from dualmap_extproc.envoy.config.http.access_log import access_logs
from dualmap_extproc.envoy.config.http.filters import ext_proc_enabled, http_filters
from dualmap_extproc.envoy.config.http.replies import ROUTER_UNREACHABLE, direct, local_replies
from dualmap_extproc.envoy.config.settings import EnvoySettings
from dualmap_extproc.envoy.config.sources import shared_stream
from dualmap_extproc.names import CLUSTER_HEADER, NO_RETRY_HEADER, RESERVED_HEADER_PREFIXES, ROUTES, cluster_name

# How long a request may pass no byte in either direction: long answers that are not streamed are silent throughout.
IDLE_TIMEOUT = timedelta(hours=1)

_UNAVAILABLE = 503


def listener(settings: EnvoySettings) -> Listener:
    """Write the one listener; HTTP/1 and HTTP/2 clients share it."""
    manager = Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=packed(_connection_manager(settings))
    )
    return Listener(
        name="requests",
        address=socket_address(settings.listen),
        per_connection_buffer_limit_bytes=BUFFER_BYTES,
        filter_chains=[FilterChain(filters=[manager])],
    )


def _connection_manager(settings: EnvoySettings) -> HttpConnectionManager:
    """Write the connection manager.

    HTTP/1 trailers stay off: with them retries send a body twice and no-wait requests hang (HTTP/2 has no such
    switch, see ``routes``). HTTP/1.0 clients need not name a host.
    """
    return HttpConnectionManager(
        stat_prefix="requests",
        codec_type=HttpConnectionManagerCodecType.AUTO,
        http_protocol_options=Http1ProtocolOptions(
            enable_trailers=False, accept_http_10=True, default_host_for_http_10="dualmap"
        ),
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        stream_idle_timeout=IDLE_TIMEOUT,
        early_header_mutation_extensions=[extension("envoy.http.early_header_mutation.header_mutation", _removals())],
        http_filters=http_filters(settings),
        access_log=access_logs(settings),
        local_reply_config=local_replies(),
        route_config=None if settings.discover else routes(unpicked=_cluster(settings.pools[0])),
        rds=Rds(config_source=shared_stream(), route_config_name=ROUTES) if settings.discover else None,
    )


def _removals() -> HeaderMutation:
    """Take off what clients may not set, before any filter runs.

    The router's own headers would be obeyed while failing open; Envoy's own would change retries and timeouts.
    """
    return HeaderMutation(
        mutations=[
            Mutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix)))
            for prefix in (*RESERVED_HEADER_PREFIXES, "x-envoy-")
        ]
    )


def routes(*, unpicked: str | None) -> RouteConfiguration:
    """Write the routes: to the cluster that the router names, and to ``unpicked`` for requests without a name.

    A name without a cluster is a pool that Envoy has not heard of, or no longer: its requests are refused, since no
    other pool's engines serve its model (``replies``). Where None is to take what no router has picked (several pools,
    of which only a router knows the right one), that is refused too.

    Envoy 1.40 sends a body twice where a retry policy makes it keep a copy while ext_proc still passes the body on:
    with request trailers, for which the router asks for the route without retries, and while failing open.
    """
    named = HeaderMatcher(name=CLUSTER_HEADER, present_match=True)
    unrepeatable = HeaderMatcher(name=NO_RETRY_HEADER, present_match=True)
    last = (
        Route(match=RouteMatch(prefix="/"), direct_response=direct(ROUTER_UNREACHABLE))
        if unpicked is None
        else _route([], RouteAction(cluster=unpicked))
    )
    found = [
        _route([named, unrepeatable], RouteAction(cluster_header=CLUSTER_HEADER)),
        _route([named], RouteAction(cluster_header=CLUSTER_HEADER, retry_policy=_retry_policy())),
        last,
    ]
    host = VirtualHost(name=ROUTES, domains=["*"], routes=found, typed_per_filter_config=ext_proc_enabled())
    return RouteConfiguration(name=ROUTES, virtual_hosts=[host])


def _route(headers: list[HeaderMatcher], action: RouteAction) -> Route:
    action.timeout = timedelta(0)
    action.idle_timeout = IDLE_TIMEOUT
    return Route(
        match=RouteMatch(prefix="/", headers=headers),
        request_headers_to_remove=[CLUSTER_HEADER, NO_RETRY_HEADER],
        route=action,
    )


def _cluster(pool: Pool) -> str:
    return cluster_name(pool.namespace, pool.name)


def _retry_policy() -> RetryPolicy:
    """Try the next candidate once when the first answered nothing of the request; without a pick, another host.

    That is when it cannot be reached, when it dies before its response begins, and when it says 503: it is full, or not
    up. All of that can be asked again, since an engine keeps nothing of a request but cached blocks; and once only, so
    that a request that kills engines kills two.
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
