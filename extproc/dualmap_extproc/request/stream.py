"""One request's conversation with Envoy: ext_proc messages in, messages out, and what they mean told to the picker.

A sans-IO state machine, one object per stream: it knows neither gRPC nor the clock, so that another transport can
be put under it. ``server`` feeds it and writes what it returns; ``picker`` chooses and keeps the books.

Three message modes exist, taken from the ``protocol_config`` of the first message (PROTOCOLS section 1; what each
answer must carry was measured against Envoy 1.40):

- no-wait STREAMED: headers and body arrive without waiting for us. Nothing is answered before the body's end; then
  the headers' answer carries the pick and every body message gets an answer of its own. Answering a body message
  before the headers loses the pick and can corrupt the body. With HTTP/2 request trailers Envoy says neither that the
  body has ended nor that there are trailers until the headers are answered, so silence must tell: after a whole body
  it is taken for such a request, after one that cannot become a request it is refused. A body that could still go on
  looks like a slow client's; it is refused shortly before Envoy would stop waiting for us and route without us.
- FULL_DUPLEX_STREAMED: nothing is answered before the decision either, and the body is ours to send back in pieces.
  The response passes through us as well, so the stream must stay open to its end.
- waiting (BUFFERED, STREAMED without the flag, or no ``protocol_config`` at all): headers are answered at once, and
  the answer to the body's end carries the pick. In STREAMED, trailers take that end's place, and their answer cannot
  name a cluster: with more than one pool such a request is refused rather than sent to another pool's engines.

A request that the picker holds is answered nothing until it is released: then what all these messages are owed goes
out by ``deliver``, in the same order. Whatever of the request still arrives meanwhile is owed its answer then, too.

With a retry policy Envoy sends the body of a request with trailers twice, so its pick asks for a route without one.
Except in FULL_DUPLEX_STREAMED we end the stream at the first chunk of the response: Envoy sends the rest past us.
"""

from collections.abc import Callable
from enum import Enum, auto

from dualmap_extproc.errors import Refused, body_too_large, trailers_unsupported
from dualmap_extproc.names import DECISION_HEADER
from dualmap_extproc.request.body import may_go_on
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.head import RequestHead, read_response
from dualmap_extproc.request.picker import Picked, Picker, Waiting
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import answers
from dualmap_extproc.wire import ext_proc_pb2 as wire

_WHOLE_BODY_MODES = (wire.BUFFERED, wire.BUFFERED_PARTIAL)
_END_BYTES = 64


class _Mode(Enum):
    """How request headers and body are answered (see the module)."""

    NO_WAIT = auto()
    DUPLEX = auto()
    WAITING = auto()


class Stream:
    """The state machine of one ext_proc stream.

    ``receive`` never raises, whatever arrives in whatever order. ``deadline_s`` is when ``on_deadline`` wants to be
    called if nothing arrives before, or None; ``deliver`` is called with answers that become ready at any other time,
    from within a call of the picker's. ``ended`` says that this side has no more to say and the transport
    shall end the stream; ``decided`` that a body was read and the choice made. ``close`` must be called once the
    stream is over, however it went.
    """

    # So many attributes are found faster in slots: 2 us a request.
    __slots__ = (
        *("_arrived_s", "_begun", "_bodies_unanswered", "_booked", "_chunks", "_deliver", "_echo_response", "_ending"),
        *("_head", "_headers_unanswered", "_heard_s", "_held", "_limits", "_mode", "_news_due_s", "_no_body"),
        *("_picker", "_receipt", "_request_done", "_response_begun", "_response_whole", "_retries"),
        *("_shown_response_body", "_size_bytes", "_trailers", "_whole_body", "_whole_response"),
        *("deadline_s", "decided", "ended"),
    )

    def __init__(
        self, picker: Picker, limits: Limits, deliver: Callable[[list[wire.ProcessingResponse]], None]
    ) -> None:
        self._picker = picker
        self._limits = limits
        self._deliver = deliver
        self._mode = _Mode.WAITING
        # Whether a single message brings the whole body (BUFFERED), or none will ever come.
        self._whole_body = False
        self._no_body = False
        self._shown_response_body = False
        self._echo_response = False
        self._whole_response = False
        self._begun = False
        self.ended = False
        self.deadline_s: float | None = None
        self._reset()

    def receive(self, now: float, message: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        """Take one message of Envoy's; return the answers to send, in order."""
        if self.ended:
            return []
        self.deadline_s = None
        first, self._begun = not self._begun, True
        if first:
            self._arrive(now)
            if message.HasField("protocol_config"):
                self._configure(message.protocol_config)
        kind = message.WhichOneof("request")
        if self._held and kind not in ("request_body", "request_trailers"):
            # Envoy answers the client itself, or sends what does not belong here: there is nothing left to wait for.
            self._release(now, Ending.ABORTED)
        match kind:
            case "request_headers":
                if not first:
                    self._release(now, Ending.ABORTED)
                    self._reset()
                    self._arrive(now)
                return self._on_request_headers(now, message)
            case "request_body":
                return self._on_request_body(now, message)
            case "request_trailers":
                return self._on_request_trailers(now)
            case "response_headers":
                return self._on_response_headers(now, message)
            case "response_body":
                return self._on_response_body(now, message.response_body)
            case "response_trailers":
                return self._on_response_trailers(now)
            case _:
                # A kind of message this version does not know cannot be answered; Envoy goes on without us.
                self.ended = True
                return []

    def on_deadline(self, now: float) -> list[wire.ProcessingResponse]:
        """Go on after silence: decide on what has arrived if no more can or will come (see the module)."""
        self.deadline_s = None
        stalled_s = self._heard_s + self._picker.max_wait_s + self._limits.stalled_s
        if now < stalled_s and self._may_go_on():
            self.deadline_s = stalled_s
            return []
        return self._decide(now, retries=False)

    def close(self, now: float, *, cancelled: bool) -> None:
        """Close the books: the stream is over. ``cancelled`` says that the other side broke it off.

        A client that goes away can also look like an orderly end. Where we are shown the response's body, an end
        without the body's end is none.
        """
        self.ended = True
        self._release(now, Ending.ABORTED if cancelled or self._shown_response_body else self._ending)

    def _configure(self, config: wire.ProtocolConfiguration) -> None:
        body_mode = config.request_body_mode
        if body_mode == wire.FULL_DUPLEX_STREAMED:
            self._mode = _Mode.DUPLEX
        elif config.send_body_without_waiting_for_header_response:
            self._mode = _Mode.NO_WAIT
        self._whole_body = body_mode in _WHOLE_BODY_MODES
        self._no_body = body_mode == wire.NONE and self._mode is _Mode.WAITING
        self._shown_response_body = config.response_body_mode != wire.NONE
        self._echo_response = config.response_body_mode == wire.FULL_DUPLEX_STREAMED
        self._whole_response = self._response_whole = config.response_body_mode in _WHOLE_BODY_MODES

    def _arrive(self, now: float) -> None:
        """Take note of when the request came."""
        self._arrived_s = self._heard_s = now
        self._news_due_s = now + self._limits.news_s

    def _reset(self) -> None:
        """Forget the request, if there was one, and be ready for another."""
        # The id of the request that is in the picker's books and ours to close; empty when there is none.
        self._booked = ""
        self._held = False
        self._head = RequestHead()
        self._chunks: list[bytes] = []
        self._size_bytes = 0
        # What is answered last, and whether Envoy may try again: both known once the choice is asked for.
        self._trailers: wire.ProcessingResponse | None = None
        self._retries = True
        self._headers_unanswered = False
        self._bodies_unanswered = 0
        self._request_done = False
        self.deadline_s = None
        self.decided = False
        self._receipt: str | None = None
        # What the response's status says; as long as there is none, the request may still come to nothing.
        self._ending = Ending.ABORTED
        # Whether the response comes in one go, so that its first chunk is no first token.
        self._response_whole = self._whole_response
        self._response_begun = False

    def _on_request_headers(self, now: float, message: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        headers = message.request_headers
        head = self._head
        head.read(headers.headers, self._limits, self._picker.session_headers)
        head.read_subset(message, self._limits)
        if head.unacceptable is not None:
            return self._refuse(self._picker.refuse(head.unacceptable, head.kept))
        if head.content_length > self._limits.body_bytes:
            return self._refuse_body()
        if head.unreadable is not None and self._expects_prompt() and not headers.end_of_stream and not self._no_body:
            return self._refuse(self._picker.refuse(head.unreadable, head.kept))
        self._headers_unanswered = True
        if headers.end_of_stream or self._no_body:
            return self._decide(now)
        if self._mode is not _Mode.WAITING:
            if self._mode is _Mode.NO_WAIT:
                self.deadline_s = now + (self._limits.pause_s if self._expects_prompt() else self._limits.silence_s)
            return []
        self._headers_unanswered = False
        answer = wire.ProcessingResponse(request_headers=wire.HeadersResponse())
        if head.strip:
            answer.request_headers.response.header_mutation.remove_headers.extend(head.strip)
        return [answer]

    def _on_request_body(self, now: float, message: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        if self._request_done:
            # Envoy has sent duplicates after the end in FULL_DUPLEX_STREAMED, where an answer would be spurious.
            if self._mode is _Mode.DUPLEX:
                return []
            self._bodies_unanswered += self._held
            return [] if self._held else [answers.PLAIN_REQUEST_BODY]
        self._head.read_subset(message, self._limits)
        if self._head.unacceptable is not None:
            return self._refuse(self._picker.refuse(self._head.unacceptable, self._head.kept))
        body = message.request_body
        # Taken once: each access copies it.
        data = body.body
        self._size_bytes += len(data)
        if self._size_bytes > self._limits.body_bytes:
            return self._refuse_body()
        if data:
            # Envoy says by an empty message that the body has ended; with it, joining would copy the only other one.
            self._chunks.append(data)
        self._bodies_unanswered += 1
        if body.end_of_stream or self._whole_body:
            return self._decide(now)
        if self._headers_unanswered:
            if self._mode is _Mode.NO_WAIT:
                self._heard_s = now
                limits = self._limits
                self.deadline_s = now + (limits.silence_s if self._looks_whole(data) else limits.pause_s)
            return []
        if self._mode is _Mode.DUPLEX:
            return []
        self._bodies_unanswered = 0
        return [answers.PLAIN_REQUEST_BODY]

    def _on_request_trailers(self, now: float) -> list[wire.ProcessingResponse]:
        trailers = wire.ProcessingResponse(request_trailers=wire.TrailersResponse())
        if self._held:
            self._trailers = trailers
            return []
        if self._request_done:
            return [trailers]
        if self._mode is _Mode.WAITING and not self._whole_body and len(self._picker.pools) > 1:
            return self._refuse(self._picker.refuse(trailers_unsupported(), self._head.kept))
        return self._decide(now, trailers, retries=self._mode is _Mode.WAITING)

    def _may_go_on(self) -> bool:
        """Whether more of the body may come, so that it is too early to decide on what is there."""
        if not self._expects_prompt():
            return False
        if self._head.content_length:
            return self._size_bytes < self._head.content_length
        return may_go_on(b"".join(self._chunks))

    def _expects_prompt(self) -> bool:
        return self._head.expects_prompt(self._size_bytes)

    def _looks_whole(self, last: bytes) -> bool:
        if self._head.content_length:
            return self._size_bytes >= self._head.content_length
        # The end first: the whole is copied only where that is blank.
        return (last[-_END_BYTES:].rstrip() or last.rstrip()).endswith(b"}")

    def _decide(
        self, now: float, trailers: wire.ProcessingResponse | None = None, *, retries: bool = True
    ) -> list[wire.ProcessingResponse]:
        """Ask for the pick and answer with it; nothing yet where the request is held."""
        self._request_done = True
        self._trailers, self._retries = trailers, retries
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        # Only FULL_DUPLEX_STREAMED wants it back.
        self._chunks = [body] if self._mode is _Mode.DUPLEX else []
        outcome = self._pick(now, body)
        if isinstance(outcome, Waiting):
            self._booked, self._held = outcome.request_id, True
            return []
        return self._answer(outcome)

    def _pick(self, now: float, body: bytes) -> Picked | Refused | Waiting:
        """Ask the picker; by the body, or for any member where the request has none by its nature."""
        if self._no_body or not self._expects_prompt():
            return self._picker.pick_bodiless(self._head.subset)
        self.decided = True
        return self._picker.pick(
            now,
            body,
            self._head.subset,
            self._arrived_s,
            headers=self._head.kept,
            resume=self._resume,
            api=self._head.api,
        )

    def _resume(self, outcome: Picked | Refused) -> None:
        """Answer the request that was held until now."""
        self._held = False
        self._booked = ""
        self._deliver(self._answer(outcome))

    def _answer(self, outcome: Picked | Refused) -> list[wire.ProcessingResponse]:
        """Answer all that is unanswered, trailers last; the first answer carries the pick."""
        if isinstance(outcome, Refused):
            return self._refuse(outcome)
        self._booked, self._receipt = outcome.request_id, outcome.receipt
        out: list[wire.ProcessingResponse] = []
        if self._headers_unanswered:
            out.append(wire.ProcessingResponse(request_headers=wire.HeadersResponse()))
        if self._mode is not _Mode.DUPLEX:
            bodies = [answers.PLAIN_REQUEST_BODY] * self._bodies_unanswered
            if bodies and not out:
                # The pick is written into it.
                bodies[0] = wire.ProcessingResponse(request_body=wire.BodyResponse())
            out += bodies
        elif self._bodies_unanswered:
            out.extend(answers.request_pieces(self._chunks[0], self._limits.chunk_bytes, last=self._trailers is None))
        if self._trailers is not None:
            out.append(self._trailers)
        self._chunks = []
        self._headers_unanswered = False
        self._bodies_unanswered = 0
        answers.add_pick(
            out[0],
            destination=outcome.destination,
            cluster=outcome.cluster,
            request_id=outcome.request_id,
            strip=self._head.strip,
            retries=self._retries,
        )
        return out

    def _refuse_body(self) -> list[wire.ProcessingResponse]:
        return self._refuse(self._picker.refuse(body_too_large(self._limits.body_bytes), self._head.kept))

    def _refuse(self, refused: Refused) -> list[wire.ProcessingResponse]:
        self.ended = True
        self._chunks = []
        status, after_s = refused.status, refused.retry_after_s
        return [answers.refusal(status=status, body=refused.body(), code=refused.code, retry_after_s=after_s)]

    def _on_response_headers(self, now: float, message: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        headers = message.response_headers
        self._ending, whole = read_response(headers.headers, self._ending)
        self._response_whole |= whole
        if self._booked and message.HasField("metadata_context"):
            served = answers.served_endpoint(message.metadata_context)
            if served:
                self._picker.served(now, self._booked, served)
        if headers.end_of_stream or self._ending is not Ending.FINISHED:
            self._release(now, self._ending)
        self.ended = headers.end_of_stream and not self._echo_response
        if self._receipt is None:
            return [answers.PLAIN_RESPONSE_HEADERS]
        answer = wire.ProcessingResponse()
        answers.set_header(answer.response_headers.response.header_mutation, DECISION_HEADER, self._receipt)
        return [answer]

    def _on_response_body(self, now: float, message: wire.HttpBody) -> list[wire.ProcessingResponse]:
        first = bool(message.body) and not self._response_begun
        if self._booked and first and not self._response_whole:
            self._picker.first_token(now, self._booked)
        if message.end_of_stream or (first and self._response_whole):
            self._release(now, Ending.FINISHED)
        self._response_begun |= first
        if self._booked and now >= self._news_due_s:
            self._news_due_s = now + self._limits.news_s
            self._picker.heard(now, self._booked)
        if self._echo_response:
            pieces = answers.response_pieces(message.body, self._limits.chunk_bytes, last=message.end_of_stream)
            return list(pieces)
        if self._response_begun or message.end_of_stream:
            # The rest flows past us; how it ends, the access log tells the picker.
            self._booked = ""
            self.ended = True
        return [answers.PLAIN_RESPONSE_BODY]

    def _on_response_trailers(self, now: float) -> list[wire.ProcessingResponse]:
        self._release(now, self._ending)
        self.ended = not self._echo_response
        return [answers.PLAIN_RESPONSE_TRAILERS]

    def _release(self, now: float, ending: Ending) -> None:
        """Close the books on this stream's request, if it is still ours to close."""
        if self._booked:
            # A response that came before the request, as no Envoy sends it, is none of a held request's.
            match Ending.ABORTED if self._held else ending:
                case Ending.FINISHED:
                    self._picker.finished(now, self._booked, None)
                case Ending.REJECTED:
                    self._picker.rejected(now, self._booked)
                case Ending.ABORTED:
                    self._picker.aborted(now, self._booked)
                case Ending.FAILED:
                    self._picker.failed(now, self._booked)
            self._booked = ""
            self._held = False
