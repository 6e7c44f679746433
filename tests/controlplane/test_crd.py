"""Tests that the CRD's schema and the code that reads pools agree: fields, defaults, bounds, enums, spellings.

e2e/controlplane/test_crd.py has the tests that need an API server: compilation of the rules, and error messages.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from dualmap.errors import PoolError
from dualmap.objects.fields import UNLIMITED, parse_duration
from dualmap.objects.pool_reader import ENGINE_TYPES, GROUP, QUEUE_ORDERS, SHADOWS_MAX, read_pools
from dualmap.policies.registry import POLICIES
from dualmap.pools.kv_store import ChunkHash, StoreType
from dualmap.pools.pool import MemberState, ReceiptFields, RingAlgorithm, TokenSource
from dualmap_operator.decide.spec import DRAIN_TIMEOUT_S, TemplateWorkload, read_spec
from dualmap_operator.decide.workload.checks import template_warnings
from dualmap_operator.names import KIND, PLURAL, VERSION, ConditionType

ROOT = Path(__file__).parents[2]
CRD: dict[str, Any] = yaml.safe_load((ROOT / "crds" / f"{GROUP}_{PLURAL}.yaml").read_text())
SCHEMA: dict[str, Any] = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC, STATUS = SCHEMA["properties"]["spec"], SCHEMA["properties"]["status"]
TEMPLATE = {"spec": {"containers": [{"name": "engine"}]}}
POOL: dict[str, Any] = {
    "apiVersion": f"{GROUP}/{VERSION}",
    "kind": KIND,
    "metadata": {"name": "qwen", "namespace": "llm"},
    "spec": {"model": {"name": "m"}, "workload": {"template": TEMPLATE}},
}
MEMBER = {"id": "qwen-0", "address": "10.0.0.1", "port": 8000, "state": "Active", "weight": 100}


class Field(NamedTuple):
    """One field of the schema and its path, such as ``("spec", "slo", "ttft")``."""

    path: tuple[str, ...]
    schema: dict[str, Any]

    def __str__(self) -> str:
        return ".".join(self.path)


def fields(schema: Mapping[str, Any], *path: str) -> Iterator[Field]:
    """Yield every field in a schema; the path of a list's items contains ``[]``."""
    for name, sub in schema.get("properties", {}).items():
        yield Field((*path, name), sub)
        yield from fields(sub, *path, name)
    if "items" in schema:
        yield from fields(schema["items"], *path, "[]")


SPEC_FIELDS = [each for each in fields(SPEC, "spec") if each.path[:2] != ("spec", "workload")]
MEMBER_FIELDS = [each for each in fields(STATUS, "status") if each.path[:3] == ("status", "ring", "members")][1:]
RING_FIELDS = [Field(("status", "ring", "version"), STATUS["properties"]["ring"]["properties"]["version"])]
READ_FIELDS = [*SPEC_FIELDS, *MEMBER_FIELDS, *RING_FIELDS]
NUMBERS = [each for each in READ_FIELDS if each.schema["type"] in ("integer", "number")]
NUMBER_RULE = re.compile(r"self >= ([\d.]+) && self <= ([\d.]+)")
ENUMS = [each for each in READ_FIELDS if "enum" in each.schema]
DURATIONS = [each for each in SPEC_FIELDS if "duration(self)" in str(each.schema.get("x-kubernetes-validations"))]


def with_value(field: Field, value: object) -> dict[str, Any]:
    """Return a pool with this value in one field; a member's field is in the pool's only member."""
    document = copy.deepcopy(POOL)
    if "members" in field.path:
        document["status"] = {"ring": {"members": [{**MEMBER, field.path[-1]: value}]}}
        return document
    *parents, last = field.path
    target = document
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    return document


def read(document: dict[str, Any]) -> None:
    """Read a document like the routers and the operator; raises PoolError if a reader rejects the document."""
    read_pools(document)
    read_spec(document)


def number_bounds(field: Field) -> tuple[float, float]:
    """Return the smallest and the largest number that the field's bounds or rule accept."""
    if "x-kubernetes-validations" not in field.schema or "minimum" in field.schema:
        return field.schema["minimum"], field.schema["maximum"]
    (rule,) = field.schema["x-kubernetes-validations"]
    low, high = NUMBER_RULE.fullmatch(rule["rule"]).groups()  # type: ignore[union-attr]  # see duration_bounds
    assert f"from {low} to {high}" in rule["messageExpression"]
    return float(low), float(high)


def duration_bounds(field: Field) -> tuple[str, str]:
    """Return the shortest and the longest duration that the field's rule accepts, in the rule's spelling."""
    (rule,) = field.schema["x-kubernetes-validations"]
    low, high = re.fullmatch(
        r".*duration\(self\) >= duration\('(\w+)'\) && duration\(self\) <= duration\('(\w+)'\)\)?", rule["rule"], re.S
    ).groups()  # type: ignore[union-attr]  # a rule without them fails the test here
    return low, high


def defaulted(value: Any, schema: Mapping[str, Any]) -> Any:
    """Add the schema's defaults like the API server, from the outer to the inner fields."""
    if schema["type"] == "object":
        filled = dict(value)
        for name, sub in schema.get("properties", {}).items():
            if name not in filled and "default" in sub:
                filled[name] = copy.deepcopy(sub["default"])
            if name in filled:
                filled[name] = defaulted(filled[name], sub)
        return filled
    return value


def test_crd_names_equal_the_names_in_code() -> None:
    names = CRD["spec"]["names"]
    assert (CRD["spec"]["group"], names["plural"], names["kind"]) == (GROUP, PLURAL, KIND)
    assert CRD["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    (version,) = CRD["spec"]["versions"]
    assert (version["name"], version["served"], version["storage"]) == (VERSION, True, True)


def test_crd_every_field_has_a_description() -> None:
    assert SCHEMA["description"]
    bare = [str(each) for each in fields(SCHEMA) if not each.schema.get("description")]
    # Kubernetes defines these fields, and rejects a schema with them.
    assert bare == ["metadata", "metadata.name"]


def test_crd_every_field_is_bounded_except_the_pod_template() -> None:
    bound = {"string": "maxLength", "array": "maxItems", "integer": "minimum", "number": "maximum"}
    unbounded = [
        str(each)
        for each in fields(SCHEMA)
        if len(each.path) > 1
        and (needed := bound.get(each.schema["type"])) is not None
        and not each.schema.keys() & {needed, "enum"}
        and not NUMBER_RULE.search(str(each.schema))
        and each.schema.get("format") != "date-time"
    ]
    assert unbounded == []
    assert [str(each) for each in fields(SPEC) if "minimum" in each.schema and "maximum" not in each.schema] == []


def test_crd_objects_with_inner_defaults_have_a_default() -> None:
    """The API server sets inner defaults only if the object exists."""
    bare = [
        str(each)
        for each in SPEC_FIELDS
        if each.schema["type"] == "object" and "required" not in each.schema and each.schema.get("default") != {}
    ]
    assert bare == []


# Only the operator reads the fields in drain. Routers ignore them, and the API server removes unknown fields.
OBJECTS = [
    Field(("spec",), SPEC),
    *(each for each in READ_FIELDS if each.schema["type"] == "object" and each.path[-1] != "drain"),
]


@pytest.mark.parametrize("field", OBJECTS, ids=str)
def test_crd_objects_have_exactly_the_fields_of_the_parser(field: Field) -> None:
    document = with_value(Field((*field.path, "unknown"), {}), 1)
    with pytest.raises(PoolError) as refused:
        read_pools(document)
    known = refused.value.accepted.removeprefix("one of the fields ").split(", ")
    assert refused.value.field == f"{field}.unknown"
    assert set(known) == set(field.schema["properties"])


def test_crd_members_have_exactly_the_fields_of_the_parser() -> None:
    with pytest.raises(PoolError) as refused:
        read_pools({**POOL, "status": {"ring": {"members": [{**MEMBER, "unknown": 1}]}}})
    known = refused.value.accepted.removeprefix("one of the fields ").split(", ")
    assert set(known) == {each.path[-1] for each in MEMBER_FIELDS}


def test_crd_defaults_equal_the_router_parser_defaults() -> None:
    document = {**POOL, "spec": defaulted(POOL["spec"], SPEC)}
    assert document["spec"] != POOL["spec"]
    assert read_pools(document) == read_pools(POOL)
    assert read_spec(document) == read_spec(POOL)
    # Every leaf except the required field has a default, so the comparison covers all defaults.
    given = {("spec", "model", "name")}
    leaves = {each.path for each in SPEC_FIELDS if each.schema["type"] != "object"}
    assert {each.path for each in SPEC_FIELDS if "default" in each.schema} >= leaves - given


def test_crd_defaults_equal_the_operator_defaults() -> None:
    spec = read_spec(POOL)
    assert spec.workload == TemplateWorkload(template=TEMPLATE)
    assert spec.replicas == SPEC["properties"]["replicas"]["default"] == 1
    timeout = SPEC["properties"]["drain"]["properties"]["timeout"]["default"]
    assert spec.drain_timeout_s == parse_duration(timeout, "timeout") == DRAIN_TIMEOUT_S


@pytest.mark.parametrize("field", NUMBERS, ids=str)
def test_crd_numbers_have_the_bounds_of_the_parser(field: Field) -> None:
    low, high = number_bounds(field)
    step = 1 if field.schema["type"] == "integer" else 1e-6
    read(with_value(field, low if field.path[-1] != "maxBlocks" else 2))
    read(with_value(field, high if field.path[-1] != "initialBlocks" else 64))
    for outside in (low - step, high + step):
        with pytest.raises(PoolError):
            read(with_value(field, outside))


@pytest.mark.parametrize("field", DURATIONS, ids=str)
def test_crd_durations_have_the_bounds_of_the_parser(field: Field) -> None:
    low, high = duration_bounds(field)
    read(with_value(field, low))
    read(with_value(field, high))
    low_s, high_s = (parse_duration(bound, "bound") for bound in (low, high))
    for outside in (f"{low_s * 999:.6f}ms", f"{high_s + 1:.0f}s"):
        with pytest.raises(PoolError):
            read(with_value(field, outside))


@pytest.mark.parametrize("field", DURATIONS, ids=str)
def test_crd_duration_message_and_description_contain_the_bounds(field: Field) -> None:
    low, high = duration_bounds(field)
    (rule,) = field.schema["x-kubernetes-validations"]
    assert f"from {low} to {high}, such as {field.schema['default']}" in " ".join(rule["messageExpression"].split())
    assert f"rom {low} to {high}" in field.schema["description"]


@pytest.mark.parametrize("field", DURATIONS, ids=str)
@pytest.mark.parametrize(
    "text",
    ["500ms", "5s", "1.5s", "0.5m", "10m", "1h", "600000ms", "", "5", "s", "-5s", "0s", "5 s", "5S", "1h30m", "1e3s",
     "+5s", ".5s", "5.s", "5us", "5ns", "5d"],
)  # fmt: skip
def test_crd_duration_pattern_equals_the_parser_pattern(field: Field, text: str) -> None:
    (rule,) = field.schema["x-kubernetes-validations"]
    (pattern,) = re.findall(r"matches\('\^(.*?)\$'\)", rule["rule"])
    try:
        parse_duration(text, "text", low_s=0, high_s=86_400)
        read_as_a_duration = True
    except PoolError:
        read_as_a_duration = False
    assert (re.fullmatch(pattern, text) is not None) == read_as_a_duration
    assert len(text) <= field.schema["maxLength"]


def test_crd_only_the_dispatch_window_may_be_unlimited() -> None:
    unlimited = [each for each in DURATIONS if f"self == '{UNLIMITED}'" in str(each.schema)]
    assert [each.path[-1] for each in unlimited] == ["dispatchWindow"]
    for each in DURATIONS:
        if each in unlimited:
            read(with_value(each, UNLIMITED))
        else:
            with pytest.raises(PoolError):
                read(with_value(each, UNLIMITED))


def test_crd_enums_equal_the_values_in_code() -> None:
    code = {
        "spec.engine.type": list(ENGINE_TYPES),
        "spec.engine.tokenizer.source": [each.value for each in TokenSource],
        "spec.kvStore.type": [each.value for each in StoreType],
        "spec.kvStore.hash": [each.value for each in ChunkHash],
        "spec.routing.policy": list(POLICIES),
        "spec.routing.receiptFields": [each.value for each in ReceiptFields],
        "spec.routing.ring.algorithm": [each.value for each in RingAlgorithm],
        "spec.routing.queue.order": list(QUEUE_ORDERS),
        "status.ring.members.[].state": [each.value for each in MemberState],
    }
    assert {str(each): each.schema["enum"] for each in ENUMS} == code


def test_crd_shadow_policies_equal_the_values_in_code() -> None:
    shadow = SPEC["properties"]["routing"]["properties"]["shadow"]
    assert (shadow["items"]["enum"], shadow["maxItems"]) == (list(POLICIES), SHADOWS_MAX)
    assert shadow["x-kubernetes-list-type"] == "set"


def test_crd_condition_names_equal_the_operators_conditions() -> None:
    named = re.findall(r"\b[A-Z]\w+", STATUS["properties"]["conditions"]["description"])
    assert set(ConditionType) <= set(named)


def test_crd_text_lengths_equal_the_parser_limits() -> None:
    texts = [each for each in READ_FIELDS if "minLength" in each.schema]
    assert {str(each) for each in texts} == {"spec.model.name", "status.ring.members.[].incarnation"}
    for field in texts:
        read(with_value(field, "x" * field.schema["maxLength"]))
        for text in ("", "x" * (field.schema["maxLength"] + 1)):
            with pytest.raises(PoolError):
                read(with_value(field, text))
    for name in ("aliases", "adapters"):
        names = Field(("spec", "model", name), SPEC["properties"]["model"]["properties"][name])
        at_most = names.schema["items"]["maxLength"]
        read(with_value(names, ["x" * at_most]))
        for text in ("", "x" * (at_most + 1)):
            with pytest.raises(PoolError):
                read(with_value(names, [text]))


@pytest.mark.parametrize(
    ("adapters", "accepted"),
    [(["sql", "law"], True), ([], True), (["m"], False), (["alias"], False), (["sql", "sql"], False)],
)
def test_adapter_names_equal_to_model_names_are_rejected(adapters: list[str], accepted: bool) -> None:
    document = with_value(Field(("spec", "model", "aliases"), {}), ["alias"])
    document["spec"]["model"]["adapters"] = adapters
    if accepted:
        read(document)
        return
    with pytest.raises(PoolError, match=r"spec\.model\.adapters\[\d\]"):
        read(document)


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        (("metadata", "name"), ["q", "q" * 50, "q" * 51, "q-0", "-q", "q-", "Q", "q.q", "q_q"]),
        (("spec", "routing", "session", "header"), ["x", "x-y_z", "X", "xY", "-x", "x y", "x" * 128, "x" * 129, ":x"]),
        (("status", "ring", "members", "[]", "id"), ["q-0", "q/0", "a b", "-q", 'a"b', "x" * 253, "x" * 254]),
    ],
    ids=["name", "header", "id"],
)
def test_crd_name_patterns_equal_the_parser_patterns(path: tuple[str, ...], texts: list[str]) -> None:
    schema = SCHEMA if path[0] == "metadata" else next(each.schema for each in READ_FIELDS if each.path == path)
    rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", [])]
    (pattern,) = [schema["pattern"]] if "pattern" in schema else re.findall(r"matches\('(.*?)'\)", " ".join(rules))
    for text in texts:
        accepted = re.fullmatch(pattern, text) is not None and len(text) <= schema.get("maxLength", len(text))
        try:
            read(with_value(Field(path, schema), text))
            assert accepted, text
        except PoolError:
            assert not accepted, text


@pytest.mark.parametrize(
    "workload",
    [None, {}, {"template": TEMPLATE, "selector": {"matchLabels": {"a": "b"}}}, {"selector": {}},
     {"selector": {"matchLabels": {}}}, {"template": {}}, {"template": {"spec": {"containers": []}}}],
)  # fmt: skip
def test_crd_rejected_workloads_are_rejected_by_the_operator(workload: object) -> None:
    with pytest.raises(PoolError, match=r"spec\.workload"):
        read_spec({**POOL, "spec": {**POOL["spec"], "workload": workload}})


def test_crd_page_lists_every_field_with_its_default() -> None:
    text = (ROOT / "docs" / "pool.md").read_text()
    rows = dict(re.findall(r"^\| `(spec\.[\w.]+)` \| (?:`([^`]*)`|required)", text, re.MULTILINE))
    leaves = {str(each): each.schema for each in SPEC_FIELDS if each.schema["type"] != "object"}
    listed = {name: default for name, default in rows.items() if not name.startswith("spec.workload")}
    assert listed.keys() == leaves.keys()
    for name, default in listed.items():
        assert yaml.safe_load(default) == leaves[name].get("default"), name


def examples(page: str) -> list[list[Any]]:
    """Return the documents of each YAML block of a page."""
    text = (ROOT / "docs" / page).read_text()
    return [list(yaml.safe_load_all(block)) for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]


def test_pages_examples_are_valid_pools_without_warnings() -> None:
    [in_a_cluster], [in_a_file], [adopting] = examples("pool.md")
    with_prefills, *_ = examples("prefill-decode.md")
    [with_store] = examples("kv-store.md")[0]
    [with_shadow] = examples("policies.md")[0]
    [with_events], [in_a_file_with_events] = examples("kv-events.md")
    assert template_warnings(read_spec(in_a_cluster)) == ()
    assert [member.id for member in read_pools(in_a_file)[0].members] == ["qwen-0", "qwen-1"]
    for each in with_prefills:
        assert set(each["spec"]) <= set(SPEC["properties"])
    assert read_pools(in_a_file_with_events)[0].engine.kv_events.enabled
    for each in (with_store, with_shadow, with_events):
        read({**POOL, "spec": {**POOL["spec"], **each["spec"]}})
    read({**POOL, **adopting})


def test_crd_page_lists_every_status_field_and_condition() -> None:
    text = (ROOT / "docs" / "pool.md").read_text()
    listed = set(re.findall(r"^\| `(status\.[\w.\[\]]+)` \|", text, re.MULTILINE))
    leaves = {
        str(each).replace("members.[]", "members[]")
        for each in fields(STATUS, "status")
        if each.schema["type"] != "object"
    }
    assert listed == {each for each in leaves if not each.startswith("status.conditions")} - {"status.ring.members"}
    _, _, after = text.partition("## Status")
    assert re.findall(r"^\| `([A-Z]\w+)` \|", after, re.MULTILINE) == list(ConditionType)
