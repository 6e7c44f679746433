"""A recording of a real engine, as values and as a JSON file: engine, machine, and requests with their token times.

``record.py`` makes recordings; ``replay.py`` replays them on the engine model. Each line of a file has one group of
requests, with times in milliseconds. A prompt is a list of pieces (a number and a length). ``scenarios.py`` converts
the pieces to tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

FORMAT: Final = "dualmap engine recording 1"

Piece = tuple[int, int]
"""A piece of a prompt: the number of a text, and the number of tokens from the text's beginning."""


class RecordingError(Exception):
    """A file is not a recording; the message contains the fault and its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request as recorded by its client. Times are in seconds since the beginning of the group."""

    pieces: tuple[Piece, ...]
    cached_tokens: int
    """Prompt tokens found in the prefix cache, as reported by the engine."""
    sent_s: float
    token_s: tuple[float, ...]
    """The arrival time of each output token."""
    setup: bool
    """Whether the request only warms the cache for other requests. The times of such a request are not counted."""
    wave: int
    """The number of the request's wave. A wave begins when all requests of the previous wave have ended."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return sum(tokens for _, tokens in self.pieces)

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds."""
        return self.token_s[0] - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Requests sent to an idle engine whose cache contained no blocks of their prompts."""

    scenario: str
    round: int
    probe_s: float
    """TTFT of the probe before the group, which shows the machine's speed at that moment."""
    load: float
    """The machine's one-minute load average before the group."""
    requests: tuple[Seen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The full result of one run of ``record``."""

    engine: Mapping[str, str | int]
    """``version``, ``model``, ``options``, ``block_tokens``, ``kv_tokens`` and ``step_tokens``.

    ``step_tokens`` is the maximum number of tokens of one step, vLLM's ``max_num_batched_tokens``.
    """
    machine: Mapping[str, str | int]
    groups: tuple[Group, ...]

    def tokens(self, fact: str) -> int:
        """Return one of the engine's values, which must be a number of tokens."""
        return int(self.engine[fact])


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording. The same recording gives the same bytes."""
    lines = [json.dumps({"format": FORMAT, "engine": dict(recording.engine), "machine": dict(recording.machine)})]
    lines += [json.dumps(_group_out(group), separators=(",", ":")) for group in recording.groups]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_recording(path: Path) -> Recording:
    """Read a recording. Raises RecordingError and OSError."""
    first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
    head = _line(path, 1, first)
    if head.get("format") != FORMAT:
        raise RecordingError(f'{path}: the first line has no "format": "{FORMAT}"')
    if not all(isinstance(head.get(name), dict) for name in ("engine", "machine")):
        raise RecordingError(f'{path}: the first line has no object "engine" or "machine"')
    groups = []
    for number, line in enumerate(rest, start=2):
        try:
            groups.append(_group_in(_line(path, number, line)))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}:{number}: the line is not a valid group of requests: {error!r}") from error
    return Recording(engine=head["engine"], machine=head["machine"], groups=tuple(groups))


def _line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RecordingError(f"{path}:{number}: the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordingError(f"{path}:{number}: the line is not a JSON object")
    return value


def _group_out(group: Group) -> dict[str, Any]:
    return {
        "scenario": group.scenario,
        "round": group.round,
        "probe_ms": _ms(group.probe_s),
        "load": group.load,
        "requests": [_seen_out(request) for request in group.requests],
    }


def _seen_out(seen: Seen) -> list[Any]:
    """Return pieces, cached tokens, wave, setup, send time, and the times between successive tokens."""
    times = (seen.sent_s, *seen.token_s)
    gaps = [_ms(after) - _ms(before) for before, after in pairwise(times)]
    facts = [seen.pieces, seen.cached_tokens, seen.wave, int(seen.setup)]
    return [*facts, _ms(times[0]), [round(gap, 1) for gap in gaps]]


def _group_in(value: Mapping[str, Any]) -> Group:
    return Group(
        scenario=value["scenario"],
        round=value["round"],
        probe_s=value["probe_ms"] / 1000,
        load=value["load"],
        requests=tuple(_seen_in(request) for request in value["requests"]),
    )


def _seen_in(value: Sequence[Any]) -> Seen:
    pieces, cached_tokens, wave, setup, sent_ms, gaps_ms = value
    _, *token_ms = accumulate(gaps_ms, initial=sent_ms)
    return Seen(
        pieces=tuple((number, tokens) for number, tokens in pieces),
        cached_tokens=cached_tokens,
        sent_s=sent_ms / 1000,
        token_s=tuple(ms / 1000 for ms in token_ms),
        setup=bool(setup),
        wave=wave,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
