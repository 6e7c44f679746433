"""Envoy's own answers in the form of the router's, an OpenAI error: for ``listeners``, which refuses with them.

The router's refusals pass untouched: they are marked by the details that ``wire.answers`` gives them.
"""

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter
from envoy_data_plane.envoy.config.core.v3 import DataSource, SubstitutionFormatString
from envoy_data_plane.envoy.config.route.v3 import DirectResponseAction
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)

from dualmap_extproc.envoy.config.extensions import BUFFER_BYTES, packed
from dualmap_extproc.errors import Refused, body_too_large

POOL_NOT_CONFIGURED = Refused(
    status=503, code="pool_not_configured", message="The gateway does not know the pool of this model yet"
)
ROUTER_UNREACHABLE = Refused(
    status=503, code="router_unreachable", message="The gateway reaches no router, which alone knows this model's pool"
)
ENGINE_UNREACHABLE = Refused(
    status=503, code="service_unavailable", message="The gateway reached no instance that could take this request"
)

# Envoy's details of the answers below. A pool that a router has and Envoy has not (yet, or no longer) is a cluster that
# is not found; without a route are all requests until a router has said what routes there are, and CONNECT always. Both
# the router's refusals and direct responses have their bodies already.
_TOO_LARGE = 'response.code_details == "request_payload_too_large"'
_NO_CLUSTER = 'response.code_details == "cluster_not_found"'
_NO_ROUTE = 'response.code_details == "route_not_found" && request.method != "CONNECT"'
_UNAVAILABLE = (
    "response.code == 503 && "
    '!(response.code_details.startsWith("dualmap_") || response.code_details == "direct_response")'
)


def local_replies() -> LocalReplyConfig:
    """Give a body to Envoy's refusal of an endless BUFFERED body, and to what else Envoy itself refuses."""
    return LocalReplyConfig(
        mappers=[
            _mapper(_TOO_LARGE, body_too_large(BUFFER_BYTES)),
            _mapper(_NO_CLUSTER, POOL_NOT_CONFIGURED),
            _mapper(_NO_ROUTE, ROUTER_UNREACHABLE),
            _mapper(_UNAVAILABLE, ENGINE_UNREACHABLE),
        ]
    )


def direct(refused: Refused) -> DirectResponseAction:
    """Answer a route's requests with this and nothing else."""
    return DirectResponseAction(
        status=refused.status, body=DataSource(inline_string=refused.body().decode()), body_format=_as_json()
    )


def _mapper(expression: str, refused: Refused) -> ResponseMapper:
    own = ExtensionFilter(
        name="envoy.access_loggers.extension_filters.cel", typed_config=packed(ExpressionFilter(expression=expression))
    )
    return ResponseMapper(
        filter=AccessLogFilter(extension_filter=own),
        status_code=refused.status,
        body=DataSource(inline_string=refused.body().decode()),
        body_format_override=_as_json(),
    )


def _as_json() -> SubstitutionFormatString:
    return SubstitutionFormatString(
        text_format_source=DataSource(inline_string="%LOCAL_REPLY_BODY%"), content_type="application/json"
    )
