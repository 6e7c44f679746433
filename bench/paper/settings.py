"""The sections' common settings: the DualMap paper's workloads, models and policies, and the extent of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from dualmap.pools.pool import Engine, Prefix
from dualmap_sim.experiment import Experiment
from dualmap_sim.presets import PRESETS, TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.catalog import Workload

CONVERSATION: Final = "conversation"
TOOL_AGENT: Final = "tool_agent"
WORKLOADS: Final = (CONVERSATION, TOOL_AGENT)
MODELS: Final = ("7b", "14b", "pd")
CHATS: Final = ("default", "poisson_chats")
"""Workloads that no paper uses: chats and agents whose requests arrive one by one (``dualmap_sim.workloads``)."""
TRACE: Final = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
"""The Conversation trace of the DualMap paper. Without the file, the sections leave out the trace's measurements."""

DEFAULT_POLICY: Final = "dualmap"
OURS: Final = (DEFAULT_POLICY, "dualmap_paper")
BASELINES: Final = ("min_ttft", "preble", "least_loaded", "cache_affinity")
"""The baselines of the DualMap paper (section 4.1)."""
OTHERS: Final = ("llmd_default", "llumnix", "dynamo", "lmetric", "linear_score")
"""The routing policies of other projects and papers that use caches and load."""
RIVALS: Final = (*BASELINES, *OTHERS)
"""The policies that every comparison contains. The best other policy is the best of these."""
BOUNDS: Final = ("limit", "limit_pooled", "limit_deadline")

WARMUP: Final = 500
CONVERSATION_REQUESTS: Final = 4000
TOOL_AGENT_REQUESTS: Final = 8000
CHATS_REQUESTS: Final = 4000

_FIXED_KEYS: Final[Mapping[str, int]] = MappingProxyType({"cache_affinity": TRACE_BLOCK_TOKENS})
"""The length of blocks of policies whose keys do not grow, in tokens: the one setting that differs from the defaults.

Prompts begin with the same system prompts. With two blocks of the default length, nearly all prompts of Conversation
have one key, and one member gets nearly all requests.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The extent of a run. ``quick`` measures one short window of each section, as a smoke test."""

    quick: bool = False
    trace: Path = TRACE

    @property
    def workloads(self) -> tuple[str, ...]:
        """The available workloads."""
        return WORKLOADS if self.trace.exists() else (TOOL_AGENT,)

    def windows(self, most: int = 1) -> tuple[int, ...]:
        """Return the first windows of the Conversation trace. The generated workloads use these numbers as seeds.

        Most sections have one window, so that the evaluation takes about two hours.
        """
        return (0,) if self.quick else tuple(range(most))

    def workload(self, name: str, window: int) -> Workload:
        """Return one window or seed of a workload at full length, or a shorter one if ``quick``."""
        if name == CONVERSATION:
            requests = 1500 if self.quick else CONVERSATION_REQUESTS
            return Workload(trace=self.trace, requests=requests, start=window * CONVERSATION_REQUESTS)
        if name in CHATS:
            return Workload(name=name, requests=1500 if self.quick else CHATS_REQUESTS, seed=window)
        return Workload(name=name, requests=4000 if self.quick else TOOL_AGENT_REQUESTS, seed=window)

    def experiment(self, name: str, model: str, window: int, policy: str, rate: float = 1.0) -> Experiment:
        """Return the paper's set-up at shipped defaults: 8 instances, SLO 5 s, and no sessions as in the paper."""
        return as_shipped(
            Experiment(
                workload=self.workload(name, window),
                engine=PRESETS[model],
                policy=policy,
                requests_per_s=rate,
                warmup=WARMUP,
                sessions=False,
            )
        )


def as_shipped(experiment: Experiment) -> Experiment:
    """Return an experiment with a pool that states nothing about its engines or its keys.

    The routers know what the engines report, and begin with the default of the prefill speed. The length of blocks is
    the default, too, except for policies with keys of a fixed length (``block_tokens``).
    """
    return replace(
        experiment,
        discovery=True,
        kv_tokens_known=False,
        believed_tokens_per_s=Engine().prefill_tokens_per_second,
        block_tokens=block_tokens(experiment.policy),
    )


def block_tokens(policy: str) -> int:
    """Return the length of the router's blocks under a policy, in tokens."""
    return _FIXED_KEYS.get(policy, Prefix().block_tokens)


TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {CONVERSATION: "Conversation", TOOL_AGENT: "Tool&Agent", "default": "Default", "poisson_chats": "Poisson chats"}
)
RATES: Final[Mapping[tuple[str, str], tuple[float, ...]]] = MappingProxyType(
    {
        (CONVERSATION, "7b"): (2.0, 2.5, 3.0, 3.5, 4.0),
        (CONVERSATION, "14b"): (1.5, 2.0, 2.5, 3.0, 3.5),
        (CONVERSATION, "pd"): (3.0, 4.0, 5.0),
        (TOOL_AGENT, "7b"): (5.0, 6.0, 7.0, 8.0, 9.0),
        (TOOL_AGENT, "14b"): (4.0, 5.0, 6.0, 7.0, 8.0),
        (TOOL_AGENT, "pd"): (7.0, 9.0, 11.0),
    }
)
"""Requests per second of the curves: from half of the capacity with one unlimited shared cache to slightly above it."""


def few_rates(rates: Iterable[float], extent: Extent) -> tuple[float, ...]:
    """Return the rates that the extent measures."""
    every = tuple(rates)
    return every[1::2] if extent.quick else every
