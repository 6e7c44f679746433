"""Tests of decisions by the blocks that engines report."""

from dataclasses import replace

import pytest

import builders
from dualmap.engines.events import Batch, Cleared, Removed, Stored
from dualmap.engines.profile import EngineProfile
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.source import Clear, SourceState, SourceStatus
from dualmap.engines.token_chain import pack_tokens, token_root
from dualmap.fleet.claims import CLAIM_S
from dualmap.pools.pool import Engine, KvEvents
from dualmap.prompts.blocks import BlockChain, chain_blocks
from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding
from dualmap.requests import NO_EVENTS, Decision, EventsStatus, Request, Usage
from dualmap.router import PoolRouter

IDS = list(range(1, 1026))
LIVE = SourceStatus(state=SourceState.LIVE, sequence=0)
KEY = b"k" * 32


def tokens(ids: list[int] = IDS, *, salt: str = "") -> PromptTokens:
    return PromptTokens(pack_tokens(ids), root=token_root(model=builders.MODEL, cache_salt=salt, key=KEY))


def stored(blocks: int, *, start: int = 0, parent: int | None = None) -> Stored:
    return Stored(
        hashes=tuple(range(start, start + blocks)),
        parent=parent,
        tokens=pack_tokens(IDS[start * 16 : (start + blocks) * 16]),
        block_tokens=16,
    )


def router(*, policy: str = "dualmap", members: int = 4, enabled: bool = True) -> PoolRouter:
    engine = Engine(kv_events=KvEvents(enabled=enabled))
    return PoolRouter(builders.pool(members, policy=policy, engine=engine), hash_key=KEY)


def text_chain(ids: list[int] = IDS) -> BlockChain:
    return chain_blocks(pack_tokens(ids), root=7, block_tokens=128, exact=True)


def decide(of: PoolRouter, request_id: str, *, now: float = 0.0, known: PromptTokens | None = None) -> Decision:
    request = Request(id=request_id, chain=text_chain(), arrived_s=now, tokens=known)
    decision = of.on_request(now, request).answer
    assert isinstance(decision, Decision)
    return decision


def test_policy_over_all_members_finds_the_member_with_reported_blocks():
    for policy in ("min_ttft", "cache_affinity_global"):
        of = router(policy=policy)
        for number in range(4):
            of.on_kv_events(f"m-{number}", 0, [Batch(events=(stored(40 if number == 2 else 1),))], LIVE)
        receipt = decide(of, "r", known=tokens()).receipt
        assert (receipt.chosen, receipt.matched_tokens, receipt.source) == ("m-2", 640, "events"), policy


def test_block_that_ends_with_the_prompt_is_not_reused():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    assert decide(of, "r", known=tokens()).receipt.matched_tokens == 1024
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    assert decide(of, "r", known=tokens(IDS[:1024])).receipt.matched_tokens == 1008


def test_prompt_of_another_salt_matches_nothing():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    assert decide(of, "r", known=tokens(salt="other")).receipt.matched_tokens == 0


def test_record_counts_while_a_rank_is_not_followed():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    of.on_kv_events("m-0", 1, [], SourceStatus(state=SourceState.CONNECTING))
    assert decide(of, "r", known=tokens()).receipt.source == "records"
    of.on_kv_events("m-0", 1, [], LIVE)
    assert decide(of, "s", known=tokens()).receipt.source == "events"


def test_claim_of_an_aborted_request_ends():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    decide(of, "a", known=tokens())
    assert decide(of, "b", known=tokens()).receipt.matched_tokens == 1024
    of.on_aborted(1.0, "a")
    assert decide(of, "c", known=tokens()).receipt.matched_tokens == 1024
    for request in ("b", "c"):
        of.on_aborted(1.0, request)
    assert decide(of, "d", known=tokens()).receipt.matched_tokens == 16


def test_claim_ends_when_the_engine_reports_the_prompt():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    decide(of, "a", known=tokens())
    hashes = stored(64).hashes
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64), Removed(hashes=hashes[2:])))], LIVE)
    # The claim would count the removed blocks.
    assert decide(of, "b", now=1.0, known=tokens()).receipt.matched_tokens == 32


def test_prompt_that_is_held_needs_no_claim():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    decide(of, "a", known=tokens())
    of.on_kv_events("m-0", 0, [Batch(events=(Removed(hashes=stored(64).hashes[3:]),))], LIVE)
    assert decide(of, "b", now=1.0, known=tokens()).receipt.matched_tokens == 48


def test_forgotten_prompt_is_held_again_after_its_next_request():
    of = router(members=1)
    hashes = stored(63).hashes
    # Two equal prompts are computed at the same time. The second store looks like a report. Then one copy is removed.
    twice = replace(stored(63), new=False)
    of.on_kv_events("m-0", 0, [Batch(events=(twice, twice, Removed(hashes=hashes[::-1])))], LIVE)
    assert of.status().endpoints[0].events.blocks == 0
    decide(of, "a", known=tokens())
    # The engine reuses the other copy, and stores the rest of the prompt.
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1, start=63, parent=62),))], LIVE)
    assert of.status().endpoints[0].events.blocks == 64
    assert decide(of, "b", now=1.0, known=tokens()).receipt.matched_tokens == 1024


def test_prompt_with_a_forgotten_middle_is_held_again():
    of = router(members=1)
    twice = replace(stored(64), new=False)
    of.on_kv_events("m-0", 0, [Batch(events=(twice, twice, Removed(hashes=(10,))))], LIVE)
    decide(of, "a", known=tokens())
    # The engine reuses all blocks, and stores what it generates.
    generated = Stored(hashes=(500,), parent=63, tokens=pack_tokens(range(16)), block_tokens=16)
    of.on_kv_events("m-0", 0, [Batch(events=(generated,))], LIVE)
    assert of.status().endpoints[0].events.blocks == 65
    of.on_aborted(1.0, "a")
    assert decide(of, "b", now=1.0, known=tokens()).receipt.matched_tokens == 1024


def test_claim_ends_when_the_engine_restarts():
    of = router(members=1)
    of.on_profile(0.0, "m-0", EngineProfile(started_s=1.0))
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    decide(of, "a", known=tokens())
    of.on_profile(1.0, "m-0", EngineProfile(started_s=100.0))
    assert decide(of, "b", now=1.0, known=tokens()).receipt.matched_tokens == 16


def test_cleared_rank_forgets_blocks_claims_and_records():
    for change in (Batch(events=(Cleared(),)), Clear()):
        of = router(members=1)
        of.on_kv_events("m-0", 0, [Batch(events=(stored(40),))], LIVE)
        decide(of, "a", known=tokens())
        of.on_kv_events("m-0", 0, [change, Batch(events=(stored(1),))], LIVE)
        assert decide(of, "b", known=tokens()).receipt.matched_tokens == 16
        of.on_kv_events("m-0", 0, [Clear()], LIVE)
        assert decide(of, "c").receipt.matched_tokens == 0


def test_member_that_restarted_or_left_has_no_reported_blocks():
    of = router(members=2)
    for member in ("m-0", "m-1"):
        of.on_kv_events(member, 0, [Batch(events=(stored(40),))], LIVE)
    first, second = of.pool.members
    of.on_pool(0.0, replace(of.pool, members=(replace(first, incarnation="2"), second)))
    assert [each.events.blocks for each in of.status().endpoints] == [0, 40]
    of.on_pool(0.0, replace(of.pool, members=(first,)))
    of.on_kv_events("m-1", 0, [Batch(events=(stored(40),))], LIVE)
    assert [each.events for each in of.status().endpoints] == [NO_EVENTS]


def test_pool_that_disables_events_forgets_blocks_and_ignores_reports():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(40),))], LIVE)
    of.on_pool(0.0, replace(of.pool, engine=Engine()))
    of.on_kv_events("m-0", 0, [Batch(events=(stored(40),))], LIVE)
    assert of.status().endpoints[0].events == NO_EVENTS
    assert decide(of, "r", known=tokens()).receipt.source == "records"


@pytest.mark.parametrize(("enabled", "reason"), [(True, "the engine reports no KV events"), (False, "")])
def test_member_whose_engine_publishes_nothing_is_off(enabled, reason):
    of = router(members=1, enabled=enabled)
    of.on_profile(0.0, "m-0", EngineProfile(engine="vLLM", publishes=False))
    assert of.status().endpoints[0].events == EventsStatus(state=SourceState.OFF, reason=reason)


def test_status_is_the_worst_rank_and_the_sum():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(2),))], replace(LIVE, gaps=1, resyncs=2))
    partial = SourceStatus(state=SourceState.PARTIAL, sequence=7, gaps=2, resyncs=1, reason="messages are lost")
    of.on_kv_events("m-0", 1, [Batch(events=(stored(3),))], partial)
    events = of.status().endpoints[0].events
    assert (events.state, events.sequence, events.blocks) == (SourceState.PARTIAL, 7, 5)
    assert (events.gaps, events.resyncs, events.reason) == (3, 3, "rank 1: messages are lost")
    of.on_kv_events("m-0", 1, [Clear()], SourceStatus())
    assert of.status().endpoints[0].events.state is SourceState.LIVE


def test_fault_of_the_blocks_is_partial_too():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(), invalid_events=1)], LIVE)
    events = of.status().endpoints[0].events
    assert (events.state, events.reason) == (SourceState.PARTIAL, "an event was invalid")


def test_profile_bounds_the_blocks_of_a_member():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(40),))], LIVE)
    of.on_profile(0.0, "m-0", EngineProfile(block_tokens=16, cache_tokens=320))
    events = of.status().endpoints[0].events
    assert (events.state, events.blocks) == (SourceState.PARTIAL, 0)


def test_receipt_counts_token_ids_and_not_text():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(32),))], LIVE)
    for text_bytes in (1, 3 * 1025, 4 * 2050):
        chain = chain_blocks(b"x" * text_bytes, root=7, block_tokens=128)
        request = Request(id=f"r-{text_bytes}", chain=chain, arrived_s=0.0, tokens=tokens())
        decision = of.on_request(0.0, request).answer
        assert isinstance(decision, Decision)
        assert (decision.receipt.prompt_tokens, decision.receipt.matched_tokens) == (1025, 512), text_bytes
        of.on_aborted(0.0, request.id)


def test_prompt_above_the_longest_one_matches_its_blocks():
    of = PoolRouter(builders.pool(1, engine=Engine(kv_events=KvEvents(enabled=True), max_model_len=512)), hash_key=KEY)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(20),))], LIVE)
    chain = chain_blocks(b"x" * 4 * 1025, root=7, block_tokens=128)
    decision = of.on_request(0.0, Request(id="r", chain=chain, arrived_s=0.0, tokens=tokens())).answer
    assert isinstance(decision, Decision)
    assert (decision.receipt.prompt_tokens, decision.receipt.matched_tokens) == (512, 320)


def placed(of: PoolRouter, *, blocks: int = 8, age_s: float = 0.0, now: float = 0.0) -> None:
    """Let another router report that it sent the prompt's first blocks of 128 tokens to the first member."""
    placement = Placement(endpoint=of.pool.members[0].endpoint, hashes=text_chain().cacheable[:blocks])
    of.on_update(
        now, "peer", ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), placements=(placement,)), age_s
    )


def matched(of: PoolRouter, request_id: str, *, now: float = 0.0, known: PromptTokens | None = None) -> tuple[int, str]:
    receipt = decide(of, request_id, now=now, known=known or tokens()).receipt
    of.on_aborted(now, request_id)
    return receipt.matched_tokens, receipt.source


def test_engine_that_sleeps_has_no_reported_blocks():
    of = router(members=1)
    of.on_profile(0.0, "m-0", EngineProfile(asleep=False))
    of.on_kv_events("m-0", 0, [Batch(events=(stored(40),))], LIVE)
    of.on_profile(1.0, "m-0", EngineProfile(asleep=True))
    assert of.status().endpoints[0].events.blocks == 0
    of.on_profile(2.0, "m-0", EngineProfile(asleep=False))
    assert matched(of, "r", now=2.0) == (0, "events")
    of.on_kv_events("m-0", 0, [Batch(events=(stored(4),))], LIVE)
    assert matched(of, "s", now=3.0) == (64, "events")


def test_prompt_that_another_router_placed_counts_until_its_claim_ends():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    assert matched(of, "a") == (16, "events")
    placed(of, blocks=4)
    assert matched(of, "b") == (512, "events")
    assert matched(of, "c", now=4.9) == (512, "events")
    assert matched(of, "d", now=CLAIM_S + 1.0) == (16, "events")
    # A report of the past, as a router that starts receives it.
    placed(of, age_s=CLAIM_S + 1.0, now=10.0)
    assert matched(of, "e", now=10.0) == (16, "events")


def test_prompt_that_another_router_placed_counts_until_it_is_reported():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    placed(of, blocks=4)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(32),))], LIVE)
    assert matched(of, "a") == (512, "events")
    of.on_kv_events("m-0", 0, [Batch(events=(Removed(hashes=stored(32).hashes[2:]),))], LIVE)
    assert matched(of, "b") == (32, "events")


def test_prompt_that_another_router_placed_ends_with_the_cache():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    placed(of)
    of.on_kv_events("m-0", 0, [Batch(events=(Cleared(),))], LIVE)
    assert matched(of, "a") == (0, "events")


def test_placed_prompt_counts_for_a_policy_over_all_members():
    of = router(policy="min_ttft")
    for number in range(4):
        of.on_kv_events(f"m-{number}", 0, [Batch(events=(stored(1),))], LIVE)
    placed(of)
    assert decide(of, "a", known=tokens()).receipt.chosen == of.pool.members[0].id


def test_request_without_token_ids_is_claimed_by_its_text():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    decide(of, "a")
    assert matched(of, "b") == (1024, "events")
    of.on_aborted(1.0, "a")
    assert matched(of, "c", now=1.0) == (16, "events")


def test_prompt_is_claimed_before_the_first_store_of_a_member():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=())], LIVE)
    decide(of, "a", known=tokens())
    assert matched(of, "b") == (1024, "events")


def test_hint_of_the_store_counts_as_long_as_a_claim():
    for moved_ago_s, expected in ((1.0, 640), (100.0, 16)):
        of = router(members=1)
        of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
        binding = SharedBinding(session=7, host="m-0", tokens=640, version=0, moved_ago_s=moved_ago_s)
        of.on_bindings(0.0, [binding])
        request = Request(id="a", chain=text_chain(), arrived_s=0.0, tokens=tokens(), session=7)
        decision = of.on_request(0.0, request).answer
        assert isinstance(decision, Decision)
        assert (decision.receipt.matched_tokens, decision.receipt.source) == (expected, "events")


def test_reported_tokens_are_rounded_as_cached_tokens_show():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(60),))], LIVE)
    assert matched(of, "a") == (960, "events")
    for number in range(1, 8):
        decide(of, f"u-{number}", known=tokens())
        of.on_finished(0.0, f"u-{number}", Usage(prompt_tokens=1025, cached_tokens=112 * number))
    assert matched(of, "b", now=100.0) == (960, "events")
    decide(of, "u-8", now=100.0, known=tokens())
    of.on_finished(100.0, "u-8", Usage(prompt_tokens=1025, cached_tokens=112 * 8))
    assert matched(of, "c", now=200.0) == (896, "events")


class TestPartial:
    """Members of which messages are lost, such as those before the router's start."""

    LOST = SourceStatus(state=SourceState.PARTIAL, sequence=500, reason="messages 0 to 499 are lost")

    def router(self, *, policy: str = "dualmap") -> PoolRouter:
        """Return a router with a member that has a prompt of which the engine reported only the last blocks."""
        of = router(members=1, policy=policy)
        of.on_kv_events("m-0", 0, [Batch(events=(stored(2, start=62, parent=61),))], self.LOST)
        decide(of, "a", known=tokens())
        of.on_finished(1.0, "a")
        return of

    def test_record_counts_where_the_events_lack_blocks(self):
        for policy in ("dualmap", "min_ttft", "cache_affinity_global"):
            of = self.router(policy=policy)
            receipt = decide(of, "b", now=100.0, known=tokens()).receipt
            assert (receipt.matched_tokens, receipt.source) == (1024, "records"), policy

    def test_events_count_where_they_have_more_blocks(self):
        of = router(members=1)
        of.on_kv_events("m-0", 0, [Batch(events=(stored(40),))], self.LOST)
        receipt = decide(of, "a", known=tokens()).receipt
        assert (receipt.matched_tokens, receipt.source) == (640, "events")

    def test_record_counts_after_blocks_were_forgotten(self):
        of = router(members=1)
        of.on_profile(0.0, "m-0", EngineProfile(block_tokens=16, cache_tokens=320))
        of.on_kv_events("m-0", 0, [Batch(events=(stored(20),)), Batch(events=(stored(1, start=20, parent=19),))], LIVE)
        assert of.status().endpoints[0].events.state is SourceState.PARTIAL
        decide(of, "a", known=tokens())
        of.on_finished(1.0, "a")
        assert decide(of, "b", now=100.0, known=tokens()).receipt.source == "records"

    def test_restart_forgets_the_record(self):
        of = self.router()
        of.on_kv_events("m-0", 0, [Clear()], LIVE)
        assert decide(of, "b", now=100.0, known=tokens()).receipt.matched_tokens == 0


def served(
    of: PoolRouter, request_id: str, *, cached: int, now: float = 1.0, client: int = 0, comparable: bool = True
) -> None:
    """Serve the prompt, of which the engine had cached ``cached`` tokens."""
    request = Request(
        id=request_id, chain=text_chain(), arrived_s=now, tokens=tokens(), client=client, comparable=comparable
    )
    assert isinstance(of.on_request(now, request).answer, Decision)
    of.on_finished(now, request_id, Usage(prompt_tokens=1025, cached_tokens=cached))


def test_record_counts_after_most_counts_contradict_the_events():
    """As with a publisher that hangs, and with a wrong topic."""
    for blocks, cached in ((64, 0), (64, 512), (1, 1024)):
        of = router(members=1)
        of.on_kv_events("m-0", 0, [Batch(events=(stored(blocks),))], LIVE)
        for number in range(7):
            # The claim of the request before has ended.
            served(of, f"wrong-{number}", cached=cached, now=100.0 * number)
        assert of.status().endpoints[0].events.state is SourceState.LIVE
        served(of, "wrong-7", cached=cached, now=700.0)
        status = of.status().endpoints[0].events
        assert status.state is SourceState.PARTIAL
        assert "counts other cached tokens" in status.reason
        assert decide(of, "r", now=800.0, known=tokens()).receipt.source == "records"
        of.on_kv_events("m-0", 0, [Clear(), Batch(events=(stored(64),))], LIVE)
        assert decide(of, "s", now=800.0, known=tokens()).receipt.source == "events"


def test_few_or_small_differences_contradict_no_events():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    for number in range(40):
        served(of, f"small-{number}", cached=1024 - 32)
        served(of, f"right-{number}", cached=1024)
        served(of, f"incomparable-{number}", cached=0, comparable=False)
        if number % 2:
            served(of, f"wrong-{number}", cached=0)
    assert of.status().endpoints[0].events.state is SourceState.LIVE


def test_one_of_several_clients_contradicts_no_events():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(64),))], LIVE)
    for number in range(40):
        served(of, f"hostile-{number}", cached=0, client=1)
        served(of, f"other-{number}", cached=1024, client=2)
    assert of.status().endpoints[0].events.state is SourceState.LIVE


def test_claims_contradict_no_events():
    of = router(members=1)
    of.on_kv_events("m-0", 0, [Batch(events=(stored(1),))], LIVE)
    for number in range(20):
        decide(of, f"first-{number}", known=tokens())
    for number in range(20):
        # The engine computes equal prompts at the same time.
        of.on_finished(1.0, f"first-{number}", Usage(prompt_tokens=1025, cached_tokens=16))
    assert of.status().endpoints[0].events.state is SourceState.LIVE


def test_counts_of_a_member_that_left_are_ignored():
    of = router(members=2)
    for number in range(2):
        of.on_kv_events(f"m-{number}", 0, [Batch(events=(stored(64),))], LIVE)
    left = decide(of, "r", known=tokens()).receipt.chosen
    kept = tuple(each for each in of.pool.members if each.id != left)
    of.on_pool(1.0, replace(of.pool, members=kept, ring_version=2))
    completion = of.on_finished(2.0, "r", Usage(prompt_tokens=1025, cached_tokens=0)).answer
    assert completion is not None
    assert completion.member == left
