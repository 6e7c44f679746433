"""Tests of the KV events that a simulated cluster reports in virtual time."""

from collections import defaultdict
from dataclasses import replace

from clusters import SEVEN_B, busy_config, busy_requests, config, one_block_prompts, small_pool
from dualmap.engines.events import Batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.source import SourceState
from dualmap.engines.token_chain import chain_tokens, token_root
from dualmap.pools.pool import KvEvents
from dualmap.requests import Completion, Effects, Usage
from dualmap.router import PoolRouter
from dualmap_sim.block_pool import EventBatch, stand_in_tokens
from dualmap_sim.cluster import Cluster, ClusterConfig, ReplicationConfig
from dualmap_sim.events import Bypass, Fail, Forget, Recover
from engines import ROUND

BLOCK = SEVEN_B.block_tokens
AMPLE = replace(SEVEN_B, cache_tokens=20_000_000)
SCARCE = replace(SEVEN_B, cache_tokens=120_000)


def test_cluster_with_kv_events_and_ample_memory_has_equal_records() -> None:
    plain = replace(busy_config(1, members=4), engine=AMPLE)
    heard: list[EventBatch] = []
    eventful = replace(plain, on_kv_events=lambda _member, batch: heard.append(batch))

    assert Cluster(eventful).run(busy_requests(100)) == Cluster(plain).run(busy_requests(100))
    assert heard


def test_residency_of_cluster_members_agrees_with_their_engines() -> None:
    held = HeldBlocks()
    blocks = SCARCE.cache_tokens // BLOCK
    members: dict[str, Residency] = defaultdict(lambda: Residency(held, model="m", capacity_blocks=blocks - 1))
    numbers: dict[str, list[int]] = defaultdict(list)

    def follow(member: str, batch: EventBatch) -> None:
        numbers[member].append(batch.number)
        members[member].apply(0, Batch(events=batch.events))

    cluster = Cluster(replace(busy_config(1, members=4), engine=SCARCE, on_kv_events=follow))
    asked = busy_requests(150)
    cluster.run(asked)

    assert sum(residency.counts.removed for residency in members.values()) > 0
    for member, residency in members.items():
        assert numbers[member] == list(range(len(numbers[member])))
        engine = cluster._instances.of(member).engine
        for arrival in asked:
            work = arrival.work
            chain = chain_tokens(
                stand_in_tokens(work.blocks, block_tokens=BLOCK), root=token_root(model="m"), block_tokens=BLOCK
            )
            chain = replace(chain, tokens=work.prompt_tokens)
            assert residency.matched_tokens(chain) == engine.cached_tokens(work)


def test_recovered_engine_begins_at_number_0() -> None:
    numbers: list[int] = []
    failing = config(small_pool(1), events=(Fail(at_s=4.0, member="m-0"), Recover(at_s=4.5, member="m-0")))
    heard = replace(failing, on_kv_events=lambda _member, batch: numbers.append(batch.number))
    Cluster(heard).run(one_block_prompts(0.0, 2.0, 5.0))

    assert numbers == [0, 1, 0]


def test_forgotten_cache_is_reported_with_the_next_step() -> None:
    heard: list[EventBatch] = []
    forgetting = config(small_pool(1), engine=ROUND, events=(Forget(at_s=3.0, member="m-0"),))
    Cluster(replace(forgetting, on_kv_events=lambda _member, batch: heard.append(batch))).run(
        one_block_prompts(0.0, 5.0, same=True)
    )

    assert [(batch.at_s, len(batch.events)) for batch in heard] == [(1.5, 1), (6.5, 2)]


def test_prompt_of_another_source_is_reported_at_once() -> None:
    heard: list[EventBatch] = []
    bypassed = config(
        small_pool(1),
        engine=ROUND,
        events=(Bypass(at_s=3.0, member="m-0", blocks=(1, 2, 3)), Forget(at_s=3.5, member="m-0")),
    )
    Cluster(replace(bypassed, on_kv_events=lambda _member, batch: heard.append(batch))).run(one_block_prompts(0.0, 5.0))

    assert [(batch.number, batch.at_s, len(batch.events)) for batch in heard] == [(0, 1.5, 1), (1, 3.0, 1), (2, 6.5, 2)]


def with_events(plain: ClusterConfig) -> ClusterConfig:
    """Return the cluster with routers that receive the KV events of its engines."""
    engine = replace(plain.pool.engine, kv_events=KvEvents(enabled=True), cache_tokens=plain.engine.cache_tokens)
    return replace(plain, pool=replace(plain.pool, engine=engine))


def test_routers_with_kv_events_predict_what_engines_reuse() -> None:
    plain = replace(busy_config(1, members=4), engine=replace(SEVEN_B, cache_tokens=60_000))
    asked = busy_requests(200, rate=2.0)
    wrong = {}
    for name, followed in (("records", plain), ("events", with_events(plain))):
        records = Cluster(followed).run(asked)
        wrong[name] = sum(abs((each.predicted_tokens or 0) - each.cached_tokens) >= BLOCK for each in records)
    assert wrong["events"] < wrong["records"] / 3


def test_all_routers_receive_kv_events_of_all_members() -> None:
    cluster = Cluster(with_events(replace(busy_config(3, members=2), engine=AMPLE)))
    cluster.run(busy_requests(30, rate=3.0))

    held = [[each.events.blocks for each in router.status().endpoints] for router in cluster.routers]
    assert min(held[0]) > 0
    assert held == held[:1] * 3


def test_prompt_that_another_router_placed_is_not_computed_twice() -> None:
    # The first prompts let every engine report something. A prefill takes 1.5 s, and four equal prompts arrive within
    # it. Their ids let both routers receive some of them.
    *warm, hot = one_block_prompts(*(0.1 * number for number in range(6)), 20.0)
    equal = [
        replace(hot, at_s=20.0 + 0.3 * number, work=replace(hot.work, request_id=f"hot-{number}"))
        for number in range(4)
    ]
    plain = config(small_pool(2, policy="cache_affinity_global"), routers=2, exchange=ReplicationConfig())
    for followed in (plain, with_events(plain)):
        first, *others = Cluster(followed).run((*warm, *equal))[-4:]
        assert {each.router for each in others} != {first.router}
        assert {each.endpoint for each in others} == {first.endpoint}
        assert all((each.predicted_tokens or 0) >= 80 for each in others)


def test_router_forgets_blocks_of_restarted_engine_at_its_first_event() -> None:
    failing = config(
        small_pool(1), engine=ROUND, events=(Fail(at_s=5.0, member="m-0"), Recover(at_s=5.5, member="m-0"))
    )
    cluster = Cluster(with_events(failing))
    records = cluster.run(one_block_prompts(0.0, 3.0, 6.0, 9.0, same=True))

    # The router counts blocks of 20 tokens. The third prompt arrives before the restarted engine reports anything.
    reused = [record.cached_tokens for record in records]
    assert [record.predicted_tokens for record in records] == [0, 80, 80, 80]
    assert reused == [0, 90, 0, 90]
    (endpoint,) = cluster.routers[0].status().endpoints
    assert (endpoint.events.state, endpoint.events.sequence, endpoint.events.blocks) == (SourceState.LIVE, 1, 10)


def test_engines_may_keep_cached_tokens_to_themselves() -> None:
    heard: list[Usage | None] = []

    class Listening(PoolRouter):
        def on_finished(self, now: float, request_id: str, usage: Usage | None = None) -> Effects[Completion | None]:
            heard.append(usage)
            return super().on_finished(now, request_id, usage)

    quiet = replace(config(small_pool(1)), reports_cached_tokens=False)
    cluster = Cluster(quiet)
    cluster.routers = (Listening(quiet.pool),)
    records = cluster.run(one_block_prompts(0.0, 3.0, same=True))

    assert [record.cached_tokens for record in records] == [0, 90]
    assert [None if usage is None else usage.cached_tokens for usage in heard] == [None, None]
