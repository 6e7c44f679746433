"""Replays a recording on the engine model, with requests at the same times, and returns the times of their tokens.

``recording.py`` defines the requests, ``fit.py`` fits the engine's parameters, and ``report.py`` compares the times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from bench.engine.recording import Group, Seen

from dualmap_sim.engine import Engine, EngineEvent, EngineRequest, Finished, FirstToken
from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One recorded request and the model's prediction for it."""

    group: Group
    position: int
    """The request's index in its group."""
    ttft_s: float
    total_s: float
    """Seconds from sending to the last token."""
    cached_tokens: int

    @property
    def seen(self) -> Seen:
        """The recorded request."""
        return self.group.requests[self.position]

    @property
    def ttft_error(self) -> float:
        """The difference of the model's TTFT from the real TTFT, relative to the real TTFT."""
        return self.ttft_s / self.seen.ttft_s - 1

    @property
    def total_error(self) -> float:
        """The relative error of the time until the last token."""
        return self.total_s / (self.seen.token_s[-1] - self.seen.sent_s) - 1


def replay(config: EngineConfig, group: Group) -> list[Replayed]:
    """Replay a group on an empty engine model; return the predictions without those for setup requests.

    As in the recording, a wave begins when the previous wave has ended. Within a wave, requests keep their times.
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
            # By a rounding error, the computed time may be earlier than ``engine.now_s``.
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
    """Assigns numbers to blocks. Two blocks have equal numbers if all tokens up to their ends are equal."""

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
        """Yield every full block as a tuple of text pieces: text, start, end."""
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
