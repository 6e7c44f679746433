"""Tests of the CRD's rules on a real API server: accepted values, and the path and values in a rejection's message.

tests/controlplane/test_crd.py compares fields, defaults and bounds with the code.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from controlplane import crds
from dualmap.objects.pool_reader import read_pools
from dualmap_operator.decide.spec import read_spec
from emulated_cluster.control_plane.cluster import Cluster

ROOT = Path(__file__).parents[2]
CRD_FILE = ROOT / "crds" / "serving.dualmap.dev_inferencepools.yaml"
TEMPLATE = {"spec": {"containers": [{"name": "engine", "image": "engine"}]}}
SELECTOR = {"matchLabels": {"app": "vllm"}}
STORED = {
    "model": {"name": "m"},
    "workload": {"selector": SELECTOR},
    "engine": {"tokenizer": {"source": "Files", "path": "/etc/dualmap/tokenizers/q"}},
}
MEMBER = {"id": "q-0", "address": "10.0.0.1", "port": 8000, "state": "Active", "weight": 100}


class Rule(NamedTuple):
    """A CEL rule: its path, the path in the rejection's message, and accepted and rejected values."""

    path: str
    accepted: tuple[object, ...]
    refused: tuple[tuple[object, str], ...]
    named: str = ""


def duration(path: str, low: str, high: str, *, too_short: str, too_long: str, also: str = "") -> Rule:
    accepted = f"is not accepted; give a number and a unit (ms, s, m or h) from {low} to {high}, such as "
    refused = (too_short, too_long, "5", "5 s", "1h30m", "-5s", "0s", "99999999m", "999999.9h", "5s\n")
    return Rule(
        path,
        accepted=(low, high, "9.5s", *([also] if also else ())),
        refused=tuple((value, f'"{value}" {accepted}' if "\n" not in value else "failed rule: ") for value in refused),
    )


RULES = (
    Rule(
        "metadata.name",
        accepted=("q", "q" * 50),
        refused=tuple(
            (
                name,
                f'"{name}" is not accepted; give a DNS label (lower-case letters, digits, -) of at most 50 characters',
            )
            for name in ("q" * 51, "q.q")
        ),
    ),
    Rule(
        "spec.engine",
        accepted=(
            {"kvEvents": {"enabled": True}, "tokenizer": {"source": "Files", "path": "/etc/dualmap/tokenizers/q"}},
            {"kvEvents": {"enabled": False}},
        ),
        refused=(
            (
                {"kvEvents": {"enabled": True}},
                "true is not accepted while engine.tokenizer.source is Estimate, because KV events contain token ids; "
                "give Files or Renderer",
            ),
        ),
        named="spec.engine.kvEvents.enabled",
    ),
    Rule(
        "spec.engine.kvEvents",
        accepted=({"port": 6000}, {"port": 5558, "replayPort": 5557}),
        refused=(
            ({"port": 5558}, "5558 is not accepted; give another port than kvEvents.port"),
            ({"port": 9, "replayPort": 9}, "9 is not accepted; give another port than kvEvents.port"),
        ),
        named="spec.engine.kvEvents.replayPort",
    ),
    Rule(
        "spec.engine.tokenizer",
        accepted=({"source": "Estimate"}, {"source": "Files", "path": "tokenizers/q"}),
        refused=tuple(
            (value, f'"{path}" is not accepted; give a folder with the source Files, and nothing with {source}')
            for value, path, source in (
                ({"source": "Files"}, "", "Files"),
                ({"path": "/q"}, "/q", "Estimate"),
                ({"source": "Renderer", "url": "http://r:8000", "path": "/q"}, "/q", "Renderer"),
            )
        ),
        named="spec.engine.tokenizer.path",
    ),
    Rule(
        "spec.engine.tokenizer",
        accepted=(
            {"source": "Renderer", "url": "http://127.0.0.1:8000"},
            {"source": "Renderer", "url": "https://[2001:db8::1]:8000/v1"},
        ),
        refused=tuple(
            (value, f'"{url}" is not accepted; give an address with the source Renderer, and nothing with {source}')
            for value, url, source in (
                ({"source": "Renderer"}, "", "Renderer"),
                ({"url": "http://r:8000"}, "http://r:8000", "Estimate"),
                ({"source": "Files", "path": "/q", "url": "http://r:8000"}, "http://r:8000", "Files"),
            )
        ),
        named="spec.engine.tokenizer.url",
    ),
    Rule(
        "spec.engine.tokenizer.url",
        accepted=("",),
        refused=tuple(
            (url, f'"{url}" is not accepted; give http://HOST:PORT or https://HOST:PORT, optionally with a path')
            for url in (
                "r:8000",
                "tcp://r:8000",
                "http://user@r:8000",
                "http://r:8000/?a=b",
                "http://r",
                "http://r:65536",
                "http://[2001:db8::1]",
            )
        ),
    ),
    Rule(
        "spec",
        accepted=tuple(
            {**STORED, "kvStore": store}
            for store in (
                {"type": "Mooncake", "endpoint": "http://mooncake:9003"},
                {"type": "LMCache", "endpoint": "http://[2001:db8::1]:9300/", "worldSize": 2},
                {"type": "Redis", "endpoint": "redis://10.0.0.1:6379/3", "hash": "xxhash"},
                {"type": "Redis", "endpoint": "redis://10.0.0.1:6379"},
            )
        ),
        refused=tuple(
            (
                {**STORED, "engine": engine, "kvStore": {"type": "Mooncake", "endpoint": "http://mooncake:9003"}},
                '"Mooncake" is not accepted while engine.tokenizer.source is Estimate, because stores are asked for '
                "hashes of token ids; give None, or the tokenizer source Files or Renderer",
            )
            for engine in ({}, {"tokenizer": {"source": "Estimate"}})
        ),
        named="spec.kvStore.type",
    ),
    Rule(
        "spec.kvStore",
        accepted=({}, {"type": "None"}, {"endpoint": "", "minTokens": 1}),
        refused=(
            ({"endpoint": "http://m:9003"}, '"http://m:9003" is not accepted; give no address with the type None'),
        ),
        named="spec.kvStore.endpoint",
    ),
    *(
        Rule(
            "spec.kvStore",
            accepted=({},),
            refused=tuple(
                ({"type": kind, **({"endpoint": each} if each else {})}, f'"{each}" is not accepted; give {form}')
                for kind in kinds
                for each in ("", "m:9003", "http://m", "redis://m:0", "http://u@m:9003", "redis://m:1/x", also)
            ),
            named="spec.kvStore.endpoint",
        )
        for kinds, form, also in (
            (("Redis",), "redis://HOST:PORT or redis://HOST:PORT/DB", "http://m:9003"),
            (("Mooncake", "LMCache"), "http://HOST:PORT", "redis://m:6379"),
        )
    ),
    Rule(
        "spec.kvStore.key",
        accepted=("", "{hash}", "x@{model}@tp_rank:0@{hash}_0"),
        refused=tuple(
            (key, f'"{key}" is not accepted; give at most 253 visible characters with {{hash}} once')
            for key in ("key", "{hash}{hash}", "{hash},", "{hash} ", "{other}{hash}", "{{hash}}")
        ),
    ),
    Rule(
        "spec.kvStore.seed",
        accepted=("", "0", "a b"),
        refused=(("\n", "failed rule: "), ("é", '"é" is not accepted; give at most 253 printable ASCII characters')),
    ),
    duration("spec.kvStore.timeout", "1ms", "1s", too_short="0.9ms", too_long="1.1s")._replace(
        accepted=("1ms", "1s", "9.5ms")
    ),
    Rule(
        "spec.workload",
        accepted=({"template": TEMPLATE}, {"selector": SELECTOR}),
        refused=(
            ({}, "neither template nor selector is given; give exactly one of the two"),
            (
                {"template": TEMPLATE, "selector": SELECTOR},
                "template and selector are given; give exactly one of the two",
            ),
        ),
    ),
    Rule(
        "spec.workload.selector",
        accepted=(SELECTOR, {"matchExpressions": [{"key": "app", "operator": "Exists"}]}),
        refused=tuple(
            (value, "empty is not accepted; give at least one of matchLabels or matchExpressions")
            for value in ({}, {"matchLabels": {}}, {"matchExpressions": []})
        ),
    ),
    Rule(
        "spec.workload.selector.matchLabels",
        accepted=({"app": ""}, {"example.com/app": "x.Y-1"}),
        refused=tuple(
            ({"app": "x", key: "y"}, f'"{key}" is not accepted; give label keys such as app or example.com/app')
            for key in ("-app", "a b", "/app", "Example/app", "a" * 64)
        ),
    ),
    Rule(
        "spec.workload.selector.matchExpressions",
        accepted=(
            [{"key": "app", "operator": "In", "values": ["a", "b"]}, {"key": "e.com/x", "operator": "DoesNotExist"}],
        ),
        refused=(
            ([{"key": "a", "operator": "In"}], "empty is not accepted; give at least one value with operator In"),
            ([{"key": "a", "operator": "NotIn", "values": []}], "give at least one value with operator NotIn"),
            (
                [{"key": "a", "operator": "Exists", "values": ["x"]}],
                "values are not accepted; give none with operator Exists",
            ),
        ),
        named="spec.workload.selector.matchExpressions[0].values",
    ),
    Rule(
        "spec.model",
        accepted=({"name": "m", "aliases": ["a"], "adapters": ["b", "c"]}, {"name": "m", "adapters": []}),
        refused=(
            (
                {"name": "m", "adapters": ["m"]},
                '"m" is not accepted; give a name that is neither the model nor an alias',
            ),
            (
                {"name": "m", "aliases": ["a"], "adapters": ["b", "a"]},
                '"a" is not accepted; give a name that is neither the model nor an alias',
            ),
        ),
        named="spec.model.adapters",
    ),
    duration("spec.engine.discovery.interval", "1s", "1h", too_short="999ms", too_long="61m"),
    duration("spec.slo.ttft", "100ms", "10m", too_short="99ms", too_long="10.1m"),
    Rule(
        "spec.slo.attainment",
        accepted=(0.01, 0.9999),
        refused=tuple(
            (value, f"{value} is not accepted; give a number from 0.01 to 0.9999, such as 0.9")
            for value in (0, 0.009, 0.99991, 1, -1)
        ),
    ),
    Rule(
        "spec.routing.prefix",
        accepted=({"initialBlocks": 8, "maxBlocks": 8}, {"initialBlocks": 64}, {"maxBlocks": 2}),
        refused=(
            ({"initialBlocks": 9, "maxBlocks": 8}, "9 is not accepted; give at most maxBlocks, 8"),
            ({"initialBlocks": 65}, "65 is not accepted; give at most maxBlocks, 64"),
            ({"maxBlocks": 1}, "2 is not accepted; give at most maxBlocks, 1"),
        ),
        named="spec.routing.prefix.initialBlocks",
    ),
    duration("spec.routing.prefix.window", "5s", "1h", too_short="4999ms", too_long="61m"),
    duration("spec.routing.rebalance.decodeStall", "1ms", "10m", too_short="0.9ms", too_long="601s"),
    duration("spec.routing.queue.dispatchWindow", "1ms", "10m", too_short="0.9ms", too_long="601s", also="Unlimited"),
    duration("spec.routing.queue.maxWait", "100ms", "10m", too_short="99ms", too_long="601s"),
    Rule(
        "spec.prefillPool",
        accepted=("", "p", "qwen-prefill"),
        refused=tuple(
            (name, f'"{name}" is not accepted; give the name of a pool or an empty text') for name in ("Q", "a.b", "-p")
        ),
    ),
    Rule(
        "spec.prefillPool",
        accepted=("p",),
        refused=(("q", '"q" is not accepted; give the name of another pool'),),
        named="spec.prefillPool",
    ),
    Rule(
        "spec.routing.fairness.header",
        accepted=("", "x", "x-tenant_id-2"),
        refused=tuple(
            (name, f'"{name}" is not accepted; give a lower-case header name or an empty text')
            for name in ("X-Tenant", ":path", "a b")
        ),
    ),
    Rule(
        "spec.routing.session.header",
        accepted=("x", "x-session_id-2"),
        refused=tuple(
            (name, f'"{name}" is not accepted; give a lower-case header name')
            for name in ("X-Session", ":path", "a b", "")
        ),
    ),
    duration("spec.routing.session.ttl", "1s", "24h", too_short="999ms", too_long="24.5h"),
    duration("spec.routing.session.migration.cooldown", "1ms", "1h", too_short="0.9ms", too_long="3601s"),
    duration("spec.drain.timeout", "1ms", "24h", too_short="0.9ms", too_long="24.5h"),
)
# Rules that compare with the old object, and rules for the status. Each rule has its own test in this file.
OTHER_RULES = (
    "spec.workload",
    "spec.model.name",
    "spec.engine.port",
    "status.ring.version",
    "status.ring.members.address",
)

# One example each of the schema's bounds, enums and types. Tests without a cluster cover the other fields.
SCHEMA_REFUSALS = (
    ("spec.model", None, 'spec.model: Required value'),
    ("spec.workload", None, "spec.workload: Required value"),
    ("spec.model.name", "", "spec.model.name: Invalid value"),
    ("spec.model.aliases", ["a", "a"], 'spec.model.aliases[1]: Duplicate value: "a"'),
    ("spec.model.adapters", ["a", "a"], 'spec.model.adapters[1]: Duplicate value: "a"'),
    ("spec.model.adapters", [""], "spec.model.adapters[0]: Invalid value"),
    ("spec.engine.type", "vllm", 'spec.engine.type: Unsupported value: "vllm": supported values: "vLLM", "SGLang"'),
    ("spec.engine.port", 70_000, "spec.engine.port: Invalid value: 70000: "),
    ("spec.engine.prefillTokensPerSecond", 99, "should be greater than or equal to 100"),
    ("spec.replicas", -1, "spec.replicas: Invalid value: -1: "),
    ("spec.replicas", 10_001, "should be less than or equal to 10000"),
    ("spec.replicas", "3", 'spec.replicas: Invalid value: "string": '),
    ("spec.routing.spill.activeKvWeight", 100.5, "should be less than or equal to 100"),
    ("spec.slo.ttft", "5" * 20 + "s", "spec.slo.ttft: Too long: may not be more than 20 bytes"),
    ("spec.slo.ttft", 5, "spec.slo.ttft: Invalid value: "),
    ("spec.slo.tftt", "5s", 'unknown field "spec.slo.tftt"'),
    ("spec.routing.policy", "best", 'spec.routing.policy: Unsupported value: "best": supported values: "dualmap"'),
    ("spec.routing.shadow", ["min_ttft", "best"],
     'spec.routing.shadow[1]: Unsupported value: "best": supported values: "dualmap"'),
    ("spec.routing.shadow", ["ear", "ear"], 'spec.routing.shadow[1]: Duplicate value: "ear"'),
    ("spec.routing.shadow", ["ear", "preble", "llumnix", "chwbl", "random"],
     "spec.routing.shadow: Too many: 5: must have at most 4 items"),
    ("spec.routing.shadow", "ear", 'spec.routing.shadow: Invalid value: "string": '),
    ("spec.routing.shadowSample", 1.5, "should be less than or equal to 1"),
    ("spec.routing.ring.algorithm", "Maglev", 'supported values: "Rendezvous", "VirtualNodes"'),
    ("spec.routing.queue.order", "FCFS", 'supported values: "Fcfs", "Deadline"'),
    ("spec.workload.template", {}, "spec.workload.template.spec: Required value"),
    ("spec.workload.template.spec.containers", [], "should have at least 1 items"),
    ("spec.workload.template.spec.containers", [{"image": "x"}], "containers[0].name: Required value"),
    ("spec.workload.selector.matchLabels", {"app": "a b"}, "spec.workload.selector.matchLabels.app: Invalid value: "),
)  # fmt: skip


@pytest.fixture(scope="module", name="namespace")
def _namespace(cluster: Cluster) -> str:
    """A namespace on a cluster with the CRD."""
    crds.install(cluster)
    return cluster.namespace()


def pool(path: str = "metadata.name", value: object = "q") -> dict[str, Any]:
    """Return a small pool with this value in one field; None removes the field."""
    workload: dict[str, Any] = {"selector": {}} if path.startswith("spec.workload.selector") else {"template": TEMPLATE}
    document: dict[str, Any] = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "q"},
        "spec": {"model": {"name": "m"}, "workload": workload},
    }
    document = json.loads(json.dumps(document))
    *parents, last = path.split(".")
    target = document
    for name in parents:
        target = target.setdefault(name, {})
    if value is None:
        del target[last]
    else:
        target[last] = value
    return document


def make(cluster: Cluster, namespace: str, documents: Sequence[Mapping[str, Any]], *, check: bool) -> str:
    """Create these pools in a dry run on the server; return kubectl's output."""
    # The input has separate documents, because kubectl validates a List itself before the request to the server.
    text = "\n---\n".join(json.dumps(document) for document in documents)
    return cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", input=text, check=check)


def refusals(cluster: Cluster, namespace: str, documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return kubectl's error for each of these pools. The server must reject every pool."""
    # The input always contains a second rejected pool, because kubectl prints a single rejection in another format.
    _, *said = make(cluster, namespace, [*documents, pool("spec", {})], check=False).split("Error from server (")
    assert len(said) == len(documents) + 1, said
    return said[:-1]


def part(refusal: str, path: str) -> str:
    """Return a rejection's message for one path."""
    assert f"{path}: " in refusal
    return refusal[refusal.index(f"{path}: ") :]


def rules(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Return the path of every CEL rule of a schema."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path or rule["fieldPath"].lstrip(".")
    for name, sub in schema.get("properties", {}).items():
        yield from rules(sub, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from rules(schema["items"], path)


def test_every_crd_validation_rule_has_a_test() -> None:
    schema = yaml.safe_load(CRD_FILE.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert Counter(rules(schema)) == Counter([*(rule.path for rule in RULES), *OTHER_RULES])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.named or rule.path)
def test_crd_rule_accepts_valid_and_rejects_invalid_values(cluster: Cluster, namespace: str, rule: Rule) -> None:
    made = make(cluster, namespace, [pool(rule.path, value) for value in rule.accepted], check=True)
    assert made.count("created (server dry run)") == len(rule.accepted)
    said = refusals(cluster, namespace, [pool(rule.path, value) for value, _ in rule.refused])
    for refusal, (_, message) in zip(said, rule.refused, strict=True):
        assert message in part(refusal, rule.named or rule.path)


def test_crd_schema_rejects_invalid_values(cluster: Cluster, namespace: str) -> None:
    said = refusals(cluster, namespace, [pool(path, value) for path, value, _ in SCHEMA_REFUSALS])
    for refusal, (_, _, message) in zip(said, SCHEMA_REFUSALS, strict=True):
        assert message in refusal


def test_model_name_is_immutable_but_aliases_can_change(cluster: Cluster, namespace: str) -> None:
    create(cluster, namespace, pool("metadata.name", "model"))
    patch(cluster, namespace, "model", {"spec": {"model": {"aliases": ["n"]}}})
    said = patch(cluster, namespace, "model", {"spec": {"model": {"name": "n"}}}, check=False)
    assert (
        '"n" is not accepted; the model of a pool cannot be changed, give "m", add an alias or create another pool'
        in part(said, "spec.model.name")
    )


def test_pool_port_is_immutable(cluster: Cluster, namespace: str) -> None:
    create(cluster, namespace, pool("metadata.name", "port"))
    said = patch(cluster, namespace, "port", {"spec": {"engine": {"port": 9000}}}, check=False)
    expected = "9000 is not accepted; the port of a pool cannot be changed, give 8000 or create another pool"
    assert expected in part(said, "spec.engine.port")


@pytest.mark.parametrize(("before", "after"), [("template", "selector"), ("selector", "template")])
def test_workload_kind_is_immutable_but_content_can_change(
    cluster: Cluster, namespace: str, before: str, after: str
) -> None:
    workloads: dict[str, Any] = {"template": TEMPLATE, "selector": SELECTOR}
    name = f"from-{before}"
    document = pool("spec.workload", {before: workloads[before]})
    create(cluster, namespace, {**document, "metadata": {"name": name}})
    other: dict[str, Any] = {"template": {"spec": {"nodeName": "n"}}, "selector": {"matchLabels": {"app": "other"}}}
    patch(cluster, namespace, name, {"spec": {"workload": {before: other[before]}}})
    switch = {"spec": {"workload": {before: None, after: workloads[after]}}}
    said = patch(cluster, namespace, name, switch, check=False)
    assert (
        f"{after} is not accepted; the kind of workload cannot be changed, give a {before} or create another pool"
        in part(said, "spec.workload")
    )


def test_api_server_rejects_lower_ring_version_or_invalid_members(cluster: Cluster, namespace: str) -> None:
    create(cluster, namespace, pool("metadata.name", "ring"))
    members = [
        MEMBER,
        {**MEMBER, "id": "q-1", "address": "fd00::1", "incarnation": "1-0", "leaveAt": "2026-11-27T21:00:00Z"},
    ]
    for version in (7, 7, 8):
        patch(cluster, namespace, "ring", {"status": {"ring": {"version": version, "members": members}}}, status=True)
    said = patch(cluster, namespace, "ring", {"status": {"ring": {"version": 7}}}, status=True, check=False)
    expected = "7 is not accepted; the version of a ring never decreases, give at least 8"
    assert expected in part(said, "status.ring.version")
    for address in ("localhost", "10.0.0.1:80", ""):
        bad = {"status": {"ring": {"members": [{**MEMBER, "address": address}]}}}
        said = patch(cluster, namespace, "ring", bad, status=True, check=False)
        expected = f'"{address}" is not accepted; give an IPv4 or IPv6 address'
        assert expected in part(said, "status.ring.members[0].address")
    invalid = {"state": "Gone", "weight": 1001, "port": 0, "id": "a b", "since": "now", "leaveAt": "soon"}
    for name, value in invalid.items():
        bad = {"status": {"ring": {"members": [{**MEMBER, name: value}]}}}
        part(patch(cluster, namespace, "ring", bad, status=True, check=False), f"status.ring.members[0].{name}")


def test_crd_defaults_are_filled_in_and_equal_the_parsers(cluster: Cluster, namespace: str) -> None:
    written = pool()
    text = cluster.kubectl(
        "create", "--dry-run=server", "-n", namespace, "-f", "-", "-o", "json", input=json.dumps(written)
    )
    kept = json.loads(text)
    migration = {"enabled": False, "hotRatio": 0.2, "cooldown": "30s", "pull": False}
    assert kept["spec"]["routing"]["session"]["migration"] == migration
    assert (kept["spec"]["replicas"], kept["spec"]["drain"]) == (1, {"timeout": "10m"})
    written["metadata"]["namespace"] = namespace
    assert read_pools(kept) == read_pools(written)
    written["metadata"] = kept["metadata"]
    assert read_spec(kept) == read_spec(written)


def test_shadow_policies_are_stored_and_read(cluster: Cluster, namespace: str) -> None:
    shadow = ["llmd_default", "min_ttft", "dualmap", "random"]
    document = pool("spec.routing", {"shadow": shadow, "shadowSample": 0.25})
    create(cluster, namespace, {**document, "metadata": {"name": "shadowed"}})
    (read,) = read_pools(get(cluster, namespace, "shadowed"))
    assert (list(read.routing.shadow), read.routing.shadow_sample) == (shadow, 0.25)

    patch(cluster, namespace, "shadowed", {"spec": {"routing": {"shadow": None, "shadowSample": None}}})
    (read,) = read_pools(get(cluster, namespace, "shadowed"))
    assert (read.routing.shadow, read.routing.shadow_sample) == ((), 0.1)


def test_pod_template_is_stored_unchanged(cluster: Cluster, namespace: str) -> None:
    template = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {
            "containers": [{"name": "engine", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
            "volumes": [{"name": "cache", "emptyDir": {}}],
        },
    }
    create(cluster, namespace, {**pool("spec.workload", {"template": template}), "metadata": {"name": "kept"}})
    assert get(cluster, namespace, "kept")["spec"]["workload"] == {"template": template}


def test_status_in_create_request_is_dropped(cluster: Cluster, namespace: str) -> None:
    document = pool("metadata.name", "statusless")
    create(cluster, namespace, {**document, "status": {"ring": {"version": 7, "members": [MEMBER]}}})
    assert "status" not in get(cluster, namespace, "statusless")


def create(cluster: Cluster, namespace: str, document: Mapping[str, Any]) -> None:
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(document))


def get(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cluster.kubectl("get", "dmpool", name, "-n", namespace, "-o", "json"))
    return document


def patch(
    cluster: Cluster, namespace: str, name: str, change: Mapping[str, Any], *, status: bool = False, check: bool = True
) -> str:
    subresource = ("--subresource=status",) if status else ()
    return cluster.kubectl(
        "patch", "dmpool", name, "-n", namespace, "--type=merge", *subresource, "-p", json.dumps(change), check=check
    )
