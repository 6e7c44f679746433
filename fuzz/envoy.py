"""Envoy's side of an ext_proc stream: messages that Envoy may send, built from choices, and checks of the answers."""

from collections import Counter
from typing import Final

from dualmap_extproc import names
from dualmap_extproc.wire import ext_proc_pb2 as wire
from fuzz.choices import Choices

_CONFIGS: Final = (
    # No-wait STREAMED, FULL_DUPLEX_STREAMED, BUFFERED, STREAMED, no body, and BUFFERED_PARTIAL without waiting.
    wire.ProtocolConfiguration(
        request_body_mode=wire.STREAMED,
        response_body_mode=wire.STREAMED,
        send_body_without_waiting_for_header_response=True,
    ),
    wire.ProtocolConfiguration(
        request_body_mode=wire.FULL_DUPLEX_STREAMED, response_body_mode=wire.FULL_DUPLEX_STREAMED
    ),
    wire.ProtocolConfiguration(request_body_mode=wire.BUFFERED, response_body_mode=wire.STREAMED),
    wire.ProtocolConfiguration(request_body_mode=wire.STREAMED, response_body_mode=wire.BUFFERED),
    wire.ProtocolConfiguration(),
    wire.ProtocolConfiguration(
        request_body_mode=wire.BUFFERED_PARTIAL, send_body_without_waiting_for_header_response=True
    ),
    None,
)
_REQUEST_HEADERS: Final = (
    *((":method", b"POST"), (":method", b"GET"), (":method", b"\xff"), ("content-length", b"0")),
    *(("content-length", b"40"), ("content-length", b"3000"), ("content-length", b"-1"), ("content-encoding", b"gzip")),
    *(("content-type", b"multipart/form-data; boundary=x"), ("Content-Type", b"application/json")),
    *((names.DESTINATION_HEADER, b"10.0.0.9:1"), ("x-session-id", b"s"), ("x-session-id", b"\xff\xed\xb2\x80")),
)
_RESPONSE_HEADERS: Final = (
    *((":status", b"200"), (":status", b"204"), (":status", b"404"), (":status", b"429"), (":status", b"503")),
    *((":status", b"2xx"), (":status", b"9" * 30), ("content-type", b"application/json")),
    *(("content-type", b"text/event-stream"),),
)
_ENDPOINTS: Final = ("10.0.0.0:8000", "10.0.0.1:8000", "10.0.0.2", "", "nonsense", "\x00,,")
_BODIES: Final = tuple(
    b'{"model":"%s","messages":[{"role":"user","content":"%s"}],"user":"u"}' % (model, text)
    for model in (b"m", b"m", b"n", b"unknown")
    for text in (b"hello", b"hello again", b"another prompt altogether, and a rather long one at that " * 8)
)
_MESSAGES: Final = (
    *("request_headers", "request_body", "request_body", "request_trailers"),
    *("response_headers", "response_body", "response_body", "response_trailers"),
)


def request(choices: Choices) -> list[wire.ProcessingRequest]:
    """Return the messages of a complete request with an ordinary body, as clients send them."""
    made = [wire.ProcessingRequest(), wire.ProcessingRequest()]
    headers, body = made[0].request_headers, made[1].request_body
    header = headers.headers.headers.add()
    header.key, header.raw_value = _REQUEST_HEADERS[0]
    config = choices.pick(_CONFIGS)
    if config is not None:
        made[0].protocol_config.CopyFrom(config)
    body.body, body.end_of_stream = choices.pick(_BODIES), True
    return made


def message(choices: Choices) -> wire.ProcessingRequest:
    """Return a message that Envoy may send. Choices determine the message's kind and most of its content."""
    made = wire.ProcessingRequest()
    kind = choices.pick(_MESSAGES)
    match kind:
        case "request_headers":
            _add_headers(made.request_headers, choices, _REQUEST_HEADERS)
            config = choices.pick(_CONFIGS)
            if config is not None:
                made.protocol_config.CopyFrom(config)
        case "response_headers":
            _add_headers(made.response_headers, choices, _RESPONSE_HEADERS)
        case "request_body" | "response_body":
            body = getattr(made, kind)
            body.body = _body(choices)
            body.end_of_stream = choices.flag()
        case _:
            getattr(made, kind).SetInParent()
    match choices.number() % 8:
        case 0:
            subset = made.metadata_context.filter_metadata[names.SUBSET_NAMESPACE].fields[names.SUBSET_KEY]
            subset.list_value.values.add().string_value = choices.pick(_ENDPOINTS)
        case 1:
            served = made.metadata_context.filter_metadata[names.LB_NAMESPACE].fields[names.SERVED_KEY]
            served.string_value = choices.pick(_ENDPOINTS)
    return made


def _add_headers(headers: wire.HttpHeaders, choices: Choices, known: tuple[tuple[str, bytes], ...]) -> None:
    # The first option is a valid value, because invalid values rarely reach much code.
    chosen = known[:1] if choices.number() % 8 else ()
    for key, value in (*chosen, *(choices.pick(known) for _ in range(choices.number() % 4))):
        header = headers.headers.headers.add()
        header.key, header.raw_value = key, value
    headers.end_of_stream = choices.flag()


def _body(choices: Choices) -> bytes:
    """Return a complete body, the beginning or the end of a body, or any bytes."""
    match choices.number() % 8:
        case 0:
            return choices.chunk()
        case 1:
            return choices.pick(_BODIES)[: choices.number()]
        case 2:
            return choices.pick(_BODIES)[choices.number() :]
        case 3 if choices.flag():
            return b"x" * 3000
        case _:
            return choices.pick(_BODIES)


class Peer:
    """Envoy's view of one stream: the sent messages, the received answers, and whether the answers were allowed."""

    def __init__(self) -> None:
        self.ended = False
        self._configured = False
        self._duplex = False
        self._waits = True
        self._echoes = False
        self._sent: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()
        # Bodies that pass through the router (FULL_DUPLEX_STREAMED): the bytes sent, and the bytes received back.
        self._there = {"request_body": b"", "response_body": b""}
        self._back = {"request_body": b"", "response_body": b""}
        # The first answer to a request contains the pick if Envoy's messages follow its protocol.
        self._picked = False
        self._in_order = True

    def send(self, sent: wire.ProcessingRequest) -> None:
        """Record a message sent to the router."""
        kind = sent.WhichOneof("request")
        if not self._configured:
            self._configured = True
            config = sent.protocol_config
            self._duplex = config.request_body_mode == wire.FULL_DUPLEX_STREAMED
            self._waits = not self._duplex and not config.send_body_without_waiting_for_header_response
            self._echoes = config.response_body_mode == wire.FULL_DUPLEX_STREAMED
        if kind is not None:
            again = self._sent["request_trailers"] or (kind == "request_headers" and self._sent)
            self._in_order &= kind.startswith("request") and not again
            self._sent[kind] += 1
            if kind in self._there:
                self._there[kind] += getattr(sent, kind).body

    def take(self, answers: list[wire.ProcessingResponse], *, ended: bool) -> None:
        """Check the router's answers. ``ended`` is whether the stream has ended with these answers."""
        assert not (self.ended and answers), "an answer after the end"
        for position, answer in enumerate(answers):
            self._take_one(answer, last=position == len(answers) - 1, ended=ended)
            if answer.WhichOneof("response") == "immediate_response":
                self._in_order = False
        if answers and self._in_order and not self._duplex:
            left = {kind: self._sent[kind] - self._answered[kind] for kind in _MESSAGES}
            assert not any(left.values()), f"left unanswered: {left}"
        self.ended = ended

    def must_answer(self, sent: wire.ProcessingRequest, answers: list[wire.ProcessingResponse]) -> None:
        """Check that each message that needs an immediate answer has one."""
        kind = sent.WhichOneof("request") or ""
        pieces = self._echoes and kind == "response_body"
        if kind.startswith("response") and not pieces:
            assert len(answers) == 1, f"{len(answers)} answers to {kind}"

    def _take_one(self, answer: wire.ProcessingResponse, *, last: bool, ended: bool) -> None:
        kind = answer.WhichOneof("response")
        assert kind is not None
        if kind == "immediate_response":
            assert last, "an answer after a refusal"
            assert ended, "a refusal that does not end the stream"
            assert 400 <= answer.immediate_response.status.code < 600
            return
        pieces = (self._duplex and kind == "request_body") or (self._echoes and kind == "response_body")
        self._answered[kind] += 1
        if not pieces:
            assert self._answered[kind] <= self._sent[kind], f"more answers than messages: {kind}"
        elif self._in_order or kind == "response_body":
            self._back[kind] += getattr(answer, kind).response.body_mutation.streamed_response.body
            assert self._there[kind].startswith(self._back[kind]), f"{kind} came back changed"
        if kind.startswith("request") and self._in_order and not self._waits:
            assert self._picked or names.LB_NAMESPACE in answer.dynamic_metadata.fields, f"{kind} before the pick"
            self._picked = True
