"""Refusals as their clients see them."""

import json

import pytest

from dualmap_extproc.errors import Refused, body_too_large, invalid_body, model_not_found, no_endpoint
from dualmap_extproc.wire import answers
from extproc.envoy_messages import headers_set


def test_every_refusal_is_an_openai_error():
    refusals = [invalid_body("why", param="model"), model_not_found("x"), body_too_large(7), no_endpoint("llm/p")]

    bodies = [json.loads(refused.body())["error"] for refused in refusals]

    assert [refused.status for refused in refusals] == [400, 404, 413, 503]
    assert all(set(body) == {"message", "type", "param", "code"} for body in bodies)
    assert bodies[0]["param"] == "model"
    assert bodies[1]["code"] == "model_not_found"
    assert "7 bytes" in bodies[2]["message"]
    assert bodies[3]["type"] == "service_unavailable_error"


def test_a_long_model_name_is_not_sent_back_whole():
    assert len(model_not_found("m" * 100_000).body()) < 1000


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, None), (3, "3")])
def test_retry_after_is_sent_where_waiting_helps(retry_after_s, header):
    refused = Refused(status=429, code="queue_full", message="Too many", retry_after_s=retry_after_s)

    answer = answers.refusal(
        status=refused.status, body=refused.body(), code=refused.code, retry_after_s=refused.retry_after_s
    )

    assert headers_set(answer).get("retry-after") == header
    assert answer.immediate_response.status.code == 429
    assert json.loads(answer.immediate_response.body)["error"]["type"] == "rate_limit_error"
