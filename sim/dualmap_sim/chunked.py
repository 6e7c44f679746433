"""Chunked prefill: an engine step that computes pieces of prompts and one token of every decoding request.

``engine.py`` builds such a step whenever a prompt is to be computed. In all other steps the batch decodes as without
chunked prefill. The budget follows vLLM V1's rule (docs.vllm.ai, "Optimization and Tuning", section on chunked prefill;
``vllm/v1/core/sched/scheduler.py``). Each step has a budget of tokens (``max_num_batched_tokens``). Every decoding
request takes one token of the budget. A prompt that is partly computed gets tokens first. The waiting prompts follow in
order, while their KV fits into memory. A prompt that exhausts the budget continues in the next step. So at most one
prompt is partly computed, and it continues in every step. Each request that joins the decodes had at least one prompt
token in the step before.

The time of a chunked step combines the costs in docs/engine-model.md. A step without decodes costs the same as a
prefill of its tokens. A step without prompt tokens costs the same as a decode step. Costs that grow with the work add
up: the linear layers and the attention of each prompt token, and the KV that the decodes read. Reading the weights and
launching the pass are fixed costs: ``o`` of a prefill, ``d0`` of a decode step. The step pays the higher fixed cost
once. The same vLLM page gives this shared pass over the weights as the reason to mix compute-bound prompts with
memory-bound decodes. Every further step of a prompt pays ``o`` again.

Other prompts can reuse a prompt's blocks as soon as the prompt's last piece is scheduled, even in the same step. The
same holds for vLLM, which registers blocks when it allocates them (docs.vllm.ai, "Automatic Prefix Caching"). A prompt
aborted before its last piece leaves no blocks in the cache, which is simpler than in vLLM.
"""

from collections.abc import Iterable

from dualmap_sim.engine_jobs import Job
from dualmap_sim.presets import EngineConfig


class ChunkedStep:
    """A step under construction, for an engine with ``chunk_tokens`` and the decodes of its batch."""

    __slots__ = ("_config", "_decoding", "_kv_tokens", "_prompts_s", "left_tokens")

    def __init__(self, config: EngineConfig, *, decoding: int, kv_tokens: int) -> None:
        assert config.chunk_tokens is not None, "this engine does not cut prompts"
        self._config = config
        self._decoding = decoding
        self._kv_tokens = kv_tokens
        self._prompts_s = 0.0
        self.left_tokens = max(0, config.chunk_tokens - decoding)
        """The remaining budget for prompt tokens."""

    def add(self, job: Job) -> None:
        """Add as much of a prompt as the budget allows."""
        if job.computed_tokens == job.cached_tokens + job.pulled_tokens:
            # The first piece also loads the KV that the engine need not compute.
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
    """Return the duration of the steps that the given prompts, computed in order, fill completely.

    Each prompt is a pair: the tokens to compute, and the seconds for them without the costs shared by a step. The
    estimate assumes that the decodes do not change.
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
