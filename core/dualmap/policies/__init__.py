"""The registry of routing policies, one module each; the names are those of ``spec.routing.policy``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dualmap.policies.cache_affinity import CacheAffinity
from dualmap.policies.dualmap import DualMap
from dualmap.policies.dualmap_paper import DualMapPaper
from dualmap.policies.least_loaded import LeastLoaded
from dualmap.policies.min_ttft import MinTtft
from dualmap.policies.round_robin import RoundRobin
from dualmap.situation import Policy

POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (DualMap(), DualMapPaper(), MinTtft(), CacheAffinity(), LeastLoaded(), RoundRobin())
    }
)
