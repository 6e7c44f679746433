"""Tests of sessions that move, at the picker and on a stream: the header with the KV's source, and the counts."""

from dataclasses import replace

import pytest

from dualmap.pools.pool import MemberState, Pool, Session, SessionMigration
from dualmap_extproc import names
from dualmap_extproc.request.observations import FanOut, Routed
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

LONG = chat("a long conversation " * 1000, session_id="seven")


def pulling(*, pull: bool = True) -> Pool:
    return pool(session=Session(migration=SessionMigration(pull=pull)))


def without_host(pool: Pool, host: str) -> Pool:
    """Return the pool with the session's host draining, so that the session moves."""
    members = [
        replace(each, state=MemberState.DRAINING) if host.startswith(each.endpoint) else each for each in pool.members
    ]
    return replace(pool, members=tuple(members))


@pytest.mark.parametrize("pull", [True, False])
def test_pick_of_a_moved_session_names_the_member_that_has_its_kv(pull: bool) -> None:
    desk = Desk(pulling(pull=pull))
    host = desk.pick(LONG).destination
    desk.picker.set_pools(11.0, (without_host(pulling(pull=pull), host),))

    picked = desk.pick(LONG, now=12.0)

    assert picked.kv_source == (host.partition(",")[0] if pull else "")
    assert picked.receipt is not None
    assert "moved_from=" in picked.receipt
    assert desk.pick(LONG, now=13.0).kv_source == "", "the session stays at its new member"


def test_stream_sets_the_source_and_removes_the_header_of_the_client() -> None:
    talk = Conversation(pulling())
    forged = {names.KV_SOURCE_HEADER: "10.9.9.9:1", "x-kv-cache-source-x": "y"}
    first = talk.send(request_headers(BUFFERED, **forged), request_body(LONG, end=True))
    sent = {key: value for answer in first for key, value in headers_set(answer).items()}
    host = sent[names.DESTINATION_HEADER]
    assert names.KV_SOURCE_HEADER not in sent
    talk.picker.set_pools(talk.now, (without_host(pulling(), host),))
    talk.again()

    moved = talk.send(request_headers(BUFFERED, **forged), request_body(LONG, end=True))

    removed = {each for answer in first for each in mutation_of(answer).remove_headers}
    assert removed >= set(forged)
    sent = {key: value for answer in moved for key, value in headers_set(answer).items()}
    assert sent[names.KV_SOURCE_HEADER] == host.partition(",")[0]


def test_counts_distinguish_fetched_and_recomputed_moves() -> None:
    counted = {}
    for pull in (True, False):
        made = pulling(pull=pull)
        desk, observations, counts = Desk(made), FanOut(), RequestCounts()
        counts.subscribe(observations)
        counts.set_pools((made,))
        host = desk.pick(LONG).destination
        desk.picker.set_pools(11.0, (without_host(made, host),))
        tokens = desk.pick(LONG, now=12.0).decision.receipt.prompt_tokens  # type: ignore[union-attr]
        for each in desk.observer.of(Routed):
            observations.report(each)
        counted[pull] = {
            (family.name, each.labels["kv"]): each.value / (tokens if "tokens" in family.name else 1)
            for family in counts.collect()
            if family.name.startswith("dualmap_session_move")
            for each in family.samples
        }

    assert counted[False] == {
        ("dualmap_session_moves", "fetched"): 0,
        ("dualmap_session_moves", "recomputed"): 1,
        ("dualmap_session_move_tokens", "fetched"): 0,
        ("dualmap_session_move_tokens", "recomputed"): 1,
    }
    assert counted[True]["dualmap_session_moves", "fetched"] == 1
    assert counted[True]["dualmap_session_move_tokens", "fetched"] > 0.9
