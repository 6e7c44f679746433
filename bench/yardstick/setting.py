"""The setting of both replays: the requests, the engine's costs, and the engine's memory.

The engine is that of Dynamo's mocker 1.4.2: block length, memory, step length and costs are the mocker's defaults
(crate ``dynamo-mocker`` 1.4.2, ``src/common/perf_model.rs``). The mocker adds the costs of a step's prompt tokens and
of its decodes. In milliseconds, ``n`` prompt tokens cost ``16.50142 + 0.01518344 n + 4.209989e-7 n^2``. Decodes cost
``5.74 + 54.01 u - 25.74 u^2``, where ``u`` is the used share of the KV memory. The engine model of the simulator has
linear costs, so both replays use the lines that meet the mocker's formulas at the ends of the ranges below. The mocker
reads these lines from a file (its option ``planner_profile_data``), so that both engines have equal costs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from dualmap_sim.presets import DecodeCost, EngineConfig, PrefillCost
from dualmap_sim.workloads.mooncake import read_mooncake
from dualmap_sim.workloads.trace import Trace

ENGINES: Final = 8
BLOCK_TOKENS: Final = 64
KV_BLOCKS: Final = 16_384
KV_TOKENS: Final = KV_BLOCKS * BLOCK_TOKENS
STEP_TOKENS: Final = 8_192
INPUT_TOKENS_MAX: Final = 20_480
"""Longest prompt, as in ``bench paper``; longer prompts are cut."""
WARMUP: Final = 500

_USED: Final = 0.4
"""The share of the KV memory up to which the line of the decodes is drawn."""
_ARRIVAL_STEP_S: Final = 1e-6


class Costs(StrEnum):
    """The costs of the engine."""

    PREFILL = "Equal engines"
    """The lines, but decodes read no KV. With these costs, both engine models agree."""
    LINEAR = "Engines that read KV"
    """The lines. The mocker counts the KV that requests share once, the simulator counts it for each request."""
    MOCKER = "Dynamo's own formula"
    """The mocker's own formula, which the simulator does not have."""


def prompt_ms(tokens: int) -> float:
    """Return the mocker's cost of a step with that number of prompt tokens."""
    return 16.50142 + 0.01518344 * tokens + 4.209989e-7 * tokens**2


def decode_ms(used: float) -> float:
    """Return the mocker's cost of a step's decodes, with that share of the KV memory in use."""
    return 5.74 + 54.01 * used - 25.74 * used**2


def engine(costs: Costs) -> EngineConfig:
    """Return the mocker's engine with linear costs, for the simulator.

    The mocker decodes also a request whose prompt ends in the same step. So each step pays both constants.
    """
    prompt_s, per_token_s, decode_s, per_kv_token_s = _lines(costs)
    return EngineConfig(
        prefill=PrefillCost(
            overhead_s=prompt_s + decode_s, tokens_per_s=1 / per_token_s, attention=0.0, load_tokens_per_s=float("inf")
        ),
        decode=DecodeCost(step_s=decode_s, per_kv_token_s=per_kv_token_s, per_request_s=0.0),
        kv_memory_tokens=KV_TOKENS,
        cache_tokens=KV_TOKENS,
        input_tokens_max=INPUT_TOKENS_MAX,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=STEP_TOKENS,
    )


def write_profile(path: Path, costs: Costs) -> None:
    """Write the linear costs in the format of the mocker's ``planner_profile_data``."""
    prompt_s, per_token_s, decode_s, per_kv_token_s = _lines(costs)
    tokens, kv_tokens, contexts = np.array([0.0, STEP_TOKENS]), np.array([0.0, KV_TOKENS]), np.array([0.0, KV_TOKENS])
    decode = 1000 * (decode_s + per_kv_token_s * kv_tokens)
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=1000 * (prompt_s + per_token_s * tokens),
        decode_active_kv_tokens=kv_tokens,
        decode_context_length=contexts,
        decode_itl=np.stack([decode, decode], axis=1),
    )


def _lines(costs: Costs) -> tuple[float, float, float, float]:
    """Return the constant and the slope of the prompts' and of the decodes' cost, in seconds and seconds per token."""
    per_token_ms = (prompt_ms(STEP_TOKENS) - prompt_ms(0)) / STEP_TOKENS
    reads_kv = costs is not Costs.PREFILL
    per_kv_token_ms = reads_kv * (decode_ms(_USED) - decode_ms(0.0)) / (_USED * KV_TOKENS)
    return prompt_ms(0) / 1000, per_token_ms / 1000, decode_ms(0.0) / 1000, per_kv_token_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One served request of either replay. ``number`` is its number in the trace; ``worker`` is the engine's."""

    number: int
    worker: int
    arrival_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@lru_cache(maxsize=2)
def requests(trace: Path, count: int) -> Trace:
    """Return the trace's first requests with cut prompts."""
    return read_mooncake(trace, limit=count).capped(INPUT_TOKENS_MAX)


def paced(trace: Trace, requests_per_s: float) -> Trace:
    """Return the trace at a rate, with different arrival times for all requests.

    The recorded times are rounded to 3 s. The difference of a microsecond fixes the order, and identifies a request in
    Dynamo's report, which has no numbers.
    """
    faster = trace.at_rate(requests_per_s).requests
    moved = (
        replace(each, arrival_s=round(each.arrival_s + number * _ARRIVAL_STEP_S, 6))
        for number, each in enumerate(faster)
    )
    return replace(trace, requests=tuple(moved))


def mooncake_lines(trace: Trace) -> Iterator[str]:
    """Return the trace in Mooncake's format, with arrival times in fractions of milliseconds."""
    for each in trace.requests:
        yield json.dumps(
            {
                "timestamp": round(each.arrival_s * 1000, 3),
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "hash_ids": each.blocks,
            }
        )
