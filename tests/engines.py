"""Small simulated engines and drivers for several tests of the engine model."""

from collections.abc import Iterable
from dataclasses import replace

from dualmap_sim.engine import Engine, EngineEvent, EngineRequest, Finished, FirstToken
from dualmap_sim.presets import DecodeCost, EngineConfig, PrefillCost

ROUND = EngineConfig(
    prefill=PrefillCost(overhead_s=0.5, tokens_per_s=100.0, attention=0.0, load_tokens_per_s=1000.0),
    decode=DecodeCost(step_s=0.25, per_kv_token_s=0.0, per_request_s=0.0),
    kv_memory_tokens=1000,
    cache_tokens=400,
    input_tokens_max=500,
    block_tokens=10,
)
"""Round numbers: a prefill of n new tokens takes 0.5 + n / 100 seconds, a decode step a quarter of a second."""

GROWING = replace(ROUND, decode=DecodeCost(step_s=0.02031, per_kv_token_s=1.0171e-4, per_request_s=3.0193e-3))
"""The same engine with decode steps that grow with the batch and its KV tokens.

Numbers with many digits, so that no step ends exactly at an arrival time. Rounding errors would otherwise determine the
order.
"""


def ask(request_id: str, *, prompt: int = 100, output: int = 1, blocks: Iterable[int] = ()) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_tokens=prompt, output_tokens=output, blocks=tuple(blocks))


def run_out(engine: Engine) -> list[EngineEvent]:
    """Advance to each next event until the engine is idle."""
    events: list[EngineEvent] = []
    while (due_s := engine.next_event_s()) is not None:
        events += engine.advance(due_s)
    return events


def first_tokens(events: Iterable[EngineEvent]) -> dict[str, float]:
    return {event.request_id: event.at_s for event in events if isinstance(event, FirstToken)}


def finishes(events: Iterable[EngineEvent]) -> dict[str, float]:
    return {event.request_id: event.at_s for event in events if isinstance(event, Finished)}
