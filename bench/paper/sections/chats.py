"""Goodput on workloads that no paper uses, and whose requests arrive one by one instead of in batches.

``default`` mixes conversations and agents, and is the demo's workload. ``poisson_chats`` are chats about long
documents. Both were made for this project. The policies and the set-up are those of the section ``goodput``.
"""

from pathlib import Path
from typing import Final

from bench.paper.comparison import Comparison
from bench.paper.results import Results
from bench.paper.section import Section
from bench.paper.settings import CHATS, Extent

MADE: Final = Comparison(section="chats", workloads=lambda _extent: CHATS, models=("7b", "14b"), windows=2)


def _page(results: Results, extent: Extent, plots: Path) -> str:
    return (
        "All prompts of Poisson chats begin with the same 1024 tokens, the length of a key of `cache_affinity`. So "
        "`cache_affinity` sends nearly all requests to one member there.\n\n" + MADE.page(results, extent, plots)
    )


SECTION: Final = Section(
    name=MADE.section,
    title="Goodput on chats and agents without batches",
    cells=MADE.cells,
    page=_page,
    excerpts={"chats": MADE.excerpt},
)
