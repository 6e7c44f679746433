"""What the members of a pool did at which times: each recorded request as seen by the engine that served it.

An engine is visible only through its answers. The end of a prefill is the first token. A prefill begins when the
request reaches the member, or when the member's prefill before it ends, because engines compute prompts in order of
arrival.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.recordings.values import RecordedOutcome, RecordedRequest

UNKNOWN_END_S: Final = 60.0
"""A request without a recorded end counts as in flight for this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request at the member that served it.

    Times are seconds since the epoch: ``sent_s`` at which the request left the router, ``first_s`` of the first token
    (None if unknown), and ``end_s``. ``prompt_tokens`` and ``cached_tokens`` are the engine's counts. ``sound`` is true
    if the engine completed the answer at its first attempt, so that its times and counts describe the engine.
    """

    request: RecordedRequest
    member: str
    sent_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int | None
    sound: bool

    @property
    def new_tokens(self) -> int:
        """The tokens of the prompt that the engine computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A prefill whose beginning and end are visible. ``decoding`` is the mean number of requests that decoded then."""

    served: Served
    seconds: float
    alone: bool
    decoding: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The decode steps of a request after its first token.

    ``batch`` and ``kv_tokens`` are the means of the requests that decoded and of the KV tokens that they held.
    ``prefills`` are the requests whose prompts the engine computed meanwhile.
    """

    served: Served
    steps: int
    seconds: float
    batch: float
    kv_tokens: float
    prefills: tuple[Served, ...]


def served_requests(requests: Iterable[RecordedRequest]) -> dict[str, list[Served]]:
    """Return the requests of each member in the order in which they were sent to it."""
    members: dict[str, list[Served]] = {}
    for request in requests:
        if request.receipt is None or request.outcome is RecordedOutcome.REFUSED:
            continue
        each = _served(request, request.served or request.receipt.chosen)
        members.setdefault(each.member, []).append(each)
    for each_served in members.values():
        each_served.sort(key=lambda served: served.sent_s)
    return members


def _served(request: RecordedRequest, member: str) -> Served:
    sent_s = request.arrived_s + (request.queued_s or 0.0)
    first_s = None if request.ttft_s is None else request.arrived_s + request.ttft_s
    end_s = sent_s + UNKNOWN_END_S if request.duration_s is None else request.arrived_s + request.duration_s
    prompt_tokens = request.known_prompt_tokens
    return Served(
        request=request,
        member=member,
        sent_s=sent_s,
        first_s=first_s,
        end_s=max(end_s, first_s or sent_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=min(request.cached_tokens or 0, max(0, prompt_tokens - 1)),
        output_tokens=request.output_tokens,
        sound=request.outcome is RecordedOutcome.OK
        and (request.attempts or 1) == 1
        and request.engine_prompt_tokens is not None
        and request.cached_tokens is not None
        and request.sequences == 1
        and request.comparable,
    )


class MemberTimes:
    """The requests of one member in order of time, and the prefills and decode steps that they show."""

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = served
        self._longest_s = max((each.end_s - each.sent_s for each in served), default=0.0)
        self._sent_s = [each.sent_s for each in served]

    def prefills(self) -> Iterable[Prefill]:
        """Yield the sound streamed requests whose prefill began at a known time."""
        streamed = [each for each in self._served if each.first_s is not None]
        streamed.sort(key=lambda each: each.first_s or 0.0)
        before: Served | None = None
        for each in streamed:
            begun_s, before = self._begun_s(each, before), each
            if each.sound and begun_s is not None and each.first_s is not None and each.first_s > begun_s:
                decoding, _ = self._decoding(each, begun_s, each.first_s)
                alone = begun_s == each.sent_s and not decoding
                yield Prefill(served=each, seconds=each.first_s - begun_s, alone=alone, decoding=decoding)

    def decodes(self) -> Iterable[Decode]:
        """Yield the sound streamed requests with decode steps."""
        for each in self._served:
            if not each.sound or each.first_s is None or (each.output_tokens or 0) < 2 or each.end_s <= each.first_s:
                continue
            assert each.output_tokens is not None
            batch, kv_tokens = self._decoding(each, each.first_s, each.end_s)
            prefills = tuple(
                other
                for other in self._around(each.first_s, each.end_s)
                if other.first_s is not None and each.first_s < other.first_s <= each.end_s
            )
            yield Decode(
                served=each,
                steps=each.output_tokens - 1,
                seconds=each.end_s - each.first_s,
                batch=1 + batch,
                kv_tokens=each.prompt_tokens + each.output_tokens / 2 + kv_tokens,
                prefills=prefills,
            )

    def _begun_s(self, served: Served, before: Served | None) -> float | None:
        """Return the time at which a prefill began; None if it is unknown, as prefills of others may overlap it.

        ``before`` is the request with the first token before this one's.
        """
        assert served.first_s is not None
        begun_s = served.sent_s
        if before is not None and before.first_s is not None and before.first_s > served.sent_s:
            if before.sent_s > served.sent_s:
                return None
            begun_s = before.first_s
        for other in self._around(begun_s, served.first_s):
            if other is served or other.end_s <= begun_s:
                continue
            # The prompt of an answer that is not streamed, or that never began, may be computed at any time.
            if other.first_s is None or (other.first_s > begun_s and other.sent_s < served.sent_s):
                return None
        return begun_s

    def _decoding(self, served: Served, begin_s: float, end_s: float) -> tuple[float, float]:
        """Return the mean number of other requests that decode within an interval, and of the KV tokens they hold."""
        requests = kv_tokens = 0.0
        for other in self._around(begin_s, end_s):
            if other is served or other.first_s is None:
                continue
            share = (min(end_s, other.end_s) - max(begin_s, other.first_s)) / (end_s - begin_s)
            if share > 0:
                requests += share
                kv_tokens += share * (other.prompt_tokens + (other.output_tokens or 0) / 2)
        return requests, kv_tokens

    def _around(self, begin_s: float, end_s: float) -> Sequence[Served]:
        """Return the requests that may have been at the member within an interval."""
        first = bisect_left(self._sent_s, begin_s - self._longest_s)
        return self._served[first : bisect_right(self._sent_s, end_s)]
