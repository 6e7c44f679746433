"""Goodput: the highest rate at which 90 % of the requests get the first token within 5 s (DualMap paper, 4.2, Fig. 3).

Runs cover both of the paper's workloads and all three models. Other sections reuse single cells of this section.
"""

from collections.abc import Sequence
from typing import Final

from bench.paper.claims import Claim
from bench.paper.comparison import Comparison
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import CONVERSATION, MODELS, OURS, TITLES, TOOL_AGENT, Extent

TRACES: Final = Comparison(section="goodput", workloads=lambda extent: extent.workloads, models=MODELS, windows=3)


def _claims(results: Results, extent: Extent) -> Sequence[Claim]:
    says = {CONVERSATION: ("Fig. 3a, 3c", "+14.3 to +40 %"), TOOL_AGENT: ("Fig. 3b, 3d", "+16.7 to +48 %")}
    claims = []
    for workload in extent.workloads:
        measured = "; ".join(
            f"`{policy}` " + ", ".join(f"{TRACES.gain(results, extent, workload, m, policy)} ({m})" for m in MODELS)
            for policy in OURS
        )
        source, gain = says[workload]
        claims.append(
            Claim(f"4.2, {source}", f"{TITLES[workload]}: goodput {gain} over the best baseline (7B, 14B)", measured)
        )
    return claims


SECTION: Final = Section(
    name=TRACES.section,
    title="Goodput (Figure 3)",
    cells=TRACES.cells,
    page=TRACES.page,
    claims=_claims,
    excerpts={"goodput": TRACES.excerpt},
)
