"""Reads a pool's spec for the operator: the fields that routers use and the operator's own fields.

``dualmap.objects.pool_reader`` reads the router's fields; this module adds ``replicas``, ``workload`` and ``drain``.
The API server has already checked the schema. The operator checks the spec again, because a CRD of another version may
be installed. The operator reports an invalid spec in the Accepted condition.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dualmap.errors import PoolError
from dualmap.objects.fields import parse_duration
from dualmap.objects.pods import mapping_in, mappings_in, text_in
from dualmap.objects.pool_reader import read_pools
from dualmap.pools.kv_store import KvStore
from dualmap.pools.pool import Engine, Pool

DRAIN_TIMEOUT_S: Final = 600.0
_MAX_REPLICAS: Final = 10_000
_OPERATORS_WITH_VALUES: Final = ("In", "NotIn")
_EXPRESSION_OPERATORS: Final = (*_OPERATORS_WITH_VALUES, "Exists", "DoesNotExist")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateWorkload:
    """A PodTemplateSpec, unchanged from the user's spec; the operator creates a StatefulSet from it."""

    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorWorkload:
    """A label selector; the pool adopts the existing pods that it matches."""

    selector: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One InferencePool's spec. ``replicas`` has an effect only for a TemplateWorkload."""

    namespace: str
    name: str
    uid: str
    generation: int
    engine: Engine
    replicas: int
    workload: TemplateWorkload | SelectorWorkload
    kv_store: KvStore = field(default_factory=KvStore)
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    deleting: bool = False

    @property
    def id(self) -> str:
        """``namespace/name``: the pool's id in logs and metrics."""
        return f"{self.namespace}/{self.name}"


def read_spec(document: Mapping[str, Any]) -> PoolSpec:
    """Read an InferencePool object; raise PoolError for an invalid field."""
    # Exclude the status: an invalid status must not make the spec unreadable.
    pool: Pool = read_pools({key: value for key, value in document.items() if key != "status"})[0]
    metadata, spec = mapping_in(document, "metadata"), mapping_in(document, "spec")
    generation = metadata.get("generation")
    return PoolSpec(
        namespace=pool.namespace,
        name=pool.name,
        uid=text_in(metadata, "uid"),
        generation=generation if isinstance(generation, int) else 0,
        engine=pool.engine,
        replicas=_read_replicas(spec.get("replicas")),
        workload=_read_workload(spec.get("workload")),
        kv_store=pool.kv_store,
        drain_timeout_s=_read_drain_timeout_s(spec.get("drain")),
        deleting="deletionTimestamp" in metadata,
    )


def selector_text(spec: PoolSpec, pool_label: str) -> str:
    """Return the pool's label selector in the syntax of the API's ``labelSelector`` parameter."""
    if isinstance(spec.workload, TemplateWorkload):
        return f"{pool_label}={spec.name}"
    selector = spec.workload.selector
    terms = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for expression in selector.get("matchExpressions") or []:
        key, values = expression["key"], ",".join(sorted(expression.get("values") or []))
        match expression["operator"]:
            case "Exists":
                terms.append(key)
            case "DoesNotExist":
                terms.append(f"!{key}")
            case operator:
                terms.append(f"{key} {operator.lower()} ({values})")
    return ",".join(terms)


def _read_replicas(value: object) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_REPLICAS:
        raise PoolError("spec.replicas", value, f"a whole number from 0 to {_MAX_REPLICAS}")
    return value


def _read_drain_timeout_s(drain: object) -> float:
    if drain is None:
        return DRAIN_TIMEOUT_S
    if not isinstance(drain, Mapping):
        raise PoolError("spec.drain", drain, "a mapping of field names to values")
    timeout = drain.get("timeout")
    return DRAIN_TIMEOUT_S if timeout is None else parse_duration(timeout, "spec.drain.timeout")


def _read_workload(workload: object) -> TemplateWorkload | SelectorWorkload:
    if not isinstance(workload, Mapping) or len(workload.keys() & {"template", "selector"}) != 1:
        raise PoolError("spec.workload", workload, "exactly one of template and selector")
    if "template" in workload:
        template = workload["template"]
        if not isinstance(template, Mapping) or not mappings_in(mapping_in(template, "spec"), "containers"):
            raise PoolError("spec.workload.template", template, "a pod template with at least one container")
        return TemplateWorkload(template=template)
    selector = workload["selector"]
    _check_selector(selector)
    return SelectorWorkload(selector=selector)


def _check_selector(selector: object) -> None:
    """Raise PoolError for an empty or invalid selector: the selector decides which pods the pool adopts."""
    field = "spec.workload.selector"
    if not isinstance(selector, Mapping) or not (selector.get("matchLabels") or selector.get("matchExpressions")):
        raise PoolError(field, selector, "a label selector that is not empty")
    labels, expressions = selector.get("matchLabels") or {}, selector.get("matchExpressions") or []
    if not isinstance(labels, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in labels.items()
    ):
        raise PoolError(f"{field}.matchLabels", labels, "a mapping of label names to strings")
    if not isinstance(expressions, list):
        raise PoolError(f"{field}.matchExpressions", expressions, "a list")
    for position, expression in enumerate(expressions):
        _check_expression(expression, f"{field}.matchExpressions[{position}]")


def _check_expression(expression: object, field: str) -> None:
    if not isinstance(expression, Mapping):
        raise PoolError(field, expression, "a mapping with key and operator, and with values for In and NotIn")
    key, operator, values = expression.get("key"), expression.get("operator"), expression.get("values") or []
    if not isinstance(key, str) or not key:
        raise PoolError(f"{field}.key", key, "a label's name")
    if operator not in _EXPRESSION_OPERATORS:
        raise PoolError(f"{field}.operator", operator, f"one of {', '.join(_EXPRESSION_OPERATORS)}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise PoolError(f"{field}.values", values, "a list of strings")
    if bool(values) != (operator in _OPERATORS_WITH_VALUES):
        accepted = "at least one value" if operator in _OPERATORS_WITH_VALUES else "no values"
        raise PoolError(f"{field}.values", values, f"{accepted} for {operator}")
