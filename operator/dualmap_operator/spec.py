"""What the user asks for, as the control plane needs it: the router's view of the pool and the operator's own fields.

``dualmap.pool_reader`` reads what routers use; this adds ``replicas``, ``workload`` and ``drain``. The API server has
checked everything against the schema already; reading again keeps the operator right where a CRD of another version is
installed, and gives the refusal a condition to stand in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dualmap.errors import PoolError
from dualmap.pool import Engine, Pool
from dualmap.pool_reader import parse_duration, read_pools

DRAIN_TIMEOUT_S: Final = 600.0
_MAX_REPLICAS: Final = 10_000
_EXPRESSION_OPERATORS: Final = ("In", "NotIn", "Exists", "DoesNotExist")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateWorkload:
    """The operator owns a StatefulSet made of this PodTemplateSpec, which is kept as the user wrote it."""

    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorWorkload:
    """Pods that somebody else made are adopted: those this label selector matches."""

    selector: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One InferencePool's spec. ``replicas`` has an effect with a template only; ``drain_timeout_s`` in seconds."""

    namespace: str
    name: str
    uid: str
    generation: int
    engine: Engine
    replicas: int
    workload: TemplateWorkload | SelectorWorkload
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    deleting: bool = False

    @property
    def id(self) -> str:
        """``namespace/name``, as logs and metrics name the pool."""
        return f"{self.namespace}/{self.name}"


def read_spec(document: Mapping[str, Any]) -> PoolSpec:
    """Read an InferencePool object; raises PoolError for a field that cannot be used."""
    metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
    # The status is ours: whatever stands in it must not make the spec unreadable.
    pool: Pool = read_pools({key: value for key, value in document.items() if key != "status"})[0]
    replicas = spec.get("replicas", 1)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or not 0 <= replicas <= _MAX_REPLICAS:
        raise PoolError("spec.replicas", replicas, f"a whole number from 0 to {_MAX_REPLICAS}")
    drain = spec.get("drain") or {}
    return PoolSpec(
        namespace=pool.namespace,
        name=pool.name,
        uid=str(metadata.get("uid", "")),
        generation=int(metadata.get("generation", 0)),
        engine=pool.engine,
        replicas=replicas,
        workload=_read_workload(spec.get("workload")),
        drain_timeout_s=(
            parse_duration(drain["timeout"], "spec.drain.timeout") if "timeout" in drain else DRAIN_TIMEOUT_S
        ),
        deleting="deletionTimestamp" in metadata,
    )


def _read_workload(workload: object) -> TemplateWorkload | SelectorWorkload:
    if not isinstance(workload, Mapping) or len(workload.keys() & {"template", "selector"}) != 1:
        raise PoolError("spec.workload", workload, "exactly one of template and selector")
    if "template" in workload:
        template = workload["template"]
        if not isinstance(template, Mapping) or not (template.get("spec") or {}).get("containers"):
            raise PoolError("spec.workload.template", template, "a pod template with at least one container")
        return TemplateWorkload(template=template)
    selector = workload["selector"]
    if not isinstance(selector, Mapping) or not (selector.get("matchLabels") or selector.get("matchExpressions")):
        raise PoolError("spec.workload.selector", selector, "a label selector that is not empty")
    return SelectorWorkload(selector=selector)


def selector_text(spec: PoolSpec, pool_label: str) -> str:
    """Return the pool's label selector as the API's ``labelSelector`` parameter spells it; raises PoolError."""
    if isinstance(spec.workload, TemplateWorkload):
        return f"{pool_label}={spec.name}"
    selector = spec.workload.selector
    terms = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for position, expression in enumerate(selector.get("matchExpressions") or []):
        key, operator, values = expression.get("key"), expression.get("operator"), expression.get("values") or []
        if operator not in _EXPRESSION_OPERATORS:
            field = f"spec.workload.selector.matchExpressions[{position}].operator"
            raise PoolError(field, operator, f"one of {', '.join(_EXPRESSION_OPERATORS)}")
        if operator in ("In", "NotIn"):
            terms.append(f"{key} {operator.lower()} ({','.join(sorted(values))})")
        else:
            terms.append(str(key) if operator == "Exists" else f"!{key}")
    return ",".join(terms)
