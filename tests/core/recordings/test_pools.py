"""A pool in a recording: it returns with all settings that decide, and without addresses that may hold a secret."""

import json
from dataclasses import fields, is_dataclass, replace
from math import inf
from typing import Any

import pytest

from dualmap.pools.kv_store import KvStore, StoreType
from dualmap.pools.pool import (
    Engine,
    Fairness,
    KvEvents,
    Member,
    MemberState,
    Model,
    Objectives,
    Pool,
    Prefix,
    Queue,
    Ring,
    RingAlgorithm,
    Routing,
    Session,
    SessionMigration,
    Slo,
    Tokenizer,
    TokenSource,
)
from dualmap.recordings.errors import InvalidField
from dualmap.recordings.lines import decode_line, encode_line
from dualmap.recordings.pools import LEFT_OUT, pool_fields
from dualmap.recordings.values import PoolChanged

_POOL = Pool(
    namespace="llm",
    name="qwen",
    model=Model(name="m", aliases=("n",), adapters=("sql", "law")),
    engine=Engine(type="SGLang", prefill_tokens_per_second=5000.0, kv_tokens=300_000),
    slo=Slo(ttft_s=2.0, attainment=0.95),
    routing=Routing(
        policy="min_ttft",
        fairness=Fairness(header="x-team"),
        ring=Ring(algorithm=RingAlgorithm.VIRTUAL_NODES, seed=3),
        prefix=Prefix(block_tokens=64),
        queue=Queue(dispatch_window_s=inf, order="Deadline"),
        session=Session(migration=SessionMigration(enabled=True)),
    ),
    members=(
        Member(id="m-0", address="10.0.0.1", port=8000, incarnation="a"),
        Member(id="m-1", address="::1", port=8001, state=MemberState.DRAINING, weight=50, leave_at_s=1.5e9),
    ),
    ring_version=4,
    kv_store=KvStore(type=StoreType.REDIS, chunk_tokens=512),
    prefill_pool="prefill",
    prefill_min_tokens=100,
)


def _line(pool: Pool) -> str:
    return encode_line(PoolChanged(at_s=1.0, pool=pool))


def test_pool_with_settings_returns_from_its_line() -> None:
    assert decode_line(_line(_POOL)) == PoolChanged(at_s=1.0, pool=_POOL)


def test_pool_line_has_no_addresses_of_stores_and_no_objectives() -> None:
    secret = "hunter2"
    pool = replace(
        _POOL,
        engine=replace(
            _POOL.engine,
            tokenizer=Tokenizer(source=TokenSource.RENDERER, url=f"http://u:{secret}@renderer"),
            kv_events=KvEvents(enabled=True, topic=secret),
        ),
        kv_store=replace(_POOL.kv_store, endpoint=f"redis://:{secret}@kv:6379", key=secret, seed=secret),
        objectives=Objectives(((secret, 3),)),
        foreign_names=frozenset({secret}),
    )

    assert secret not in _line(pool)
    assert decode_line(_line(pool)) == PoolChanged(at_s=1.0, pool=_POOL)


def test_pool_line_without_a_setting_has_its_default() -> None:
    fields = json.loads(_line(_POOL))
    del fields["pool"]["slo"], fields["pool"]["engine"]["kv_tokens"]

    decoded = decode_line(json.dumps(fields))

    assert isinstance(decoded, PoolChanged)
    assert decoded.pool == replace(_POOL, slo=Slo(), engine=replace(_POOL.engine, kv_tokens=None))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("name",), None, "pool.name: nothing"),
        (("members",), 3, "pool.members: 3 is not accepted; the format has a list"),
        (("members", 0, "weight"), -1, r"pool.members\[0\].weight: -1"),
        (("members", 0, "state"), "Gone", r"pool.members\[0\].state: 'Gone' .* one of Joining, Active, Draining"),
        (("routing", "queue", "max_held"), "all", "pool.routing.queue.max_held: 'all'"),
        (("routing", "rebalance", "enabled"), 1, "pool.routing.rebalance.enabled: 1"),
        (("slo", "ttft_s"), [], "pool.slo.ttft_s"),
        (("routing", "policy"), "best", "pool.routing.policy: 'best' is not accepted; the format has one of dualmap, "),
        (("members", 1, "id"), "m-0", r"pool.members: \['m-0', 'm-0'\] is not accepted; the format has each id and"),
    ],
    ids=str,
)
def test_pool_line_with_wrong_value_names_field(path: tuple[str | int, ...], value: object, said: str) -> None:
    line: Any = json.loads(_line(_POOL))
    inner = line["pool"]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value

    with pytest.raises(InvalidField, match=said):
        decode_line(json.dumps(line))


def test_pool_line_without_a_member_id_names_it() -> None:
    line: Any = json.loads(_line(_POOL))
    del line["pool"]["members"][1]["id"]

    with pytest.raises(InvalidField, match=r"pool.members\[1\].id: nothing is not accepted"):
        decode_line(json.dumps(line))


def test_left_out_fields_exist_and_have_defaults() -> None:
    for kind, names in LEFT_OUT.items():
        assert is_dataclass(kind)
        assert names <= {each.name for each in fields(kind)}
    assert "members" in pool_fields(_POOL)
