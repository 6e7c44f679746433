"""Tests of the KV events that a simulated cluster reports in virtual time."""

from collections import defaultdict
from dataclasses import replace

from clusters import SEVEN_B, busy_config, busy_requests, config, one_block_prompts, small_pool
from dualmap.engines.events import Batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.token_chain import chain_tokens, token_root
from dualmap_sim.block_pool import EventBatch, stand_in_tokens
from dualmap_sim.cluster import Cluster
from dualmap_sim.events import Fail, Forget, Recover
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
