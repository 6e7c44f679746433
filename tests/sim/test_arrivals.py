"""Tests of traces at the router and the engine: block hashes for each block length, and the order of a session's
requests.
"""

from dataclasses import replace

from dualmap_sim.arrivals import arrivals
from dualmap_sim.workloads.trace import Trace, TraceRequest


def two_block_trace(input_tokens: int, blocks: tuple[int, ...]) -> Trace:
    request = TraceRequest(arrival_s=0.0, blocks=blocks, input_tokens=input_tokens, output_tokens=1)
    return Trace(name="t", block_tokens=128, requests=(request,))


def test_prompts_share_block_hashes_as_far_as_their_ids_agree() -> None:
    def hashes(input_tokens: int, *blocks: int) -> tuple[int, ...]:
        (arrival,) = arrivals(two_block_trace(input_tokens, blocks), router_block_tokens=64, engine_block_tokens=256)
        return arrival.chain.hashes

    assert len(hashes(256, 1, 2)) == 4
    assert hashes(256, 1, 2)[:2] == hashes(256, 1, 3)[:2]
    assert not set(hashes(256, 1, 2)[2:]) & set(hashes(256, 1, 3)[2:])
    assert hashes(200, 1, 2)[:3] == hashes(256, 1, 2)[:3]
    assert hashes(200, 1, 2)[3] != hashes(256, 1, 2)[3]


def test_router_and_engine_use_separate_block_sizes() -> None:
    (arrival,) = arrivals(two_block_trace(200, (1, 2)), router_block_tokens=50, engine_block_tokens=256)
    assert (len(arrival.chain.hashes), len(arrival.chain.cacheable), len(arrival.work.blocks)) == (4, 4, 1)
    assert arrival.chain.tokens == arrival.work.prompt_tokens == 200


def sessions_trace(*sessions: int | None) -> Trace:
    requests = tuple(
        TraceRequest(
            arrival_s=float(number), blocks=(number,), input_tokens=10, output_tokens=1, session=session, pause_s=2.0
        )
        for number, session in enumerate(sessions)
    )
    return Trace(name="t", block_tokens=10, requests=requests)


def test_closed_loop_request_follows_the_last_request_of_its_session() -> None:
    trace = replace(sessions_trace(7, 8, None, 7, 7, 8), closed_loop=True)
    made = arrivals(trace, router_block_tokens=10, engine_block_tokens=10)
    assert [each.follows for each in made] == [None, None, None, "0", "3", "1"]
    assert [each.pause_s for each in made] == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]


def test_open_loop_request_has_no_previous_request() -> None:
    made = arrivals(sessions_trace(7, 7), router_block_tokens=10, engine_block_tokens=10)
    assert [(each.follows, each.pause_s) for each in made] == [(None, 0.0), (None, 0.0)]
