"""Ablation of DualMap: the published choice without rebalancing (paper section 4.3)."""

from typing import ClassVar

from dualmap.policies.pair.dualmap_paper import DualMapPaper


class DualMapNoRebalance(DualMapPaper):
    """Chooses as ``dualmap_paper`` does; queued requests do not move."""

    name: ClassVar[str] = "dualmap_no_rebalance"
    source: ClassVar[str] = "DualMap section 4.3, ablation 4"
    summary: ClassVar[str] = "dualmap_paper without rebalancing"
    rebalances: ClassVar[bool] = False
    defers: ClassVar[bool] = False
