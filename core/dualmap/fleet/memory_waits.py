"""How long a prompt waits for KV memory at the members that have much less memory than the others.

A prompt that does not fit into a member's memory waits in the router, so no prefill is pending at the member, and its
backlog does not show the wait. Where all members have similar memories, all of them let prompts wait at the same load.
The wait then counts for none: requests that avoid it lose the prefix that their member has cached, which costs more
(docs/adr/0011-deferring-and-memory.md).
"""

from collections.abc import Iterable, Iterator
from statistics import median_high
from typing import Final

from dualmap.engines.profiles import Profiles
from dualmap.fleet.answers import AnswerTimes
from dualmap.fleet.capacity import Capacity
from dualmap.fleet.load import MemberLoad

_SMALL_PART: Final = 0.5
"""A member is small if it has at most this part of the pool's median memory."""
_LEAST_LEFT: Final = 0.1
"""A request that is older than the mean answer is expected to take this part of the mean."""
_MOST_TURNS: Final = 3.0
"""The expected wait for the ends of requests that are still queued is at most this number of mean answers."""


class MemoryWaits:
    """The expected waits for KV memory at a pool's small members. The arguments are of the same pool."""

    def __init__(self, *, profiles: Profiles, capacity: Capacity, answers: AnswerTimes) -> None:
        self._profiles = profiles
        self._capacity = capacity
        self._answers = answers
        self.small: dict[str, int] = {}
        """The KV memory of each small member in tokens."""

    def update(self, members: Iterable[str]) -> None:
        """Find the small members among all of a pool, after a change of the members or of their engines' memory."""
        known = {each: tokens for each in members if (tokens := self._profiles.kv_tokens(each)) is not None}
        least = _SMALL_PART * median_high(known.values()) if known else 0.0
        self.small = {each: tokens for each, tokens in known.items() if tokens <= least}

    def wait_s(self, now: float, member: str, load: MemberLoad, prompt_tokens: int) -> float:
        """Return the expected seconds until a new prompt fits into a member's memory; 0 if the member is not small.

        A request in flight is expected to end when it is as old as the mean of the last answers. The queued requests
        that are not late go before the new prompt.
        """
        kv_tokens, answer_s = self.small.get(member), self._answers.mean_s()
        if kv_tokens is None or not answer_s:
            return 0.0
        output_tokens = self._capacity.reserved_output_tokens
        ahead = [each.request.chain.tokens for each in load.queue.in_time()]
        if not ahead and load.has_room(prompt_tokens, kv_tokens, output_tokens=output_tokens):
            return 0.0
        requests = load.working + load.others.load.in_flight + len(ahead) + 1
        missing = load.in_flight_kv_tokens + sum(ahead) + prompt_tokens + requests * output_tokens - kv_tokens
        wait_s = 0.0
        for left_s, freed_tokens in _ends(now, load, answer_s):
            if missing <= 0.0:
                break
            wait_s = max(wait_s, left_s)
            missing -= freed_tokens + output_tokens
        return wait_s + answer_s * min(max(missing / kv_tokens, 0.0), _MOST_TURNS)


def _ends(now: float, load: MemberLoad, answer_s: float) -> Iterator[tuple[float, int]]:
    """Yield the expected end of each request in flight, in seconds from now, with the tokens of its prompt.

    The decoding request with the oldest report is first, which usually ends first.
    """
    for request in load.kv.decoding.values():
        age_s = now - request.answers_since_s
        yield max(answer_s - age_s, _LEAST_LEFT * answer_s), request.chain.tokens
    for request in load.prefills.pending.values():
        yield load.prefills.compute_s + answer_s, request.chain.tokens
