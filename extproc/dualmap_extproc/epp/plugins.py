"""Reads the EndpointPickerConfig of the pickers of the Gateway API Inference Extension and of llm-d.

The router has a policy of its own, so plugins that score, pick, order or collect have no effect. Plugins for prefill
and decode on different pods set up the router's own prefills (``epp.prefills``). Other plugins that change which pods
may serve a request, or how a request is read, cannot be left out: the picker refuses them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.errors import PoolError
from dualmap_extproc.epp import prefills
from dualmap_extproc.epp.fields import any_mapping, list_at, text_at
from dualmap_extproc.epp.prefills import Plugin
from dualmap_extproc.epp.profiles import ENCODERS, read_profiles

API_VERSIONS: Final = ("inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1alpha1")
_KIND: Final = "EndpointPickerConfig"
_PLUGIN_FIELDS: Final = ("type", "name", "parameters")
_FIELDS: Final = (
    *("apiVersion", "kind", "metadata", "featureGates", "plugins", "schedulingProfiles", "saturationDetector"),
    *("data", "dataLayer", "flowControl", "parser", "requestHandler"),
)
_POLICY: Final = "spec.routing.policy chooses the member"
_CACHE: Final = "the router has its own index of cached prefixes; spec.engine.kvEvents adds what the engines report"
_SESSIONS: Final = "spec.routing.session binds sessions to members"
_LOAD: Final = "the router counts each member's load itself, and reads the engines' own"
_QUEUE: Final = "spec.routing.queue and spec.routing.fairness control the queue"
_TTFT: Final = "the router predicts the time to first token itself; spec.slo has the objective"
_DISCOVERY: Final = "spec.engine.discovery reads the engines' metrics and models"
_TOKENS: Final = "spec.engine.tokenizer gives token ids"
_READS: Final = "the router reads JSON bodies of every path: OpenAI's and Anthropic's APIs, and token ids"
_HOOKS: Final = "--conformance-hooks switches the headers of the conformance tests on"

UNNEEDED: Final = {
    **dict.fromkeys(
        (
            *("single-profile-handler", "data-parallel-profile-handler", "max-score-picker", "random-picker"),
            *("weighted-random-picker", "lora-affinity-scorer", "context-length-aware", "endpoint-attribute-scorer"),
            *("endpoint-attribute-weight-scorer", "header-label-affinity-scorer", "label-producer"),
            *("topology-affinity-scorer", "topology-extractor", "decision-tree-filter", "lora-affinity-filter"),
        ),
        _POLICY,
    ),
    **dict.fromkeys(
        (
            *(
                "prefix-cache-scorer",
                "precise-prefix-cache-scorer",
                "precise-prefix-cache-producer",
                "approx-prefix-cache-producer",
                "no-hit-lru-scorer",
            ),
            *("prefix-cache-affinity-filter", "burst-prefix-cache-producer", "mm-embeddings-cache-producer"),
            "mm-embeddings-cache-scorer",
        ),
        _CACHE,
    ),
    **dict.fromkeys(("session-affinity-scorer", "session-affinity-filter", "session-id-producer"), _SESSIONS),
    **dict.fromkeys(
        (
            *("queue-scorer", "kv-cache-utilization-scorer", "running-requests-size-scorer", "token-load-scorer"),
            *("load-aware-scorer", "active-request-scorer", "inflight-load-producer", "utilization-filter"),
            *("dcgm-data-source", "dcgm-extractor", "kv-cache-scorer", "least-kv-cache-filter", "least-queue-filter"),
            "low-queue-filter",
        ),
        _LOAD,
    ),
    **dict.fromkeys(
        (
            *("global-strict-fairness-policy", "round-robin-fairness-policy", "fcfs-ordering-policy"),
            *("edf-ordering-policy", "slo-deadline-ordering-policy", "static-usage-limit-policy"),
            *("concurrency-detector", "utilization-detector", "sheddable-eviction-filter", "eviction-sheddable-filter"),
            *("priority-then-time-eviction-order-policy", "eviction-priority-then-time-ordering"),
            *("probabilistic-admitter", "latency-slo-admitter", "program-aware-fairness", "agent-identity"),
            *("priority-holdback-policy", "soft-reflective-ceiling-policy"),
        ),
        _QUEUE,
    ),
    **dict.fromkeys(
        (
            *("latency-scorer", "slo-headroom-tier-filter", "predicted-latency-producer", "predicted-latency-scorer"),
            *("slo-aware-routing", "slo-aware-profile-handler"),
        ),
        _TTFT,
    ),
    **dict.fromkeys(
        (
            *("metrics-data-source", "core-metrics-extractor", "model-server-protocol-metrics", "models-data-source"),
            *("models-data-extractor", "model-server-protocol-models", "k8s-notification-source"),
            "endpoint-notification-source",
        ),
        _DISCOVERY,
    ),
    **dict.fromkeys(("tokenizer", "token-producer"), _TOKENS),
    **dict.fromkeys(("header-based-testing-filter", "destination-endpoint-served-verifier"), _HOOKS),
    "p2p-source-producer": "a request goes to the member that has its prefix; engines fetch no blocks from each other",
    "dp-rank-header-handler": "an engine distributes the requests of one port over its ranks itself",
    **dict.fromkeys(("openai-parser", "anthropic-parser", "vllmhttp-parser", "sglanghttp-parser"), _READS),
    "request-attribute-reporter": "requests' attributes are not reported to the gateway",
}
"""What is done instead, by the type of a plugin that has no effect."""
_STAGES: Final = (
    "disagg-profile-handler with decode-filter and prefill-filter: the stages of a request are decode, and prefill"
)
_PLACES: Final = (
    "another plugin: the policy chooses among all ready pods; put labels into the pool's selector to leave pods out"
)
_LABELS: Final = "another plugin: every ready pod of the pool is a member; put the labels into the pool's selector"
_BODIES: Final = "another parser: the router reads JSON bodies only, as openai-parser does"
_PODS: Final = "another plugin: the members are ready pods of one cluster, those of the InferencePool's selector"
_ATTRIBUTES: Final = "another plugin: the router leaves out members that are not ready or overloaded, and no others"
UNSUPPORTED: Final = {
    **dict.fromkeys(("encode-filter", "always-disagg-multimodal-decider"), ENCODERS),
    "header-profile-handler": _STAGES,
    **dict.fromkeys(("topology-affinity-filter", "disaggregatedset-rollout-screener"), _PLACES),
    **dict.fromkeys(
        (
            *("file-discovery", "multicluster-file-discovery", "multicluster-metrics-data-source"),
            *("multicluster-metrics-extractor", "multicluster-session-affinity-filter", "multicluster-queue-scorer"),
            *("multicluster-kv-cache-utilization-scorer", "multicluster-prefix-cache-scorer"),
            "multicluster-approx-prefix-cache-producer",
        ),
        _PODS,
    ),
    "endpoint-attribute-filter": _ATTRIBUTES,
    **dict.fromkeys(("by-label", "by-label-selector", "label-selector-filter"), _LABELS),
    **dict.fromkeys(("vllmgrpc-parser", "vertexai-parser", "passthrough-parser"), _BODIES),
}
"""What is accepted instead of a plugin that cannot be left out, by its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerConfig:
    """What the configuration of another picker says.

    ``unneeded`` are the types of its plugins that have no effect, all of which are in UNNEEDED. ``unused`` are further
    parts without effect, each with its reason. ``roles`` says how the pods' roles count.
    """

    unneeded: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    roles: prefills.RoleUse = prefills.ANY_ROLE


def read_plugins(documents: Iterable[object]) -> PickerConfig:
    """Return what the documents of a configuration say. Raises PoolError."""
    found: list[Plugin] = []
    profiles: set[str] = set()
    for document in documents:
        fields = any_mapping(document, "document")
        # As in llm-d, both may be absent.
        for key, accepted in (("apiVersion", API_VERSIONS), ("kind", (_KIND,))):
            if key in fields and fields[key] not in accepted:
                raise PoolError(key, fields[key], " or ".join(accepted))
        for name in fields:
            if name not in _FIELDS:
                raise PoolError(name[:80], fields[name], f"a field of {_KIND}: {', '.join(_FIELDS)}")
        plugins = list_at(fields, "plugins", "", "a list of plugins")
        found += [_read_plugin(plugin, f"plugins[{position}]") for position, plugin in enumerate(plugins)]
        _check_names(found)
        profiles |= read_profiles(fields, {each.name for each in found} | UNNEEDED.keys())
    unneeded = dict.fromkeys(each.type for each in found if each.type in UNNEEDED)
    roles, unused = prefills.read_role_use(found, profiles)
    return PickerConfig(unneeded=tuple(unneeded), unused=unused, roles=roles)


def _read_plugin(value: object, place: str) -> Plugin:
    plugin = any_mapping(value, place)
    type = _read_type(plugin.get("type"), f"{place}.type")
    for name, found in plugin.items():
        if name not in _PLUGIN_FIELDS:
            raise PoolError(f"{place}.{name[:80]}", found, f"a field of a plugin: {', '.join(_PLUGIN_FIELDS)}")
    parameters = any_mapping(plugin.get("parameters") or {}, f"{place}.parameters")
    return Plugin(place=place, type=type, name=text_at(plugin, "name", place, type), parameters=parameters)


def _check_names(plugins: Sequence[Plugin]) -> None:
    names: set[str] = set()
    for each in plugins:
        if each.name in names:
            raise PoolError(f"{each.place}.name", each.name, "a name that no other plugin has; the default is the type")
        names.add(each.name)


def _read_type(type: object, field: str) -> str:
    if isinstance(type, str) and type in UNSUPPORTED:
        raise PoolError(field, type, UNSUPPORTED[type])
    if not isinstance(type, str) or type not in UNNEEDED.keys() | prefills.TYPES:
        raise PoolError(field, type, f"a plugin of these: {', '.join(sorted(UNNEEDED.keys() | prefills.TYPES))}")
    return type
