"""Fuzzes ext_proc streams on one picker with real routers. Any client of the port may send any messages."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from google.protobuf.message import DecodeError

from dualmap.pools.pool import Engine, Member, MemberState, Model, Pool, Queue, Routing
from dualmap.requests import Usage
from dualmap_extproc.request.buffered import BufferedBodies
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import Ended, Expired, Observation, Routed
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.stream import Stream
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import ext_proc_pb2 as wire
from fuzz.choices import Choices
from fuzz.envoy import Peer, message, request

_STREAMS: Final = 4
# More steps would be slow and would find few further faults.
_STEPS: Final = 150
_LIMITS: Final = Limits(chunk_bytes=50, alive_interval_s=1.0, ended_requests=4)
_PAUSES_S: Final = (0.0, 0.01, 0.2, 3.0, 700.0)
_WINDOWS_S: Final = (0.001, 0.05, 1.0, float("inf"))
# Each routed request has exactly one of these observations at its end.
_ENDINGS: Final[tuple[type[Observation], ...]] = (Ended, Expired)


def check(data: bytes) -> None:
    """Check that no sequence of steps makes the router raise, give a forbidden answer, or keep a request's state."""
    choices = Choices(data)
    talk = _Talk(choices)
    steps = 0
    while choices.more and steps < _STEPS:
        talk.step()
        steps += 1
    talk.end()


@dataclass(slots=True)
class _Line:
    """A stream and the checks of its answers."""

    stream: Stream
    peer: Peer = field(default_factory=Peer)


def _decoded(answers: list[bytes]) -> list[wire.ProcessingResponse]:
    return [wire.ProcessingResponse.FromString(answer) for answer in answers]


class _Talk:
    """Several concurrent streams, the pools that route them, and the clock."""

    def __init__(self, choices: Choices) -> None:
        self._source = choices
        self._counts: Counter[type[Observation]] = Counter()
        self._buffered = BufferedBodies(_LIMITS.buffered_bytes)
        self._picker = Picker(_LIMITS, self._count, id_prefix="r", replicated=choices.flag())
        self._now = 100.0
        queue = Queue(
            dispatch_window_s=choices.pick(_WINDOWS_S),
            max_held=choices.pick((0, 1, 100)),
            max_wait_s=choices.pick((0.1, 30.0)),
            order=choices.pick(("Fcfs", "Deadline")),
            hold_when_empty=choices.flag(),
        )
        routing = Routing(
            max_body_bytes=2000, queue=queue, policy=choices.pick(("dualmap", "least_loaded", "round_robin"))
        )
        engine = Engine(prefill_tokens_per_second=100.0)
        self._pools = [
            Pool(namespace="llm", name=name, model=Model(name=name), engine=engine, routing=routing, ring_version=1)
            for name in ("m", "n")
        ]
        self._set_members()
        self._lines = [self._line() for _ in range(_STREAMS)]

    def step(self) -> None:
        """Choose the next step and run it."""
        choices, kind = self._source, self._source.number() % 16
        at = choices.number() % _STREAMS
        line = self._lines[at]
        match kind:
            case 0:
                self._now += choices.pick(_PAUSES_S)
            case 1:
                self._on_time()
            case 2 if line.stream.deadline_s is not None:
                self._now = max(self._now, line.stream.deadline_s)
                line.peer.take(_decoded(line.stream.on_deadline(self._now)), ended=line.stream.ended)
            case 3:
                self._close(line, cancelled=choices.flag())
                self._lines[at] = self._line()
            case 4:
                self._set_members()
            case 5:
                self._picker.access_log(self._now, self._entry())
            case 6:
                self._receive(line, self._raw())
            case 7 | 8 | 9:
                for sent in request(choices):
                    self._receive(line, sent)
            case _:
                self._receive(line, message(choices))

    def end(self) -> None:
        """Close every stream, advance the clock past all deadlines, and check that no state remains."""
        for line in self._lines:
            self._close(line, cancelled=True)
        for _ in range(1000):
            if self._picker.next_deadline() is None:
                break
            self._on_time()
        else:
            raise AssertionError("the picker still has a deadline after 1000 steps")
        for status in self._picker.statuses():
            assert status.held == 0
            for each in status.endpoints:
                left = (each.in_flight, each.held, each.pending_prefill_tokens, each.held_prefill_tokens)
                assert left == (0, 0, 0, 0), f"{each.id} keeps {left}"
                assert each.active_kv_tokens == 0
        assert not self._picker._owners
        assert not self._buffered.held_bytes
        assert self._counts[Routed] == sum(self._counts[kind] for kind in _ENDINGS)

    def _count(self, observation: Observation) -> None:
        self._counts[type(observation)] += 1

    def _line(self) -> _Line:
        """Return a new stream."""

        def deliver(answers: list[bytes]) -> None:
            assert not line.peer.ended, "a request was released after its stream had ended"
            line.peer.take(_decoded(answers), ended=line.stream.ended)

        line = _Line(Stream(self._picker, _LIMITS, deliver, self._buffered))
        return line

    def _receive(self, line: _Line, sent: wire.ProcessingRequest) -> None:
        was_over = line.peer.ended
        line.peer.send(sent)
        answers = _decoded(line.stream.receive(self._now, sent.SerializeToString()))
        line.peer.take(answers, ended=line.stream.ended)
        if not was_over:
            line.peer.must_answer(sent, answers)

    def _close(self, line: _Line, *, cancelled: bool) -> None:
        line.stream.close(self._now, cancelled=cancelled)
        line.peer.ended = True

    def _on_time(self) -> None:
        """Advance the clock to the picker's next deadline."""
        deadline_s = self._picker.next_deadline()
        if deadline_s is not None:
            self._now = max(self._now, deadline_s)
            self._picker.on_deadline(self._now)

    def _set_members(self) -> None:
        """Set zero to three members in each pool; some members may be draining."""
        for at, pool in enumerate(self._pools):
            members = tuple(
                Member(
                    id=f"{pool.name}-{i}",
                    address=f"10.0.{at}.{i}",
                    port=8000,
                    state=self._source.pick((MemberState.ACTIVE, MemberState.DRAINING, MemberState.JOINING)),
                )
                for i in range(self._source.number() % 4)
            )
            self._pools[at] = replace(pool, members=members, ring_version=pool.ring_version + 1)
        self._picker.set_pools(self._now, self._pools)

    def _entry(self) -> AccessLogEntry:
        choices = self._source
        return AccessLogEntry(
            request_id=f"r-{choices.number() % 8}",
            status=choices.pick((None, 200, 404, 503)),
            flags=choices.pick(((), ("local_reset",), ("upstream_remote_reset",))),
            served_endpoint=choices.pick((None, "10.0.0.0:8000", "10.0.0.1:8000", "10.9.9.9:1")),
            usage=choices.pick((None, Usage(prompt_tokens=10, cached_tokens=5), Usage(completion_tokens=3))),
        )

    def _raw(self) -> wire.ProcessingRequest:
        """Return the message parsed from chosen bytes. The message's fields may be unknown or contradict each other."""
        try:
            return wire.ProcessingRequest.FromString(self._source.chunk())
        except DecodeError:
            return wire.ProcessingRequest()
