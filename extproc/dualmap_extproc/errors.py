"""The HTTP error answers to requests that the router does not send to a member.

The status is 400, 404, 413, 429 or 503. The body is an OpenAI error object, so that OpenAI clients show the message.
The module ``request.stream`` passes the answers to Envoy, which sends them to the client.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import orjson

from dualmap.requests import Reason, Rejection

# The largest Retry-After, equal to the largest queue.maxWait that a pool may set.
_RETRY_AFTER_MAX_S = 600
_TYPE_OF_STATUS = {429: "rate_limit_error", 503: "service_unavailable_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The error answer to a request that the router does not send to a member.

    ``pool`` is empty if no pool was found for the request.
    ``code`` is for programs and metrics, and does not change between versions; ``message`` is for people.
    ``retry_after_s`` is in whole seconds (RFC 9110 section 10.2.3).
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    pool: str = ""

    def body(self) -> bytes:
        """Return the OpenAI error object as JSON."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def invalid_body(message: str, *, param: str | None = None) -> Refused:
    """Return a 400: the router cannot route a request with this body."""
    return Refused(status=400, code="invalid_request", message=message, param=param)


def encoding_unsupported(encoding: str) -> Refused:
    """Return a 400: the body is compressed, and the router cannot read compressed bodies."""
    shown = encoding if len(encoding) <= 40 else f"{encoding[:40]}..."
    return invalid_body(f"content-encoding {shown} is not supported: send the body uncompressed")


def multipart_unsupported() -> Refused:
    """Return a 400: the body is a form, and the router reads the model's name from JSON only."""
    return invalid_body("content-type multipart/form-data is not supported: send the body as JSON")


def model_not_found(model: str) -> Refused:
    """Return a 404: no pool serves ``model``."""
    shown = model if len(model) <= 200 else f"{model[:200]}..."
    return Refused(status=404, code="model_not_found", message=f"The model `{shown}` does not exist", param="model")


def model_unnamed() -> Refused:
    """Return a 404: the request names no model, and there are several pools."""
    message = "The request names no model, and there are several pools; GET /v1/models/MODEL names a model"
    return Refused(status=404, code="model_not_found", message=message, param="model")


def body_too_large(limit_bytes: int) -> Refused:
    """Return a 413: the body is longer than ``limit_bytes``."""
    return Refused(status=413, code="request_too_large", message=f"The request body is larger than {limit_bytes} bytes")


def overloaded() -> Refused:
    """Return a 503: the router has no memory or time left for this request's body; a later try may succeed."""
    message = "The router is overloaded with large request bodies; try again later"
    return Refused(status=503, code="overloaded", message=message, retry_after_s=1)


def too_many_headers(limit: int) -> Refused:
    """Return a 400: the request has more than ``limit`` headers."""
    return Refused(status=400, code="headers_too_large", message=f"The request has more than {limit} headers")


def headers_too_large(limit_bytes: int) -> Refused:
    """Return a 400: the request's headers are longer than ``limit_bytes`` together."""
    message = f"The request's headers are larger than {limit_bytes} bytes"
    return Refused(status=400, code="headers_too_large", message=message)


def subset_too_large(limit_bytes: int) -> Refused:
    """Return a 400: the gateway's list of allowed endpoints is longer than ``limit_bytes``."""
    message = f"The gateway's list of endpoints for this request is larger than {limit_bytes} bytes"
    return Refused(status=400, code="subset_too_large", message=message)


def trailers_unsupported() -> Refused:
    """Return a 400: in this message mode, the router cannot route a request with trailers to one of several pools."""
    message = "The gateway does not route requests with trailers; send the request without trailers"
    return Refused(status=400, code="trailers_unsupported", message=message)


def no_endpoint(pool: str, *, retry_after_s: float | None = None) -> Refused:
    """Return a 503: no member of ``pool`` (of any pool if empty) is a candidate.

    ``retry_after_s`` is set if a member may become a candidate soon.
    """
    message = "No ready instance can take this request"
    wait_s = None if retry_after_s is None else _retry_after_s(retry_after_s)
    return Refused(status=503, code=Reason.NO_ENDPOINT.value, message=message, retry_after_s=wait_s, pool=pool)


def refused_by_router(pool: str, refusal: Rejection) -> Refused:
    """Return the answer to a request that ``pool`` rejects.

    The status is 503 if the pool has no candidate, and 429 if the request may not queue or may not stay queued.
    """
    match refusal.reason:
        case Reason.NO_ENDPOINT:
            return no_endpoint(pool, retry_after_s=refusal.retry_after_s)
        case Reason.QUEUE_FULL:
            message = "Too many requests are queued; try again later"
        case Reason.WAITED_TOO_LONG:
            message = "The request was queued for too long; try again later"
        case _:
            assert_never(refusal.reason)
    wait_s = _retry_after_s(refusal.retry_after_s or 1.0)
    return Refused(status=429, code=refusal.reason.value, message=message, retry_after_s=wait_s, pool=pool)


def _retry_after_s(seconds: float) -> int:
    return math.ceil(min(max(1.0, seconds), _RETRY_AFTER_MAX_S))
