"""The statistics of a trace: lengths, the ideal reuse, and the engine time that the trace needs with ideal reuse.

``compare`` pairs a trace's figures with the target figures (each generator's ``ASKED``).

The bound of reuse is one shared cache without a limit, the DualMap paper's theoretical upper bound (section A.2.2). A
router can at best approach this bound with one cache per engine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isnan, nan, sqrt
from typing import Final

from dualmap_sim.presets import EngineConfig, PrefillCost
from dualmap_sim.workloads.trace import Trace

_WHOLE_FROM: Final = 100
"""Figures of at least this value are printed without decimals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Means per request over a trace, and its ideal hit rate (reused prompt tokens over all prompt tokens)."""

    requests: int
    sessions: int | None
    input_tokens_mean: float
    output_tokens_mean: float
    input_tokens_longest: int
    ideal_hit_rate: float


def ideal_cached_tokens(trace: Trace) -> tuple[int, ...]:
    """Return, per request, the prompt tokens that one shared unlimited cache would contain at its arrival.

    The tokens are the longest cached prefix of the prompt, which may end within a block.
    """
    seen_tokens: dict[int, int] = {}
    cached = []
    for request in trace.requests:
        reused, run = 0, True
        left = request.input_tokens
        for block in request.blocks:
            tokens = min(left, trace.block_tokens)
            left -= tokens
            known = min(seen_tokens.get(block, 0), tokens)
            if run:
                reused += known
            run = run and known == tokens
            seen_tokens[block] = max(tokens, seen_tokens.get(block, 0))
        cached.append(reused)
    return tuple(cached)


def measure(trace: Trace) -> TraceStatistics:
    """Return the trace's statistics."""
    count = len(trace.requests)
    prompt_tokens = sum(request.input_tokens for request in trace.requests)
    sessions = {request.session for request in trace.requests}
    return TraceStatistics(
        requests=count,
        sessions=None if None in sessions else len(sessions),
        input_tokens_mean=prompt_tokens / count,
        output_tokens_mean=sum(request.output_tokens for request in trace.requests) / count,
        input_tokens_longest=max(request.input_tokens for request in trace.requests),
        ideal_hit_rate=sum(ideal_cached_tokens(trace)) / prompt_tokens,
    )


def prefill_work_s(trace: Trace, cost: PrefillCost, *, ideally_cached: bool) -> float:
    """Return the engine seconds of all the trace's prefills, with an ideal cache or without a cache."""
    cached = ideal_cached_tokens(trace) if ideally_cached else (0,) * len(trace.requests)
    return sum(
        cost.seconds(new_tokens=request.input_tokens - reused, cached_tokens=reused)
        for request, reused in zip(trace.requests, cached, strict=True)
    )


def decode_work_s(trace: Trace, engine: EngineConfig) -> float:
    """Return the least engine seconds for the trace's decoding, in batches as large as the KV memory admits.

    Each request has its share of the steps of a batch of average requests that fills the memory.
    """
    if engine.decode is None:
        return 0.0
    facts = measure(trace)
    held_tokens = facts.input_tokens_mean + facts.output_tokens_mean
    batch = max(1, int(engine.kv_memory_tokens / held_tokens))
    step_s = engine.decode.steps_s(1, requests=batch, kv_tokens=int(batch * held_tokens))
    return sum(request.output_tokens - 1 for request in trace.requests) * step_s / batch


def ideal_block_tokens(trace: Trace) -> tuple[int, ...]:
    """Return, per request, its leading tokens in full blocks of earlier requests, which engines can reuse."""
    seen: set[int] = set()
    cached = []
    for request in trace.requests:
        full = request.blocks[: request.input_tokens // trace.block_tokens]
        run = next((index for index, block in enumerate(full) if block not in seen), len(full))
        cached.append(run * trace.block_tokens)
        seen.update(full)
    return tuple(cached)


def ideal_block_hit_rate(trace: Trace) -> float:
    """Return the share of all prompt tokens that one shared unlimited cache of full blocks would contain."""
    return sum(ideal_block_tokens(trace)) / sum(request.input_tokens for request in trace.requests)


def shared_prefix_rates(trace: Trace) -> tuple[float, ...]:
    """Return, in increasing order, the share of each prompt that is a prefix of earlier prompts (0 to 1; paper A.4)."""
    cached = ideal_block_tokens(trace)
    return tuple(sorted(reused / request.input_tokens for reused, request in zip(cached, trace.requests, strict=True)))


def share_reusing(trace: Trace, least: float) -> float:
    """Return the share of requests that share at least ``least`` (0 to 1) of their prompt with earlier requests."""
    rates = shared_prefix_rates(trace)
    return sum(rate >= least for rate in rates) / len(rates)


def prefix_share(trace: Trace, *, blocks: int = 1, rank: int) -> float:
    """Return the share of requests with the prefix of ``blocks`` blocks at frequency rank ``rank`` (from 0)."""
    prefixes = Counter(request.blocks[blocks - 1] for request in trace.requests if len(request.blocks) >= blocks)
    ranked = prefixes.most_common(rank + 1)
    return ranked[rank][1] / len(trace.requests) if len(ranked) > rank else 0.0


def input_tokens_mean(trace: Trace) -> float:
    """Return the mean length of the prompts in tokens."""
    return sum(request.input_tokens for request in trace.requests) / len(trace.requests)


def output_tokens_mean(trace: Trace) -> float:
    """Return the mean length of the answers in tokens."""
    return sum(request.output_tokens for request in trace.requests) / len(trace.requests)


def input_per_output(trace: Trace) -> float:
    """Return the number of prompt tokens per token of the answers."""
    return input_tokens_mean(trace) / output_tokens_mean(trace)


def turns_mean(trace: Trace) -> float:
    """Return the mean number of requests of a session; NaN if the trace has no sessions."""
    sessions = {request.session for request in trace.requests}
    return nan if None in sessions else len(trace.requests) / len(sessions)


def session_share(trace: Trace, *, top: float) -> float:
    """Return the share of all prompt tokens that belongs to the largest ``top`` (0 to 1) of the sessions.

    If ``top`` is not a whole number of sessions, the last session counts in part. NaN if the trace has no sessions.
    """
    sizes: Counter[int] = Counter()
    for request in trace.requests:
        if request.session is None:
            return nan
        sizes[request.session] += request.input_tokens
    largest = sorted(sizes.values(), reverse=True)
    whole = int(len(largest) * top)
    part = len(largest) * top - whole
    return (sum(largest[:whole]) + part * sum(largest[whole : whole + 1])) / sum(largest)


def own_session_hit_rate(trace: Trace) -> float:
    """Return the share of all prompt tokens in full blocks that the same session has sent before."""
    own: dict[int | None, set[int]] = {}
    reused = 0
    for request in trace.requests:
        full = request.blocks[: request.input_tokens // trace.block_tokens]
        seen = set() if request.session is None else own.setdefault(request.session, set())
        reused += next((index for index, block in enumerate(full) if block not in seen), len(full))
        seen.update(full)
    return reused * trace.block_tokens / sum(request.input_tokens for request in trace.requests)


def intra_session_share(trace: Trace) -> float:
    """Return the share of the ideally reused blocks that the same session was the first to send; NaN without reuse.

    A prefix common to many sessions counts as another session's block in all sessions except the first.
    """
    first_with: dict[int, int | None] = {}
    reused, own = 0, 0
    for request, cached in zip(trace.requests, ideal_block_tokens(trace), strict=True):
        full = request.blocks[: request.input_tokens // trace.block_tokens]
        run = cached // trace.block_tokens
        reused += run
        if request.session is not None:
            own += sum(first_with[block] == request.session for block in full[:run])
        for block in full[run:]:
            first_with.setdefault(block, request.session)
    return own / reused if reused else nan


def arrival_cv(trace: Trace) -> float:
    """Return the standard deviation of the gaps between arrivals over their mean: 1 for a Poisson process.

    In a closed loop only the first request of each session counts, because the other arrival times are nominal.
    """
    begun: set[int | None] = set()
    arrivals_s = []
    for request in trace.requests:
        if not trace.closed_loop or request.session not in begun:
            arrivals_s.append(request.arrival_s)
        begun.add(request.session)
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    mean_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
    return sqrt(sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) / mean_s if mean_s else nan


@dataclass(frozen=True, slots=True)
class Asked:
    """A figure of a workload and the function that measures it. ``value`` is the target, None if there is no target."""

    name: str
    value: float | None
    measured: Callable[[Trace], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure of a trace, and the target value or None."""

    name: str
    asked: float | None
    produced: float


SHOWN: Final = (
    Asked("input tokens, mean", None, input_tokens_mean),
    Asked("output tokens, mean", None, output_tokens_mean),
    Asked("ideal hit rate, whole blocks", None, ideal_block_hit_rate),
    Asked("requests that share half their prompt", None, partial(share_reusing, least=0.5)),
    Asked("input tokens of the top 1 % of sessions", None, partial(session_share, top=0.01)),
    Asked("coefficient of variation of arrivals", None, arrival_cv),
)
"""Figures for every trace, generated or recorded."""


def compare(trace: Trace, asked: Sequence[Asked]) -> tuple[Fact, ...]:
    """Return each target figure with the trace's value, then the general figures."""
    names = {one.name for one in asked}
    return tuple(
        Fact(name=one.name, asked=one.value, produced=one.measured(trace))
        for one in (*asked, *(shown for shown in SHOWN if shown.name not in names))
    )


def fact_lines(facts: Sequence[Fact]) -> tuple[str, ...]:
    """Return a table of facts to print: a heading, then one line for each fact."""
    width = max(len(fact.name) for fact in facts)
    rows = (
        f"{fact.name:<{width}}  {'' if fact.asked is None else _figure(fact.asked):>10}  {_figure(fact.produced):>10}"
        for fact in facts
    )
    return f"{'':<{width}}  {'asked':>10}  {'produced':>10}", *rows


def _figure(value: float) -> str:
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= _WHOLE_FROM else f"{value:.3f}"
