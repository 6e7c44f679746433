"""Makes the configuration that turns Envoy's own error answers into OpenAI error objects, as the router sends them.

Envoy does not change the router's own error answers. ``wire.answers`` marks these answers by their response details.
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
    status=503,
    code="pool_not_configured",
    message="The gateway has not received the configuration of this model's pool yet",
)
ROUTER_UNREACHABLE = Refused(
    status=503, code="router_unreachable", message="The gateway cannot reach a router to find this model's pool"
)
ENGINE_UNREACHABLE = Refused(
    status=503, code="service_unavailable", message="The gateway cannot reach an instance for this request"
)

# Conditions on Envoy's response details. The detail "cluster_not_found" means that Envoy does not have the pool's
# cluster yet, or has removed it. The detail "route_not_found" means that no router has sent the routes yet. A CONNECT
# request always has the detail "route_not_found". The router's error answers and direct responses already have a body.
_TOO_LARGE = 'response.code_details == "request_payload_too_large"'
_NO_CLUSTER = 'response.code_details == "cluster_not_found"'
_NO_ROUTE = 'response.code_details == "route_not_found" && request.method != "CONNECT"'
_UNAVAILABLE = (
    "response.code == 503 && "
    '!(response.code_details.startsWith("dualmap_") || response.code_details == "direct_response")'
)


def local_replies() -> LocalReplyConfig:
    """Return the bodies of Envoy's own errors: a body above the limit, and a missing cluster, route or host."""
    return LocalReplyConfig(
        mappers=[
            _mapper(_TOO_LARGE, body_too_large(BUFFER_BYTES)),
            _mapper(_NO_CLUSTER, POOL_NOT_CONFIGURED),
            _mapper(_NO_ROUTE, ROUTER_UNREACHABLE),
            _mapper(_UNAVAILABLE, ENGINE_UNREACHABLE),
        ]
    )


def direct(refused: Refused) -> DirectResponseAction:
    """Return the action of a route that answers every request with ``refused``."""
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
