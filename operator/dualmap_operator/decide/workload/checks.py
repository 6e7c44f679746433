"""Warnings about fields of a pod template that Kubernetes accepts but that harm the pool.

``plan`` publishes the warnings in the Accepted condition and an Event. Only settings that harm requests or metrics
cause a warning. All other engine flags are the user's choice, and a wrapper script may set them. Each warning contains
the field, its value and a better value.
"""

from typing import Final

from dualmap_operator.decide.spec import PoolSpec, TemplateWorkload
from dualmap_operator.decide.workload.arguments import (
    KV_EVENTS_CONFIG,
    PROMPT_TOKENS_DETAILS,
    SHUTDOWN_TIMEOUT,
    json_option,
    mentions,
    option,
    runs_vllm,
    switched_on,
    whole_option,
    words,
)
from dualmap_operator.decide.workload.template import (
    TEMPLATE_PATH,
    EngineContainer,
    declared_ports,
    engine_container,
    mapping,
    whole_number,
)
from dualmap_operator.decide.workload.termination import grace_period_s

_VLLM: Final = "vLLM"
_EVENTS_ENDPOINT: Final = "tcp://*:5557"
"""vLLM's default. With another form of address, vLLM connects to a subscriber and does not listen."""
_LISTENS: Final = ("*", "::", "ipc://", "inproc://")
_SHOWN: Final = 64
"""The most characters of a value that a warning shows."""
_SHUTDOWN_S: Final = 20
"""With ``--shutdown-timeout 20`` vLLM finishes its streams on SIGTERM; with 0 vLLM aborts the streams."""


def template_warnings(spec: PoolSpec) -> tuple[str, ...]:
    """Return the warnings about the pod template; none for a pool of adopted pods. Never raises."""
    if not isinstance(spec.workload, TemplateWorkload):
        return ()
    found = [_grace_period(spec, spec.workload)]
    engine = engine_container(spec.workload.template, spec.engine.port)
    if engine is not None:
        found += [_readiness(engine, spec), _undeclared_port(engine, spec)]
        if spec.engine.type == _VLLM:
            found += [_shutdown_timeout(engine), _other_port(engine, spec), _prompt_tokens_details(engine)]
            found += [_kv_events(engine, spec)]
    return tuple(warning for warning in found if warning is not None)


def _grace_period(spec: PoolSpec, workload: TemplateWorkload) -> str | None:
    pod = mapping(workload.template.get("spec"))
    own_s, needed_s = whole_number(pod.get("terminationGracePeriodSeconds")), grace_period_s(spec)
    if own_s is None or own_s >= needed_s:
        return None
    return (
        f"{TEMPLATE_PATH}.spec.terminationGracePeriodSeconds: {own_s} is shorter than a drain "
        f"(spec.drain.timeout is {spec.drain_timeout_s:g}s), so the operator uses {needed_s}; "
        f"give {needed_s} or more, or a shorter spec.drain.timeout"
    )


def _readiness(engine: EngineContainer, spec: PoolSpec) -> str | None:
    # A startup probe also delays readiness until the engine has started.
    if engine.written.get("readinessProbe") is not None or engine.written.get("startupProbe") is not None:
        return None
    return (
        f"{engine.path}.readinessProbe: the probe is missing, so a pod joins the ring before the engine can serve; "
        f"give a probe that succeeds after the model has loaded, such as GET /health on port {spec.engine.port}"
    )


def _undeclared_port(engine: EngineContainer, spec: PoolSpec) -> str | None:
    declared = declared_ports(engine.written)
    if not declared or spec.engine.port in declared:
        return None
    return (
        f"{engine.path}.ports: {', '.join(str(port) for port in declared)} do not include spec.engine.port "
        f"{spec.engine.port}; declare port {spec.engine.port} on the engine's container, or correct spec.engine.port"
    )


def _shutdown_timeout(engine: EngineContainer) -> str | None:
    given = words(engine.written)
    if option(given, SHUTDOWN_TIMEOUT) is None:
        if not runs_vllm(engine.written):
            return None
        stands = f"{SHUTDOWN_TIMEOUT} is missing (default: 0 s)"
    else:
        shutdown_s = whole_option(given, SHUTDOWN_TIMEOUT)
        if shutdown_s is None or shutdown_s >= _SHUTDOWN_S:
            return None
        stands = f"{SHUTDOWN_TIMEOUT} {shutdown_s} is too short"
    return (
        f"{engine.path}.args: {stands}; at shutdown, vLLM aborts streams that are still open after this timeout; "
        f"give {SHUTDOWN_TIMEOUT} {_SHUTDOWN_S} or more"
    )


def _other_port(engine: EngineContainer, spec: PoolSpec) -> str | None:
    port = whole_option(words(engine.written), "--port")
    if port is None or port == spec.engine.port:
        return None
    return (
        f"{engine.path}.args: --port {port} differs from spec.engine.port {spec.engine.port}, which receives the "
        "requests; give the same port in both"
    )


def _prompt_tokens_details(engine: EngineContainer) -> str | None:
    if switched_on(words(engine.written), PROMPT_TOKENS_DETAILS) or not runs_vllm(engine.written):
        return None
    return (
        f"{engine.path}.args: {PROMPT_TOKENS_DETAILS} is missing, so vLLM does not report cached prompt tokens "
        f"and routers cannot measure the hit rate; give {PROMPT_TOKENS_DETAILS}"
    )


def _kv_events(engine: EngineContainer, spec: PoolSpec) -> str | None:
    if not spec.engine.kv_events.enabled or not runs_vllm(engine.written):
        return None
    if not mentions(engine.written, KV_EVENTS_CONFIG):
        stands = f"{KV_EVENTS_CONFIG} is missing, so vLLM publishes no KV events"
    else:
        config = json_option(engine.written, KV_EVENTS_CONFIG)
        if config is None:
            return None
        endpoint = config.get("endpoint", _EVENTS_ENDPOINT)
        if config.get("enable_kv_cache_events") is not True:
            stands = f"{KV_EVENTS_CONFIG} does not enable KV events"
        elif isinstance(endpoint, str) and not any(mark in endpoint for mark in _LISTENS):
            shown = ascii(endpoint[:_SHOWN])
            stands = f"{KV_EVENTS_CONFIG} has the endpoint {shown}, to which vLLM connects instead of listening"
        else:
            return None
    return (
        f"{engine.path}.args: {stands}, but spec.engine.kvEvents.enabled is true; "
        f'give {KV_EVENTS_CONFIG}={{"enable_kv_cache_events":true,"endpoint":"{_EVENTS_ENDPOINT}",'
        f'"replay_endpoint":"tcp://*:5558"}}'
    )
