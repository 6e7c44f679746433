"""Helpers for the tests of requests on a stream: every message mode, and the forwarded body."""

import pytest

from dualmap_extproc.wire import ext_proc_pb2 as wire
from extproc.envoy_messages import MODES

every_mode = pytest.mark.parametrize("config", MODES.values(), ids=MODES)


def sent_back(answers: list[wire.ProcessingResponse]) -> list[tuple[bytes, bool]]:
    pieces = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    return [(piece.body, piece.end_of_stream) for piece in pieces]
