"""Fair shares between two clients in virtual time: one needs less than its share, one sends ten times its share."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from builders import pool
from clusters import SEVEN_B, config
from dualmap.pools.pool import Engine, Prefix, Queue, Routing
from dualmap_sim.arrivals import arrivals
from dualmap_sim.cluster import Cluster, Record
from dualmap_sim.workloads.trace import Trace, TraceRequest

MEMBERS, LASTS_S = 4, 60.0
BLOCK_TOKENS = 100
# What an engine of the 7B model prefills in a second, with the attention of prompts of some thousand tokens, in pieces
# between the decodes. (Without pieces an engine's full KV memory stops all prefills for seconds.)
TOKENS_PER_S = 6000.0
ENGINE = replace(SEVEN_B, chunk_tokens=2048)
LIGHT, HEAVY = 1, 2


def requests_of(share: float, *, tokens: int, seed: int) -> list[TraceRequest]:
    """Requests with prompts of about ``tokens`` that share nothing, for a share of the pool's capacity."""
    chance, now, requests = random.Random(seed), 0.0, list[TraceRequest]()
    while (now := now + chance.expovariate(share * MEMBERS * TOKENS_PER_S / tokens)) < LASTS_S:
        blocks = max(1, round(chance.gauss(tokens, tokens / 4) / BLOCK_TOKENS))
        requests.append(
            TraceRequest(
                arrival_s=now,
                blocks=tuple((seed << 40) + (len(requests) << 16) + n for n in range(blocks)),
                input_tokens=blocks * BLOCK_TOKENS,
                output_tokens=50,
            )
        )
    return requests


@cache
def run(*, light: float, heavy: float, told_apart: bool = True) -> tuple[Record, ...]:
    """Serve both clients' requests; each client sends a share of the pool's capacity."""
    both = [(LIGHT, each) for each in requests_of(light, tokens=4000, seed=LIGHT)] if light else []
    both += [(HEAVY, each) for each in requests_of(heavy, tokens=2000, seed=HEAVY)] if heavy else []
    both.sort(key=lambda each: each[1].arrival_s)
    trace = Trace(name="two clients", block_tokens=BLOCK_TOKENS, requests=tuple(each for _, each in both))
    asked = arrivals(trace, router_block_tokens=BLOCK_TOKENS, engine_block_tokens=BLOCK_TOKENS)
    asked = tuple(
        replace(each, client=client if told_apart else 0) for each, (client, _) in zip(asked, both, strict=True)
    )
    of = replace(
        pool(MEMBERS, routing=Routing(prefix=Prefix(block_tokens=BLOCK_TOKENS), queue=Queue(max_held=200))),
        engine=Engine(prefill_tokens_per_second=SEVEN_B.prefill.tokens_per_s),
    )
    return Cluster(replace(config(of, engine=ENGINE), feedback_delay_s=0.005)).run(asked)


def ttft_p90_s(records: Sequence[Record]) -> float:
    """The 90th percentile over a client's requests; one that was rejected never had a first token."""
    waits_s = sorted(float("inf") if record.ttft_s is None else record.ttft_s for record in records)
    return waits_s[int(0.9 * len(waits_s))]


def of_light(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.arrival.client == LIGHT]


def prefilled_tokens(records: Sequence[Record]) -> int:
    return sum(
        record.arrival.work.prompt_tokens
        for record in records
        if record.first_token_s is not None and record.first_token_s < LASTS_S
    )


def test_light_client_waits_at_most_half_longer_beside_a_heavy_one() -> None:
    alone = of_light(run(light=0.3, heavy=0.0))
    beside = of_light(run(light=0.3, heavy=5.0))
    assert len(alone) == len(beside) > 100
    assert ttft_p90_s(beside) <= 1.5 * ttft_p90_s(alone)


def test_light_client_is_never_rejected_for_a_heavy_one() -> None:
    records = run(light=0.3, heavy=5.0)
    assert not any(record.refused for record in of_light(records))
    assert sum(record.refused is not None for record in records) > 1000


def test_fair_shares_leave_the_total_throughput_unchanged() -> None:
    fair, by_arrival = run(light=0.3, heavy=5.0), run(light=0.3, heavy=5.0, told_apart=False)
    assert prefilled_tokens(fair) >= 0.97 * prefilled_tokens(by_arrival)


def test_heavy_client_without_rivals_gets_everything() -> None:
    alone, unnamed = run(light=0.0, heavy=5.0), run(light=0.0, heavy=5.0, told_apart=False)
    assert [record.dispatched_s for record in alone] == [record.dispatched_s for record in unnamed]
    assert [record.refused for record in alone] == [record.refused for record in unnamed]
