"""Chunked prefill: one step of an engine that computes a piece of the prompts and one token of every decoding request.

``engine.py`` builds such a step whenever a prompt is to be computed. Otherwise the batch decodes as if there were no
chunks. The budget follows vLLM V1's rule (docs.vllm.ai, "Optimization and Tuning", section on chunked prefill;
``vllm/v1/core/sched/scheduler.py``): a step has a budget of tokens (``max_num_batched_tokens``). Every request that
decodes takes one of it. The rest goes to the prompt begun before, then to the waiting prompts in order, while memory
admits them. The prompt that exhausts the budget continues in the next step. So at most one prompt is in pieces, and it
continues in every step: each request that joins the decodes had at least one prompt token in the step before.

The time of such a step combines the costs in docs/engine-model.md, so that a step without decodes costs what
a prefill of its tokens does, and one without prompt tokens what a decode step does. Costs that grow with the work add
up: each prompt token's share of the linear layers, its attention to all before it, the KV that the decodes read. Fixed
costs (reading the weights and launching the pass: ``o`` of a prefill, ``d0`` of a decode step) are paid once, at the
higher of the two. The same page of vLLM names this shared pass over the weights as the reason to mix compute-bound
prompts with memory-bound decodes. Every further step of a prompt pays ``o`` again.

A prompt's blocks can be reused from the moment its last piece is scheduled, even by the next prompts of the same step
(vLLM registers blocks as it allocates them: docs.vllm.ai, "Automatic Prefix Caching"). A prompt aborted before that
leaves nothing in the cache, which is simpler than in vLLM.
"""

from collections.abc import Iterable

from dualmap_sim.engine_jobs import Job
from dualmap_sim.presets import EngineConfig


class ChunkedStep:
    """A step under construction, of an engine with ``chunk_tokens`` and a batch that decodes."""

    __slots__ = ("_config", "_decoding", "_kv_tokens", "_prompts_s", "left_tokens")

    def __init__(self, config: EngineConfig, *, decoding: int, kv_tokens: int) -> None:
        assert config.chunk_tokens is not None, "this engine does not cut prompts"
        self._config = config
        self._decoding = decoding
        self._kv_tokens = kv_tokens
        self._prompts_s = 0.0
        self.left_tokens = max(0, config.chunk_tokens - decoding)
        """The remaining budget of prompt tokens."""

    def add(self, job: Job) -> None:
        """Compute as much of a prompt as the budget allows."""
        if job.computed_tokens == job.cached_tokens + job.pulled_tokens:
            # The first piece also loads all the KV that need not be computed.
            self._prompts_s += self._config.reuse_s(cached_tokens=job.cached_tokens, pulled_tokens=job.pulled_tokens)
        tokens = min(self.left_tokens, job.request.prompt_tokens - job.computed_tokens)
        self._prompts_s += self._config.prefill.compute_s(new_tokens=tokens, cached_tokens=job.computed_tokens)
        job.computed_tokens += tokens
        self.left_tokens -= tokens

    @property
    def seconds(self) -> float:
        """Return the step's duration so far."""
        return self._prompts_s + _shared_s(self._config, decoding=self._decoding, kv_tokens=self._kv_tokens)


def full_steps_s(config: EngineConfig, prompts: Iterable[tuple[int, float]], *, decoding: int, kv_tokens: int) -> float:
    """Return the duration of the steps that some prompts, one after the other, fill completely.

    ``prompts`` are the tokens to compute and the seconds this takes, without the costs that a step shares. The decodes
    are assumed not to change.
    """
    assert config.chunk_tokens is not None, "this engine does not cut prompts"
    tokens, seconds = 0, 0.0
    for prompt_tokens, prompt_s in prompts:
        tokens += prompt_tokens
        seconds += prompt_s
    room = max(1, config.chunk_tokens - decoding)
    steps = tokens // room
    if not steps:
        return 0.0
    return seconds * (steps * room / tokens) + steps * _shared_s(config, decoding=decoding, kv_tokens=kv_tokens)


def _shared_s(config: EngineConfig, *, decoding: int, kv_tokens: int) -> float:
    overhead_s = config.prefill.overhead_s
    if not decoding:
        return overhead_s
    assert config.decode is not None
    decode_s = config.decode.steps_s(1, requests=decoding, kv_tokens=kv_tokens)
    return decode_s + max(0.0, overhead_s - config.decode.step_s)
