"""The sections of the evaluation, one module each. The modules' names are the values of ``--section``.

A section defines its cells, and makes a page of the cells' figures: Markdown with tables, and plots.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from bench.paper.section import Section
from bench.paper.sections import (
    ablation,
    blocks,
    chats,
    choices,
    decode,
    ear,
    elasticity,
    gap,
    goodput,
    keys,
    llumnix,
    load,
    overhead,
    robust,
    scale,
    sessions,
    stated,
    ttft,
)

SECTIONS: Final[Mapping[str, Section]] = MappingProxyType(
    {
        section.name: section
        for section in (
            goodput.SECTION,
            chats.SECTION,
            ttft.SECTION,
            load.SECTION,
            decode.SECTION,
            ablation.SECTION,
            keys.SECTION,
            elasticity.SECTION,
            scale.SECTION,
            overhead.SECTION,
            stated.SECTION,
            choices.SECTION,
            blocks.SECTION,
            sessions.SECTION,
            ear.SECTION,
            llumnix.SECTION,
            robust.SECTION,
            gap.SECTION,
        )
    }
)
