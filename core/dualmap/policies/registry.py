"""The registry of routing policies by name; the names are the values of ``spec.routing.policy``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dualmap.policies.cache_and_load.aibrix_prefix import AibrixPrefix
from dualmap.policies.cache_and_load.chwbl import Chwbl
from dualmap.policies.cache_and_load.dynamo import Dynamo
from dualmap.policies.cache_and_load.ear import Ear
from dualmap.policies.cache_and_load.linear_score import LinearScore
from dualmap.policies.cache_and_load.llmd_default import LlmdDefault
from dualmap.policies.cache_and_load.llmd_sticky import LlmdSticky
from dualmap.policies.cache_and_load.llumnix import Llumnix
from dualmap.policies.cache_and_load.lmetric import LMetric
from dualmap.policies.cache_and_load.min_ttft import MinTtft
from dualmap.policies.cache_and_load.preble import Preble
from dualmap.policies.cache_and_load.sglang_cache_aware import SglangCacheAware
from dualmap.policies.cache_and_load.smg_spill import SmgSpill
from dualmap.policies.cache_and_load.stack_loadaware import StackLoadaware
from dualmap.policies.pair.dualmap import DualMap
from dualmap.policies.pair.dualmap_cache_affinity import DualMapCacheAffinity
from dualmap.policies.pair.dualmap_least_loaded import DualMapLeastLoaded
from dualmap.policies.pair.dualmap_min_ttft import DualMapMinTtft
from dualmap.policies.pair.dualmap_no_rebalance import DualMapNoRebalance
from dualmap.policies.pair.dualmap_paper import DualMapPaper
from dualmap.policies.single_signal.cache_affinity import CacheAffinity
from dualmap.policies.single_signal.cache_affinity_global import CacheAffinityGlobal
from dualmap.policies.single_signal.least_loaded import LeastLoaded
from dualmap.policies.single_signal.least_requests import LeastRequests
from dualmap.policies.single_signal.power_of_two import PowerOfTwo
from dualmap.policies.single_signal.random import Random
from dualmap.policies.single_signal.round_robin import RoundRobin
from dualmap.policies.situation import Policy

_DUALMAP = (
    DualMap(),
    DualMapPaper(),
    DualMapNoRebalance(),
    DualMapMinTtft(),
    DualMapLeastLoaded(),
    DualMapCacheAffinity(),
)
_CACHE_AND_LOAD = (
    MinTtft(),
    Preble(),
    Llumnix(),
    Ear(),
    Dynamo(),
    LMetric(),
    LinearScore(),
    AibrixPrefix(),
    SglangCacheAware(),
    SmgSpill(),
    StackLoadaware(),
    LlmdDefault(),
    LlmdSticky(),
    Chwbl(),
)
_CACHE_OR_LOAD = (
    CacheAffinity(),
    CacheAffinityGlobal(),
    LeastLoaded(),
    LeastRequests(),
    PowerOfTwo(),
    RoundRobin(),
    Random(),
)

POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {policy.name: policy for policy in (*_DUALMAP, *_CACHE_AND_LOAD, *_CACHE_OR_LOAD)}
)
