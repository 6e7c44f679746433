"""Replays recorded requests on the engine model: each at the time and at the member of the recording."""

from collections.abc import Iterator, Mapping, Sequence

from dualmap_sim.engine import Engine, EngineEvent, EngineRequest, FirstToken
from dualmap_sim.errors import RequestDoesNotFit
from dualmap_sim.fitting.estimates import Prediction
from dualmap_sim.fitting.service import Served
from dualmap_sim.presets import EngineConfig


def predict(
    members: Mapping[str, Sequence[Served]],
    engines: Mapping[str, EngineConfig],
    *,
    block_tokens: float,
    from_s: float,
) -> Iterator[Prediction]:
    """Yield predictions for the sound streamed requests that arrived at ``from_s`` or later.

    ``block_tokens`` is the length of a recorded block in the engine's tokens. Earlier requests fill the caches.
    """
    for member, served in members.items():
        first_s = _first_tokens(served, engines[member], block_tokens)
        for number, each in enumerate(served):
            if each.sound and each.first_s is not None and number in first_s and each.request.arrived_s >= from_s:
                arrived_s = each.request.arrived_s
                yield Prediction(
                    prompt_tokens=each.prompt_tokens,
                    measured_s=each.first_s - arrived_s,
                    predicted_s=first_s[number] - arrived_s,
                )


def _first_tokens(served: Sequence[Served], config: EngineConfig, block_tokens: float) -> dict[int, float]:
    """Return the time of the first token of each request, by its number."""
    engine, events, blocks_apart = Engine(config), list[EngineEvent](), config.block_tokens / block_tokens
    for number, each in enumerate(served):
        events += engine.advance(each.sent_s)
        request = EngineRequest(
            request_id=str(number),
            prompt_tokens=max(1, each.prompt_tokens),
            output_tokens=each.output_tokens or 1,
            blocks=engine_blocks(each.request.chain.cacheable, blocks_apart),
        )
        try:
            engine.submit(each.sent_s, request)
        except RequestDoesNotFit:
            continue
    while (due_s := engine.next_event_s()) is not None:
        events += engine.advance(due_s)
    return {int(event.request_id): event.at_s for event in events if isinstance(event, FirstToken)}


def engine_blocks(blocks: Sequence[int], apart: float) -> list[int]:
    """Return the hashes of the engine's blocks, of which each is ``apart`` recorded blocks long.

    An engine's block ends within a recorded block, unless ``apart`` is a whole number. It then has the hash of the
    recorded block that contains its end, so it is equal only in prompts that are equal beyond it.
    """
    count = int(len(blocks) / apart + 1e-6)
    return [blocks[max(0, _ceil(number * apart) - 1)] for number in range(1, count + 1)]


def _ceil(value: float) -> int:
    """Return the smallest whole number that is not below ``value``, apart from rounding errors."""
    return -int(-(value - 1e-6) // 1)
