"""Tests of the oracles in small calculated cases: each request's instance, time, order and cached tokens."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dualmap.prompts.blocks import BlockChain
from dualmap_sim.arrivals import Arrival
from dualmap_sim.engine import Engine
from dualmap_sim.errors import RequestDoesNotFit
from dualmap_sim.oracles import ORACLES, run_oracle
from dualmap_sim.oracles.replay import HandOver, Instance, Replay
from dualmap_sim.oracles.waiting_lines import PASSED_OVER_MAX
from dualmap_sim.presets import EngineConfig
from dualmap_sim.records import LoadSample, Record
from engines import ROUND, ask

NO_BLOCKS = BlockChain(hashes=(), block_tokens=10, tokens=0)
PREFILL_ONLY = replace(ROUND, decode=None)


def asked(
    name: str,
    at_s: float,
    *,
    prompt: int = 100,
    output: int = 2,
    blocks: Sequence[int] = (),
    follows: str | None = None,
) -> Arrival:
    """Return a request with a prompt of 100 tokens.

    On a ROUND engine, the prefill takes 1.5 s, and each further output token takes 0.25 s.
    """
    work = ask(name, prompt=prompt, output=output, blocks=blocks)
    return Arrival(at_s=at_s, chain=NO_BLOCKS, session=None, work=work, follows=follows, pause_s=1.0)


def run(
    oracle: str, *arrivals: Arrival, instances: int = 1, engine: EngineConfig = ROUND, slo_ttft_s: float = 5.0
) -> dict[str, Record]:
    replayed = run_oracle(oracle, engine=engine, instances=instances, arrivals=arrivals, slo_ttft_s=slo_ttft_s)
    assert not replayed.gave_up
    assert sorted(record.arrival.request_id for record in replayed.records) == sorted(
        each.request_id for each in arrivals
    )
    return {record.arrival.request_id: record for record in replayed.records}


def first_token_s(records: dict[str, Record]) -> dict[str, float | None]:
    return {name: record.first_token_s for name, record in records.items()}


def places(records: dict[str, Record]) -> dict[str, str | None]:
    return {name: record.endpoint for name, record in records.items()}


def one_prompt(name: str, at_s: float, blocks: int = 10) -> Arrival:
    return asked(name, at_s, blocks=range(blocks))


def test_single_queue_sends_first_request_to_first_ready_engine() -> None:
    records = run("limit", asked("a", 0.0), asked("b", 0.5), asked("c", 0.6), asked("d", 0.7), instances=2)

    assert first_token_s(records) == {"a": 1.5, "b": 2.0, "c": 3.0, "d": 3.5}
    assert places(records) == {"a": "instance-0", "b": "instance-1", "c": "instance-0", "d": "instance-1"}
    assert [record.dispatched_s for record in records.values()] == [0.0, 0.5, 1.5, 2.0]
    assert [record.held for record in records.values()] == [False, False, True, True]
    assert [record.finished_s for record in records.values()] == [1.5 + 1.5 + 0.25, 2.0 + 1.5 + 0.25, 3.25, 3.75]


def test_single_queue_waits_for_the_current_decode_step() -> None:
    records = run("limit", asked("decodes", 0.0, output=100), asked("b", 1.6))

    assert records["b"].dispatched_s == 1.6
    assert records["b"].first_token_s == 1.75 + 1.5


def test_single_queue_prefers_engine_with_least_reserved_memory() -> None:
    records = run(
        "limit",
        asked("large", 0.0, prompt=200, output=100),
        asked("small", 0.0, prompt=100, output=100),
        asked("c", 5.0),
        asked("d", 5.1),
        instances=3,
    )
    assert places(records) == {"large": "instance-0", "small": "instance-1", "c": "instance-2", "d": "instance-1"}


def test_single_queue_first_request_without_memory_blocks_queue() -> None:
    records = run(
        "limit", asked("fills", 0.0, output=801), asked("head", 5.0, output=100), asked("behind", 6.0, prompt=50)
    )

    # 1.5 s of prefill and 800 steps of 0.25 s, until more than 99 tokens of memory are free.
    assert records["head"].dispatched_s == records["fills"].finished_s == 201.5
    assert records["behind"].dispatched_s == records["head"].first_token_s == 203.0


def test_single_queue_rejects_request_that_never_fits() -> None:
    with pytest.raises(RequestDoesNotFit, match="1001 tokens"):
        run("limit", asked("too large", 0.0, prompt=1000, output=1), instances=2)


def test_limit_oracle_shares_an_unbounded_cache() -> None:
    # The blocks of six other prompts exceed the 40 blocks of a ROUND engine's cache.
    others = [asked(f"other {n}", 10.0 + 2 * n, blocks=range(100 * n, 100 * n + 10)) for n in range(1, 7)]
    fills = asked("fills instance 0", 2.0, prompt=200, output=1000 - 200)
    records = run("limit", one_prompt("cold", 0.0), fills, *others, one_prompt("warm", 100.0), instances=2)

    assert places(records)["cold"] == "instance-0"
    assert places(records)["warm"] == "instance-1"
    assert [record.cached_tokens for record in records.values()] == [0] * 8 + [90]


@pytest.mark.parametrize(("oracle", "cached_tokens"), [("limit", [0, 0, 0, 90]), ("limit_ideal", [0, 90, 90, 90])])
def test_running_prefill_counts_as_cached_only_in_limit_ideal(oracle: str, cached_tokens: list[int]) -> None:
    # The third prompt waits for the end of a decode step, and uses the blocks that were cached at its dispatch.
    decodes = asked("decodes", 0.0, output=100)
    alike = [one_prompt("a", 5.0), one_prompt("b", 5.1), one_prompt("c", 5.2), one_prompt("d", 50.0)]
    records = run(oracle, decodes, *alike, instances=3)

    assert [records[name].cached_tokens for name in "abcd"] == cached_tokens


@pytest.mark.parametrize(("instances", "cached_tokens"), [(1, 0), (2, 90)])
def test_pooled_cache_has_the_capacity_of_all_engines(instances: int, cached_tokens: int) -> None:
    # Five other prompts of ten blocks exceed one cache of 40 blocks, but not two caches.
    others = [asked(f"other {n}", 10.0 + 2 * n, blocks=range(100 * n, 100 * n + 10)) for n in range(1, 6)]
    records = run("limit_pooled", one_prompt("cold", 0.0), *others, one_prompt("again", 100.0), instances=instances)

    assert records["again"].cached_tokens == cached_tokens


def test_limit_deadline_serves_requests_that_can_meet_slo_first() -> None:
    waiting = [asked("late", 0.1, prompt=300), asked("b", 0.2, prompt=50), asked("c", 0.3, prompt=50)]
    in_order = run("limit", asked("first", 0.0, output=1), *waiting, slo_ttft_s=4.0)
    hopeful_first = run("limit_deadline", asked("first", 0.0, output=1), *waiting, slo_ttft_s=4.0)

    assert first_token_s(in_order) == {"first": 1.5, "late": 5.0, "b": 6.0, "c": 7.0}
    assert first_token_s(hopeful_first) == {"first": 1.5, "b": 2.5, "c": 3.5, "late": 7.0}


def test_limit_deadline_keeps_arrival_order_within_slo() -> None:
    arrivals = (asked("a", 0.0), asked("long", 0.1, prompt=200), asked("short", 0.2, prompt=10))

    assert first_token_s(run("limit_deadline", *arrivals)) == first_token_s(run("limit", *arrivals))


def test_limit_deadline_bounds_overtaking_of_late_requests() -> None:
    # One engine serves one request per second. Each request takes one second and arrives before the previous end, so
    # only one request is late.
    steady = [asked(f"{n}", max(0.0, n - 0.1), prompt=50, output=1) for n in range(2 * PASSED_OVER_MAX)]
    late = asked("late", 0.5, prompt=400, output=1)
    records = run("limit_deadline", steady[0], late, *steady[1:], slo_ttft_s=4.0, engine=PREFILL_ONLY)

    started = sorted(records, key=lambda name: records[name].dispatched_s or 0.0)
    assert started.index("late") == 1 + PASSED_OVER_MAX


def test_full_scan_prefers_cached_engine_if_faster() -> None:
    def second(at_s: float, *, backlog: int) -> Record:
        busy = [asked(f"busy {n}", 10.0, prompt=60, output=1) for n in range(backlog)]
        arrivals = (asked("elsewhere", 0.0, output=1), one_prompt("cold", 0.0), *busy, one_prompt("again", at_s))
        return run("full_scan_oracle", *arrivals, instances=2)["again"]

    # The second request's member has the prefix: 0.5 + 0.1 + 0.09 s instead of 1.5 s.
    assert (second(20.0, backlog=0).endpoint, second(20.0, backlog=0).cached_tokens) == ("instance-1", 90)
    # With 1.1 s of backlog on both instances, instance-1 is still faster; with 1.1 s only on instance-1, it is not.
    assert second(10.0, backlog=2).endpoint == "instance-1"
    assert second(10.0, backlog=3).first_token_s == 10.0 + 1.1 + 0.69


def test_full_scan_queues_no_request_in_the_router() -> None:
    records = run("full_scan_oracle", *(asked(f"{n}", 0.0) for n in range(6)), instances=2)

    assert all(record.dispatched_s == 0.0 and not record.held for record in records.values())
    assert list(places(records).values()) == ["instance-0", "instance-1"] * 3


def test_all_cached_computes_only_the_last_block_or_token() -> None:
    records = run(
        "all_cached",
        one_prompt("whole blocks", 0.0),
        asked("and a half", 0.0, prompt=95, blocks=range(10)),
        one_prompt("again", 0.0),
    )
    assert [record.cached_tokens for record in records.values()] == [90, 90, 90]
    assert [record.first_token_s for record in records.values()] == pytest.approx([0.69, 0.64, 0.69])
    assert [record.finished_s for record in records.values()] == pytest.approx([0.94, 0.89, 0.94])


@pytest.mark.parametrize("oracle", ORACLES)
def test_next_turn_arrives_a_pause_after_the_previous_turn_ends(oracle: str) -> None:
    records = run(oracle, asked("a", 0.0), asked("then", 0.1, follows="a"), asked("last", 0.2, follows="then"))

    for before, after in (("a", "then"), ("then", "last")):
        ended_s = records[before].finished_s
        assert ended_s is not None
        assert records[after].arrival.at_s == records[after].dispatched_s == ended_s + 1.0
        assert records[after].ttft_s == pytest.approx(1.5)


def test_oracle_run_stops_at_first_token_if_callback_ends_the_run() -> None:
    replayed = run_oracle(
        "limit",
        engine=ROUND,
        instances=1,
        arrivals=[asked(f"{n}", 0.0) for n in range(5)],
        gives_up=lambda record: record.arrival.request_id == "1",
    )
    assert replayed.gave_up
    assert [record.first_token_s for record in replayed.records] == [1.5, 3.0, None, None, None]


def test_load_samples_show_pending_tokens_of_each_engine() -> None:
    arrivals = [one_prompt("a", 0.0), asked("b", 0.0), asked("c", 0.0, prompt=20, output=9), one_prompt("d", 1.6)]
    replayed = run_oracle("full_scan_oracle", engine=ROUND, instances=2, arrivals=arrivals, sample_s=1.75)

    # At 1.6 s, "c" waits for its prefill behind "a". "d" has its blocks in the cache, and misses only ten of its
    # hundred tokens.
    assert replayed.samples[1] == LoadSample(at_s=1.75, pending_tokens={"instance-0": 20 + 10, "instance-1": 0})
    # The first sample at 0 s is between the first arrival and the other arrivals.
    assert [sum(sample.pending_tokens.values()) for sample in replayed.samples] == [100, 30, 0]


class _Forgets:
    """A queueing discipline that loses its requests."""

    instances: tuple[Instance, ...] = ()

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        pass

    def changed(self, now: float, hand_over: HandOver) -> None:
        pass


class _SendsTwice(_Forgets):
    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        for name in "ab":
            hand_over(record, Instance(name, Engine(ROUND)))


def test_lost_or_duplicate_dispatch_stops_the_oracle_run() -> None:
    with pytest.raises(AssertionError, match="1 requests never end"):
        Replay(_Forgets(), sample_s=1.0).run([asked("a", 0.0)])
    with pytest.raises(AssertionError, match="a was dispatched twice"):
        Replay(_SendsTwice()).run([asked("a", 0.0)])
    with pytest.raises(AssertionError, match="two requests are called a"):
        Replay(_Forgets()).run([asked("a", 0.0), asked("a", 0.0)])
