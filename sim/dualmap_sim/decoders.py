"""The decode side of a static prefill/decode split: engines that decode prompts which other engines have prefilled.

The model follows vLLM's disaggregated prefill (docs.vllm.ai, "Disaggregated Prefilling"). A prefill-only engine
computes a prompt. Its KV then moves to a decode-only engine, which computes the prompt's last token again. So the
client gets the first token from the decode-only engine. The router knows only the engines that prefill (DualMap paper,
A.5). The serving framework attaches the decode-only engine: here the engine with the fewest KV tokens of all requests
that it has not ended.

Two simplifications favour the split. The transfer does not slow down the engines. The transfer needs no memory at the
decode-only engine, so a request that waits for memory there has already been transferred.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from dualmap_sim.engine import Engine, EngineRequest, Finished, FirstToken
from dualmap_sim.presets import EngineConfig
from dualmap_sim.timeline import Timeline

_STEP_TOKENS: Final = 8192
"""Tokens of a step. The last token of a transferred prompt joins a decode step of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSide:
    """The settings of the decode side: its number of equal engines, and the speed of transferring KV to them."""

    instances: int
    engine: EngineConfig
    transfer_tokens_per_s: float


def split(engine: EngineConfig, *, decoders: int) -> tuple[EngineConfig, DecodeSide]:
    """Return an engine that only prefills, and a decode side of ``decoders`` engines of the same speeds and memory.

    Raises ValueError if the engine does not decode, or if it has no speed of pulling KV.
    """
    if engine.decode is None or engine.pull_tokens_per_s is None:
        raise ValueError("a split requires an engine that decodes, with pull_tokens_per_s")
    decoder = replace(engine, cache_tokens=0, pull_tokens_per_s=inf, chunk_tokens=_STEP_TOKENS)
    side = DecodeSide(instances=decoders, engine=decoder, transfer_tokens_per_s=engine.pull_tokens_per_s)
    return replace(engine, decode=None), side


class Decoders:
    """The decode-only engines of a run. Each event of a request goes to ``first_token`` or ``finished``."""

    def __init__(
        self,
        side: DecodeSide,
        *,
        timeline: Timeline,
        first_token: Callable[[FirstToken], None],
        finished: Callable[[Finished], None],
    ) -> None:
        self._transfer_tokens_per_s = side.transfer_tokens_per_s
        self._timeline = timeline
        self._first_token = first_token
        self._finished = finished
        self._decoders = tuple(_Decoder(Engine(side.engine)) for _ in range(side.instances))

    def submit(self, now: float, work: EngineRequest) -> None:
        """Transfer the KV of a prefilled prompt, then decode its answer."""
        self._timeline.at(now + work.prompt_tokens / self._transfer_tokens_per_s, self._transferred, work)

    def _transferred(self, work: EngineRequest) -> None:
        decoder = min(self._decoders, key=lambda each: each.kv_tokens)
        decoder.add(self._timeline.now_s, work)
        self._wake(decoder)

    def _wake(self, decoder: "_Decoder") -> None:
        due_s = decoder.engine.next_event_s()
        if due_s is not None and due_s != decoder.wakes_s:
            decoder.wakes_s = due_s
            self._timeline.at(due_s, self._due, decoder)

    def _due(self, decoder: "_Decoder") -> None:
        if decoder.wakes_s != self._timeline.now_s:
            return
        decoder.wakes_s = inf
        for event in decoder.engine.advance(self._timeline.now_s):
            if isinstance(event, FirstToken):
                self._first_token(event)
            else:
                decoder.remove(event.request_id)
                self._finished(event)
        self._wake(decoder)


class _Decoder:
    __slots__ = ("_need_tokens", "engine", "kv_tokens", "wakes_s")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # The time of the next wake-up. Wake-ups scheduled for other times have no effect.
        self.wakes_s = inf
        # The KV tokens of the unfinished requests at their end.
        self.kv_tokens = 0
        self._need_tokens: dict[str, int] = {}

    def add(self, now: float, work: EngineRequest) -> None:
        need_tokens = work.prompt_tokens + work.output_tokens
        self._need_tokens[work.request_id] = need_tokens
        self.kv_tokens += need_tokens
        self.engine.submit(now, replace(work, pulled_tokens=work.prompt_tokens))

    def remove(self, request_id: str) -> None:
        self.kv_tokens -= self._need_tokens.pop(request_id)
