"""Fits the engine model's parameters to a real engine: least squares of relative errors, on simple cases only.

The cost of a prefill is fitted to requests that ran alone, and the cost of a decode step to batches that share a
prefix. ``report.py`` predicts queues and mixes. ``PrefillCost`` and ``DecodeCost`` define the formulas. The formulas
are linear in ``o``, ``1/r``, ``a/r``, ``1/l`` and in ``d0``, ``d1``, ``d2``.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import median

import numpy as np
from bench.engine.recording import Group, Recording, Seen

from dualmap_sim.presets import DecodeCost, EngineConfig, PrefillCost

ALONE = ("alone cold", "alone warm")
DECODE = "decode"
NOTHING_S = 1e-12
"""Replaces a time of zero in a division."""


class FitError(Exception):
    """The recording has too few requests of one kind; the message names the kind."""


def fit(recording: Recording, groups: Sequence[Group], *, chunk_tokens: int | None) -> EngineConfig:
    """Return the engine configuration that fits these groups of the recording best. Raises FitError.

    With ``chunk_tokens``, prefills are cut into chunks, and each chunk pays ``o``. If ``chunk_tokens`` is None,
    prefills are not cut.
    """
    block_tokens, kv_tokens = recording.tokens("block_tokens"), recording.tokens("kv_tokens")
    return EngineConfig(
        prefill=_prefill(groups, chunk_tokens),
        decode=_decode(groups),
        kv_memory_tokens=kv_tokens,
        cache_tokens=kv_tokens,
        input_tokens_max=kv_tokens,
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
    )


def _prefill(groups: Iterable[Group], chunk_tokens: int | None) -> PrefillCost:
    rows, times_s = [], []
    for group in groups:
        if group.scenario in ALONE:
            for seen in group.requests:
                cached = seen.cached_tokens
                new = seen.prompt_tokens - cached
                steps = 1 if chunk_tokens is None else -(-new // chunk_tokens)
                rows.append((steps, new, new * cached + new * new / 2, cached))
                times_s.append(seen.ttft_s)
    overhead_s, per_token_s, per_pair_s, load_s = _solve(rows, times_s, "alone")
    return PrefillCost(
        overhead_s=overhead_s,
        tokens_per_s=1 / per_token_s,
        attention=per_pair_s / per_token_s,
        load_tokens_per_s=1 / max(load_s, NOTHING_S),
    )


def _decode(groups: Iterable[Group]) -> DecodeCost:
    rows, times_s = [], []
    for group in groups:
        if group.scenario == DECODE:
            for _, wave in groupby(group.requests, key=lambda seen: seen.wave):
                batch = list(wave)
                steady = _steady(batch) if not batch[0].setup else None
                if steady is not None:
                    kv_tokens, step_s = steady
                    rows.append((1, kv_tokens, len(batch)))
                    times_s.append(step_s)
    step_s, per_kv_token_s, per_request_s = _solve(rows, times_s, "decode")
    return DecodeCost(step_s=step_s, per_kv_token_s=per_kv_token_s, per_request_s=per_request_s)


def _steady(batch: Sequence[Seen]) -> tuple[int, float] | None:
    """Return the KV tokens of a batch halfway through its common steps, and the median time of these steps.

    All requests of the batch are in every common step. The result is None without a common step: on a busy machine the
    last request may begin after the first has ended.
    """
    begin_s, end_s = max(each.token_s[0] for each in batch), min(each.token_s[-1] for each in batch)
    last = max(batch, key=lambda each: each.token_s[0])
    gaps = [after - before for before, after in pairwise(last.token_s) if begin_s <= before and after <= end_s + 1e-9]
    if not gaps:
        return None
    middle_s = (begin_s + end_s) / 2
    held = sum(each.prompt_tokens + sum(at <= middle_s for at in each.token_s) for each in batch)
    return held, median(gaps)


def _solve(rows: Sequence[Sequence[float]], times_s: Sequence[float], what: str) -> list[float]:
    """Return the non-negative coefficients that minimise the sum of squared relative errors.

    Negative coefficients are set to zero, the most negative first, because their columns explain only noise.
    """
    if len(rows) <= len(rows[0] if rows else ()):
        raise FitError(f"the recording has too few requests of the kind {what!r} for a fit: {len(rows)}")
    matrix = np.array(rows, dtype=float) / np.array(times_s)[:, None]
    scale = np.abs(matrix).max(axis=0)
    kept = list(range(matrix.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)
        if solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    coefficients = [0.0] * matrix.shape[1]
    for column, value in zip(kept, solved, strict=True):
        coefficients[column] = float(value / scale[column])
    return coefficients
