"""The state machine of one ext_proc stream: messages from Envoy in, answers out.

The state machine does no I/O and reads no clock: ``transport`` passes messages to it and writes its answers. ``picker``
picks the member. ``Stream.STEPS`` is the transition table for request messages. ``response`` handles response messages.
``modes`` describes the modes in which Envoy sends bodies and expects answers.

The stream answers a queued request when the picker dispatches or rejects it. ``deliver`` then sends the answers to all
messages of the request in the usual order, including messages that arrived while the request was queued. A request with
a large body waits in the same way until ``reading`` has read the body. The stream calls the picker after that.

The bytes of a body count as buffered (``buffered``) until the body is read or, in ``DUPLEX``, written to Envoy. If
``buffered`` evicts a body, its stream answers through ``deliver``.

In ``NO_WAIT``, if an HTTP/2 request has trailers, Envoy does not send the body's end or the trailers before the router
has answered the headers. The router therefore decides after a time without messages (``on_deadline``):

- A body that looks complete counts as a body with trailers after ``Limits.silence_s``.

- The router rejects a body that cannot become a JSON object after ``Limits.pause_s``.

- Any other body may come from a slow client. The router decides by the body after ``Limits.stalled_s``, before Envoy's
  timeout. After its timeout, Envoy would forward the request without a pick.

If a route has a retry policy, Envoy 1.40 sends the body of a request with trailers twice. The pick of such a request
therefore selects a route without retries.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum, auto
from typing import ClassVar, TypeAlias

from dualmap.prompts.prompt import Prompt
from dualmap_extproc.errors import Refused, body_too_large, no_endpoint, overloaded, trailers_unsupported
from dualmap_extproc.names import ECHO_HEADER, FAIRNESS_HEADER, SELECTION_HEADER, SERVED_HEADER
from dualmap_extproc.request.body import ReceivedBody, read_body
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.client import NAME_CHARACTERS
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.head import RequestHead
from dualmap_extproc.request.modes import DEFAULT_MODES, DUPLEX, NO_WAIT, WAITING, RequestBody, ResponseBody, read_modes
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.reading import INLINE_BYTES, LargeBody, Reader, read_small
from dualmap_extproc.request.response import RESPONSE_ENDED, RESPONSE_STREAMING, Response
from dualmap_extproc.request.tokens import Pending, Tokens, TokenSources
from dualmap_extproc.request.unanswered import Unanswered
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import answers, chunks
from dualmap_extproc.wire import ext_proc_pb2 as wire

_Answers: TypeAlias = list[bytes]
_Step: TypeAlias = Callable[["Stream", float, wire.ProcessingRequest], _Answers]


class Phase(StrEnum):
    """The progress of a stream's request."""

    NEW = auto()
    """No message has arrived on the stream."""
    READING = auto()
    """The request is arriving; no member is chosen."""
    QUEUED = auto()
    """The request is complete: the router reads its large body, or the request waits for a member."""
    ANSWERED = auto()
    """The router has picked a member, or Envoy itself has answered the client."""
    ENDED = auto()
    """The stream has ended, or the transport must end it. The router answers no further messages."""


# Module names are faster than members of an enum (``modes``).
_NEW, _READING, _QUEUED, _ANSWERED, _ENDED = Phase
_WHOLE_BODY, _NO_BODY = RequestBody.WHOLE, RequestBody.NONE


def _row(
    *, headers: _Step, body: _Step, trailers: _Step, response: _Step, unknown: _Step
) -> Mapping[str | None, _Step]:
    """Return a row of the transition table: the step for each kind of message (None: an unknown kind)."""
    return {
        "request_headers": headers,
        "request_body": body,
        "request_trailers": trailers,
        **dict.fromkeys(("response_headers", "response_body", "response_trailers"), response),
        None: unknown,
    }


class Stream:
    """The state machine of one ext_proc stream.

    ``receive`` raises no error for any messages in any order, only for bytes that are no message. ``echo`` is a shorter
    way for chunks of responses.
    The transport calls ``on_deadline`` at ``deadline_s`` if no message arrives before, ``written`` after it has written
    all answers, and ``close`` after the stream's end. The stream passes answers without a preceding message to
    ``deliver``, during a call of the picker, the reader or another stream. If ``ended`` is true, the transport must
    end the stream. ``decided`` is true after the stream has read a body itself and called the picker. ``reader``
    reads large bodies; without a reader, the stream reads them. ``held_bytes`` is the number of bytes that
    ``buffered`` counts for the stream. ``peer`` is the identity of the Envoy that opened the stream.
    """

    # Slots make the access to attributes faster: 2 us per request.
    __slots__ = (
        *("_arrived_s", "_body", "_buffered", "_cancel_reading", "_deliver", "_head", "_heard_s", "_hooks"),
        *("_limits", "_max_body_bytes", "_modes", "_peer", "_picker", "_reader", "_response", "_retries", "_tokens"),
        "_unanswered",
        *("deadline_s", "decided", "held_bytes", "phase"),
    )

    def __init__(
        self,
        picker: Picker,
        limits: Limits,
        deliver: Callable[[_Answers], None],
        buffered: BufferedBodies,
        reader: Reader | None = None,
        *,
        tokens: TokenSources | None = None,
        peer: str = "",
    ) -> None:
        self._picker = picker
        self._hooks = picker.gateway.conformance_hooks
        self._peer = peer
        self._limits = limits
        self._deliver = deliver
        self._buffered = buffered
        self._reader = reader
        self._tokens = tokens
        self._cancel_reading: Callable[[], None] | None = None
        self.held_bytes = 0
        self._modes = DEFAULT_MODES
        self.phase = _NEW
        self.deadline_s: float | None = None
        self.decided = False

    @property
    def ended(self) -> bool:
        """Whether the transport must end the stream."""
        return self.phase is _ENDED

    def receive(self, now: float, data: bytes | memoryview) -> _Answers:
        """Process an encoded message from Envoy; return the answers to send, encoded and in order.

        Nothing refers to ``data`` afterwards. Raises DecodeError if it is no message. The usual chunks of bodies need
        no protobuf.
        """
        self.deadline_s = None
        if self.phase is _ANSWERED:
            answer = self._response.receive_chunk(now, data)
            if answer is not None:
                if self._response.phase is RESPONSE_ENDED:
                    self.phase = _ENDED
                return [answer]
        elif self.phase is _READING:
            chunk = chunks.request_chunk(data)
            if chunk is not None:
                return self._read_chunk(now, *chunk)
        # The stubs of protobuf do not know memoryviews.
        message = wire.ProcessingRequest.FromString(data)  # type: ignore[arg-type]
        return self._take(now, message)

    def echo(self, now: float, data: bytes | memoryview) -> bytes | None:
        """Process an encoded message if it is a chunk of a response after the first one; return its only answer.

        Else, return None: ``receive`` must process the message. Every output token of a gateway in FULL_DUPLEX_STREAMED
        passes this method.
        """
        if self.phase is not _ANSWERED or self._response.phase is not RESPONSE_STREAMING:
            return None
        return self._response.receive_chunk(now, data)

    def _take(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        return self.STEPS[self.phase][message.WhichOneof("request")](self, now, message)

    def on_deadline(self, now: float) -> _Answers:
        """Process the deadline: decide by the received messages, unless the body may continue (see the module)."""
        self.deadline_s = None
        stalled_s = self._heard_s + self._limits.stalled_s
        if now < stalled_s and self._expects_prompt() and self._body.may_continue(self._head.content_length):
            self.deadline_s = stalled_s
            return []
        return self._decide(now, retries=False)

    def written(self) -> None:
        """Take that all answers are written: a body that went back to Envoy is no longer stored."""
        if self.held_bytes and self.phase is _ANSWERED:
            self._buffered.release(self)

    def evict(self, now: float) -> None:
        """Refuse a request whose body is arriving, since the router stores too many bytes."""
        self.deadline_s = None
        self._deliver(self._refuse(now, overloaded()))

    def close(self, now: float, *, cancelled: bool) -> None:
        """Report the end of the stream to the picker. ``cancelled`` is true if Envoy or its client cancelled.

        After a client has disconnected, a stream can also end without an error. If Envoy sends the response's body, an
        end of the stream before the body's end therefore counts as aborted.
        """
        if self.phase is not _NEW:
            cut = cancelled or self._modes.response_body is not ResponseBody.NONE
            self._end_request(now, Ending.ABORTED if cut else self._response.ending)
        self.phase = _ENDED

    def _begin(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Process the headers of a stream's first request. The first message contains Envoy's modes."""
        self._read_modes(message)
        self._expect_request(now)
        return self._read_headers(now, message)

    def _begin_without_headers(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Process a first message that is not request headers, as part of a request without headers."""
        self._read_modes(message)
        self._expect_request(now)
        return self._take(now, message)

    def _read_modes(self, message: wire.ProcessingRequest) -> None:
        if message.HasField("protocol_config"):
            self._modes = read_modes(message.protocol_config)

    def _begin_again(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Process the headers of another request; abort the previous request on the stream."""
        self._end_request(now, Ending.ABORTED)
        self._expect_request(now)
        return self._read_headers(now, message)

    def _expect_request(self, now: float) -> None:
        self.phase = _READING
        self.decided = False
        self._arrived_s = self._heard_s = now
        self._head = RequestHead()
        self._body = ReceivedBody()
        self._unanswered = Unanswered()
        self._response = Response(self._picker, self._limits, self._modes, now)

    def _read_headers(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        headers, head, limits = message.request_headers, self._head, self._limits
        head.read(headers.headers, limits, self._picker.kept_headers)
        head.read_subset(message, limits)
        if head.unacceptable is not None:
            return self._refuse(now, head.unacceptable)
        if not self._picker.knows_pools:
            return self._refuse(now, no_endpoint(""))
        if head.content_length > self._picker.max_body_bytes:
            return self._refuse(now, body_too_large(self._picker.max_body_bytes))
        complete = headers.end_of_stream or self._modes.request_body is _NO_BODY
        if head.unreadable is not None and not complete and self._expects_prompt():
            return self._refuse(now, head.unreadable)
        if complete:
            self._unanswered.headers = True
            return self._decide(now)
        if self._modes.answering is WAITING:
            return [answers.without_headers(answers.PLAIN_REQUEST_HEADERS, head.strip)]
        self._unanswered.headers = True
        if self._modes.answering is NO_WAIT:
            self.deadline_s = now + (limits.pause_s if self._expects_prompt() else limits.silence_s)
        return []

    def _read_body(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Process a body message that has other fields than a chunk, or an unusual encoding."""
        self._head.read_subset(message, self._limits)
        if self._head.unacceptable is not None:
            return self._refuse(now, self._head.unacceptable)
        body = message.request_body
        return self._read_chunk(now, body.body, body.end_of_stream)

    def _read_chunk(self, now: float, chunk: bytes, last: bool) -> _Answers:
        """Process the next chunk of a body: decide after the last chunk, or answer if the mode requires an answer."""
        limits, answering = self._limits, self._modes.answering
        self._body.add(chunk)
        if self._body.size_bytes > self._picker.max_body_bytes:
            return self._refuse(now, body_too_large(self._picker.max_body_bytes))
        if last or self._modes.request_body is _WHOLE_BODY:
            self._unanswered.bodies += 1
            return self._decide(now)
        if not self._buffered.hold(now, self, len(chunk)):
            return self._refuse(now, overloaded())
        if not self._unanswered.headers and answering is not DUPLEX:
            return [answers.PLAIN_REQUEST_BODY]
        self._unanswered.bodies += 1
        if answering is NO_WAIT:
            self._heard_s = now
            complete = self._body.scan(chunk, self._head.content_length)
            self.deadline_s = now + (limits.silence_s if complete else limits.pause_s)
        return []

    def _read_trailers(self, now: float, _: wire.ProcessingRequest) -> _Answers:
        """Process trailers, which end a body; reject the request if no other answer could contain the pick."""
        modes = self._modes
        waiting = modes.answering is WAITING
        if waiting and modes.request_body is not _WHOLE_BODY and len(self._picker.pools) > 1:
            # An answer to trailers cannot set headers, so it cannot name a cluster. Without a named cluster, Envoy
            # would answer 503.
            return self._refuse(now, trailers_unsupported())
        self._unanswered.trailers = True
        return self._decide(now, retries=waiting)

    def _owe_body(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Process a body message after the decision; answer it together with the queued request."""
        if not self._accepts(message, self._picker.max_body_bytes):
            return self._break_off(now, self._picker.max_body_bytes)
        if self._modes.answering is not DUPLEX:
            self._unanswered.bodies += 1
        return []

    def _owe_trailers(self, _: float, __: wire.ProcessingRequest) -> _Answers:
        """Process trailers after the end of the body; answer them together with the queued request."""
        self._unanswered.trailers = True
        return []

    def _answer_late_body(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Answer a body message after the pick. In FULL_DUPLEX_STREAMED, Envoy expects no answer."""
        if not self._accepts(message, self._max_body_bytes):
            return self._break_off(now, self._max_body_bytes)
        return [] if self._modes.answering is DUPLEX else [answers.PLAIN_REQUEST_BODY]

    def _accepts(self, message: wire.ProcessingRequest, max_body_bytes: int) -> bool:
        """Count the bytes of a body message after the decision; return whether the body is within the limit."""
        self._body.size_bytes += len(message.request_body.body)
        return self._body.size_bytes <= max_body_bytes

    def _break_off(self, now: float, max_body_bytes: int) -> _Answers:
        """Abort the request, whose body has grown above the limit after the decision.

        Envoy closes its connection to the engine, and answers the client unless the response has begun.
        """
        request_id = self._response.request_id
        self._end_request(now, Ending.ABORTED)
        return self._refuse(now, body_too_large(max_body_bytes), request_id)

    def _answer_late_trailers(self, _: float, __: wire.ProcessingRequest) -> _Answers:
        return [answers.PLAIN_REQUEST_TRAILERS]

    def _leave_queue(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        """Abort the queued request, because Envoy itself has answered the client, or has sent an unexpected message."""
        self._end_request(now, Ending.ABORTED)
        self.phase = _ANSWERED
        self._max_body_bytes = self._picker.max_body_bytes
        return self._take(now, message)

    def _on_response(self, now: float, message: wire.ProcessingRequest) -> _Answers:
        out = self._response.receive(now, message)
        if self._response.phase is RESPONSE_ENDED:
            self.phase = _ENDED
        return out

    def _stop(self, _: float, __: wire.ProcessingRequest) -> _Answers:
        """End the stream after an unknown kind of message; Envoy continues the request without the router."""
        self.phase = _ENDED
        return []

    def _ignore(self, _: float, __: wire.ProcessingRequest) -> _Answers:
        return []

    def _expects_prompt(self) -> bool:
        return self._head.expects_prompt(self._body.size_bytes)

    def _decide(self, now: float, *, retries: bool = True) -> _Answers:
        """Request the pick and return the answers with the pick; return no answers if the request is queued.

        ``retries`` is true if Envoy may retry the request.
        """
        self._retries = retries
        if self._hooks and (chosen := self._head.kept.get(SELECTION_HEADER)):
            self._head.subset = answers.endpoints_of(chosen)
        chunks = self._body.take()
        if self._modes.answering is DUPLEX:
            chunks = (b"".join(chunks),)
            self._unanswered.body = chunks[0]
            if not self._hold_whole(now):
                return self._refuse(now, overloaded())
        if self._modes.request_body is _NO_BODY or not self._expects_prompt():
            return self._after_pick(self._picker.pick_bodiless(now, self._head.subset, model=self._head.named_model))
        prompt: Prompt | Refused | None = None
        if self._reader is None:
            prompt = read_body(b"".join(chunks), self._head.api)
        elif self._body.size_bytes <= INLINE_BYTES:
            prompt = read_small(b"".join(chunks), self._head.api)
        if prompt is None:
            return self._read_elsewhere(now, chunks)
        return self._after_read(now, now, prompt, chunks)

    def _hold_whole(self, now: float) -> bool:
        """Count the rest of a complete body as buffered; return False if the request must be refused instead."""
        held = self._buffered.hold(now, self, self._body.size_bytes - self.held_bytes)
        self._buffered.arrived(self)
        return held

    def _after_read(
        self, now: float, began_s: float, prompt: Prompt | Refused, chunks: tuple[bytes, ...], *, small: bool = True
    ) -> _Answers:
        """Ask the picker, perhaps after the token ids are there. The decision began at ``began_s``.

        ``small`` is true for a body that this stream has read itself.
        """
        tokens: Tokens | Pending | None = None
        pool = None if self._tokens is None or isinstance(prompt, Refused) else self._picker.pool_of(prompt.model)
        # The ids of a client are never taken for those of its text.
        asks = isinstance(prompt, Prompt) and not prompt.exact and not prompt.names_ids
        if pool is not None and self._tokens is not None and isinstance(prompt, Prompt) and asks:

            def done(done_s: float, found: Tokens | None) -> None:
                self._cancel_reading = None
                self._deliver_pick(done_s, began_s, prompt, found)

            tokens = self._tokens.tokens(pool, prompt, chunks, self._head.api, small=small, done=done)
        if isinstance(tokens, Pending):
            self._cancel_reading = tokens.cancel
            if small and not self._hold_whole(now):
                return self._refuse(now, overloaded())
            self.phase = _QUEUED
            return []
        self.decided = small
        return self._after_pick(self._pick(now, prompt, tokens))

    def _deliver_pick(self, now: float, began_s: float, prompt: Prompt | Refused, tokens: Tokens | None) -> None:
        """Ask the picker without a message from Envoy, and deliver the answers."""
        outcome = self._pick(now, prompt, tokens)
        self._picker.decided(now, now - began_s)
        answers = self._after_pick(outcome)
        if answers:
            self._deliver(answers)

    def _pick(self, now: float, prompt: Prompt | Refused, tokens: Tokens | None) -> Picked | Refused | AnswerLater:
        """Ask the picker for a member by the prompt."""
        return self._picker.pick_read(
            now,
            prompt,
            self._head.subset,
            self._arrived_s,
            size_bytes=self._body.size_bytes,
            headers=self._head.kept,
            resume=self._resume,
            peer=self._peer,
            tokens=tokens,
        )

    def _read_elsewhere(self, now: float, chunks: tuple[bytes, ...]) -> _Answers:
        """Have a large body read; ask the picker when its prompt is there."""
        assert self._reader is not None, "a stream without a reader reads its body itself"

        def done(read_s: float, prompt: Prompt | Refused) -> None:
            self._cancel_reading = None
            answers = self._after_read(read_s, now, prompt, chunks, small=False)
            if self._cancel_reading is None:
                self._picker.decided(read_s, read_s - now)
            if answers:
                self._deliver(answers)

        if not self._hold_whole(now):
            return self._refuse(now, overloaded())
        client = self._head.kept.get(FAIRNESS_HEADER, "")[:NAME_CHARACTERS]
        large = LargeBody(chunks=chunks, api=self._head.api, bounds=self._picker.bounds, client=client)
        self._cancel_reading = self._reader.read(large, done)
        if self._cancel_reading is None:
            return self._refuse(now, overloaded())
        self.phase = _QUEUED
        return []

    def _after_pick(self, outcome: Picked | Refused | AnswerLater) -> _Answers:
        """Answer with the outcome of a pick; return nothing if the request is queued."""
        if self.held_bytes and self._modes.answering is not DUPLEX:
            self._buffered.release(self)
        if isinstance(outcome, AnswerLater):
            self._response.request_id = outcome.request_id
            self.phase = _QUEUED
            return []
        return self._answer(outcome)

    def _resume(self, outcome: Picked | Refused) -> None:
        """Answer the queued request."""
        self._response.request_id = ""
        self._deliver(self._answer(outcome))

    def _answer(self, outcome: Picked | Refused) -> _Answers:
        """Answer all unanswered messages; the first answer contains the pick."""
        if isinstance(outcome, Refused):
            return self._reject(outcome)
        self.phase = _ANSWERED
        self._max_body_bytes = outcome.max_body_bytes
        self._response.request_id, self._response.receipt = outcome.request_id, outcome.receipt
        out = self._unanswered.answer(self._modes.answering, self._limits.chunk_bytes)
        out[0] = answers.with_pick(
            out[0],
            destination=outcome.destination,
            cluster=outcome.cluster,
            request_id=outcome.request_id,
            strip=self._head.strip,
            retries=self._retries,
            prefillers=outcome.prefillers,
            continuing=outcome.continuing,
            kv_source=outcome.kv_source,
        )
        self._response.destination = outcome.destination
        if self._hooks:
            served = f"{SERVED_HEADER}:{outcome.destination.partition(',')[0]}"
            out[0] = answers.with_request_header(out[0], ECHO_HEADER, served)
        return out

    def _refuse(self, now: float, refused: Refused, request_id: str = "") -> _Answers:
        """Report a rejection that the stream has decided, and return it as the answer."""
        return self._reject(self._picker.refuse(now, refused, self._head.kept, request_id))

    def _reject(self, refused: Refused) -> _Answers:
        """Return the answer that Envoy sends to the client, and end the stream."""
        self.phase = _ENDED
        self._drop_body()
        status, after_s = refused.status, refused.retry_after_s
        return [answers.refusal(status=status, body=refused.body(), code=refused.code, retry_after_s=after_s)]

    def _end_request(self, now: float, ending: Ending) -> None:
        """Report the end of the request to the picker if the picker tracks it; abort a queued request."""
        if self.held_bytes:
            self._drop_body()
        self._response.end(now, Ending.ABORTED if self.phase is _QUEUED else ending)

    def _drop_body(self) -> None:
        """Release the body, wherever it is stored."""
        if self._cancel_reading is not None:
            self._cancel_reading()
            self._cancel_reading = None
        self._body.take()
        self._unanswered.body = b""
        if self.held_bytes:
            self._buffered.release(self)

    STEPS: ClassVar[Mapping[Phase, Mapping[str | None, _Step]]] = {
        _NEW: _row(
            headers=_begin,
            body=_begin_without_headers,
            trailers=_begin_without_headers,
            response=_begin_without_headers,
            unknown=_begin_without_headers,
        ),
        _READING: _row(
            headers=_begin_again, body=_read_body, trailers=_read_trailers, response=_on_response, unknown=_stop
        ),
        _QUEUED: _row(
            headers=_begin_again, body=_owe_body, trailers=_owe_trailers, response=_leave_queue, unknown=_leave_queue
        ),
        _ANSWERED: _row(
            headers=_begin_again,
            body=_answer_late_body,
            trailers=_answer_late_trailers,
            response=_on_response,
            unknown=_stop,
        ),
        _ENDED: _row(headers=_ignore, body=_ignore, trailers=_ignore, response=_ignore, unknown=_ignore),
    }
