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

from dualmap_extproc.envoy.config.extensions import packed
from dualmap_extproc.envoy.config.settings import EnvoySettings
from dualmap_extproc.errors import Refused, body_too_large, invalid_body
from dualmap_extproc.names import ONLY_POOL

POOL_NOT_CONFIGURED = Refused(
    status=503,
    code="pool_not_configured",
    message="The gateway has not received the configuration of this model's pool yet",
)
ROUTER_UNREACHABLE = Refused(
    status=503, code="router_unreachable", message="The gateway cannot reach a router to find this model's pool"
)
PATH_NOT_FOUND = Refused(status=404, code="path_not_found", message="The gateway does not serve this path")
METHOD_NOT_ALLOWED = Refused(
    status=405, code="method_not_allowed", message="The gateway does not serve this path with this method"
)
PATH_INVALID = invalid_body("The path is not valid: send it without escaped slashes (%2F, %5C)")
REQUEST_TIMEOUT = Refused(
    status=408, code="request_timeout", message="The request did not arrive completely in time; send it again"
)
OVERLOADED = Refused(
    status=503, code="gateway_overloaded", message="The gateway has too little memory for this request; try again later"
)
ENGINE_UNREACHABLE = Refused(
    status=503, code="service_unavailable", message="The gateway cannot reach an instance for this request"
)

# Conditions on Envoy's response details. The detail "cluster_not_found" means that Envoy does not have the pool's
# cluster yet, or has removed it. The cluster ONLY_POOL gets only requests without a pick, and has no host if there are
# several pools. The router's error answers and direct responses already have a body.
_TOO_LARGE = 'response.code_details == "request_payload_too_large"'
_NO_CLUSTER = 'response.code_details == "cluster_not_found"'
_NO_PICK = f'response.code_details == "no_healthy_upstream" && xds.cluster_name == "{ONLY_POOL}"'
_BAD_PATH = 'response.code_details == "path_normalization_failed"'
_TOO_SLOW = 'response.code_details in ["request_header_timeout", "request_overall_timeout"]'
_OVERLOAD = 'response.code_details.contains("overload") && !response.code_details.startsWith("dualmap_")'
_UNAVAILABLE = (
    "response.code == 503 && "
    '!(response.code_details.startsWith("dualmap_") || response.code_details == "direct_response")'
)


def local_replies(settings: EnvoySettings) -> LocalReplyConfig:
    """Return the OpenAI error bodies of Envoy's own error responses, such as 413 for a body above the limit."""
    return LocalReplyConfig(
        mappers=[
            _mapper(_TOO_LARGE, body_too_large(settings.body_bytes)),
            _mapper(_NO_CLUSTER, POOL_NOT_CONFIGURED),
            _mapper(_NO_PICK, ROUTER_UNREACHABLE),
            _mapper(_BAD_PATH, PATH_INVALID),
            _mapper(_TOO_SLOW, REQUEST_TIMEOUT),
            _mapper(_OVERLOAD, OVERLOADED),
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
