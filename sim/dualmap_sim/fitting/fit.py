"""Fits an engine to the requests of a pool, and tests the fit on the half that it was not fitted to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median, median_low
from typing import Final

import numpy as np

from dualmap.pools.pool import Pool
from dualmap.recordings.values import RecordedRequest
from dualmap_sim.fitting.cache import fit_block, fit_cache
from dualmap_sim.fitting.costs import (
    LEAST_SAMPLES,
    Samples,
    decode_cost,
    decode_estimates,
    decode_samples,
    prefill_cost,
    prefill_estimates,
    prefill_samples,
)
from dualmap_sim.fitting.estimates import EngineFit, Estimate, FitError, Prediction, Verdict
from dualmap_sim.fitting.least_squares import FAR, FEW, RESAMPLES, SEED, interval
from dualmap_sim.fitting.replay import predict
from dualmap_sim.fitting.service import MemberTimes, Prefill, Served, served_requests
from dualmap_sim.presets import EngineConfig, slowed

_DIFFERENT: Final = 0.1
"""A member is named if it differs from the pool by more than this share, with certainty."""
_CHUNKS: Final = (None, 512, 1024, 2048, 4096, 8192, 16_384)
"""The sizes of steps that are tried; None for whole prefills."""
_AS_GOOD: Final = 1.1
"""Sizes with errors up to this ratio of the smallest error are as good as the best."""
TRIED_MOST: Final = 2000
"""The most requests of each member with which the sizes are tried."""
_INCOMPLETE: Final = "the recording has a part of the sessions, and the others may have slowed the engines"
_UNBOUNDED_TOKENS: Final = 10**9
_TIMES: Final = ("o", "d0", "d1", "d2")
_SPEEDS: Final = ("r", "l")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    """How many times as long a member takes for equal work, with its 90 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_different(self) -> bool:
        """Whether the member certainly differs from the median member."""
        return self.low > 1 + _DIFFERENT or self.high < 1 / (1 + _DIFFERENT)

    @property
    def inverse(self) -> "_Speed":
        """How much of the work of the median member this one does in the same time."""
        return _Speed(value=1 / self.value, low=1 / self.high, high=1 / self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    """An engine fitted to the requests of ``members``. ``block_tokens`` is the length of a recorded block."""

    members: Mapping[str, Sequence[Served]]
    block_tokens: float
    prefill: Samples
    decode: Samples | None
    speeds: Mapping[str, _Speed]
    block: Estimate
    cache: Estimate
    chunk: Estimate
    engine: EngineConfig

    def engines(self, members: Iterable[str]) -> dict[str, EngineConfig]:
        """Return the engine of each member."""
        return {
            name: slowed(self.engine, self.speeds[name].value) if name in self.speeds else self.engine
            for name in members
        }


def fit_engine(
    pool: str, requests: Sequence[RecordedRequest], *, known: Pool | None, base: EngineConfig, complete: bool = True
) -> EngineFit:
    """Fit an engine to the requests of a pool, in order of arrival.

    ``known`` is the pool's object in the recording. ``base`` has the numbers with which the fit is tested where the
    recording does not contain them. Without ``complete``, the engines also served requests that the recording lacks,
    so nothing is known for certain. Raises FitError.
    """
    memory_tokens = None if known is None else known.engine.kv_tokens
    base = replace(base, kv_memory_tokens=memory_tokens or _UNBOUNDED_TOKENS)
    requests, impossible = _without_impossible_counts(requests)
    fitted = _fit(requests, base)
    parameters = {
        **prefill_estimates(fitted.prefill),
        **decode_estimates(fitted.decode),
        "m": _memory(memory_tokens),
        "c": fitted.cache,
        "block": fitted.block,
        "chunk": fitted.chunk,
        "cap": Estimate.absent("a recording does not contain the limit of prompts; see --max-model-len of the engine"),
        "pull": Estimate.absent("a recording does not contain the times of pulls between engines"),
    }
    if not complete:
        parameters = {name: each.doubted(_INCOMPLETE) for name, each in parameters.items()}
    return EngineFit(
        pool=pool,
        requests=sum(map(len, fitted.members.values())),
        impossible=impossible,
        parameters=parameters,
        members={name: _of_member(parameters, speed) for name, speed in fitted.speeds.items()},
        predictions=_test(requests, base),
    )


def _without_impossible_counts(requests: Sequence[RecordedRequest]) -> tuple[Sequence[RecordedRequest], int]:
    """Return the requests without the engine's counts that contradict their times, and the number of these requests.

    A single prompt that is counted as a million tokens would fill the memory and the queue of its member. Raises
    FitError.
    """
    members = served_requests(requests)
    times = [MemberTimes(served) for served in members.values()]
    prefill = prefill_samples([each for of in times for each in of.prefills()], {}, chunk_tokens=None)
    if not prefill.grows:
        return requests, 0
    cost = prefill_cost(prefill)
    decodes = [each for of in times for each in of.decodes()]
    samples = decode_samples(decodes, cost, {})
    wrong = {
        id(each.request)
        for served in members.values()
        for each in served
        if each.first_s is not None
        and cost.seconds(new_tokens=each.new_tokens, cached_tokens=each.cached_tokens)
        > FAR * (each.first_s - each.sent_s)
        > 0
    }
    if samples is not None:
        step_s = decode_cost(samples).step_s
        wrong |= {id(each.served.request) for each in decodes if each.steps * step_s > FAR * each.seconds}
    if len(wrong) > FEW * len(requests):
        return requests, 0
    return [_uncounted(each) if id(each) in wrong else each for each in requests], len(wrong)


def _uncounted(request: RecordedRequest) -> RecordedRequest:
    """Return a request without the engine's counts of tokens."""
    return request._replace(engine_prompt_tokens=None, output_tokens=None, cached_tokens=None)


def _memory(tokens: int | None) -> Estimate:
    if tokens is None:
        return Estimate.absent("the engines did not report their KV memory; spec.engine.kvTokens states it")
    return Estimate(value=tokens, low=tokens, high=tokens, verdict=Verdict.KNOWN, reason="stated by the pool")


def _test(requests: Sequence[RecordedRequest], base: EngineConfig) -> Sequence[Prediction]:
    """Return the predictions for the second half of the requests, with an engine fitted to the first half."""
    half = len(requests) // 2
    try:
        fitted = _fit(requests[:half], base)
    except FitError:
        return ()
    members = served_requests(requests)
    engines = fitted.engines(members)
    return tuple(predict(members, engines, block_tokens=fitted.block_tokens, from_s=requests[half].arrived_s))


def _fit(requests: Sequence[RecordedRequest], base: EngineConfig) -> _Fitted:
    """Fit to whole prefills first, then try steps of each size. Raises FitError."""
    members, block_tokens = served_requests(requests), _block_tokens(requests)
    times = [MemberTimes(served) for served in members.values()]
    prefills = [prefill for each in times for prefill in each.prefills()]
    decodes = [decode for each in times for decode in each.decodes()]
    block = fit_block(members)
    cache = fit_cache(members, recorded_block_tokens=block_tokens, block_tokens=block.value or block_tokens)
    base = replace(
        base,
        block_tokens=base.block_tokens if block.value is None else int(block.value),
        cache_tokens=_UNBOUNDED_TOKENS if cache.value is None else int(cache.value),
    )
    speeds = _speeds(prefills, {})
    speeds = {name: each for name, each in _speeds(prefills, speeds).items() if each.is_different}

    def fitted(chunk_tokens: int | None, chunk: Estimate) -> _Fitted:
        factors = {name: each.value for name, each in speeds.items()}
        prefill = prefill_samples(prefills, factors, chunk_tokens=chunk_tokens)
        cost = prefill_cost(prefill)
        decode = decode_samples(decodes, cost, factors)
        decoding = base.decode if decode is None else decode_cost(decode)
        return _Fitted(
            members=members,
            block_tokens=block_tokens,
            prefill=prefill,
            decode=decode,
            speeds=speeds,
            block=block,
            cache=cache,
            chunk=chunk,
            engine=replace(base, prefill=cost, decode=decoding, chunk_tokens=chunk_tokens),
        )

    errors = {size: _error(fitted(size, cache)) for size in _CHUNKS}
    chunk = _chunk(errors)
    return fitted(None if chunk.value is None else int(chunk.value), chunk)


def _error(fitted: _Fitted) -> float:
    """Return the mean error of the predictions for the first requests that the engine was fitted to."""
    members = {name: each[:TRIED_MOST] for name, each in fitted.members.items()}
    predictions = predict(members, fitted.engines(members), block_tokens=fitted.block_tokens, from_s=-inf)
    # Without a bound, a few predictions that are far too high would decide.
    return fmean([min(1.0, abs(each.error)) for each in predictions] or [1.0])


def _chunk(errors: Mapping[int | None, float]) -> Estimate:
    """Estimate the tokens of a step from the error with each size; None is the size of whole prefills."""
    best = min(errors.values())
    good = [size for size in errors if errors[size] <= _AS_GOOD * best]
    sizes = [size for size in good if size is not None]
    if len(sizes) < len(good):
        return Estimate.absent("whole prefills predict the times as well as steps; queues of long prompts show it")
    value = min(sizes, key=lambda size: errors[size])
    return Estimate.of(
        value, min(sizes), max(sizes), reason=f"best of {len(errors)} sizes", missing="queues of long prompts show it"
    )


def _speeds(prefills: Sequence[Prefill], speeds: Mapping[str, _Speed]) -> dict[str, _Speed]:
    """Return the speed of each member with enough prefills, relative to the median of these members.

    ``speeds`` are those of an earlier estimate. Raises FitError.
    """
    factors = {name: each.value for name, each in speeds.items()}
    cost = prefill_cost(prefill_samples(prefills, factors, chunk_tokens=None))
    ratios: dict[str, list[float]] = {}
    for each in prefills:
        cost_s = cost.seconds(new_tokens=each.served.new_tokens, cached_tokens=each.served.cached_tokens)
        ratios.setdefault(each.served.member, []).append(each.seconds / cost_s)
    enough = {name: np.array(own) for name, own in sorted(ratios.items()) if len(own) >= LEAST_SAMPLES}
    if not enough:
        return {}
    usual = median_low(float(np.median(own)) for own in enough.values())
    generator = np.random.default_rng(SEED)
    found = {}
    for name, own in enough.items():
        drawn = np.median(own[generator.integers(0, len(own), (RESAMPLES, len(own)))], axis=1) / usual
        low, high = interval(drawn)
        found[name] = _Speed(value=float(np.median(own)) / usual, low=low, high=high)
    return found


def _of_member(parameters: Mapping[str, Estimate], speed: _Speed) -> dict[str, Estimate]:
    """Return the parameters that differ for a member of another speed."""
    reason = f"this member takes {speed.value:.2f} times as long as the median member"
    changed = {}
    for names, factor in ((_TIMES, speed), (_SPEEDS, speed.inverse)):
        for name in names:
            each = parameters[name]
            if each.value is None or each.low is None:
                continue
            high = None if each.high is None else each.high * factor.high
            value, low = each.value * factor.value, each.low * factor.low
            changed[name] = Estimate(value=value, low=low, high=high, verdict=each.verdict, reason=reason)
    return changed


def _block_tokens(requests: Sequence[RecordedRequest]) -> float:
    """Return the length of a recorded block in the engine's tokens, the median of all prompts."""
    lengths = [
        each.block_tokens * each.engine_prompt_tokens / each.prompt_tokens
        for each in requests
        if each.engine_prompt_tokens and each.prompt_tokens
    ]
    return median(lengths) if lengths else float(requests[0].block_tokens)
