"""Queued requests of several clients: turns by fair shares, and the places of a full queue."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from builders import request, text_of
from core.queue_pools import SPEED, decided, held, slow_pool
from dualmap.requests import Decision, Effects, Queued, Reason, Rejection
from dualmap.router import PoolRouter

UNNAMED, LIGHT, HEAVY, THIRD = 0, 1, 2, 3


def send(
    router: PoolRouter, id: str, *, client: int, tokens: int = 2000, now: float = 0.0
) -> Effects[Decision | Queued | Rejection]:
    return router.on_request(now, request(id, text_of(tokens, f"prompt {id}"), now=now, client=client))


def in_order(router: PoolRouter, *, first: str, now: float = 0.0) -> list[str]:
    """Answer each request in turn; return the queued ones as they were dispatched."""
    order, current = list[str](), first
    while True:
        now += 100.0
        released = [each.request_id for each in router.on_first_token(now, current).outcomes]
        router.on_finished(now, current)
        if not released:
            return order
        (current,) = released
        order.append(current)


def rejections(effects: Effects[object]) -> list[Rejection]:
    return [each for each in effects.outcomes if isinstance(each, Rejection)]


class TestTurns:
    def test_light_client_is_served_before_the_queue_of_a_heavy_one(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        for n in range(20):
            send(router, f"heavy {n}", client=HEAVY)
        send(router, "light", client=LIGHT)
        assert in_order(router, first="heavy 0")[:2] == ["heavy 1", "light"]

    def test_clients_that_wait_receive_equal_tokens(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        send(router, "first", client=THIRD)
        for n in range(30):
            send(router, f"heavy {n}", client=HEAVY, tokens=1500)
        for n in range(10):
            send(router, f"light {n}", client=LIGHT, tokens=3000)
        served = in_order(router, first="first")[:15]
        assert sum(each.startswith("heavy") for each in served) == 10

    def test_requests_of_one_client_keep_their_order(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        send(router, "first", client=THIRD)
        for n in range(5):
            send(router, f"heavy {n}", client=HEAVY)
            send(router, f"light {n}", client=LIGHT)
        order = in_order(router, first="first")
        assert [each for each in order if each.startswith("heavy")] == [f"heavy {n}" for n in range(5)]
        assert [each for each in order if each.startswith("light")] == [f"light {n}" for n in range(5)]

    def test_unnamed_clients_have_one_share_and_keep_their_order(self) -> None:
        """The engine reports no usage, so the tokens of a share are the estimated ones."""
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        for n in range(20):
            send(router, f"unnamed {n}", client=UNNAMED)
        for n in range(5):
            send(router, f"light {n}", client=LIGHT)
        order = in_order(router, first="unnamed 0")
        assert sum(each.startswith("light") for each in order[:10]) == 5
        unnamed = [each for each in order if each.startswith("unnamed")]
        assert unnamed == [f"unnamed {n}" for n in range(1, 20)]

    @pytest.mark.parametrize("seed", range(20))
    def test_requests_of_a_single_client_are_dispatched_by_arrival(self, seed: int) -> None:
        """With order Fcfs, a policy that does not defer, and one client: first come, first served."""
        chance = random.Random(seed)
        router = PoolRouter(slow_pool(policy="least_loaded", max_wait_s=1e9))
        ids = [str(n) for n in range(40)]
        for id in ids:
            send(router, id, client=7, tokens=chance.randint(1500, 6000))
        assert in_order(router, first=ids[0]) == ids[1:]

    @pytest.mark.parametrize("seed", range(10))
    def test_name_of_the_only_client_changes_no_outcome(self, seed: int) -> None:
        def outcomes(client: int) -> Sequence[object]:
            chance, router, now = random.Random(seed), PoolRouter(slow_pool(3, max_held=20, slo_ttft_s=9.0)), 0.0
            seen, in_flight = list[object](), list[str]()
            for n in range(200):
                now += chance.expovariate(1.0)
                answer, released = send(router, str(n), client=client, tokens=chance.randint(100, 8000), now=now)
                seen.append(answer)
                if in_flight and chance.random() < 0.6:
                    id = in_flight.pop(chance.randrange(len(in_flight)))
                    released += router.on_first_token(now, id).outcomes + router.on_finished(now, id).outcomes
                released += router.on_deadline(now).outcomes
                seen += released
                in_flight += [each.request_id for each in (answer, *released) if isinstance(each, Decision)]
            assert {type(each) for each in seen} == {Decision, Queued, Rejection}
            return seen

        assert outcomes(0) == outcomes(5)

    def test_predicted_ttft_excludes_the_work_of_a_heavy_client(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        for n in range(20):
            send(router, f"heavy {n}", client=HEAVY)
        send(router, "light", client=LIGHT)
        (light,) = [
            each
            for each in (router.on_first_token(2.0, "heavy 0"), router.on_first_token(4.0, "heavy 1"))
            for each in each.outcomes
            if each.request_id == "light"
        ]
        assert isinstance(light, Decision)
        # What is in flight, one request of the other client, its own prefill: 2000 tokens each, and their attention.
        assert light.receipt.predicted_ttft_s < 4 * 2000 / SPEED

    def test_new_names_are_no_advantage_over_a_client_that_waits(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        send(router, "first", client=THIRD)
        for n in range(10):
            send(router, f"known {n}", client=LIGHT)
        order, current, now = list[str](), "first", 0.0
        for n in range(10):
            send(router, f"new {n}", client=100 + n, now=now)
            now += 2.1
            (current,) = decided(router.on_first_token(now, current))
            order.append(current)
        assert sum(each.startswith("known") for each in order) >= 4


class TestFullQueue:
    def test_queue_full_evicts_the_newest_request_of_the_client_with_most(self) -> None:
        router = PoolRouter(slow_pool(max_held=4))
        for n in range(5):
            send(router, f"heavy {n}", client=HEAVY)
        answer, outcomes = send(router, "light", client=LIGHT)
        assert answer == Queued(request_id="light")
        (evicted,) = rejections(Effects(None, outcomes))
        assert (evicted.request_id, evicted.reason, evicted.limited) == ("heavy 4", Reason.QUEUE_FULL, True)
        assert evicted.retry_after_s is not None
        assert held(router) == 4

    def test_queue_full_rejects_an_arriving_request_of_the_client_with_most(self) -> None:
        router = PoolRouter(slow_pool(max_held=4))
        for n in range(4):
            send(router, f"heavy {n}", client=HEAVY)
        send(router, "light", client=LIGHT)
        answer, outcomes = send(router, "late", client=HEAVY)
        assert isinstance(answer, Rejection)
        assert (answer.reason, answer.limited, outcomes) == (Reason.QUEUE_FULL, True, ())

    def test_queue_full_evicts_an_unnamed_request_for_a_named_client(self) -> None:
        router = PoolRouter(slow_pool(max_held=4))
        for n in range(5):
            send(router, f"unnamed {n}", client=UNNAMED)
        answer, outcomes = send(router, "light", client=LIGHT)
        assert answer == Queued(request_id="light")
        (evicted,) = rejections(Effects(None, outcomes))
        assert (evicted.request_id, evicted.limited) == ("unnamed 4", True)

    def test_queue_full_of_one_client_limits_no_client(self) -> None:
        router = PoolRouter(slow_pool(max_held=1))
        for n in range(2):
            send(router, f"heavy {n}", client=HEAVY)
        answer = send(router, "late", client=HEAVY).answer
        assert isinstance(answer, Rejection)
        assert not answer.limited

    def test_queue_full_gives_equal_places_to_all_clients(self) -> None:
        router = PoolRouter(slow_pool(max_held=9))
        gone = list[str]()
        for client, sent in ((HEAVY, 30), (LIGHT, 30), (THIRD, 2)):
            for n in range(sent):
                answer, outcomes = send(router, f"{client}-{n}", client=client)
                gone += [each.request_id for each in (answer, *outcomes) if isinstance(each, Rejection)]
        assert held(router) == 9
        waiting = {HEAVY: 29, LIGHT: 30, THIRD: 2}
        for each in gone:
            waiting[int(each[0])] -= 1
        assert sorted(waiting.values()) == [2, 3, 4]
        assert waiting[THIRD] == 2

    def test_queue_full_of_an_empty_pool_evicts_the_client_with_most(self) -> None:
        router = PoolRouter(replace(slow_pool(0), routing=slow_pool(hold_when_empty=True, max_held=3).routing))
        for n in range(3):
            send(router, f"heavy {n}", client=HEAVY)
        answer, outcomes = send(router, "light", client=LIGHT)
        assert answer == Queued(request_id="light")
        (evicted,) = rejections(Effects(None, outcomes))
        assert (evicted.request_id, evicted.reason, evicted.limited) == ("heavy 2", Reason.NO_ENDPOINT, True)
        assert router.status().unplaced_prefill_tokens == 6000


class TestManyClients:
    def test_clients_beyond_the_predicted_ones_take_turns(self) -> None:
        router = PoolRouter(slow_pool(max_wait_s=1e9))
        for n in range(3):
            send(router, f"heavy {n}", client=HEAVY)
        for n in range(40):
            send(router, f"other {n}", client=100 + n)
        order = in_order(router, first="heavy 0")
        assert order[0] == "heavy 1"
        assert order.index("heavy 2") >= 40
