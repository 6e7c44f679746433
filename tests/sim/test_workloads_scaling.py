"""Tests of traces with more or fewer sessions."""

from collections import Counter

import pytest

from dualmap_sim.workloads.scaling import scaled_sessions
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.trace import Trace, TraceRequest

SYSTEM = 1_000_000


def conversations(count: int, *, named: bool = True) -> Trace:
    """Return conversations of three turns behind one system prompt, 10 s apart."""
    requests = [
        TraceRequest(
            arrival_s=10.0 * number + 30.0 * turn,
            blocks=(SYSTEM, *(10 * number + block for block in range(1 + turn))),
            input_tokens=512 * (2 + turn),
            output_tokens=5,
            session=number if named else None,
        )
        for number in range(count)
        for turn in range(3)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(name="conversations", block_tokens=512, requests=tuple(requests))


def test_copies_are_sessions_of_their_own_behind_the_same_system_prompt() -> None:
    trace = conversations(20)
    doubled = scaled_sessions(trace, 2.0)
    turns = Counter(request.session for request in doubled.requests)
    assert len(turns) == 40
    assert set(turns.values()) == {3}
    assert {request.blocks[0] for request in doubled.requests} == {SYSTEM}
    for session in turns:
        first, second, third = (request for request in doubled.requests if request.session == session)
        assert third.blocks[:3] == second.blocks
        assert third.arrival_s - second.arrival_s == pytest.approx(30.0)
        assert second.arrival_s - first.arrival_s == pytest.approx(30.0)
    own = [{block for r in doubled.requests if r.session == s for block in r.blocks[1:]} for s in turns]
    assert sum(map(len, own)) == len(set().union(*own))


def test_originals_stay_and_copies_come_later_in_order() -> None:
    trace = conversations(20)
    tripled = scaled_sessions(trace, 3.0)
    assert set(trace.requests) <= set(tripled.requests)
    times_s = [request.arrival_s for request in tripled.requests]
    assert times_s == sorted(times_s)
    assert times_s[-1] <= trace.requests[-1].arrival_s + 60.0


def test_part_of_the_sessions_is_kept_whole() -> None:
    part = scaled_sessions(conversations(200), 0.5)
    turns = Counter(request.session for request in part.requests)
    assert set(turns.values()) == {3}
    assert 70 < len(turns) < 130


def test_requests_without_session_are_scaled_by_their_conversations() -> None:
    doubled = scaled_sessions(conversations(20, named=False), 2.0)
    assert len(doubled.requests) == 120
    assert {request.session for request in doubled.requests} == {None}
    chains = {request.blocks for request in doubled.requests}
    # Each longer prompt continues a shorter one.
    assert all(chain[:-1] in chains for chain in chains if len(chain) > 2)


def test_factor_of_one_changes_nothing_and_results_repeat() -> None:
    trace = default_workload(100)
    assert scaled_sessions(trace, 1.0) == trace
    assert scaled_sessions(trace, 2.5) == scaled_sessions(trace, 2.5)


def test_factor_that_is_too_small_leaves_no_requests() -> None:
    assert scaled_sessions(conversations(3), 0.001).requests == ()
