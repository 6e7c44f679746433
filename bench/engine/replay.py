"""Asks the simulated engine what a real one was asked, at the same times, and returns when its tokens would have come.

``recording.py`` holds what was asked, ``fit.py`` chooses the engine's parameters, ``report.py`` compares.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from bench.engine.recording import Group, Seen

from dualmap_sim.engine import Engine, EngineEvent, EngineRequest, Finished, FirstToken
from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One request that really happened, and what the model says of it."""

    group: Group
    position: int
    """Which of the group's requests it is."""
    ttft_s: float
    total_s: float
    """From sending to the last token."""
    cached_tokens: int

    @property
    def seen(self) -> Seen:
        """What really happened."""
        return self.group.requests[self.position]

    @property
    def ttft_error(self) -> float:
        """The model's TTFT less the real one, as a share of the latter."""
        return self.ttft_s / self.seen.ttft_s - 1

    @property
    def total_error(self) -> float:
        """The same of the time until the last token."""
        return self.total_s / (self.seen.token_s[-1] - self.seen.sent_s) - 1


def replay(config: EngineConfig, group: Group) -> list[Replayed]:
    """Let an empty engine of the model serve a group; return those that are no setup.

    As in reality a wave waits until the last one has ended, and then comes as it came.
    """
    blocks = _Blocks(config.block_tokens)
    engine = Engine(config)
    replayed: list[Replayed] = []
    late_s = 0.0
    for _, wave in groupby(enumerate(group.requests), key=lambda each: each[1].wave):
        asked = sorted(wave, key=lambda each: each[1].sent_s)
        late_s = max(late_s, engine.now_s - asked[0][1].sent_s)
        events: list[EngineEvent] = []
        for position, seen in asked:
            # What was added and taken away again may be a rounding less.
            at_s = max(engine.now_s, late_s + seen.sent_s)
            events += engine.advance(at_s)
            engine.submit(at_s, _request(position, seen, blocks))
        while (due_s := engine.next_event_s()) is not None:
            events += engine.advance(due_s)
        first = {event.request_id: event for event in events if isinstance(event, FirstToken)}
        end_s = {event.request_id: event.at_s for event in events if isinstance(event, Finished)}
        replayed += [
            Replayed(
                group=group,
                position=position,
                ttft_s=first[str(position)].at_s - late_s - seen.sent_s,
                total_s=end_s[str(position)] - late_s - seen.sent_s,
                cached_tokens=first[str(position)].cached_tokens,
            )
            for position, seen in asked
            if not seen.setup
        ]
    return replayed


def _request(position: int, seen: Seen, blocks: "_Blocks") -> EngineRequest:
    return EngineRequest(
        request_id=str(position),
        prompt_tokens=seen.prompt_tokens,
        output_tokens=len(seen.token_s),
        blocks=blocks.of(seen),
    )


class _Blocks:
    """Numbers for the blocks of prompts: the same one where the tokens up to the block's end are the same."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}

    def of(self, seen: Seen) -> list[int]:
        chain, numbers = 0, []
        for content in self._contents(seen):
            chain = self._numbers.setdefault((chain, content), len(self._numbers) + 1)
            numbers.append(chain)
        return numbers

    def _contents(self, seen: Seen) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Yield every whole block as the stretches of texts that it is made of: text, from, to."""
        block: list[tuple[int, int, int]] = []
        room = self._block_tokens
        for text, tokens in seen.pieces:
            begin = 0
            while tokens - begin >= room:
                yield (*block, (text, begin, begin + room))
                begin, block, room = begin + room, [], self._block_tokens
            if begin < tokens:
                block.append((text, begin, tokens))
                room -= tokens - begin
