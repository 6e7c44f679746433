"""Tests of the chart's network policies, and of the pages and examples that name its ports."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from chart.cases import APIS, CASES, GATEWAYS
from chart.objects import pods, ports
from chart.rendering import NAMESPACE, ROOT, Object, only, render


def reached(objects: Sequence[Object], component: str) -> Iterator[tuple[str, str]]:
    """Yield (port, peer) for the allowed ingress of a component's pods; a peer is a component or a namespace."""
    policy = only(objects, "NetworkPolicy", f"dualmap-{component}")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    components = {tuple(sorted(labels.items())): name for name, labels, _ in pods(objects)}
    for rule in policy["spec"].get("ingress", ()):
        for port in rule["ports"]:
            if "from" not in rule:
                yield port["port"], "everybody"
            for peer in rule.get("from", ()):
                if "podSelector" in peer:
                    wanted = peer["podSelector"]["matchLabels"].items()
                    assert "namespaceSelector" not in peer
                    (name,) = [name for labels, name in components.items() if wanted <= set(labels)]
                    yield port["port"], name.removeprefix("dualmap-")
                else:
                    yield port["port"], peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]


def test_network_policies_never_limit_what_routers_reach() -> None:
    """The routers connect to engines at ports that only the engines know."""
    for case in CASES.values():
        policies = [each for each in render(case, apis=APIS) if each["kind"] == "NetworkPolicy"]
        assert all(each["spec"]["policyTypes"] == ["Ingress"] for each in policies)


def test_example_of_kv_events_admits_the_charts_pods_only() -> None:
    file = ROOT / "manifests" / "examples" / "kv-events.yaml"
    pool, _, policy = yaml.safe_load_all(file.read_text())
    events = pool["spec"]["engine"]["kvEvents"]
    components = {name.removeprefix("dualmap-"): labels for name, labels, _ in pods(render(apis=APIS))}
    admitted: dict[int, set[str]] = {}
    for rule in policy["spec"]["ingress"]:
        (peer,) = rule["from"]
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
        labels = peer["podSelector"]["matchLabels"].items()
        (kinds,) = [each["values"] for each in peer["podSelector"].get("matchExpressions", ())] or [[]]
        names = {name for name, has in components.items() if labels <= has.items()}
        named = {name for name in names if not kinds or components[name]["app.kubernetes.io/component"] in kinds}
        for port in rule["ports"]:
            admitted[port["port"]] = named
    assert admitted == {
        8000: {"gateway", "router", "operator"},
        events["port"]: {"router"},
        events["replayPort"]: {"router"},
    }
    (listens,) = [each for each in engine_arguments(pool) if each.startswith("--kv-events-config=")]
    config = json.loads(listens.partition("=")[2])
    assert config["endpoint"] == f"tcp://*:{events['port']}"
    assert config["replay_endpoint"] == f"tcp://*:{events['replayPort']}"


def engine_arguments(pool: Any) -> list[str]:
    """Return the arguments of a pool's engine."""
    (engine,) = pool["spec"]["workload"]["template"]["spec"]["containers"]
    return list(engine["args"])


def test_network_policy_allows_only_required_peers() -> None:
    objects = render()
    assert set(reached(objects, "router")) == {
        ("grpc", "gateway"),
        ("als", "gateway"),
        ("grpc", "router"),
        ("grpc", "keda"),
        ("health", "keda"),
        ("metrics", "operator"),
        ("metrics", "monitoring"),
    }
    assert set(reached(objects, "operator")) == {("metrics", "monitoring")}
    assert set(reached(objects, "gateway")) == {("http", "everybody"), ("status", "monitoring")}
    assert set(reached(objects, "redis")) == {("redis", "router")}


def test_network_policy_admits_external_gateway_only_if_listed() -> None:
    objects = render({"gateway": {"mode": "none"}, "networkPolicy": {"gatewayFrom": GATEWAYS, "kedaFrom": []}})
    assert {each for each in reached(objects, "router") if each[0] in ("grpc", "als")} == {
        ("grpc", "gateways"),
        ("als", "gateways"),
        ("grpc", "router"),
    }
    nobody = render({"gateway": {"mode": "none"}, "networkPolicy": {"kedaFrom": [], "metricsFrom": []}})
    assert set(reached(nobody, "router")) == {("grpc", "router"), ("metrics", "operator")}
    assert set(reached(nobody, "operator")) == set()


def test_security_page_lists_every_chart_port() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    listed = {int(port) for row in rows for port in row.split(", ")}
    assert listed == {port for _, _, spec in pods(render()) for port in ports(spec).values()}
