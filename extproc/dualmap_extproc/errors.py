"""Requests that get no instance, as the HTTP answers their clients see.

The status codes are CONTRACT's ("Router behaviour"): 400, 404, 413, 429, 503; the bodies are OpenAI error
objects, so that OpenAI clients show the message. Envoy sends them (``stream`` wraps them for it).
"""

import math
from dataclasses import dataclass
from typing import assert_never

import orjson

from dualmap.requests import Reason, Rejection

# A client that is told to come back waits no longer than any pool lets a request wait (the schema's bound of maxWait).
_RETRY_AFTER_MAX_S = 600
_TYPE_OF_STATUS = {429: "rate_limit_error", 503: "service_unavailable_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An answer instead of an instance. ``pool`` is empty where the request never got as far as a pool.

    ``code`` is the stable word for programs and metrics, ``message`` is for people. ``retry_after_s`` is in whole
    seconds (RFC 9110 section 10.2.3).
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
    """Answer 400: the body cannot be routed."""
    return Refused(status=400, code="invalid_request", message=message, param=param)


def encoding_unsupported(encoding: str) -> Refused:
    """Answer 400: the body is compressed, and routing must read it."""
    shown = encoding if len(encoding) <= 40 else f"{encoding[:40]}..."
    return invalid_body(f"content-encoding {shown} is not supported: send the body plain")


def multipart_unsupported() -> Refused:
    """Answer 400: the body is a form, which names its model in no way that is read here."""
    return invalid_body("content-type multipart/form-data is not supported: send the body as JSON")


def model_not_found(model: str) -> Refused:
    """Answer 404: no pool serves ``model``."""
    shown = model if len(model) <= 200 else f"{model[:200]}..."
    return Refused(status=404, code="model_not_found", message=f"The model `{shown}` does not exist", param="model")


def body_too_large(limit_bytes: int) -> Refused:
    """Answer 413: the body is longer than ``limit_bytes``."""
    return Refused(status=413, code="request_too_large", message=f"The request body is larger than {limit_bytes} bytes")


def too_many_headers(limit: int) -> Refused:
    """Answer 400: the request has more than ``limit`` headers."""
    return Refused(status=400, code="headers_too_large", message=f"The request has more than {limit} headers")


def headers_too_large(limit_bytes: int) -> Refused:
    """Answer 400: the request's headers are longer than ``limit_bytes`` together."""
    message = f"The request's headers are larger than {limit_bytes} bytes"
    return Refused(status=400, code="headers_too_large", message=message)


def subset_too_large(limit_bytes: int) -> Refused:
    """Answer 400: the gateway allows so many endpoints that naming them takes more than ``limit_bytes``."""
    message = f"The gateway's list of endpoints for this request is larger than {limit_bytes} bytes"
    return Refused(status=400, code="subset_too_large", message=message)


def trailers_unsupported() -> Refused:
    """Answer 400: the message mode cannot tell Envoy which of several pools a request with trailers goes to."""
    message = "Requests with trailers cannot be routed here; send the request without trailers"
    return Refused(status=400, code="trailers_unsupported", message=message)


def no_endpoint(pool: str, *, retry_after_s: float | None = None) -> Refused:
    """Answer 503: no member of ``pool`` (empty: of any pool) may take the request; one may come where it may retry."""
    message = "No ready instance may take this request"
    wait_s = None if retry_after_s is None else _retry_after_s(retry_after_s)
    return Refused(status=503, code=Reason.NO_ENDPOINT.value, message=message, retry_after_s=wait_s, pool=pool)


def refused_by_router(pool: str, refusal: Rejection) -> Refused:
    """Answer for ``pool``'s router: 503 where no member may take the request, 429 where it may not wait (longer)."""
    match refusal.reason:
        case Reason.NO_ENDPOINT:
            return no_endpoint(pool, retry_after_s=refusal.retry_after_s)
        case Reason.QUEUE_FULL:
            message = "Too many requests are waiting for an instance already; try again later"
        case Reason.WAITED_TOO_LONG:
            message = "The request has waited too long for an instance; try again later"
        case _:
            assert_never(refusal.reason)
    wait_s = _retry_after_s(refusal.retry_after_s or 1.0)
    return Refused(status=429, code=refusal.reason.value, message=message, retry_after_s=wait_s, pool=pool)


def _retry_after_s(seconds: float) -> int:
    return math.ceil(min(max(1.0, seconds), _RETRY_AFTER_MAX_S))
