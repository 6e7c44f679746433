"""Tests of a pool with a prefill pool at the picker and on a stream: pools by name, headers, reports and demand."""

from dataclasses import replace

import pytest

from dualmap.objects.pool_reader import read_pools
from dualmap.pools.pool import Pool, Queue
from dualmap.requests import Usage
from dualmap_extproc import names
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import Abandoned, Ended, FanOut, FirstTokenSeen, Measured, Routed
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.telemetry.counts import RequestCounts
from extproc.desks import Desk
from extproc.envoy_messages import (
    BUFFERED,
    Conversation,
    chat,
    headers_set,
    mutation_of,
    pool,
    request_body,
    request_headers,
)

LONG = chat("a long prompt " * 1000, stream=True)
OTHER = chat("another prompt " * 1000, stream=True)


def pools(**prefill_queue: float) -> tuple[Pool, Pool]:
    """Return the pool that clients address, and its prefill pool on other ports."""
    decode = replace(pool("qwen"), prefill_pool="prefill")
    prefill = pool("prefill", **({"queue": Queue(**prefill_queue)} if prefill_queue else {}))  # type: ignore[arg-type]
    return decode, replace(prefill, members=tuple(replace(each, port=9000) for each in prefill.members))


def one_at_a_time() -> tuple[Pool, Pool]:
    decode, prefill = pools(dispatch_window_s=0.001)
    return decode, replace(prefill, members=prefill.members[:1])


def test_pick_of_a_long_prompt_names_a_member_of_each_pool() -> None:
    picked = Desk(*pools()).pick(LONG)

    assert all(each.endswith(":8000") for each in picked.destination.split(","))
    assert len(picked.prefillers) == 2
    assert all(each.endswith(":9000") for each in picked.prefillers)
    assert picked.cluster == "llm/qwen"
    assert picked.receipt is not None
    assert 'prefill="prefill-' in picked.receipt


def test_pick_of_a_short_prompt_names_no_prefill_member() -> None:
    picked = Desk(*pools()).pick(chat())

    assert picked.prefillers == ()
    assert picked.receipt is not None
    assert 'prefill=local, prefill_reason="short"' in picked.receipt


@pytest.mark.parametrize("order", [1, -1])
def test_model_name_of_both_pools_belongs_to_the_pool_with_the_prefill_pool(order: int) -> None:
    desk = Desk(*pools()[::order])

    assert desk.picker.pool_of("m") == "llm/qwen"

    bodiless = desk.picker.pick_bodiless(1.0, None)
    assert isinstance(bodiless, Picked)
    assert bodiless.cluster == "llm/qwen"


def test_adapter_of_a_prefill_pool_is_not_addressed() -> None:
    decode, prefill = pools()
    desk = Desk(decode, replace(prefill, model=replace(prefill.model, adapters=("sql",))))

    assert isinstance(desk.ask(chat(model="sql")), Refused)


@pytest.mark.parametrize(
    "change",
    [
        lambda decode, prefill: (decode,),
        lambda decode, prefill: (decode, replace(prefill, model=replace(prefill.model, name="other"))),
        lambda decode, prefill: (decode, replace(prefill, prefill_pool="qwen")),
        lambda decode, prefill: (decode, replace(prefill, namespace="other")),
    ],
    ids=["absent", "other-model", "chain", "other-namespace"],
)
def test_unusable_prefill_pool_leaves_the_pool_serving(change) -> None:  # type: ignore[no-untyped-def]
    picked = Desk(*change(*pools())).pick(LONG)

    assert picked.prefillers == ()
    assert picked.receipt is not None
    assert 'prefill=local, prefill_reason="unusable"' in picked.receipt


def test_first_token_is_reported_for_both_pools_and_ends_the_prefill() -> None:
    desk = Desk(*pools())
    request = desk.pick(LONG, now=10.0).request_id

    desk.picker.first_token(11.0, request)

    seen = {each.pool: each.first_token for each in desk.observer.of(FirstTokenSeen)}
    assert seen.keys() == {"llm/qwen", "llm/prefill"}
    assert seen["llm/qwen"].predicted_ttft_s == seen["llm/prefill"].predicted_ttft_s
    assert seen["llm/qwen"].ttft_s == 1.0
    assert [status.pool for status in desk.picker.statuses() if any(e.in_flight for e in status.endpoints)] == [
        "llm/qwen"
    ]


@pytest.mark.parametrize(
    "end",
    [
        lambda picker, id: picker.finished(12.0, id, None),
        lambda picker, id: picker.rejected(12.0, id),
        lambda picker, id: picker.aborted(12.0, id),
        lambda picker, id: picker.failed(12.0, id),
        lambda picker, id: picker.access_log(12.0, AccessLogEntry(request_id=id, status=503)),
    ],
    ids=["finished", "rejected", "aborted", "failed", "access-log"],
)
@pytest.mark.parametrize("prefilled", [False, True])
def test_end_of_a_request_ends_it_in_both_pools(end, prefilled: bool) -> None:  # type: ignore[no-untyped-def]
    desk = Desk(*pools())
    request = desk.pick(LONG).request_id
    if prefilled:
        desk.picker.first_token(11.0, request)

    end(desk.picker, request)

    assert desk.in_flight == 0
    assert len(desk.observer.of(Ended)) == 1
    assert not desk.picker._prefills.splits


def test_cached_tokens_are_compared_with_those_of_the_prefill_member() -> None:
    desk = Desk(*pools())
    first = desk.pick(LONG, now=10.0)
    desk.picker.first_token(11.0, first.request_id)
    desk.picker.finished(12.0, first.request_id, Usage(prompt_tokens=3500, cached_tokens=0))

    (measured,) = desk.observer.of(Measured)

    assert measured.completion.predicted_cached_tokens == 0
    assert measured.completion.measured_cached_tokens == 0


def test_request_waits_for_a_saturated_prefill_pool() -> None:
    desk = Desk(*one_at_a_time())
    first = desk.pick(LONG, now=10.0).request_id

    assert isinstance(desk.ask(OTHER, now=10.0), AnswerLater)
    desk.picker.first_token(12.0, first)

    (picked,) = desk.resumed
    assert isinstance(picked, Picked)
    assert picked.prefillers
    routed = desk.observer.of(Routed)[-1]
    assert (routed.pool, routed.queued_s) == ("llm/qwen", 2.0)


def test_client_that_leaves_the_prefill_queue_is_abandoned() -> None:
    desk = Desk(*one_at_a_time())
    desk.pick(LONG, now=10.0)
    waiting = desk.ask(OTHER, now=10.0)
    assert isinstance(waiting, AnswerLater)

    desk.picker.aborted(11.0, waiting.request_id)

    assert desk.in_flight == 2
    assert [each.pool for each in desk.observer.of(Abandoned)] == ["llm/qwen"]
    assert desk.observer.of(Ended) == []


@pytest.mark.parametrize("kept", [(0,), (1,), ()], ids=["prefill-removed", "decode-removed", "both-removed"])
def test_removed_pools_answer_every_waiting_request(kept: tuple[int, ...]) -> None:
    both = one_at_a_time()
    desk = Desk(*both)
    desk.pick(LONG, now=10.0)
    desk.ask(OTHER, now=10.0)

    desk.picker.set_pools(11.0, [both[each] for each in kept])

    (answer,) = desk.resumed
    assert isinstance(answer, Picked if kept == (0,) else Refused)
    assert not desk.picker._prefills.splits


def test_expired_prefill_keeps_its_request() -> None:
    desk = Desk(*pools())
    request = desk.pick(LONG, now=10.0).request_id
    for now in range(100, 700, 100):
        desk.picker.heard(now, request)

    desk.picker.on_deadline(650.0)
    desk.picker.finished(651.0, request, None)

    assert len(desk.observer.of(Ended)) == 1
    assert desk.in_flight == 0


def test_stream_sets_the_prefillers_and_removes_those_of_the_client() -> None:
    talk = Conversation(*pools())
    forged = ("x-prefiller-host-port", "x-dualmap-prefillers", "x-data-parallel-rank", "x-prefill-instance-id")

    answers = talk.send(request_headers(BUFFERED, **dict.fromkeys(forged, "10.9.9.9:1")), request_body(LONG, end=True))

    sent, removed = {}, set()
    for answer in answers:
        sent |= headers_set(answer)
        removed |= set(mutation_of(answer).remove_headers)
    assert removed >= {"x-data-parallel-rank", "x-prefill-instance-id"}
    assert sent[names.PREFILLER_HEADER].endswith(":9000")
    assert "," not in sent[names.PREFILLER_HEADER]
    first, second = sent[names.PREFILLERS_HEADER].split(",")
    assert first == sent[names.PREFILLER_HEADER]
    assert second != first


def test_counts_and_demand_belong_to_the_pool_that_computes() -> None:
    observations, counts, demand = FanOut(), RequestCounts(), Demand(clock=lambda: 11.0)
    counts.subscribe(observations)
    demand.subscribe(observations)
    desk = Desk(*pools())
    counts.set_pools(pools())
    demand.set_pools(pools())
    desk.pick(LONG, now=10.0)
    desk.pick(chat(), now=10.0)

    for each in desk.observer.of(Routed):
        observations.report(each)

    assert (counts.traffic("llm/qwen").requests, counts.traffic("llm/prefill").requests) == (2, 1)
    (family,) = (each for each in counts.collect() if each.name == "dualmap_prefills")
    assert {each.labels["where"]: each.value for each in family.samples} == {"remote": 1, "short": 1}
    signals = demand.signals(desk.picker.statuses())
    assert signals["llm/prefill"].arriving_uncached_tokens_per_second > 100.0
    assert signals["llm/qwen"].arriving_uncached_tokens_per_second < 10.0


def test_prefill_pool_without_members_is_asked_to_scale() -> None:
    observations, demand = FanOut(), Demand(clock=lambda: 11.0)
    demand.subscribe(observations)
    decode, prefill = pools()
    empty = replace(prefill, members=())
    desk = Desk(decode, empty)
    demand.set_pools((decode, empty))
    woken: list[str] = []
    demand.on_arrival(woken.append)
    desk.pick(LONG, now=10.0)

    observations.report(desk.observer.of(Routed)[-1])

    assert "llm/prefill" in woken
    assert demand.signals(desk.picker.statuses())["llm/prefill"].desired_replicas > 0


def test_reader_accepts_both_pools_of_one_model() -> None:
    def document(name: str, **spec: object) -> dict[str, object]:
        return {
            "apiVersion": "serving.dualmap.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": {"model": {"name": "m"}, **spec},
        }

    both = read_pools({"kind": "List", "items": [document("qwen", prefillPool="prefill"), document("prefill")]})

    assert [each.prefill_pool for each in both] == ["prefill", ""]
