"""Tests of the header that names the member which continues a stream."""

from dataclasses import replace

import pytest

from dualmap.objects.pool_reader import read_pools
from dualmap.pools.pool import Pool
from dualmap_extproc import names
from extproc.envoy_messages import (
    BUFFERED,
    STREAMED,
    Conversation,
    chat,
    headers_set,
    mutation_of,
    pool,
    request_body,
    request_headers,
)


def continuing(*, members: int = 2) -> Pool:
    made = pool("qwen")
    return replace(made, members=made.members[:members], routing=replace(made.routing, continues=True))


def headers(made: Pool) -> tuple[dict[str, str], set[str]]:
    """Return the headers that the router sets and removes, for a client that sends the header itself."""
    talk = Conversation(made)
    forged = {names.CONTINUE_HEADER: "10.9.9.9:1"}
    answers = talk.send(request_headers(BUFFERED, **forged), request_body(chat(), end=True))
    sent: dict[str, str] = {}
    removed: set[str] = set()
    for answer in answers:
        sent |= headers_set(answer)
        removed |= set(mutation_of(answer).remove_headers)
    return sent, removed


def test_stream_names_the_second_member_as_the_one_that_continues() -> None:
    sent, _ = headers(continuing())
    chosen, second = sent[names.DESTINATION_HEADER].split(",")
    assert sent[names.CONTINUE_HEADER] == second != chosen


@pytest.mark.parametrize("made", [pool("qwen"), continuing(members=1)])
def test_stream_without_a_member_to_continue_has_no_header(made: Pool) -> None:
    sent, removed = headers(made)
    assert names.CONTINUE_HEADER not in sent
    assert names.CONTINUE_HEADER in removed


def test_pool_says_whether_streams_continue() -> None:
    document = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": "llm"},
        "spec": {"model": {"name": "qwen"}, "routing": {"continue": True}},
    }
    (read,) = read_pools(document)
    assert read.routing.continues


def test_answer_with_a_member_to_continue_does_not_remove_the_header() -> None:
    talk = Conversation(continuing())
    answers = talk.send(
        request_headers(STREAMED, **{names.CONTINUE_HEADER: "10.9.9.9:1"}), request_body(chat(), end=True)
    )
    (picked,) = (each for each in answers if names.CONTINUE_HEADER in headers_set(each))
    assert names.CONTINUE_HEADER not in mutation_of(picked).remove_headers
