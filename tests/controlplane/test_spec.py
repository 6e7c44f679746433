import json
from pathlib import Path
from typing import Any

import pytest

from dualmap.errors import PoolError
from dualmap_operator.decide.pod_reading import matches
from dualmap_operator.decide.spec import DRAIN_TIMEOUT_S, SelectorWorkload, TemplateWorkload, read_spec, selector_text
from dualmap_operator.names import POOL_LABEL

TEMPLATE = {
    "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "engine", "image": "x"}]}}
}


def pool(**spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen", "namespace": "llm", "uid": "u-1", "generation": 3},
        "spec": {"model": {"name": "m"}, "workload": TEMPLATE, **spec},
    }


def adopting(selector: object) -> dict[str, Any]:
    return pool(workload={"selector": selector})


class TestReading:
    def test_parsed_spec_has_every_field(self) -> None:
        spec = read_spec(pool(replicas=4, drain={"timeout": "90s"}, engine={"type": "SGLang", "port": 8001}))
        assert (spec.id, spec.uid, spec.generation) == ("llm/qwen", "u-1", 3)
        assert (spec.replicas, spec.drain_timeout_s, spec.deleting) == (4, 90.0, False)
        assert (spec.engine.type, spec.engine.port) == ("SGLang", 8001)
        assert spec.workload == TemplateWorkload(template=TEMPLATE["template"])

    @pytest.mark.parametrize(
        "unsaid", [{}, {"replicas": None, "drain": None}, {"drain": {}}, {"drain": {"timeout": None}}]
    )
    def test_spec_without_optional_fields_has_defaults(self, unsaid: dict[str, object]) -> None:
        spec = read_spec(pool(**unsaid))
        assert (spec.replicas, spec.drain_timeout_s) == (1, DRAIN_TIMEOUT_S)

    def test_spec_with_zero_replicas_is_valid(self) -> None:
        assert read_spec(pool(replicas=0)).replicas == 0

    def test_spec_of_a_deleted_pool_is_marked_as_deleting(self) -> None:
        document = pool()
        document["metadata"]["deletionTimestamp"] = "2026-11-22T02:00:00Z"
        assert read_spec(document).deleting

    @pytest.mark.parametrize("status", [None, 7, {"ring": {"members": [{"id": "-"}]}}])
    def test_spec_is_parsed_regardless_of_the_status(self, status: object) -> None:
        assert read_spec({**pool(), "status": status}).name == "qwen"

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            ({"replicas": -1}, "spec.replicas"),
            ({"replicas": 10_001}, "spec.replicas"),
            ({"replicas": True}, "spec.replicas"),
            ({"replicas": "4"}, "spec.replicas"),
            ({"drain": "timeout"}, "spec.drain"),
            ({"drain": {"timeout": "soon"}}, "spec.drain.timeout"),
            ({"drain": {"timeout": 600}}, "spec.drain.timeout"),
            ({"workload": None}, "spec.workload"),
            ({"workload": {}}, "spec.workload"),
            ({"workload": {**TEMPLATE, "selector": {"matchLabels": {"a": "b"}}}}, "spec.workload"),
            ({"workload": {"template": None}}, "spec.workload.template"),
            ({"workload": {"template": {"spec": "engine"}}}, "spec.workload.template"),
            ({"workload": {"template": {"spec": {"containers": []}}}}, "spec.workload.template"),
            ({"engine": {"port": 0}}, "spec.engine.port"),
        ],
    )
    def test_invalid_spec_is_rejected(self, spec: dict[str, object], field: str) -> None:
        with pytest.raises(PoolError) as refusal:
            read_spec(pool(**spec))
        assert refusal.value.field == field


def test_spec_from_an_api_server_is_parsed() -> None:
    """The recorded pool has the schema's defaults in every field (recorded/README.md)."""
    document = json.loads((Path(__file__).parent / "recorded" / "inferencepool.json").read_text())
    spec = read_spec(document)
    assert (spec.name, spec.replicas, spec.drain_timeout_s, spec.generation) == ("qwen", 3, DRAIN_TIMEOUT_S, 1)
    assert spec.uid == document["metadata"]["uid"]
    assert isinstance(spec.workload, TemplateWorkload)
    assert spec.workload.template == document["spec"]["workload"]["template"]


class TestSelectors:
    def test_selector_of_adopted_pods_is_parsed(self) -> None:
        selector = {"matchLabels": {"app": "vllm"}}
        assert read_spec(adopting(selector)).workload == SelectorWorkload(selector=selector)

    @pytest.mark.parametrize(
        ("selector", "field"),
        [
            (None, ""),
            ({}, ""),
            ({"matchLabels": {}, "matchExpressions": []}, ""),
            ("app=vllm", ""),
            ({"matchLabels": "app"}, ".matchLabels"),
            ({"matchLabels": {"app": 7}}, ".matchLabels"),
            ({"matchExpressions": {"key": "app"}}, ".matchExpressions"),
            ({"matchExpressions": ["app"]}, ".matchExpressions[0]"),
            ({"matchExpressions": [{"operator": "Exists"}]}, ".matchExpressions[0].key"),
            ({"matchExpressions": [{"key": "app", "operator": "Near"}]}, ".matchExpressions[0].operator"),
            ({"matchExpressions": [{"key": "app"}]}, ".matchExpressions[0].operator"),
            ({"matchExpressions": [{"key": "app", "operator": "In"}]}, ".matchExpressions[0].values"),
            ({"matchExpressions": [{"key": "app", "operator": "In", "values": [7]}]}, ".matchExpressions[0].values"),
            (
                {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]},
                ".matchExpressions[0].values",
            ),
        ],
    )
    def test_ambiguous_selector_is_rejected(self, selector: object, field: str) -> None:
        with pytest.raises(PoolError) as refusal:
            read_spec(adopting(selector))
        assert refusal.value.field == f"spec.workload.selector{field}"

    def test_selector_text_of_template_pool_is_the_pool_label(self) -> None:
        assert selector_text(read_spec(pool()), POOL_LABEL) == "serving.dualmap.dev/pool=qwen"

    @pytest.mark.parametrize(
        ("selector", "text"),
        [
            ({"matchLabels": {"b": "2", "a": "1"}}, "a=1,b=2"),
            ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["2", "1"]}]}, "a in (1,2)"),
            ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, "a notin (1)"),
            ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, "a"),
            ({"matchLabels": {"b": ""}, "matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, "b=,!a"),
        ],
    )
    def test_selector_text_of_adopted_pods_is_the_users_selector(self, selector: dict[str, Any], text: str) -> None:
        spec = read_spec(adopting(selector))
        assert selector_text(spec, POOL_LABEL) == text

    def test_accepted_selector_can_be_matched(self) -> None:
        accepted = [
            {"key": "app", "operator": "In", "values": ["vllm"]},
            {"key": "zone", "operator": "NotIn", "values": ["b"]},
            {"key": "app", "operator": "Exists"},
            {"key": "gone", "operator": "DoesNotExist"},
        ]
        workload = read_spec(adopting({"matchLabels": {"app": "vllm"}, "matchExpressions": accepted})).workload
        assert isinstance(workload, SelectorWorkload)
        assert matches(workload.selector, {"app": "vllm", "zone": "a"})
