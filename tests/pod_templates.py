"""Pools with a pod template, for the tests of the operator's pods and of its warnings."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from dualmap.pools.pool import Engine
from dualmap_operator.decide.spec import PoolSpec, TemplateWorkload

PORT = 8000

GOOD_CONTAINER: Mapping[str, Any] = {
    "name": "engine",
    "image": "vllm/vllm-openai:v0.32.0",
    "args": ["--model=m", "--shutdown-timeout=20", "--enable-prompt-tokens-details"],
    "ports": [{"containerPort": PORT}],
    "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
}
"""A container of an engine that causes no warning."""


def pool_of(template: Mapping[str, Any], *, drain_timeout_s: float = 600.0, engine: str = "vLLM") -> PoolSpec:
    return PoolSpec(
        namespace="llm",
        name="qwen",
        uid="7f7ad0a4",
        generation=3,
        engine=Engine(type=engine, port=PORT),
        replicas=4,
        workload=TemplateWorkload(template=template),
        drain_timeout_s=drain_timeout_s,
    )


def template_of(*containers: Mapping[str, Any], **pod: Any) -> dict[str, Any]:
    return {"metadata": {"labels": {"app": "qwen"}}, "spec": {"containers": list(containers), **pod}}


def engine_with(**changes: Any) -> dict[str, Any]:
    """Return the good container with some changed fields; None removes a field."""
    return {key: value for key, value in {**GOOD_CONTAINER, **changes}.items() if value is not None}


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def odd_templates(draw: st.DrawFn) -> Mapping[str, Any]:
    """Draw a template with a random replacement at a random path."""
    full = engine_with(
        command=["/bin/sh", "-c", "exec vllm serve m --port 8000"],
        env=[{"name": "A", "value": "b"}],
        lifecycle={"postStart": {"exec": {"command": ["true"]}}},
    )
    gates = [{"conditionType": "example.com/warm"}]
    template: Any = template_of(full, full, terminationGracePeriodSeconds=60, readinessGates=gates)
    for _ in range(draw(st.integers(1, 3))):
        template = _replaced(draw, template, top=True)
    return template  # type: ignore[no-any-return]  # The top itself is never replaced, so it is still an object.


def _replaced(draw: st.DrawFn, value: Any, *, top: bool = False) -> Any:
    places: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value) if type(value) is list else 0))
    )
    if not places or (not top and draw(st.booleans())):
        return draw(_ANYTHING)
    place = draw(st.sampled_from(places))
    changed = value.copy()
    changed[place] = _replaced(draw, value[place])
    return changed
