"""The response half of a stream: answers to response messages, and reports to the picker on how the request ends.

Except in FULL_DUPLEX_STREAMED, the router ends the stream at the first chunk of the response. Envoy then sends the
other chunks to the client without the router, and the access log reports the end of the request to the picker.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum, auto
from typing import ClassVar, TypeAlias

from dualmap_extproc.names import DECISION_HEADER, SERVED_HEADER
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.head import read_response
from dualmap_extproc.request.modes import Modes, ResponseBody
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import answers, chunks
from dualmap_extproc.wire import ext_proc_pb2 as wire

_Step: TypeAlias = Callable[["Response", float, wire.ProcessingRequest], list[bytes]]


class ResponsePhase(StrEnum):
    """The progress of a response."""

    AWAITED = auto()
    """No byte of the body has arrived."""
    STREAMING = auto()
    """The first chunk has arrived, and the router sends every chunk back (FULL_DUPLEX_STREAMED)."""
    ENDED = auto()
    """The router needs no more of the response; the stream ends."""


# Module names are faster than members of an enum (``modes``).
_AWAITED, RESPONSE_STREAMING, RESPONSE_ENDED = ResponsePhase
_WHOLE, _DUPLEX = ResponseBody.WHOLE, ResponseBody.DUPLEX
_FINISHED, _ABORTED = Ending.FINISHED, Ending.ABORTED


class Response:
    """The response to one request, and the request's id in the picker between its pick and its end.

    ``request_id`` is the request's id in the picker. The id is empty before the pick, after the end, and for a request
    without a prompt. ``destination`` lists the endpoints of the pick. ``receipt`` is the value of the decision header,
    or None without this header. ``ending`` is the request's ending by the response's status.
    """

    __slots__ = (
        *("_alive_due_s", "_limits", "_modes", "_picker", "_whole"),
        *("destination", "ending", "phase", "receipt", "request_id"),
    )

    def __init__(self, picker: Picker, limits: Limits, modes: Modes, arrived_s: float) -> None:
        self._picker = picker
        self._limits = limits
        self._modes = modes
        self._alive_due_s = arrived_s + limits.alive_interval_s
        # Whether the body arrives in one piece, so that its first chunk is not the first token.
        self._whole = modes.response_body is _WHOLE
        self.phase = _AWAITED
        self.ending = _ABORTED
        self.request_id = self.destination = ""
        self.receipt: str | None = None

    def receive(self, now: float, message: wire.ProcessingRequest) -> list[bytes]:
        """Return the answers to a response message."""
        return self.STEPS[self.phase][message.WhichOneof("request")](self, now, message)

    def receive_chunk(self, now: float, data: bytes | memoryview) -> bytes | None:
        """Process an encoded message if it is a chunk that needs no protobuf; return its only answer, encoded.

        Else, return None: ``receive`` must process the message.
        """
        if len(data) > self._limits.chunk_bytes:
            return None
        echoed = chunks.echo(data)
        if echoed is None:
            return None
        answer, last = echoed
        if self.phase is _AWAITED and not chunks.is_empty(data):
            self._begin_body(now)
        self._note_chunk(now, last=last)
        return answer if self._modes.response_body is _DUPLEX else self._answer_first(last=last)

    def end(self, now: float, ending: Ending) -> None:
        """Report the end of the request to the picker, if it is not reported yet."""
        request_id, self.request_id = self.request_id, ""
        if not request_id:
            return
        match ending:
            case Ending.FINISHED:
                self._picker.finished(now, request_id, None)
            case Ending.REJECTED:
                self._picker.rejected(now, request_id)
            case Ending.ABORTED:
                self._picker.aborted(now, request_id)
            case Ending.FAILED:
                self._picker.failed(now, request_id)

    def _on_headers(self, now: float, message: wire.ProcessingRequest) -> list[bytes]:
        headers = message.response_headers
        self.ending, whole = read_response(headers.headers, self.ending)
        self._whole |= whole
        served = answers.served_endpoint(message.metadata_context) if message.HasField("metadata_context") else ""
        if served and self.request_id:
            if served not in self.destination.split(","):
                self._picker.not_followed(now, self.request_id)
            self._picker.served(now, self.request_id, served)
        if headers.end_of_stream or self.ending is not _FINISHED:
            self.end(now, self.ending)
        if headers.end_of_stream:
            self._leave()
        values = {} if self.receipt is None else {DECISION_HEADER: self.receipt}
        if self._picker.gateway.conformance_hooks:
            values[SERVED_HEADER] = served or "not reported"
        return [answers.response_headers(values)]

    def _begin_body(self, now: float) -> None:
        """Report the first byte of the body."""
        self.phase = RESPONSE_STREAMING
        if self._whole:
            self.end(now, _FINISHED)
        elif self.request_id:
            self._picker.first_token(now, self.request_id)

    def _on_chunk(self, now: float, message: wire.ProcessingRequest) -> list[bytes]:
        chunk = message.response_body
        body, last = chunk.body, chunk.end_of_stream
        if self.phase is _AWAITED and body:
            self._begin_body(now)
        self._note_chunk(now, last=last)
        if self._modes.response_body is _DUPLEX:
            return list(answers.response_pieces(body, self._limits.chunk_bytes, last=last))
        return [self._answer_first(last=last)]

    def _answer_first(self, *, last: bool) -> bytes:
        """Answer a chunk that Envoy does not expect back. The first one ends the stream."""
        if self.phase is RESPONSE_STREAMING or last:
            # The other chunks do not pass through the router, so the access log reports the end of this request.
            self.request_id = ""
            self.phase = RESPONSE_ENDED
        return answers.PLAIN_RESPONSE_BODY

    def _note_chunk(self, now: float, *, last: bool) -> None:
        """Report the end of the request with its last chunk, and from time to time that it continues."""
        if last:
            self.end(now, _FINISHED)
        elif now >= self._alive_due_s and self.request_id:
            self._alive_due_s = now + self._limits.alive_interval_s
            self._picker.heard(now, self.request_id)

    def _on_trailers(self, now: float, _: wire.ProcessingRequest) -> list[bytes]:
        self.end(now, self.ending)
        self._leave()
        return [answers.PLAIN_RESPONSE_TRAILERS]

    def _leave(self) -> None:
        """End the stream, except in FULL_DUPLEX_STREAMED, where Envoy ends it."""
        if self._modes.response_body is not _DUPLEX:
            self.phase = RESPONSE_ENDED

    STEPS: ClassVar[Mapping[ResponsePhase, Mapping[str | None, _Step]]] = {
        _AWAITED: {
            "response_headers": _on_headers,
            "response_body": _on_chunk,
            "response_trailers": _on_trailers,
        },
        RESPONSE_STREAMING: {
            "response_headers": _on_headers,
            "response_body": _on_chunk,
            "response_trailers": _on_trailers,
        },
    }
