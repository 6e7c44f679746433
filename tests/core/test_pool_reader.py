import copy
import random
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from dualmap.errors import PoolError
from dualmap.objects.fields import parse_duration
from dualmap.objects.pool_reader import read_pools
from dualmap.pools.pool import (
    Engine,
    MemberState,
    Pool,
    Queue,
    ReceiptFields,
    RingAlgorithm,
    Routing,
    Tokenizer,
    TokenSource,
)

OBJECT: dict[str, Any] = {
    "apiVersion": "serving.dualmap.dev/v1alpha1",
    "kind": "InferencePool",
    "metadata": {"name": "qwen", "namespace": "llm", "managedFields": [], "uid": "x"},
    "spec": {
        "model": {"name": "Qwen/Qwen2.5-7B-Instruct", "aliases": ["qwen"]},
        "engine": {"type": "vLLM", "port": 8000, "prefillTokensPerSecond": 9000, "cacheTokens": 500000,
                   "maxModelLen": 32768,
                   "discovery": {"enabled": True, "interval": "10s"},
                   "tokenizer": {"source": "Files", "path": "/models/qwen"},
                   "kvEvents": {"enabled": True, "port": 1, "replayPort": 2}},
        "replicas": 4,
        "workload": {"template": {"anything": ["goes"]}},
        "slo": {"ttft": "2s", "attainment": 0.95},
        "routing": {
            "policy": "dualmap_paper",
            "shadow": ["min_ttft", "dualmap_paper"],
            "shadowSample": 0.25,
            "receiptHeader": False,
            "receiptFields": "Chosen",
            "maxBodyBytes": 1048576,
            "fairness": {"header": "x-tenant"},
            "ring": {"algorithm": "VirtualNodes", "virtualNodes": 64, "seed": 3},
            "prefix": {"blockTokens": 64, "initialBlocks": 1, "maxBlocks": 32, "window": "30s"},
            "spill": {"sloFraction": 0.4, "prefillWeight": 2, "activeKvWeight": 0.1},
            "rebalance": {"enabled": False, "decodeStall": "2500ms"},
            "queue": {"maxHeld": 10, "maxWait": "1m", "order": "Deadline", "holdWhenEmpty": True},
            "session": {"header": "x-user", "ttl": "1h",
                        "migration": {"enabled": True, "hotRatio": 0.3, "cooldown": "10s"}},
        },
        "drain": {"timeout": "10m"},
    },
    "status": {
        "observedGeneration": 3,
        "ring": {"version": 7, "members": [
            {"id": "qwen-1", "address": "10.0.0.12", "port": 9000, "state": "Draining", "weight": 50, "since": "now",
             "incarnation": "2"},
            {"id": "qwen-0", "address": "fd00::1"},
        ]},
    },
}  # fmt: skip


def changed(path: str, value: object) -> dict[str, Any]:
    document = copy.deepcopy(OBJECT)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    target: Any = document
    for part in parents:
        target = target[part]
    target[last] = value
    return document


def test_pool_fields_are_all_parsed() -> None:
    (pool,) = read_pools(OBJECT)
    assert (pool.id, pool.model.name, pool.model.aliases) == ("llm/qwen", "Qwen/Qwen2.5-7B-Instruct", ("qwen",))
    assert (pool.engine.prefill_tokens_per_second, pool.engine.cache_tokens) == (9000, 500_000)
    assert pool.engine.kv_events.enabled
    assert pool.engine.tokenizer == Tokenizer(source=TokenSource.FILES, path="/models/qwen")
    assert pool.engine.max_model_len == 32_768
    assert (pool.slo.ttft_s, pool.slo.attainment) == (2, 0.95)
    routing = pool.routing
    assert (routing.policy, routing.receipt_header) == ("dualmap_paper", False)
    assert (routing.receipt_fields, routing.max_body_bytes) == (ReceiptFields.CHOSEN, 1_048_576)
    assert (routing.shadow, routing.shadow_sample) == (("min_ttft", "dualmap_paper"), 0.25)
    assert routing.fairness.header == "x-tenant"
    assert (routing.ring.algorithm, routing.ring.virtual_nodes, routing.ring.seed) == (
        RingAlgorithm.VIRTUAL_NODES,
        64,
        3,
    )
    assert (routing.prefix.block_tokens, routing.prefix.initial_blocks, routing.prefix.max_blocks) == (64, 1, 32)
    assert (routing.prefix.window_s, routing.rebalance.enabled, routing.rebalance.decode_stall_s) == (30, False, 2.5)
    assert routing.queue == Queue(max_held=10, max_wait_s=60, order="Deadline", hold_when_empty=True)
    assert (routing.session.header, routing.session.ttl_s, routing.session.migration.cooldown_s) == ("x-user", 3600, 10)
    assert pool.ring_version == 7
    first, second = pool.members
    assert (first.incarnation, second.incarnation) == ("", "2")
    assert (first.id, first.endpoint, first.state, first.weight) == (
        "qwen-0",
        "[fd00::1]:8000",
        MemberState.ACTIVE,
        100,
    )
    assert (second.endpoint, second.state, second.weight) == ("10.0.0.12:9000", MemberState.DRAINING, 50)


def test_pool_without_shadow_compares_no_policies() -> None:
    (pool,) = read_pools(changed("spec/routing", {}))
    assert (pool.routing.shadow, pool.routing.shadow_sample) == ((), 0.1)


def test_pool_error_about_a_shadow_policy_names_the_policies() -> None:
    with pytest.raises(PoolError, match=r"shadow\[0\].*'best'.*dualmap, dualmap_paper"):
        read_pools(changed("spec/routing/shadow", ["best"]))


@pytest.mark.parametrize("text", ["'2026-11-27T21:00:00Z'", "2026-11-27T21:00:00Z", "2026-11-27T22:00:00+01:00"])
def test_member_that_leaves_is_draining(text: str) -> None:
    """YAML reads a time without quotes as another type."""
    member = {"id": "a", "address": "10.0.0.1", "state": "Active", "leaveAt": yaml.safe_load(text)}
    (pool,) = read_pools({**OBJECT, "status": {"ring": {"members": [member]}}})
    assert pool.members[0].state is MemberState.DRAINING
    assert pool.members[0].leave_at_s == datetime(2026, 11, 27, 21, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("value", ["soon", "2026-11-27T21:00:00", "", 1_800_000_000, [], yaml.safe_load("2026-01-01")])
def test_member_with_an_unreadable_leaving_time_is_refused(value: object) -> None:
    member = {"id": "a", "address": "10.0.0.1", "leaveAt": value}
    with pytest.raises(PoolError, match=r"status\.ring\.members\[0\]\.leaveAt: .*with the time zone Z"):
        read_pools({**OBJECT, "status": {"ring": {"members": [member]}}})


@pytest.mark.parametrize(
    ("given", "tokens", "discovered"),
    [({}, 1_000_000, True), ({"cacheTokens": 0}, 1_000_000, True), ({"cacheTokens": 5000}, 5000, False)],
)
def test_pool_cache_tokens_of_0_are_discovered(given: dict[str, int], tokens: int, discovered: bool) -> None:
    (pool,) = read_pools({**OBJECT, "spec": {"model": {"name": "m"}, "engine": given}})
    assert (pool.engine.cache_tokens, pool.engine.discovery.cache_tokens) == (tokens, discovered)


@pytest.mark.parametrize(("given", "tokens", "discovered"), [(0, 131_072, True), (4096, 4096, False)])
def test_pool_max_model_len_of_0_is_discovered(given: int, tokens: int, discovered: bool) -> None:
    (pool,) = read_pools({**OBJECT, "spec": {"model": {"name": "m"}, "engine": {"maxModelLen": given}}})
    assert (pool.engine.max_model_len, pool.engine.discovery.max_model_len) == (tokens, discovered)


def test_pool_discovery_is_read() -> None:
    discovery = {"enabled": False, "interval": "1m"}
    (pool,) = read_pools({**OBJECT, "spec": {"model": {"name": "m"}, "engine": {"discovery": discovery}}})
    assert (pool.engine.discovery.enabled, pool.engine.discovery.interval_s) == (False, 60.0)


def test_pool_defaults_equal_the_schema_defaults() -> None:
    (pool,) = read_pools({**OBJECT, "spec": {"model": {"name": "m"}}, "status": None})
    assert (pool.engine, pool.routing, pool.members) == (Engine(), Routing(), ())


def test_pool_lists_with_duplicate_items_are_rejected() -> None:
    other = changed("metadata/name", "llama")
    with pytest.raises(PoolError, match="pool llm/qwen does not have"):
        read_pools({"kind": "List", "items": [OBJECT, other]})
    other["spec"]["model"] = {"name": "llama"}
    assert [pool.id for pool in read_pools({"kind": "InferencePoolList", "items": [OBJECT, other]})] == [
        "llm/qwen",
        "llm/llama",
    ]
    with pytest.raises(PoolError, match="no other pool has"):
        read_pools({"kind": "List", "items": [OBJECT, OBJECT]})


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("kind", "Pod", "kind"),
        ("apiVersion", "v1", "apiVersion"),
        ("metadata", None, "metadata.name"),
        ("metadata/name", "Qwen", "metadata.name"),
        ("metadata/name", "q" * 51, "metadata.name"),
        ("metadata/namespace", "a_b", "metadata.namespace"),
        ("spec", [], "spec"),
        ("spec/model", {}, "spec.model.name"),
        ("spec/model/name", "", "spec.model.name"),
        ("spec/model/aliases", "qwen", "spec.model.aliases"),
        ("spec/model/aliases", [1], "spec.model.aliases[0]"),
        ("spec/model/aliases", ["qwen", "qwen"], "spec.model.aliases[1]"),
        ("spec/model/adapters", "sql", "spec.model.adapters"),
        ("spec/model/adapters", [""], "spec.model.adapters[0]"),
        ("spec/model/adapters", ["sql", 1], "spec.model.adapters[1]"),
        ("spec/model/adapters", ["sql", "sql"], "spec.model.adapters[1]"),
        ("spec/model/adapters", ["qwen"], "spec.model.adapters[0]"),
        ("spec/model/adapters", ["Qwen/Qwen2.5-7B-Instruct"], "spec.model.adapters[0]"),
        ("spec/modle", {}, "spec.modle"),
        ("spec/engine/type", "vllm", "spec.engine.type"),
        ("spec/engine/port", "8000", "spec.engine.port"),
        ("spec/engine/port", True, "spec.engine.port"),
        ("spec/engine/prefillTokensPerSecond", 99, "spec.engine.prefillTokensPerSecond"),
        ("spec/engine/prefillTokensPerSecond", float("nan"), "spec.engine.prefillTokensPerSecond"),
        ("spec/engine/kvEvents/prt", 1, "spec.engine.kvEvents.prt"),
        ("spec/engine/kvEvents/replayPort", 1, "spec.engine.kvEvents.replayPort"),
        ("spec/engine/tokenizer/source", "files", "spec.engine.tokenizer.source"),
        ("spec/engine/tokenizer/source", "Estimate", "spec.engine.tokenizer.path"),
        ("spec/engine/tokenizer/path", "", "spec.engine.tokenizer.path"),
        ("spec/engine/tokenizer/path", 7, "spec.engine.tokenizer.path"),
        ("spec/engine/tokenizer/url", "http://renderer:8000", "spec.engine.tokenizer.url"),
        ("spec/engine/tokenizer/file", "x", "spec.engine.tokenizer.file"),
        ("spec/engine/tokenizer", {}, "spec.engine.kvEvents.enabled"),
        ("spec/engine/tokenizer", {"source": "Renderer"}, "spec.engine.tokenizer.url"),
        ("spec/engine/tokenizer", {"source": "Renderer", "url": "ftp://renderer"}, "spec.engine.tokenizer.url"),
        *[
            ("spec/engine/tokenizer", {"source": "Renderer", "url": url}, "spec.engine.tokenizer.url")
            for url in (
                "http://user@host:8000",
                "http://host",
                "http://host/v1",
                "http://host:0",
                "http://host:65536",
                "http://host:99999",
                "http://[::1]",
                "http://::1:8000",
            )
        ],
        ("spec/engine/maxModelLen", -1, "spec.engine.maxModelLen"),
        ("spec/engine/discovery/enabled", 1, "spec.engine.discovery.enabled"),
        ("spec/engine/discovery/interval", "500ms", "spec.engine.discovery.interval"),
        ("spec/engine/discovery/interval", "2h", "spec.engine.discovery.interval"),
        ("spec/engine/discovery/every", "10s", "spec.engine.discovery.every"),
        ("spec/slo/ttft", 5, "spec.slo.ttft"),
        ("spec/slo/ttft", "50ms", "spec.slo.ttft"),
        ("spec/slo/ttft", "11m", "spec.slo.ttft"),
        ("spec/slo/attainment", 1.5, "spec.slo.attainment"),
        ("spec/routing/policy", "best", "spec.routing.policy"),
        ("spec/routing/receiptHeader", "yes", "spec.routing.receiptHeader"),
        ("spec/routing/receiptFields", "None", "spec.routing.receiptFields"),
        ("spec/routing/shadow", "min_ttft", "spec.routing.shadow"),
        ("spec/routing/shadow", ["min_ttft", "best"], "spec.routing.shadow[1]"),
        ("spec/routing/shadow", ["min_ttft", "min_ttft"], "spec.routing.shadow[1]"),
        ("spec/routing/shadow", ["min_ttft", "random", "ear", "preble", "chwbl"], "spec.routing.shadow"),
        ("spec/routing/shadow", [7], "spec.routing.shadow[0]"),
        ("spec/routing/shadowSample", 1.1, "spec.routing.shadowSample"),
        ("spec/routing/shadowSample", "10%", "spec.routing.shadowSample"),
        ("spec/routing/maxBodyBytes", 1023, "spec.routing.maxBodyBytes"),
        ("spec/routing/fairness/header", "X-Tenant", "spec.routing.fairness.header"),
        ("spec/routing/fairness/weight", 1, "spec.routing.fairness.weight"),
        ("spec/routing/ring/algorithm", "Maglev", "spec.routing.ring.algorithm"),
        ("spec/routing/prefix/blockTokens", 0, "spec.routing.prefix.blockTokens"),
        ("spec/routing/prefix/initialBlocks", 33, "spec.routing.prefix.initialBlocks"),
        ("spec/routing/queue/maxWait", "1 minute", "spec.routing.queue.maxWait"),
        ("spec/routing/session/header", "X-Session-Id", "spec.routing.session.header"),
        ("status/ring/version", -1, "status.ring.version"),
        ("status/ring/members", {}, "status.ring.members"),
        ("status/ring/members/0", None, "status.ring.members[0]"),
        ("status/ring/members/0/id", "a b", "status.ring.members[0].id"),
        ("status/ring/members/0/id", 'a"b', "status.ring.members[0].id"),
        ("status/ring/members/1/id", "qwen-1", "status.ring.members[1].id"),
        ("status/ring/members/0/address", "localhost", "status.ring.members[0].address"),
        ("status/ring/members/0/address", 1, "status.ring.members[0].address"),
        ("status/ring/members/0/port", 70_000, "status.ring.members[0].port"),
        ("status/ring/members/0/prt", 9000, "status.ring.members[0].prt"),
        ("status/ring/members/0/state", "Gone", "status.ring.members[0].state"),
        ("status/ring/members/1", {"id": "x", "address": "10.0.0.12", "port": 9000}, "status.ring.members[1].address"),
    ],
)  # fmt: skip
def test_pool_error_contains_field_value_and_accepted_form(path: str, value: object, field: str) -> None:
    with pytest.raises(PoolError) as refusal:
        read_pools(changed(path, value))
    assert refusal.value.field == field
    assert refusal.value.accepted
    assert str(refusal.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "document", [None, [], "text", 3, {1: 2}, {"kind": "List", "items": {}}, {"kind": "List", "items": [None]}]
)
def test_object_of_another_kind_is_rejected_as_pool(document: object) -> None:
    with pytest.raises(PoolError):
        read_pools(document)


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("5s", 5), ("1.5s", 1.5), ("10m", 600), ("1h", 3600)])
def test_valid_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text, "x") == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-5s", "0s", "5 s", "5S", "1h30m", "1e3s", "٣s", "5s\n", None, 5, "99h"]
)
def test_invalid_durations_are_rejected(text: object) -> None:
    with pytest.raises(PoolError, match="a number and a unit"):
        parse_duration(text, "x")


@pytest.mark.parametrize(
    ("name", "shown"), [("t\tft\n", "spec.slo.'t\\tft\\n'"), ("x" * 5000, f"spec.slo.{'x' * 77}...")]
)
def test_pool_unknown_field_error_is_a_short_line(name: str, shown: str) -> None:
    with pytest.raises(PoolError) as refused:
        read_pools(changed("spec/slo", {name: 1}))
    assert refused.value.field == shown
    assert str(refused.value).isprintable()


def test_pool_renderer_with_a_password_is_rejected_without_quoting_it() -> None:
    for tokenizer in ({"source": "Renderer"}, {}):
        url = {"url": "http://user:s3cret@renderer:8000/?key=s3cret"}
        with pytest.raises(PoolError, match="@renderer:8000/") as refused:
            read_pools(changed("spec/engine/tokenizer", {**tokenizer, **url}))
        assert "s3cret" not in str(refused.value)


def test_pool_member_order_in_the_file_is_ignored() -> None:
    members = [{"id": f"m-{n}", "address": f"10.0.0.{n + 1}"} for n in range(9)]
    shuffled = list(members)
    random.Random(1).shuffle(shuffled)

    def read(order: list[dict[str, str]]) -> tuple[Pool, ...]:
        return read_pools(changed("status/ring/members", order))

    assert read(members) == read(shuffled)
