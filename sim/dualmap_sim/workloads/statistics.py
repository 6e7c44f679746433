"""What a trace asks for: lengths, how much of it could be reused at best, and the engine time that leaves.

The reuse bound is one shared cache without a limit (the paper's theoretical upper bound, section A.2.2): what a
router can at best approach with as many caches as it has engines.
"""

from dataclasses import dataclass

from dualmap_sim.presets import EngineConfig, PrefillCost
from dualmap_sim.workloads.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Means per request over a trace, and its ideal hit rate (reused over all prompt tokens)."""

    requests: int
    sessions: int | None
    input_tokens_mean: float
    output_tokens_mean: float
    input_tokens_longest: int
    ideal_hit_rate: float


def ideal_cached_tokens(trace: Trace) -> tuple[int, ...]:
    """Return, per request, the prompt tokens that one shared unlimited cache would hold when it arrives.

    Counts the longest run from the prompt's beginning; of a block seen only in part, that part.
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
    """Return the engine seconds that the trace's prefills take, all of them, with an ideal cache or with none."""
    cached = ideal_cached_tokens(trace) if ideally_cached else (0,) * len(trace.requests)
    return sum(
        cost.seconds(new_tokens=request.input_tokens - reused, cached_tokens=reused)
        for request, reused in zip(trace.requests, cached, strict=True)
    )


def decode_work_s(trace: Trace, engine: EngineConfig) -> float:
    """Return the engine seconds that the trace's decoding takes at best: in batches as large as the KV memory admits.

    Each request bears its share of the steps of a batch of average requests that fills the memory (ALGORITHMS 7).
    """
    if engine.decode is None:
        return 0.0
    facts = measure(trace)
    held_tokens = facts.input_tokens_mean + facts.output_tokens_mean
    batch = max(1, int(engine.kv_memory_tokens / held_tokens))
    step_s = engine.decode.steps_s(1, requests=batch, kv_tokens=int(batch * held_tokens))
    return sum(request.output_tokens - 1 for request in trace.requests) * step_s / batch
