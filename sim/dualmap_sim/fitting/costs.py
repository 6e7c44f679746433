"""Fits the costs of prefills and of decode steps (``presets.PrefillCost``, ``presets.DecodeCost``).

Both formulas are linear in ``o``, ``1/r``, ``a/r``, ``1/l``, and in ``d0``, ``d1``, ``d2``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dualmap_sim.fitting.estimates import Estimate, FitError, Verdict
from dualmap_sim.fitting.least_squares import Problem, interval
from dualmap_sim.fitting.service import Decode, Prefill
from dualmap_sim.presets import DecodeCost, PrefillCost

LEAST_SAMPLES: Final = 20
"""The smallest number of requests that a cost is fitted to."""
ENOUGH_ALONE: Final = 50
"""With so many prefills on idle engines, the others are not used."""
FASTEST_TOKENS_PER_S: Final = 1e7
"""The speed of loading cached tokens if it is too high to be measured."""
_SLOWEST_TOKENS_PER_S: Final = 1.0
_ATTENTION_MOST: Final = 1000.0
"""Simulations accept no slower engines, and no steeper growth."""
_LEAST_STEPS: Final = 8
"""Decodes of fewer steps are too short to tell a step's time from the times at which the router sees tokens."""
_LENGTHS: Final = "prompts from a hundred to many thousand uncached tokens show it"
_ANSWERS: Final = "answers of several hundred tokens, alone and in large batches with long prompts, show it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Measured times with the numbers that explain them. ``source`` names the samples to the user."""

    problem: Problem
    source: str

    @property
    def grows(self) -> bool:
        """Whether the times of prefills grow with the new tokens."""
        return bool(self.problem.best()[1])


def prefill_samples(prefills: Sequence[Prefill], speeds: Mapping[str, float], *, chunk_tokens: int | None) -> Samples:
    """Return the samples of prefills that are computed in steps of ``chunk_tokens``, None for one step each.

    ``speeds`` is how many times as long each member takes; members that are not named take once as long. Raises
    FitError.
    """
    alone = [each for each in prefills if each.alone]
    used = alone if len(alone) >= ENOUGH_ALONE else list(prefills)
    if len(used) < LEAST_SAMPLES:
        raise FitError(
            f"only {len(used)} streamed answers have a prefill of their own, {LEAST_SAMPLES} are needed; record light "
            "traffic of streamed requests with engines that report cached tokens (vLLM: --enable-prompt-tokens-details)"
        )
    rows, seconds = [], []
    for each in used:
        new, cached = each.served.new_tokens, each.served.cached_tokens
        steps = 1 if chunk_tokens is None else -(-new // chunk_tokens)
        # A prefill waits for a decode step that runs, or shares its steps with decodes.
        rows.append((steps, new, new * cached + new * new / 2, cached, min(1.0, each.decoding)))
        seconds.append(each.seconds / speeds.get(each.served.member, 1.0))
    source = f"from {len(used):,} prefills" + (" on idle engines" if used is alone else "")
    return Samples(problem=Problem(rows, seconds), source=source)


def prefill_cost(samples: Samples) -> PrefillCost:
    """Return the cost of a prefill that fits the samples best.

    If the times do not grow with the prompts, the new tokens alone explain them.
    """
    overhead_s, per_token_s, per_pair_s, load_s, _ = map(float, samples.problem.best())
    if not per_token_s:
        overhead_s, per_token_s, per_pair_s, load_s = 0.0, samples.problem.alone(1), 0.0, 0.0
    return PrefillCost(
        overhead_s=overhead_s,
        tokens_per_s=max(_SLOWEST_TOKENS_PER_S, 1 / per_token_s),
        attention=min(_ATTENTION_MOST, per_pair_s / per_token_s),
        load_tokens_per_s=1 / max(load_s, 1 / FASTEST_TOKENS_PER_S),
    )


def prefill_estimates(samples: Samples) -> dict[str, Estimate]:
    """Return the parameters ``o``, ``r``, ``a`` and ``l`` with their intervals."""
    cost, drawn, source = prefill_cost(samples), samples.problem.resampled(), samples.source
    if not samples.grows:
        flat = f"{source}, whose times do not grow with the prompts; {_LENGTHS}"
        absent = Estimate.absent(flat)
        speed = Estimate(value=cost.tokens_per_s, low=None, high=None, verdict=Verdict.WEAK, reason=flat)
        return {"o": absent, "r": speed, "a": absent, "l": absent}
    token_s = np.maximum(drawn.column(1), 1e-12)
    estimates = {
        "o": Estimate.of(cost.overhead_s, *interval(drawn.column(0)), reason=source, missing=_LENGTHS),
        "r": Estimate.of(cost.tokens_per_s, *interval(1 / token_s), reason=source, missing=_LENGTHS),
        "a": Estimate.of(
            cost.attention,
            *interval(drawn.column(2) / token_s),
            reason=source,
            missing="long prompts show it, above ten thousand tokens",
        ),
        "l": Estimate.absent("no prompt had cached tokens; repeated prompts and conversations show it"),
    }
    if samples.problem.has(3):
        low, high = interval(1 / np.maximum(drawn.column(3), 1 / FASTEST_TOKENS_PER_S))
        estimates["l"] = Estimate.of(
            cost.load_tokens_per_s,
            low,
            None if high >= FASTEST_TOKENS_PER_S else high,
            reason=source,
            missing="prompts with many thousand cached tokens and few new ones show it",
        )
    return estimates


def decode_samples(decodes: Sequence[Decode], prefill: PrefillCost, speeds: Mapping[str, float]) -> Samples | None:
    """Return the samples of decode steps, None if there are too few answers. ``speeds`` as in ``prefill_samples``."""
    rows, seconds = [], []
    for each in decodes:
        stalled_s = sum(
            prefill.seconds(new_tokens=other.new_tokens, cached_tokens=other.cached_tokens) for other in each.prefills
        )
        decoding_s = each.seconds / speeds.get(each.served.member, 1.0) - stalled_s
        # If others' prompts took most of the time, their error hides the steps.
        if each.steps >= _LEAST_STEPS and decoding_s > stalled_s:
            rows.append((each.steps, each.steps * each.kv_tokens, each.steps * each.batch))
            seconds.append(decoding_s)
    if len(rows) < LEAST_SAMPLES:
        return None
    return Samples(problem=Problem(rows, seconds), source=f"from {len(rows):,} answers")


def decode_cost(samples: Samples) -> DecodeCost:
    """Return the cost of a decode step that fits the samples best."""
    step_s, per_kv_token_s, per_request_s = map(float, samples.problem.best())
    return DecodeCost(step_s=max(step_s, 1e-6), per_kv_token_s=per_kv_token_s, per_request_s=per_request_s)


def decode_estimates(samples: Samples | None) -> dict[str, Estimate]:
    """Return the parameters ``d0``, ``d1`` and ``d2`` with their intervals."""
    if samples is None:
        absent = Estimate.absent(f"too few streamed answers of {_LEAST_STEPS + 1} tokens or more")
        return {"d0": absent, "d1": absent, "d2": absent}
    cost, drawn = decode_cost(samples), samples.problem.resampled()
    values = {"d0": cost.step_s, "d1": cost.per_kv_token_s, "d2": cost.per_request_s}
    return {
        name: Estimate.of(value, *interval(drawn.column(column)), reason=samples.source, missing=_ANSWERS)
        for column, (name, value) in enumerate(values.items())
    }
