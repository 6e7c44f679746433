"""Tests of the error responses to clients."""

import json
from math import inf

import pytest

from dualmap.requests import Reason, Rejection
from dualmap_extproc.errors import (
    Refused,
    body_too_large,
    invalid_body,
    model_not_found,
    no_endpoint,
    refused_by_router,
)
from dualmap_extproc.wire import answers
from extproc.envoy_messages import decoded, headers_set


def test_rejected_request_body_is_an_openai_error():
    refusals = [invalid_body("why", param="model"), model_not_found("x"), body_too_large(7), no_endpoint("llm/p")]

    bodies = [json.loads(refused.body())["error"] for refused in refusals]

    assert [refused.status for refused in refusals] == [400, 404, 413, 503]
    assert all(set(body) == {"message", "type", "param", "code"} for body in bodies)
    assert bodies[0]["param"] == "model"
    assert bodies[1]["code"] == "model_not_found"
    assert "7 bytes" in bodies[2]["message"]
    assert bodies[3]["type"] == "service_unavailable_error"


def test_model_not_found_error_truncates_a_long_name():
    assert len(model_not_found("m" * 100_000).body()) < 1000


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, None), (3, "3")])
def test_rejection_sends_retry_after_if_set(retry_after_s, header):
    refused = Refused(status=429, code="queue_full", message="Too many", retry_after_s=retry_after_s)

    (answer,) = decoded(
        [
            answers.refusal(
                status=refused.status, body=refused.body(), code=refused.code, retry_after_s=refused.retry_after_s
            )
        ]
    )

    assert headers_set(answer).get("retry-after") == header
    assert answer.immediate_response.status.code == 429
    assert json.loads(answer.immediate_response.body)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("retry_after_s", "said"), [(None, 1), (0.0, 1), (0.2, 1), (1.0, 1), (1.1, 2), (29.5, 30), (1e9, 600), (inf, 600)]
)
@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.WAITED_TOO_LONG])
def test_queue_rejection_sets_retry_after_in_whole_seconds(reason, retry_after_s, said):
    refused = refused_by_router("llm/p", Rejection(request_id="r", reason=reason, retry_after_s=retry_after_s))

    assert (refused.status, refused.code, refused.pool) == (429, reason.value, "llm/p")
    assert refused.retry_after_s == said
    assert isinstance(refused.retry_after_s, int)


def test_no_endpoint_error_without_time_sets_no_retry_after():
    refused = refused_by_router("llm/p", Rejection(request_id="r", reason=Reason.NO_ENDPOINT))

    assert refused == no_endpoint("llm/p")
    assert refused.retry_after_s is None


def test_no_endpoint_error_with_time_sets_retry_after():
    refused = refused_by_router("llm/p", Rejection(request_id="r", reason=Reason.NO_ENDPOINT, retry_after_s=2.5))

    assert (refused.status, refused.code, refused.retry_after_s) == (503, "no_endpoint", 3)
