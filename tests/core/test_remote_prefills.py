"""A request of a pool with a prefill pool: two members, two accounts, one decision."""

from dataclasses import replace

import pytest

from builders import members, pool, request, text_of
from core.routers import loads
from core.shared_routers import Routers
from dualmap.kv_store.view import NO_MATCH, StoreMatch
from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import MemberState, Pool, Queue, Routing
from dualmap.remote_prefills import Prefiller, RemotePrefills, Settled
from dualmap.requests import Asked, Completion, Decision, Effects, Queued, Rejection, Request, Usage
from dualmap.router import PoolRouter

LONG = text_of(4000, "a long prompt")
BRIEF = text_of(500, "a short prompt")


def prefill_pool(**changes: object) -> Pool:
    prefillers = tuple(replace(each, id=f"p-{n}", port=9000) for n, each in enumerate(members(2)))
    return replace(pool(), name="prefill", members=prefillers, **changes)  # type: ignore[arg-type]


class CountingRouter(PoolRouter):
    """A router that counts how often it is asked."""

    asked = 0

    def on_request(self, now: float, request: Request) -> Effects[Decision | Queued | Rejection]:
        self.asked += 1
        return super().on_request(now, request)


class Split:
    """A decode pool of three members and a prefill pool of two, and the requests of one router."""

    def __init__(self, *, decode: Pool | None = None, prefill: Pool | None = None) -> None:
        self.decode = PoolRouter(replace(decode or pool(3), prefill_pool="prefill"))
        self.prefill = PoolRouter(prefill or prefill_pool())
        self.prefills = RemotePrefills()

    def ask(
        self, id: str, text: str = LONG, *, now: float = 0.0, usable: bool = True, stored: StoreMatch = NO_MATCH
    ) -> Decision | Queued | Rejection | Asked:
        asked = request(id, text, now=now)._replace(stored=stored)
        answer, _ = self.prefills.on_request(
            now, asked, self.decode, Prefiller(self.prefill, asked) if usable else None
        )
        return answer

    def decide(
        self, id: str, text: str = LONG, *, now: float = 0.0, usable: bool = True, stored: StoreMatch = NO_MATCH
    ) -> Decision:
        decision = self.ask(id, text, now=now, usable=usable, stored=stored)
        assert isinstance(decision, Decision)
        return decision

    def first_token(self, id: str, *, now: float) -> list[Settled]:
        first_token, effects = self.prefills.on_first_token(now, id)
        assert first_token is not None
        return self.prefills.settle(now, [(self.decode, self.decode.on_first_token(now, id).outcomes), *effects])

    def end(self, id: str, *, now: float, finished: bool = True, failed: bool = False) -> list[Settled]:
        end = self.decode.on_finished if finished else self.decode.on_failed if failed else self.decode.on_aborted
        completion, outcomes = end(now, id)
        assert completion is not None
        _, effects = self.prefills.on_end(now, completion, None, finished=finished, failed=failed)
        return self.prefills.settle(now, [(self.decode, outcomes), *effects])


def narrow() -> Pool:
    """A prefill pool that queues a second request of each member, and has a queue of two."""
    return prefill_pool(routing=Routing(queue=Queue(dispatch_window_s=0.001, max_held=2, max_wait_s=10.0)))


def test_long_prompt_is_prefilled_by_a_member_of_the_prefill_pool() -> None:
    split = Split()

    decision = split.decide("a")

    assert decision.endpoints[0].endswith(":8000")
    assert all(each.endswith(":9000") for each in decision.prefillers)
    assert len(decision.prefillers) == 2
    receipt = decision.receipt.prefill
    assert receipt is not None
    assert receipt.receipt is not None
    assert receipt.receipt.address == decision.prefillers[0]
    assert decision.receipt.predicted_ttft_s == receipt.receipt.predicted_ttft_s
    # The decode member has the KV memory, the prefill member the prefill.
    assert loads(split.decode) == (1, 0, 4000)
    assert loads(split.prefill) == (1, 4000, 4000)


def test_receipt_header_names_both_members() -> None:
    split = Split()

    remote, local = split.decide("a").receipt, split.decide("b", BRIEF).receipt

    assert ', prefill="p-' in remote.header()
    assert ', prefill=local, prefill_reason="short"' in local.header()
    assert remote.as_json()["prefill"]["receipt"]["pool"] == "llm/prefill"  # type: ignore[index]
    assert local.as_json()["prefill"]["reason"] == "short"  # type: ignore[index]
    assert "prefill" not in PoolRouter(pool()).on_request(0.0, request("c", LONG)).answer.receipt.as_json()  # type: ignore[union-attr]


def test_short_prompt_is_prefilled_by_the_decode_member() -> None:
    split = Split()

    decision = split.decide("a", BRIEF)

    assert decision.prefillers == ()
    assert loads(split.decode) == (1, 500, 500)
    assert loads(split.prefill) == (0, 0, 0)
    assert not split.prefills.splits


@pytest.mark.parametrize(("stored", "prefilled_elsewhere"), [(3900, False), (1000, True)])
def test_prompt_in_the_store_of_the_decode_pool_counts_as_cached(stored: int, prefilled_elsewhere: bool) -> None:
    store = KvStore(type=StoreType.MOONCAKE, endpoint="http://127.0.0.1:9003")
    split = Split(decode=replace(pool(3), kv_store=store))

    decision = split.decide("a", stored=StoreMatch(stored))

    assert bool(decision.prefillers) == prefilled_elsewhere
    assert decision.receipt.fetch_tokens == stored
    # The prefill pool has no store.
    assert loads(split.prefill)[1] == (4000 if prefilled_elsewhere else 0)


def test_prompt_cached_at_the_decode_member_is_prefilled_there() -> None:
    split = Split()
    first = split.decide("a")
    split.first_token("a", now=1.0)
    split.end("a", now=2.0)

    again = split.decide("b", now=3.0)

    assert again.receipt.chosen == first.receipt.chosen
    assert again.receipt.prefill is not None
    assert again.receipt.prefill.local == "short"


def test_first_token_ends_the_prefill_and_teaches_its_members_speed() -> None:
    split = Split()
    member = split.decide("a").receipt.prefill.receipt.chosen  # type: ignore[union-attr]
    before = {each.id: each.prefill_tokens_per_second for each in split.prefill.status().endpoints}

    split.first_token("a", now=2.0)

    assert loads(split.prefill) == (0, 0, 0)
    assert loads(split.decode) == (1, 0, 4000)
    after = {each.id: each.prefill_tokens_per_second for each in split.prefill.status().endpoints}
    assert after[member] < before[member]
    assert len({each.prefill_tokens_per_second for each in split.decode.status().endpoints}) == 1


def test_first_token_of_a_remote_prefill_keeps_the_progress_of_local_ones() -> None:
    split = Split(decode=pool(1))
    split.decide("remote")
    split.decide("local", BRIEF, now=0.0)
    before_s = split.decode.status().endpoints[0]

    split.first_token("remote", now=0.05)

    assert split.decode.status().endpoints[0].pending_prefill_tokens == before_s.pending_prefill_tokens == 500


@pytest.mark.parametrize(("finished", "failed"), [(True, False), (False, False), (False, True)])
def test_end_before_the_first_token_releases_both_accounts(finished: bool, failed: bool) -> None:
    split = Split()
    split.decide("a")

    split.end("a", now=1.0, finished=finished, failed=failed)

    assert loads(split.decode) == loads(split.prefill) == (0, 0, 0)
    assert not split.prefills.splits


def test_failures_before_the_first_token_suspend_the_prefill_member() -> None:
    split = Split(prefill=replace(prefill_pool(), members=prefill_pool().members[:1]))

    for number in range(3):
        split.decide(f"a{number}", text_of(4000, f"prompt {number}"), now=number)
        split.end(f"a{number}", now=number + 0.1, finished=False, failed=True)

    assert [each.suspended for each in split.prefill.status().endpoints] == [True]


def test_completion_predicts_the_tokens_that_the_prefill_member_cached() -> None:
    split = Split()
    split.decide("a")
    split.first_token("a", now=1.0)
    completion = split.decode.on_finished(1.5, "a").answer
    assert isinstance(completion, Completion)
    split.prefills.on_end(1.5, completion, None, finished=True, failed=False)
    # Another decode member: the first is gone, so only the prefill member caches the prompt.
    split.decode.on_pool(2.0, replace(split.decode.pool, members=members(5)[3:]))

    decision = split.decide("b", now=2.0)
    completion = split.decode.on_finished(3.0, "b").answer
    assert isinstance(completion, Completion)
    reported, _ = split.prefills.on_end(3.0, completion, None, finished=True, failed=False)

    assert decision.prefillers
    assert (completion.predicted_cached_tokens, reported.predicted_cached_tokens) == (0, 3968)


def test_saturated_prefill_pool_queues_the_request_until_a_first_token() -> None:
    split = Split(prefill=replace(narrow(), members=narrow().members[:1]))
    split.decide("a")

    assert isinstance(split.ask("b", text_of(4000, "another")), Queued)
    assert split.prefills.is_waiting("b")
    settled = split.first_token("a", now=1.0)

    assert [(each.router, type(each.outcome), each.outcome.request_id) for each in settled] == [
        (split.decode, Decision, "b")
    ]
    assert settled[0].outcome.prefillers  # type: ignore[union-attr]
    assert loads(split.prefill) == (1, 4000, 4000)
    assert loads(split.decode)[0] == 2


def test_full_prefill_pool_leaves_the_prefill_to_the_decode_member() -> None:
    split = Split(prefill=replace(narrow(), members=narrow().members[:1]))
    for number in range(3):
        split.ask(f"a{number}", text_of(4000, f"prompt {number}"))

    decision = split.decide("b", text_of(4000, "one too many"))

    assert decision.prefillers == ()
    assert decision.receipt.prefill is not None
    assert decision.receipt.prefill.local == "full"
    assert loads(split.decode)[1] == 4000


def test_request_that_waited_too_long_for_a_prefill_member_is_prefilled_locally() -> None:
    split = Split(prefill=replace(narrow(), members=narrow().members[:1]))
    split.decide("a")
    split.ask("b", text_of(4000, "another"))

    settled = split.prefills.settle(10.0, [(split.prefill, split.prefill.on_deadline(10.0).outcomes)])

    (decision,) = (each.outcome for each in settled)
    assert isinstance(decision, Decision)
    assert decision.receipt.prefill is not None
    assert decision.receipt.prefill.local == "full"


@pytest.mark.parametrize("state", [None, MemberState.DRAINING])
def test_prefill_pool_without_usable_members_leaves_prefills_to_decode_members(state: MemberState | None) -> None:
    none = () if state is None else tuple(replace(each, state=state) for each in prefill_pool().members)
    holding = Routing(queue=Queue(hold_when_empty=True))
    split = Split(prefill=replace(prefill_pool(), members=none, routing=holding))

    decision, brief = split.decide("a"), split.decide("b", BRIEF)

    assert decision.receipt.prefill is not None
    assert decision.receipt.prefill.local == "no-member"
    assert brief.receipt.prefill is not None
    assert brief.receipt.prefill.local == "short"


def test_prefill_pool_without_members_costs_no_second_decision() -> None:
    split = Split(prefill=replace(prefill_pool(), members=()))
    router = CountingRouter(split.decode.pool)
    split.decode = router

    split.decide("a")

    assert router.asked == 1
    assert loads(split.decode) == (1, 4000, 4000)


def test_unusable_prefill_pool_leaves_prefills_to_decode_members() -> None:
    split = Split()

    decision = split.decide("a", usable=False)

    assert decision.receipt.prefill is not None
    assert decision.receipt.prefill.local == "unusable"
    assert loads(split.decode) == (1, 4000, 4000)
    assert not split.prefills.splits


def test_removed_prefill_pool_releases_its_waiting_requests_to_decode_members() -> None:
    split = Split(prefill=replace(narrow(), members=narrow().members[:1]))
    split.decide("a")
    split.ask("b", text_of(4000, "another"))

    settled = split.prefills.settle(1.0, split.prefills.on_removed(1.0, {"llm/prefill"}))

    (decision,) = (each.outcome for each in settled)
    assert isinstance(decision, Decision)
    assert decision.request_id == "b"
    assert decision.prefillers == ()
    assert not split.prefills.splits


def test_client_that_leaves_the_prefill_queue_frees_both_members() -> None:
    split = Split(prefill=replace(narrow(), members=narrow().members[:1]))
    split.decide("a")
    split.ask("b", text_of(4000, "another"))

    split.decode.on_aborted(1.0, "b")
    assert split.prefills.settle(1.0, split.prefills.forget(1.0, "b")) == []

    assert loads(split.decode)[0] == loads(split.prefill)[0] == 1
    assert split.prefill.status().held == 0


def test_decode_pool_without_room_rejects_before_a_prefill_member_is_chosen() -> None:
    split = Split(decode=replace(pool(0), routing=Routing()))

    assert isinstance(split.ask("a"), Rejection)
    assert loads(split.prefill) == (0, 0, 0)
    assert not split.prefills.splits


class SharedSplit:
    """Two routers; the requests arrive at the one that does not own the decode pool."""

    def __init__(self, prefill: Pool) -> None:
        self.decode = Routers(replace(pool(3), prefill_pool="prefill"))
        self.prefill = Routers(prefill)
        (self.name,) = self.decode.others
        self.prefills = RemotePrefills()

    def ask(self, id: str, text: str = LONG) -> list[Decision]:
        """Send a request, deliver all messages and return the decisions."""
        asked = request(id, text)
        prefiller = Prefiller(self.prefill[self.name], asked)
        answer, settled = self.prefills.on_request(0.0, asked, self.decode[self.name], prefiller)
        assert isinstance(answer, Asked)
        decided = [each.outcome for each in settled]
        for _ in range(4):
            for of in (self.decode, self.prefill):
                of.deliver()
                arrived = tuple(of.outcomes.pop(id, ()))
                decided += [each.outcome for each in self.prefills.settle(0.0, [(of[self.name], arrived)])]
        return [each for each in decided if isinstance(each, Decision)]


def test_owners_of_both_pools_account_for_their_part_of_a_request() -> None:
    split = SharedSplit(prefill_pool())

    (decision,) = split.ask("a")

    assert decision.prefillers
    assert loads(split.decode[split.decode.owner]) == (1, 0, 4000)
    assert loads(split.prefill[split.prefill.owner]) == (1, 4000, 4000)
    assert split.decode[split.name].demand().endpoints[0].pending_prefill_tokens == 0


def test_owner_decides_again_when_the_prefill_pool_is_full() -> None:
    one = prefill_pool(routing=Routing(queue=Queue(dispatch_window_s=0.001, max_held=0)))
    split = SharedSplit(replace(one, members=one.members[:1]))
    split.ask("a")

    (decision,) = split.ask("b", text_of(4000, "another"))

    assert decision.receipt.prefill is not None
    assert decision.receipt.prefill.local == "full"
    assert loads(split.decode[split.decode.owner])[:2] == (2, 4000)


def test_whole_answer_with_a_remote_prefill_teaches_no_member_a_speed() -> None:
    """Its duration is that of two members together."""
    split, now = Split(), 0.0
    for number in range(60):
        asked = request(f"{number}", text_of(4000, f"prompt {number}"), now=now)._replace(streamed=False)
        answer, _ = split.prefills.on_request(now, asked, split.decode, Prefiller(split.prefill, asked))
        assert isinstance(answer, Decision)
        is_first = answer.prefillers[0] == split.prefill.status().endpoints[0].endpoint
        now += 10.0 if number >= 20 and is_first else 1.0
        usage = Usage(prompt_tokens=4000, completion_tokens=100)
        completion, _ = split.decode.on_finished(now, asked.id, usage)
        assert completion is not None
        split.prefills.on_end(now, completion, usage, finished=True, failed=False)
    for router in (split.decode, split.prefill):
        assert len({each.prefill_tokens_per_second for each in router.status().endpoints}) == 1
