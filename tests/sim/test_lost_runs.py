"""Tests of the rule that stops a run with too many missed SLOs, with constructed cases."""

from dualmap.prompts.blocks import BlockChain
from dualmap.requests import Reason
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import EngineRequest
from dualmap_sim.lost_runs import LostRun
from dualmap_sim.records import Record

SLO_S = 2.0


def arrived(count: int) -> list[Arrival]:
    """Return one request per second, from 0 s."""
    chain = BlockChain(hashes=(), block_tokens=1, tokens=1)
    return [
        Arrival(
            at_s=float(number),
            chain=chain,
            session=None,
            work=EngineRequest(request_id=str(number), prompt_tokens=1, output_tokens=1),
        )
        for number in range(count)
    ]


def lost_run(asked: list[Arrival], *, attainment: float, warmup: int = 0, in_order: bool = True) -> LostRun:
    return LostRun(asked, warmup=warmup, slo_ttft_s=SLO_S, attainment=attainment, in_order=in_order)


def served(arrival: Arrival, at_s: float) -> Record:
    return Record(arrival=arrival, router=0, first_token_s=at_s)


def test_run_fails_after_more_slo_misses_than_allowed() -> None:
    asked = arrived(10)
    run = lost_run(asked, attainment=0.8, in_order=False)
    answers = [run.gives_up(served(each, each.at_s + SLO_S + 0.5)) for each in asked[:3]]
    assert answers == [False, False, True]


def test_ttft_equal_to_the_slo_meets_the_slo() -> None:
    asked = arrived(4)
    run = lost_run(asked, attainment=1.0)
    assert not any(run.gives_up(served(each, each.at_s + SLO_S)) for each in asked)


def test_requests_waiting_beyond_slo_count_as_slo_misses() -> None:
    asked = arrived(10)
    assert not lost_run(asked, attainment=0.8).gives_up(served(asked[3], 3.9)), "0 and 1 are overdue"
    assert not lost_run(asked, attainment=0.8).gives_up(served(asked[3], 4.0)), "2 may be served at this very moment"
    assert lost_run(asked, attainment=0.8).gives_up(served(asked[3], 4.1)), "0, 1 and 2 are overdue"


def test_closed_loop_infers_no_overdue_requests() -> None:
    asked = arrived(10)
    assert not lost_run(asked, attainment=0.8, in_order=False).gives_up(served(asked[3], 4.1))


def test_request_with_missed_slo_counts_once() -> None:
    asked = arrived(10)
    run = lost_run(asked, attainment=0.8)
    assert not run.gives_up(served(asked[3], 3.5)), "0 and 1 are overdue"
    late = served(asked[0], 3.6)
    assert not run.gives_up(late)
    late.failed = True
    assert not run.gives_up(late)
    assert not run.gives_up(Record(arrival=asked[1], router=0, refused=Reason.QUEUE_FULL))
    assert run.gives_up(Record(arrival=asked[4], router=0, refused=Reason.QUEUE_FULL))


def test_slo_misses_during_warm_up_do_not_count() -> None:
    asked = arrived(10)
    run = lost_run(asked, attainment=1.0, warmup=5)
    assert not any(run.gives_up(served(each, 6.9)) for each in asked[:5])
    assert run.gives_up(served(asked[5], 7.1))
