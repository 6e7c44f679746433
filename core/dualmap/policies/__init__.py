"""The registry of routing policies, one module each; the names are those of ``spec.routing.policy``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dualmap.policies.aibrix_prefix import AibrixPrefix
from dualmap.policies.cache_affinity import CacheAffinity
from dualmap.policies.cache_affinity_global import CacheAffinityGlobal
from dualmap.policies.chwbl import Chwbl
from dualmap.policies.dualmap import DualMap
from dualmap.policies.dualmap_cache_affinity import DualMapCacheAffinity
from dualmap.policies.dualmap_least_loaded import DualMapLeastLoaded
from dualmap.policies.dualmap_min_ttft import DualMapMinTtft
from dualmap.policies.dualmap_no_rebalance import DualMapNoRebalance
from dualmap.policies.dualmap_paper import DualMapPaper
from dualmap.policies.dynamo import Dynamo
from dualmap.policies.ear import Ear
from dualmap.policies.least_loaded import LeastLoaded
from dualmap.policies.least_requests import LeastRequests
from dualmap.policies.llmd_default import LlmdDefault
from dualmap.policies.llmd_sticky import LlmdSticky
from dualmap.policies.llumnix import Llumnix
from dualmap.policies.min_ttft import MinTtft
from dualmap.policies.power_of_two import PowerOfTwo
from dualmap.policies.preble import Preble
from dualmap.policies.random import Random
from dualmap.policies.round_robin import RoundRobin
from dualmap.policies.sglang_cache_aware import SglangCacheAware
from dualmap.policies.smg_spill import SmgSpill
from dualmap.policies.stack_loadaware import StackLoadaware
from dualmap.situation import Policy

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
