"""Defines the groups of requests to a real engine, from a single request to a Poisson mix, and their prompts' tokens.

``record.py`` sends the groups. Every group has its own texts, so an engine's cache contains no blocks of the group
beforehand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from bench.engine.recording import Piece

LENGTHS = (256, 512, 1024, 1536, 2048, 3072, 4000)
WARM = ((2048, 512), (2048, 1024), (2048, 1536), (2048, 2016), (4000, 1024), (4000, 2048), (4000, 3072), (4000, 3968))
"""Lengths of prompts with the number of cached tokens; all have the same prefix."""
MIXED = (2048, 256, 1024, 512, 256, 1536)
BATCHES = (1, 2, 4, 8, 16)
DECODE_CONTEXTS = (64, 768, 2560)
DECODE_TOKENS = 24
POISSON_REQUESTS = 30
POISSON_LOADS = (("poisson light", 0.5), ("poisson heavy", 0.85))
DOCUMENTS = 6
VOCABULARY = (1, 2047)
"""Range of token ids. The model has 2048 ids, and 0 is the end of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, sent ``after_s`` seconds after its wave begins.

    ``setup`` marks requests that only warm the cache for others.
    """

    pieces: tuple[Piece, ...]
    output_tokens: int = 1
    after_s: float = 0.0
    setup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Waves of requests. A wave begins when all requests of the previous wave have ended."""

    scenario: str
    round: int
    waves: tuple[tuple[Ask, ...], ...]


class Texts:
    """Assigns numbers to new texts."""

    def __init__(self) -> None:
        self._last = 0

    def new(self, tokens: int) -> Piece:
        """Return a piece of a new text with this number of tokens."""
        self._last += 1
        return (self._last, tokens)


def token_ids(pieces: tuple[Piece, ...]) -> list[int]:
    """Return a prompt's token ids; equal pieces always give equal ids."""
    return [token for number, tokens in pieces for token in Random(number).choices(range(*VOCABULARY), k=tokens)]


def planned(rounds: int, *, tokens_per_s: float, seed: int = 0) -> Iterator[PlannedGroup]:
    """Yield all groups. The engine's speed ``tokens_per_s`` determines the rates of the Poisson mixes."""
    texts, random = Texts(), Random(seed)
    for number in range(rounds):
        for scenario, waves in _waves(texts, random, tokens_per_s):
            yield PlannedGroup(scenario=scenario, round=number, waves=waves)


def _waves(texts: Texts, random: Random, tokens_per_s: float) -> Iterator[tuple[str, tuple[tuple[Ask, ...], ...]]]:
    for length in LENGTHS:
        yield "alone cold", ((Ask(pieces=(texts.new(length),)),),)
    first, warm = texts.new(max(cached for _, cached in WARM)), []
    for length, cached in WARM:
        warm.append(Ask(pieces=((first[0], cached), texts.new(length - cached))))
    yield "alone warm", ((Ask(pieces=(first,), setup=True),), *((ask,) for ask in warm))
    yield "queue cold", (tuple(Ask(pieces=(texts.new(1024),)) for _ in range(4)),)
    yield "queue cold", (tuple(Ask(pieces=(texts.new(512),), output_tokens=8) for _ in range(8)),)
    yield "queue cold", (tuple(Ask(pieces=(texts.new(length),), output_tokens=8) for length in MIXED),)
    shared = texts.new(2048)
    yield (
        "queue warm",
        (
            (Ask(pieces=(shared,), setup=True),),
            tuple(Ask(pieces=(shared, texts.new(256)), output_tokens=8) for _ in range(6)),
        ),
    )
    together = texts.new(1024)
    yield "queue sharing", (tuple(Ask(pieces=(together, texts.new(128))) for _ in range(4)),)
    for context in DECODE_CONTEXTS:
        yield "decode", _decode(texts, context)
    for scenario, load in POISSON_LOADS:
        yield scenario, (_poisson(texts, random, load * tokens_per_s),)


def _decode(texts: Texts, context: int) -> tuple[tuple[Ask, ...], ...]:
    """Return batches of requests that decode together.

    The cache contains their shared prefix, so their prefills take almost no time.
    """
    shared = texts.new(context)
    batches = (
        tuple(Ask(pieces=(shared, texts.new(8)), output_tokens=DECODE_TOKENS) for _ in range(batch))
        for batch in BATCHES
    )
    return ((Ask(pieces=(shared,), setup=True),), *batches)


def _poisson(texts: Texts, random: Random, new_tokens_per_s: float) -> tuple[Ask, ...]:
    """Return questions on a few documents, at random times, with this number of uncached tokens per second."""
    documents = [texts.new(random.randrange(512, 1537)) for _ in range(DOCUMENTS)]
    chosen = [random.choice(documents) for _ in range(POISSON_REQUESTS)]
    pieces = [(document, texts.new(random.randrange(64, 513))) for document in chosen]
    new_tokens = sum(question for _, (_, question) in pieces) + sum(tokens for _, tokens in set(chosen))
    mean_gap_s = new_tokens / new_tokens_per_s / POISSON_REQUESTS
    asks, at_s = [], 0.0
    for prompt in pieces:
        asks.append(Ask(pieces=prompt, output_tokens=random.randrange(4, 25), after_s=at_s))
        at_s += random.expovariate(1 / mean_gap_s)
    return tuple(asks)
