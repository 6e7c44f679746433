"""Reports that no replica of the pool made: their effect on a pool's decisions is limited."""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import pytest

from builders import pool, request, text_of
from dualmap.pools.pool import Engine, Pool, Prefix, Queue, Routing, Slo
from dualmap.prompts.blocks import MAX_BLOCKS
from dualmap.replicas.plausible import IN_FLIGHT_MAX, LoadLimits
from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.requests import Decision, EndpointStatus, Outcome, Queued, Rejection
from dualmap.router import PoolRouter
from dualmap.scaling.reports import FIRST_TOKENS_MAX, REPLICAS_MAX, ROUTERS_MAX, Report, Share, limited

NOTHING = HotnessCounts(requests=0, nodes={})
ABSURD = SharedLoad(
    pending_prefill_tokens=2**63, backlog_s=1e9, held_s=1e9, in_flight=2**32 - 1, active_kv_tokens=2**63
)
SLO_S = 5.0


def victim(*, kv_tokens: int | None = None, max_wait_s: float = 30.0) -> Pool:
    return replace(
        pool(
            3,
            engine=Engine(prefill_tokens_per_second=7000.0, kv_tokens=kv_tokens),
            routing=Routing(queue=Queue(max_wait_s=max_wait_s)),
        ),
        slo=Slo(ttft_s=SLO_S),
    )


class Run:
    """A router in virtual time: each dispatched request gets its first token after a second, and ends then."""

    def __init__(self, of: Pool) -> None:
        self.router = PoolRouter(of, replicated=True)
        self.members = [member.id for member in of.members]
        self.arrived_s: dict[str, float] = {}
        self.waited_s: dict[str, float] = {}
        self.rejected: list[Rejection] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, event: Callable[[float], None]) -> None:
        heappush(self._events, (time_s, next(self._numbers), event))

    def ask(self, now: float) -> None:
        id = f"request {len(self.arrived_s)}"
        self.arrived_s[id] = now
        answer, outcomes = self.router.on_request(now, request(id, text_of(500, id), now=now))
        self._take(now, outcomes if isinstance(answer, Queued) else (answer, *outcomes))

    def tell(self, now: float, peer: str, load: SharedLoad) -> None:
        update = ReplicaUpdate(hotness=NOTHING, loads=dict.fromkeys(self.members, load))
        self._take(now, self.router.on_update(now, peer, update, 0.0).outcomes)

    def run(self, until_s: float) -> None:
        while True:
            deadline_s = self.router.next_deadline()
            event_s = self._events[0][0] if self._events else until_s
            now = min(event_s, until_s if deadline_s is None else deadline_s)
            if now >= until_s:
                return
            if deadline_s is not None and deadline_s <= event_s:
                self._take(now, self.router.on_deadline(now).outcomes)
            else:
                heappop(self._events)[2](now)

    def _take(self, now: float, outcomes: tuple[Outcome, ...]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Rejection):
                self.rejected.append(outcome)
            else:
                self.waited_s[outcome.request_id] = now - self.arrived_s[outcome.request_id]
                self.at(now + 1.0, lambda at_s, id=outcome.request_id: self._end(at_s, id))

    def _end(self, now: float, id: str) -> None:
        self._take(now, self.router.on_first_token(now, id).outcomes)
        self._take(now, self.router.on_finished(now, id).outcomes)


@pytest.mark.parametrize("kv_tokens", [None, 100_000])
@pytest.mark.parametrize("peers", [1, 8])
def test_false_loads_of_one_peer_do_not_close_the_pool(kv_tokens: int | None, peers: int) -> None:
    run = Run(victim(kv_tokens=kv_tokens))
    for number in range(80):
        run.at(number * 0.5, lambda now, n=number: run.tell(now, f"forged {n % peers}", ABSURD))
    for number in range(40):
        run.at(0.1 + number * 0.7, run.ask)
    run.run(40.0)
    assert not run.rejected
    assert len(run.waited_s) == 40
    # Each request waits for half the SLO, and then for the prefills of this router before it.
    assert max(run.waited_s.values()) <= SLO_S / 2 + 3.0


def test_false_loads_leave_half_the_longest_wait() -> None:
    run = Run(victim(max_wait_s=2.0))
    for number in range(20):
        run.at(number * 0.5, lambda now: run.tell(now, "forged", ABSURD))
    run.at(0.1, run.ask)
    run.run(10.0)
    assert run.waited_s == {"request 0": pytest.approx(1.0)}


def test_plausible_loads_of_a_peer_still_queue_requests() -> None:
    run = Run(victim())
    run.at(0.0, lambda now: run.tell(now, "peer", SharedLoad(pending_prefill_tokens=7000, backlog_s=1.0, in_flight=1)))
    run.at(0.1, run.ask)
    run.at(1.0, lambda now: run.tell(now, "peer", SharedLoad()))
    run.run(10.0)
    assert run.waited_s == {"request 0": pytest.approx(0.9)}


def test_false_loads_are_reduced_to_their_limits() -> None:
    limits = LoadLimits(backlog_s=20.0, held_s=30.0, max_held=10, prompt_tokens=1000)
    assert limits.clamp(ABSURD) == SharedLoad(
        pending_prefill_tokens=(IN_FLIGHT_MAX + 10) * 1000,
        backlog_s=20.0,
        held_s=30.0,
        in_flight=IN_FLIGHT_MAX,
        active_kv_tokens=IN_FLIGHT_MAX * 1000,
    )
    assert limits.clamp(SharedLoad(pending_prefill_tokens=10**9, active_kv_tokens=1)) == SharedLoad(
        pending_prefill_tokens=10 * 1000
    )
    real = SharedLoad(pending_prefill_tokens=3000, backlog_s=1.0, held_s=2.0, in_flight=2, active_kv_tokens=2000)
    assert limits.clamp(real) is real


@pytest.mark.parametrize("of", [victim(), victim().never_queueing()], ids=["queueing", "never queueing"])
def test_false_loads_show_as_plausible_ones_in_decisions(of: Pool) -> None:
    router = PoolRouter(of, replicated=True)
    loads = {member.id: ABSURD for member in of.members}
    router.on_update(0.0, "forged", ReplicaUpdate(hotness=NOTHING, loads=loads), 0.0)
    answer, outcomes = router.on_request(0.0, request("r", text_of(500, "r")))
    if isinstance(answer, Queued):
        (answer,) = outcomes or router.on_deadline(SLO_S / 2).outcomes
        assert isinstance(answer, Decision)
        assert answer.receipt.predicted_ttft_s < 100.0
    assert isinstance(answer, Decision)
    assert all(each.in_flight <= IN_FLIGHT_MAX for each in answer.receipt.candidates)


def status_of(router: PoolRouter) -> dict[str, EndpointStatus]:
    return {each.id: each for each in router.status().endpoints}


def test_false_placement_takes_at_most_the_longest_prompt_of_the_index() -> None:
    small = replace(victim(), engine=Engine(max_model_len=1280))
    router = PoolRouter(small, replicated=True)
    member = small.members[0]
    placement = Placement(endpoint=member.endpoint, hashes=tuple(range(1, 5000)))
    router.on_update(0.0, "forged", ReplicaUpdate(hotness=NOTHING, placements=(placement,)), 0.0)
    assert status_of(router)[member.id].indexed_blocks == 1280 // Prefix().block_tokens


def test_false_placement_takes_at_most_the_most_blocks_of_a_prompt() -> None:
    tiny = replace(victim().routing, prefix=Prefix(block_tokens=1))
    router = PoolRouter(replace(victim(), engine=Engine(max_model_len=10**8), routing=tiny), replicated=True)
    member = router.pool.members[0]
    placement = Placement(endpoint=member.endpoint, hashes=tuple(range(1, 2 * MAX_BLOCKS)))
    router.on_update(0.0, "forged", ReplicaUpdate(hotness=NOTHING, placements=(placement,)), 0.0)
    assert status_of(router)[member.id].indexed_blocks == MAX_BLOCKS


def test_false_binding_has_at_most_the_longest_prompt() -> None:
    small = replace(victim(), engine=Engine(max_model_len=1280))
    for hinted in (False, True):
        router = PoolRouter(small, replicated=True)
        binding = SharedBinding(session=7, host="m-0", tokens=2**40, version=1, moved_ago_s=0.0)
        if hinted:
            router.on_bindings(0.0, (binding,))
        else:
            router.on_update(0.0, "forged", ReplicaUpdate(hotness=NOTHING, bindings=(binding,)), 0.0)
        known = router._chooser.sessions.get(0.0, 7)
        assert known is not None
        assert known.tokens == 1280
        assert known.hint_tokens <= 1280


def test_false_counts_cannot_outnumber_a_replicas_requests() -> None:
    router = PoolRouter(victim(), replicated=True)
    counts = HotnessCounts(requests=2**32 - 1, nodes={1: 2**32 - 1, 2: 5})
    router.on_update(0.0, "forged", ReplicaUpdate(hotness=counts), 0.0)
    tree = router._chooser.tree
    assert tree._requests == tree._nodes[1] == 100_000
    assert tree._nodes[2] == 5
    counts = HotnessCounts(requests=3, nodes={3: 2**32 - 1})
    router.on_update(0.0, "forged", ReplicaUpdate(hotness=counts), 0.0)
    assert tree._nodes[3] == 3


def test_false_demand_is_reduced_to_its_limits() -> None:
    false = Share(
        desired_replicas=1e6,
        pending_prefill_tokens=2**48,
        in_flight=2**32 - 1,
        held=2**32 - 1,
        first_tokens=2**32 - 1,
        slo_met=2**32 - 1,
    )
    report = limited(Report(own=false, pool=false), victim())
    requests = 3 * IN_FLIGHT_MAX + 1000
    assert report.own == Share(
        desired_replicas=REPLICAS_MAX,
        pending_prefill_tokens=requests * 131_072,
        in_flight=3 * IN_FLIGHT_MAX,
        held=1000,
        first_tokens=3 * FIRST_TOKENS_MAX,
        slo_met=3 * FIRST_TOKENS_MAX,
    )
    assert (report.pool.held, report.pool.in_flight) == (ROUTERS_MAX * 1000, ROUTERS_MAX * 3 * IN_FLIGHT_MAX)
    real = Share(desired_replicas=2.5, pending_prefill_tokens=5000, in_flight=4, held=2, first_tokens=9, slo_met=8)
    assert limited(Report(own=real, pool=real), victim()) == Report(own=real, pool=real)
