"""The ledger of a pool: every request in flight, and the load of every member.

The ledger records a request at its dispatch. The ledger removes a request at its completion, at its abort, or after
IN_FLIGHT_TTL_S without a report. The ledger releases a request's pending prefill earlier, at the first token.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from dualmap.fleet.dispatch_times import DispatchTimes
from dualmap.fleet.estimate import SHORTEST_SAMPLE_TOKENS, EndedAnswer, Lesson
from dualmap.fleet.fetches import FetchSpeed
from dualmap.fleet.in_flight import InFlightRequest
from dualmap.fleet.load import MemberLoad
from dualmap.fleet.samples import Agreement
from dualmap.fleet.usage import Prediction
from dualmap.pools.kv_store import KvStore
from dualmap.requests import Usage

IN_FLIGHT_TTL_S = 600.0
ENDED_MAX = 4096
# A prefill teaches no speed if its prompt has more or fewer tokens than estimated by more than this factor.
ESTIMATE_ERROR = 2.0


class _Loads(dict[str, MemberLoad]):
    """Loads by member. The class is a dict, because a method call for each lookup would make decisions slower."""

    def __init__(self, new: Callable[[], MemberLoad]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, member: str) -> MemberLoad:
        load = self[member] = self._new()
        return load


class _Ended(NamedTuple):
    """What the ledger keeps of an ended request. It keeps no blocks, because engines may never report the counts."""

    member: str
    prediction: Prediction
    lesson: Lesson | None
    answer: EndedAnswer | None = None
    output_is_counted: bool = False


class Counted(NamedTuple):
    """What the engine's token counts of an ended request show for the first time."""

    prediction: Prediction | None = None
    """What was predicted for the prompt; None if the prompt's tokens are not counted."""
    output_tokens: int | None = None
    """The output tokens; None if they are not counted."""


class Ledger:
    """A pool's requests in flight, and the load of every member that has or may get requests."""

    def __init__(self, prior_tokens_per_second: float) -> None:
        self._prior_tokens_per_second = prior_tokens_per_second
        self.fetches = FetchSpeed(KvStore().fetch_tokens_per_second)
        self._agreement = Agreement()
        # The loads with an outdated summary.
        self._outdated: dict[MemberLoad, None] = {}
        # The time at which the first of all other summaries becomes invalid.
        self._update_s = inf
        self.dispatch_times = DispatchTimes()
        self.loads = _Loads(
            lambda: MemberLoad(
                self._prior_tokens_per_second,
                self._agreement,
                self.fetches,
                self._outdated,
                self.dispatch_times.changed,
            )
        )
        """The load of every member by id; a lookup of an unknown member adds an empty load."""
        # The request with the oldest report is first, so that ``expire`` reads expired requests only.
        self._in_flight: OrderedDict[str, InFlightRequest] = OrderedDict()
        # The last requests that ended, since the engine's token counts may come later.
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    def update(self, now: float, decode_stall_s: float) -> None:
        """Update every outdated summary."""
        if now >= self._update_s:
            self._outdated.update(self._invalid(now))
            ends_s = [load.summary.until_s for load in self.loads.values()]
            self._update_s = min([each for each in ends_s if each > now], default=inf)
        outdated = tuple(self._outdated)
        self._outdated.clear()
        for load in outdated:
            until_s = load.update(now, decode_stall_s).until_s
            if until_s > now:
                self._update_s = min(self._update_s, until_s)
            else:
                self._outdated[load] = None

    def keep(self, now: float) -> Sequence[Callable[[], None]]:
        """Return functions that take back what reading the loads ends from now on (``MemberLoad.end_overdue``)."""
        # The summaries of all other loads are valid, so they have nothing overdue.
        invalid = self._outdated if now < self._update_s else self._invalid(now)
        return [load.keep() for load in invalid if load.is_overdue(now)]

    def _invalid(self, now: float) -> dict[MemberLoad, None]:
        """Return the loads whose summary is not valid at ``now``."""
        return dict.fromkeys([load for load in self.loads.values() if load.summary.until_s <= now])

    def set_prior(self, tokens_per_second: float) -> None:
        """Set another prior of the prefill speed; a changed prior resets the learnt speeds."""
        if tokens_per_second != self._prior_tokens_per_second:
            self._prior_tokens_per_second = tokens_per_second
            self._agreement = Agreement()
            for load in self.loads.values():
                load.set_prior(tokens_per_second, self._agreement)

    def request(self, request_id: str) -> InFlightRequest | None:
        """Return a request in flight, or None if it is unknown or has ended."""
        return self._in_flight.get(request_id)

    def enter(self, now: float, request: InFlightRequest) -> None:
        """Record a request that was dispatched to ``request.member``; its id must not be in flight."""
        assert request.request_id not in self._in_flight, f"request {request.request_id} is already in flight"
        self._in_flight[request.request_id] = request
        load = self.loads[request.member]
        if request.is_timed:
            load.await_answer(now, request)
        load.enter(now, request)

    def first_token(self, now: float, request_id: str) -> InFlightRequest | None:
        """Release a request's pending prefill and learn from it; None if the request is unknown or already released."""
        request = self.heard(now, request_id)
        if request is None:
            return None
        load = self.loads[request.member]
        # The answer arrives in parts after all, so the client can delay its end.
        load.give_up_answer(request)
        if request.prefilled:
            return None
        load.first_token(now, request)
        return request

    def leave(self, now: float, request_id: str) -> InFlightRequest | None:
        """Remove and return a request; None if it is unknown or has ended."""
        return self._leave(now, request_id, None)

    def _leave(self, now: float, request_id: str, answer: EndedAnswer | None) -> InFlightRequest | None:
        request = self._in_flight.pop(request_id, None)
        if request is not None:
            self.loads[request.member].leave(now, request)
            self._ended[request_id] = _Ended(request.member, request.prediction, request.lesson, answer)
            if len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        return request

    def on_usage(self, now: float, request_id: str, usage: Usage) -> Counted:
        """Learn from the engine's token counts of an ended request; return what they show for the first time.

        The counts may arrive in several reports. Those of an unknown request show nothing. Learn no speed from a prompt
        with far other tokens than were estimated, and take back what was learnt.
        """
        ended = self._ended.get(request_id)
        if ended is None:
            return Counted()
        prompt_tokens, prediction = usage.prompt_tokens, ended.prediction
        fewest, most = prediction.tokens / ESTIMATE_ERROR, prediction.tokens * ESTIMATE_ERROR
        is_estimated = prompt_tokens is None or fewest <= prompt_tokens <= most
        output_tokens = None if ended.output_is_counted else usage.completion_tokens
        if output_tokens is not None:
            self._ended[request_id] = ended._replace(answer=None, output_is_counted=True)
            if ended.answer is not None and is_estimated:
                _learn(now, ended.answer, prediction, output_tokens)
        if prompt_tokens is None:
            return Counted(output_tokens=output_tokens)
        del self._ended[request_id]
        if ended.lesson is not None and not is_estimated:
            load = self.loads.get(ended.member)
            if load is not None:
                load.retract(ended.lesson)
        return Counted(prediction, output_tokens)

    def finish(self, now: float, request_id: str) -> InFlightRequest | None:
        """Remove and return a request that ended without an error, and learn from it; None if it is unknown."""
        request = self._in_flight.get(request_id)
        if request is None:
            return None
        load = self.loads[request.member]
        if request.prefilled:
            load.kv.learn_silence(now - request.silent_since_s)
        return self._leave(now, request_id, load.end_answer(now, request))

    def move(
        self,
        now: float,
        request: InFlightRequest,
        *,
        to: str,
        prediction: Prediction,
        compute_s: float,
        fetch_tokens: int = 0,
    ) -> None:
        """Move a request in flight to the member that serves it."""
        self.loads[request.member].leave(now, request)
        request.member, request.prediction, request.compute_s = to, prediction, compute_s
        request.fetch_tokens = fetch_tokens
        request.matched_tokens = prediction.matched_tokens
        self.loads[to].enter(now, request)

    def heard(self, now: float, request_id: str) -> InFlightRequest | None:
        """Record a report of a request, which postpones its expiry; return the request, or None if it is unknown."""
        request = self._in_flight.get(request_id)
        if request is not None:
            request.heard_s = now
            self.loads[request.member].heard(now, request)
            self._in_flight.move_to_end(request_id)
        return request

    def next_expiry(self) -> float | None:
        """Return the time at which the request with the oldest report expires, or None without requests in flight."""
        oldest = next(iter(self._in_flight.values()), None)
        return None if oldest is None else oldest.heard_s + IN_FLIGHT_TTL_S

    def expire(self, now: float) -> list[InFlightRequest]:
        """Remove and return the requests without a report for IN_FLIGHT_TTL_S."""
        expired = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            request = self.leave(now, next(iter(self._in_flight)))
            assert request is not None
            expired.append(request)
        return expired

    def retain(self, members: set[str]) -> None:
        """Remove the loads of members that have left the pool and have no request in flight."""
        for member in [name for name, load in self.loads.items() if name not in members and not load.in_flight]:
            load = self.loads.pop(member)
            self._outdated.pop(load, None)
            load.speed.forget()


def _learn(now: float, answer: EndedAnswer, prediction: Prediction, completion_tokens: int) -> None:
    """Let a member's speed learn from a whole answer that is long enough."""
    computed_tokens = prediction.tokens - prediction.matched_tokens + completion_tokens
    if computed_tokens >= SHORTEST_SAMPLE_TOKENS and answer.seconds > 0.0:
        answer.taught.observe_answer(
            now,
            prediction.origin.client,
            work_s=answer.work_s,
            tokens=completion_tokens,
            seconds=answer.seconds,
        )
