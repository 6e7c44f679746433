"""Hotspot-aware rebalancing: moves queued requests away from an overloaded member (paper section 3.3, A.1.2, eq. 6).

If both candidates of a request are overloaded, queued requests of both members may move. A queued request moves if the
other member of its pair would return the first token earlier and meet the SLO with it. The time saved is the benefit of
the move. Requests move in the order of decreasing benefit until the SLO is expected for all remaining requests. Each
request moves at most once. There are two deviations from the paper. The other member's load is read again before each
move, because each move increases it. One round considers at most MAX_CONSIDERED requests from the head of a queue.
"""

from collections.abc import Callable
from itertools import islice

from dualmap.policies.situation import Candidate, Rule
from dualmap.queue.request_queue import MemberQueue, QueuedRequest

MAX_CONSIDERED = 64

REBALANCED = Rule("rebalanced", "it waited at an overloaded instance, and this one of its pair will serve it sooner")


def relieve(
    now: float,
    queue: MemberQueue,
    *,
    ahead_s: float,
    slo_ttft_s: float,
    queue_s: Callable[[str], float],
    alternative: Callable[[QueuedRequest], Candidate | None],
    move: Callable[[QueuedRequest, Candidate], None],
) -> int:
    """Run one round over the queue of an overloaded member; return the number of moved requests.

    ``ahead_s`` is the member's backlog before the first request of the queue. ``queue_s`` returns a member's T_q (paper
    eq. 7) at the beginning of the round. ``alternative`` returns the other member of a request's pair with its present
    load. ``move`` moves the request to that member.
    """
    ttfts_s = _ttfts_s(now, queue, ahead_s)
    benefits_s = []
    for queued, ttft_s in ttfts_s:
        # A cheap check first: in an overloaded pool, the queue alone excludes nearly all other members.
        if all(queue_s(each) >= slo_ttft_s for each in queued.pair if each != queued.member):
            continue
        benefit_s, other = _benefit(now, queued, ttft_s, alternative, slo_ttft_s)
        if other is not None:
            benefits_s.append((benefit_s, queued))
    benefits_s.sort(key=lambda each: -each[0])
    moved = 0
    for _, queued in benefits_s:
        if all(ttft_s <= slo_ttft_s for _, ttft_s in ttfts_s):
            break
        ttft_s = next(ttft_s for each, ttft_s in ttfts_s if each is queued)
        _, other = _benefit(now, queued, ttft_s, alternative, slo_ttft_s)
        if other is not None:
            move(queued, other)
            moved += 1
            ttfts_s = _ttfts_s(now, queue, ahead_s)
    return moved


def _ttfts_s(now: float, queue: MemberQueue, ahead_s: float) -> list[tuple[QueuedRequest, float]]:
    """Return the requests at the head of a queue, each with its expected TTFT without a move."""
    expected = []
    for queued in islice(queue, MAX_CONSIDERED):
        ahead_s += queued.compute_s
        expected.append((queued, now - queued.request.arrived_s + ahead_s))
    return expected


def _benefit(
    now: float,
    queued: QueuedRequest,
    ttft_s: float,
    alternative: Callable[[QueuedRequest], Candidate | None],
    slo_ttft_s: float,
) -> tuple[float, Candidate | None]:
    """Return a move's benefit (paper eq. 6) and the target; None if the request may not move or has no benefit."""
    other = None if queued.moved else alternative(queued)
    if other is None:
        return 0.0, None
    other_ttft_s = now - queued.request.arrived_s + other.ttft_s
    if other_ttft_s >= min(slo_ttft_s, ttft_s):
        return 0.0, None
    return ttft_s - other_ttft_s, other
