"""The figures of a recording as the JSON document of ``dualmap trace show --json``. A missing figure is null."""

import json
import math
from collections.abc import Sequence

from dualmap.recordings.values import VERSION
from dualmap_sim.recordings.figures import Figures
from dualmap_sim.recordings.reader import Reading
from dualmap_sim.summary import percentile


def figures_document(reading: Reading, figures: Figures) -> str:
    """Return the JSON document of a recording that was read completely."""
    width_s, counts = figures.rates()
    document = {
        "version": VERSION,
        "requests": figures.requests,
        "sample": reading.samples[0] if reading.samples else None,
        "routers": list(reading.routers),
        "pools": list(figures.pools),
        "start_s": figures.start_s,
        "duration_s": figures.duration_s,
        "qps": figures.qps,
        "prompt_tokens": _lengths(figures.prompt_tokens),
        "output_tokens": _lengths(figures.output_tokens),
        "sessions": figures.sessions,
        "reuse_at_best": figures.reuse_at_best,
        "hit_rate": figures.hit_rate,
        "slo_attainment": figures.slo_attainment,
        "ttft_s": {name: _percentile(figures.ttft_s, share) for name, share in SHARES.items()},
        "outcomes": dict(figures.outcomes),
        "unrouted": figures.unrouted,
        "dropped": figures.dropped,
        "models": dict(figures.models),
        "members": [
            {"pool": each.pool, "id": each.member, "requests": each.requests, "hit_rate": each.hit_rate}
            for each in figures.members
        ],
        "hot_prefixes": [
            {"hash": f"{each.last_block:016x}", "blocks": each.blocks, "tokens": each.tokens, "requests": each.requests}
            for each in figures.hot_prefixes
        ],
        "rate": {"interval_s": width_s, "requests": list(counts)},
        "damaged": [{"file": each.file, "line": each.line, "reason": each.reason} for each in reading.damaged],
        "damaged_lines": reading.damaged_lines,
    }
    return json.dumps(document, indent=2, allow_nan=False)


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""The percentiles of latencies."""


def _lengths(tokens: Sequence[int]) -> dict[str, float | None]:
    return {
        "mean": sum(tokens) / len(tokens) if tokens else None,
        "p50": _percentile(tokens, 0.5),
        "p99": _percentile(tokens, 0.99),
    }


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    value = percentile(ordered, share)
    return None if math.isnan(value) else value
