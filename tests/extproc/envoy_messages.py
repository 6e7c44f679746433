"""Envoy's messages on an ext_proc stream and parsers of the picker's answers, for the tests of ext_proc."""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from dualmap.pools.pool import Engine, Member, Model, Pool, Queue
from dualmap_extproc import names
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.observations import (
    Abandoned,
    Accepted,
    ClientLimited,
    Decided,
    Ended,
    Expired,
    FirstTokenSeen,
    Logged,
    Measured,
    Observation,
    PoolsChanged,
    Rejected,
    Routed,
    RoutedBodiless,
    ServedElsewhere,
)
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.reading import Reader
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.request.tokens import TokenSources
from dualmap_extproc.settings import OWN_GATEWAY, Gateway, Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire

NO_WAIT = wire.ProtocolConfiguration(
    request_body_mode=wire.STREAMED,
    response_body_mode=wire.STREAMED,
    send_body_without_waiting_for_header_response=True,
)
DUPLEX = wire.ProtocolConfiguration(
    request_body_mode=wire.FULL_DUPLEX_STREAMED, response_body_mode=wire.FULL_DUPLEX_STREAMED
)
BUFFERED = wire.ProtocolConfiguration(request_body_mode=wire.BUFFERED, response_body_mode=wire.STREAMED)
STREAMED = wire.ProtocolConfiguration(request_body_mode=wire.STREAMED, response_body_mode=wire.STREAMED)
MODES = {"no-wait": NO_WAIT, "duplex": DUPLEX, "buffered": BUFFERED, "streamed": STREAMED, "unsaid": None}


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Restore the logging configuration after the block."""
    root, ours = logging.getLogger(), logging.getLogger("dualmap_extproc")
    handlers, root_level, our_level = root.handlers[:], root.level, ours.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(root_level)
        ours.setLevel(our_level)


def pool(name="qwen", *, model="m", aliases=(), adapters=(), members=4, namespace="llm", **routing):
    """Return a pool of ``members`` at 10.0.0.0:8000, 10.0.0.1:8000, ..."""
    made = Pool(
        namespace=namespace,
        name=name,
        model=Model(name=model, aliases=tuple(aliases), adapters=tuple(adapters)),
        members=tuple(Member(id=f"{name}-{i}", address=f"10.0.0.{i}", port=8000) for i in range(members)),
        ring_version=1,
    )
    if routing:
        made = replace(made, routing=replace(made.routing, **routing))
    return made


def crowded_pool(name="qwen", *, members=1, **queue):
    """Return a pool of slow engines with one prefill at a time; other requests queue with the settings ``queue``."""
    made = pool(name, members=members, queue=Queue(**({"dispatch_window_s": 0.0, "max_wait_s": 600.0} | queue)))
    return replace(made, engine=Engine(prefill_tokens_per_second=100.0))


def chat(text="hello", *, model="m", **fields) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **fields}).encode()


def _add(headers: wire.HttpHeaders, values: dict[str, str]) -> None:
    for key, value in values.items():
        header = headers.headers.headers.add()
        header.key = key
        header.raw_value = value.encode()


def _value(text) -> Value:
    if isinstance(text, list):
        return Value(list_value=ListValue(values=[_value(each) for each in text]))
    return Value(string_value=text)


def with_metadata(message: wire.ProcessingRequest, namespace: str, key: str, value) -> wire.ProcessingRequest:
    message.metadata_context.filter_metadata[namespace].fields[key].CopyFrom(_value(value))
    return message


def with_subset(message: wire.ProcessingRequest, subset) -> wire.ProcessingRequest:
    return with_metadata(message, names.SUBSET_NAMESPACE, names.SUBSET_KEY, subset)


def request_headers(config=None, *, method="POST", end=False, **headers: str) -> wire.ProcessingRequest:
    """An underscore in a keyword is a hyphen in the header's name."""
    message = wire.ProcessingRequest(request_headers=wire.HttpHeaders(end_of_stream=end))
    if config is not None:
        message.protocol_config.CopyFrom(config)
    values = {":method": method, ":path": "/v1/chat/completions"}
    _add(message.request_headers, values | {key.replace("_", "-"): value for key, value in headers.items()})
    return message


def request_body(body: bytes, *, end=True) -> wire.ProcessingRequest:
    return wire.ProcessingRequest(request_body=wire.HttpBody(body=body, end_of_stream=end))


def request_bodies(chunks: Iterable[bytes], *, end=True) -> list[wire.ProcessingRequest]:
    """Return body messages for the chunks; only the last message may end the stream."""
    chunks = list(chunks)
    return [request_body(chunk, end=end and i == len(chunks) - 1) for i, chunk in enumerate(chunks)]


def request_trailers() -> wire.ProcessingRequest:
    return wire.ProcessingRequest(request_trailers=wire.HttpTrailers())


def response_headers(status=200, *, end=False, served=None, content_type="text/event-stream", **headers: str):
    message = wire.ProcessingRequest(response_headers=wire.HttpHeaders(end_of_stream=end))
    values = {":status": str(status), "content-type": content_type}
    _add(message.response_headers, values | {key.replace("_", "-"): value for key, value in headers.items()})
    if served is not None:
        with_metadata(message, names.LB_NAMESPACE, names.SERVED_KEY, served)
    return message


def response_body(body: bytes = b"data: {}\n\n", *, end=False) -> wire.ProcessingRequest:
    return wire.ProcessingRequest(response_body=wire.HttpBody(body=body, end_of_stream=end))


def response_trailers() -> wire.ProcessingRequest:
    return wire.ProcessingRequest(response_trailers=wire.HttpTrailers())


def decoded(answers: Iterable[bytes]) -> list[wire.ProcessingResponse]:
    return [wire.ProcessingResponse.FromString(answer) for answer in answers]


def kinds(answers: Iterable[wire.ProcessingResponse]) -> list[str]:
    return [answer.WhichOneof("response") for answer in answers]


def mutation_of(answer: wire.ProcessingResponse) -> wire.HeaderMutation:
    kind = answer.WhichOneof("response")
    if kind == "immediate_response":
        return answer.immediate_response.headers
    if kind in ("request_trailers", "response_trailers"):
        return getattr(answer, kind).header_mutation
    return getattr(answer, kind).response.header_mutation


def headers_set(answer: wire.ProcessingResponse) -> dict[str, str]:
    """Return the headers that an answer sets; every header must replace an existing value."""
    options = mutation_of(answer).set_headers
    assert all(option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD for option in options)
    return {option.header.key: option.header.raw_value.decode() for option in options}


def metadata_of(answer: wire.ProcessingResponse) -> dict[str, dict[str, str]]:
    plain: Struct = answer.dynamic_metadata
    return {name: dict(value.struct_value.items()) for name, value in plain.fields.items()}


def destination(answer: wire.ProcessingResponse) -> str | None:
    """Return the pick in an answer, or None; header, metadata, cluster and route cache must be consistent."""
    value = headers_set(answer).get(names.DESTINATION_HEADER)
    if value is not None:
        assert metadata_of(answer)[names.LB_NAMESPACE] == {names.DESTINATION_KEY: value}
        assert names.CLUSTER_HEADER in headers_set(answer)
        assert getattr(answer, answer.WhichOneof("response")).response.clear_route_cache
    return value


def refused_with(answers: list[wire.ProcessingResponse]) -> int:
    """Return the status of the only answer, which must be an OpenAI error."""
    assert kinds(answers) == ["immediate_response"]
    immediate = answers[0].immediate_response
    error = json.loads(immediate.body)["error"]
    assert error["message"]
    assert error["type"]
    assert error["code"]
    assert headers_set(answers[0])["content-type"] == "application/json"
    return immediate.status.code


Kind = TypeVar("Kind")


@dataclass
class Recorder:
    """A subscriber that keeps every observation: in ``events`` those that metrics count, in ``others`` the rest."""

    events: list[Observation] = field(default_factory=list)
    others: list[Observation] = field(default_factory=list)

    def report(self, observation: Observation) -> None:
        uncounted = isinstance(observation, Accepted | Logged | PoolsChanged)
        (self.others if uncounted else self.events).append(observation)

    def names(self) -> list[str]:
        """Return the names of the events in order; a request that leaves the queue adds ``waited``."""
        return [name for event in self.events for name in _names(event)]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the observations of a type."""
        return [event for event in (*self.events, *self.others) if isinstance(event, kind)]


def _names(event: Observation) -> tuple[str, ...]:
    match event:
        case Routed() | Rejected():
            name = "routed" if isinstance(event, Routed) else "refused"
            return (name,) if event.queued_s is None else (name, "waited")
        case Abandoned():
            return ("waited",)
        case Ended():
            return (event.ending.value,)
        case _:
            return (_NAMES[type(event)],) if type(event) in _NAMES else ()


_NAMES = {
    RoutedBodiless: "routed_bodiless",
    Decided: "decided",
    FirstTokenSeen: "first_token",
    Expired: "expired",
    Measured: "measured",
    ServedElsewhere: "served_elsewhere",
    ClientLimited: "client_limited",
}


class Conversation:
    """A stream and its messages. The time ``now`` advances by a second with every message.

    ``delivered`` has the answers without a message from Envoy: the answers to a queued request.
    """

    def __init__(
        self,
        *pools: Pool,
        config=None,
        limits: Limits | None = None,
        picker: Picker | None = None,
        now=100.0,
        buffered: BufferedBodies | None = None,
        reader: Reader | None = None,
        tokens: TokenSources | None = None,
        gateway: Gateway = OWN_GATEWAY,
    ) -> None:
        self.observer = Recorder()
        self.limits = limits or Limits()
        self.delivered: list[wire.ProcessingResponse] = []
        self.now = now
        self.config = config
        if picker is None:
            picker = Picker(self.limits, self.observer.report, id_prefix="r", gateway=gateway)
            picker.set_pools(0.0, pools or (pool(),))
        self.picker = picker
        self.buffered = buffered or BufferedBodies(self.limits.buffered_bytes)
        self.reader = reader
        self.tokens = tokens
        self.again()

    def send(self, *messages: wire.ProcessingRequest) -> list[wire.ProcessingResponse]:
        answers = []
        for message in messages:
            self.now += 1.0
            answers += decoded(self.stream.receive(self.now, message.SerializeToString()))
        return answers

    def close(self, *, cancelled=False) -> None:
        self.now += 1.0
        self.stream.close(self.now, cancelled=cancelled)

    def again(self) -> None:
        """Begin another stream with the same picker."""
        self.stream = Stream(*(self.picker, self.limits, self._deliver, self.buffered, self.reader), tokens=self.tokens)

    def _deliver(self, answers: list[bytes]) -> None:
        self.delivered += decoded(answers)

    @property
    def in_flight(self) -> int:
        return sum(each.in_flight for status in self.picker.statuses() for each in status.endpoints)

    @property
    def pending_tokens(self) -> int:
        return sum(each.pending_prefill_tokens for status in self.picker.statuses() for each in status.endpoints)

    @property
    def held(self) -> int:
        return sum(status.held for status in self.picker.statuses())
