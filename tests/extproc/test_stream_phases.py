"""Tests of a stream's transition tables: each message in each phase has an outcome, and each phase is reachable."""

from collections import defaultdict

import pytest

from dualmap_extproc.request.modes import read_modes
from dualmap_extproc.request.response import Response, ResponsePhase
from dualmap_extproc.request.stream import Phase, Stream
from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import (
    DUPLEX,
    MODES,
    NO_WAIT,
    Conversation,
    chat,
    crowded_pool,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)

KINDS = {field.name for field in wire.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"].fields}
RESPONSE_KINDS = {kind for kind in KINDS if kind.startswith("response_")}
NEW, READING, QUEUED, ANSWERED, ENDED = Phase

# The phases that may follow each kind of message; None is an unknown kind of message.
NEXT = {
    NEW: {
        "request_headers": {READING, ANSWERED, ENDED},
        "request_body": {READING, QUEUED, ANSWERED, ENDED},
        "request_trailers": {ANSWERED, ENDED},
        "response_headers": {READING, ENDED},
        "response_body": {READING, ENDED},
        "response_trailers": {READING, ENDED},
        None: {ENDED},
    },
    READING: {
        "request_headers": {READING, ANSWERED, ENDED},
        "request_body": {READING, QUEUED, ANSWERED, ENDED},
        "request_trailers": {QUEUED, ANSWERED, ENDED},
        "response_headers": {READING, ENDED},
        "response_body": {READING, ENDED},
        "response_trailers": {READING, ENDED},
        None: {ENDED},
    },
    QUEUED: {
        "request_headers": {READING, ANSWERED, ENDED},
        "request_body": {QUEUED},
        "request_trailers": {QUEUED},
        "response_headers": {ANSWERED, ENDED},
        "response_body": {ANSWERED, ENDED},
        "response_trailers": {ANSWERED, ENDED},
        None: {ENDED},
    },
    ANSWERED: {
        "request_headers": {READING, ANSWERED, ENDED},
        "request_body": {ANSWERED},
        "request_trailers": {ANSWERED},
        "response_headers": {ANSWERED, ENDED},
        "response_body": {ANSWERED, ENDED},
        "response_trailers": {ANSWERED, ENDED},
        None: {ENDED},
    },
    ENDED: {kind: {ENDED} for kind in (*sorted(KINDS), None)},
}


def messages(config) -> list[wire.ProcessingRequest]:
    """Return messages of every kind, in each variant that may lead to a different phase."""
    made = [
        request_headers(config),
        request_headers(config, end=True),
        request_headers(config, method="GET", end=True),
        request_body(chat(), end=False),
        request_body(chat()),
        request_body(b""),
        request_trailers(),
        response_headers(),
        response_headers(end=True),
        response_body(b""),
        response_body(),
        response_body(end=True),
        response_trailers(),
        wire.ProcessingRequest(),
    ]
    if config is not None:
        for message in made:
            message.protocol_config.CopyFrom(config)
    return made


def stream_after(sent: list[wire.ProcessingRequest], fleet="idle") -> Stream:
    """Return a stream that has received messages; its pool's only member is idle, busy, or missing."""
    first = Conversation(crowded_pool(members=0 if fleet == "missing" else 1))
    if fleet == "busy":
        first.send(request_headers(NO_WAIT), request_body(chat("long " * 1000)))
    talk = Conversation(picker=first.picker)
    talk.send(*sent)
    return talk.stream


def explored(config, fleet: str) -> dict[tuple[Phase, str | None], set[Phase]]:
    """Return the next phase for each phase and message, found with one path per phase and last message."""
    follow: dict[tuple[Phase, str | None], set[Phase]] = defaultdict(set)
    known = set()
    paths: list[tuple[Phase, list[wire.ProcessingRequest]]] = [(NEW, [])]
    while paths:
        phase, path = paths.pop()
        for message in messages(config):
            kind = message.WhichOneof("request")
            after = stream_after([*path, message], fleet).phase
            follow[phase, kind].add(after)
            if (after, kind) not in known:
                known.add((after, kind))
                paths.append((after, [*path, message]))
    return follow


def test_stream_table_has_a_step_per_message_and_phase():
    assert set(Stream.STEPS) == set(Phase)
    assert all(set(row) == {*KINDS, None} for row in Stream.STEPS.values())


def test_stream_phase_changes_equal_the_documented_list():
    seen: dict[Phase, dict[str | None, set[Phase]]] = {phase: defaultdict(set) for phase in Phase}
    for config in MODES.values():
        for fleet in ("idle", "busy", "missing"):
            for (phase, kind), after in explored(config, fleet).items():
                seen[phase][kind] |= after

    for phase in Phase:
        assert seen[phase] == NEXT[phase]


@pytest.mark.parametrize("message", messages(None), ids=lambda each: str(each.WhichOneof("request")))
def test_closed_stream_answers_no_message(message):
    talk = Conversation()
    talk.close()

    assert talk.send(message) == []
    assert talk.stream.phase is ENDED


def test_ended_stream_requests_the_transport_to_close():
    assert [stream_after(sent).ended for sent in ([], [wire.ProcessingRequest()])] == [False, True]


def test_response_table_has_a_step_per_message_until_the_end():
    assert set(Response.STEPS) == set(ResponsePhase) - {ResponsePhase.ENDED}
    assert all(set(row) == RESPONSE_KINDS for row in Response.STEPS.values())


AWAITED, STREAMING, OVER = ResponsePhase
RESPONSE_NEXT = {
    (AWAITED, "response_headers"): {AWAITED, OVER},
    (AWAITED, "response_body"): {AWAITED, STREAMING, OVER},
    (AWAITED, "response_trailers"): {AWAITED, OVER},
    (STREAMING, "response_headers"): {STREAMING},
    (STREAMING, "response_body"): {STREAMING},
    (STREAMING, "response_trailers"): {STREAMING},
}


def test_response_phase_changes_equal_the_documented_list():
    seen: dict[tuple[ResponsePhase, str], set[ResponsePhase]] = defaultdict(set)
    for config in (NO_WAIT, DUPLEX):
        for path in ([], [response_body()]):
            for message in messages(None):
                talk = Conversation()
                response = Response(talk.picker, talk.limits, read_modes(config), 0.0)
                for each in path:
                    response.receive(1.0, each)
                before, kind = response.phase, message.WhichOneof("request")
                if before is not OVER and kind in RESPONSE_KINDS:
                    response.receive(2.0, message)
                    seen[before, kind].add(response.phase)

    assert seen == RESPONSE_NEXT
