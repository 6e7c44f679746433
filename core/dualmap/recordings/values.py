"""The values of a recording: its first line, requests, changes of pools, and counts of what the recording lacks.

Times are in seconds since the epoch. Hashes are keyed 64-bit values: equal values mean equal blocks, sessions, clients
or request ids within all recordings with the same key, and say nothing to anyone without the key. docs/recordings.md
describes every field.
"""

from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import BlockChain
from dualmap.receipt import CandidateReceipt

VERSION: Final = 1
"""The version of the format."""


class RecordedOutcome(StrEnum):
    """How a recorded request ended."""

    OK = "ok"
    """The engine's answer is complete."""
    ENGINE_ERROR = "engine_error"
    """The engine answered with an error, or its member failed."""
    CLIENT_GONE = "client_gone"
    """The client cancelled the request, or its answer broke off without the member's fault."""
    REFUSED = "refused"
    """The router answered 429 or 503."""


class Header(NamedTuple):
    """The first line of each file of a recording.

    ``router`` is the name of the router that wrote the file from ``started_s`` on. ``sample`` is the share of sessions
    that is recorded, above 0 and at most 1. ``key`` is the fingerprint of the key of all hashes: files with different
    fingerprints have nothing in common. ``program`` is the version of the program that wrote the file. A file that is
    merged of others' files has several routers, separated by commas.
    """

    router: str
    started_s: float
    key: str
    sample: float = 1.0
    program: str = ""


class RecordedReceipt(NamedTuple):
    """What the router's decision on a request was, with the numbers that it was made from (``dualmap.receipt``).

    ``prompt_tokens`` is the router's count at the decision. ``key_blocks`` of the request's blocks were its key, with
    ``key_tokens`` tokens; 0 if the key was the session's. ``candidates`` are those of the pair and the chosen one.
    ``prefill`` is empty for a pool without a prefill pool; else ``remote`` with the member ``prefiller``, or why the
    chosen member computed the prompt itself.
    """

    policy: str
    rule: str
    pair: tuple[str, ...]
    chosen: str
    prompt_tokens: int
    matched_tokens: int
    key_blocks: int
    key_tokens: int
    predicted_ttft_s: float
    source: str = "records"
    fetch_tokens: int | None = None
    moved_from: str = ""
    prefill: str = ""
    prefiller: str = ""
    candidates: tuple[CandidateReceipt, ...] = ()


class RecordedRequest(NamedTuple):
    """A request that found its pool, and its end.

    ``prompt_tokens`` and ``block_tokens`` are the router's first estimate, as in ``BlockChain``; ``blocks`` are the
    keyed hashes. ``engine_prompt_tokens``, ``output_tokens`` and ``cached_tokens`` are what the engine reported; None
    if it reported nothing. ``comparable`` is false if the cached tokens do not say what the engine caches.
    ``queued_s`` is the time in the router's queue, None for a request that was not queued. ``ttft_s`` is None without a
    first token of a streamed answer. ``duration_s`` is the time from the arrival to the end; None if no end was
    reported. ``receipt`` is None for a request that was never sent to a member. ``code`` says why the router refused a
    request. ``served`` is the member that served the request, empty if it is the chosen one. ``attempts`` is the number
    of members that Envoy tried, None if it did not say.
    """

    arrived_s: float
    pool: str
    model: str
    streamed: bool
    prompt_tokens: int
    block_tokens: int
    blocks: tuple[int, ...]
    outcome: RecordedOutcome
    full_blocks: int | None = None
    exact: bool = False
    adapter: str = ""
    priority: int = 0
    sequences: int = 1
    session: int | None = None
    client: int | None = None
    request: int | None = None
    receipt: RecordedReceipt | None = None
    code: str = ""
    served: str = ""
    attempts: int | None = None
    queued_s: float | None = None
    ttft_s: float | None = None
    duration_s: float | None = None
    engine_prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    comparable: bool = True

    @property
    def chain(self) -> BlockChain:
        """The blocks as a chain, whose hashes are the keyed ones."""
        return BlockChain(
            hashes=self.blocks,
            block_tokens=self.block_tokens,
            tokens=self.prompt_tokens,
            exact=self.exact,
            full_blocks=self.full_blocks,
        )

    @property
    def known_prompt_tokens(self) -> int:
        """The best known number of prompt tokens: the engine's, else that of the decision, else the first estimate."""
        if self.engine_prompt_tokens is not None:
            return self.engine_prompt_tokens
        return self.prompt_tokens if self.receipt is None else self.receipt.prompt_tokens


class PoolChanged(NamedTuple):
    """A pool as it is from ``at_s`` on: its members, and the settings that decide (``dualmap.recordings.pools``)."""

    at_s: float
    pool: Pool


class PoolRemoved(NamedTuple):
    """The router no longer serves the pool ``namespace/name``."""

    at_s: float
    pool: str


class Missing(NamedTuple):
    """What the recording lacks since the last such line, at ``at_s``.

    ``unrouted`` requests found no pool or could not be read. ``dropped`` requests could not be written.
    """

    at_s: float
    unrouted: int = 0
    dropped: int = 0


Line: TypeAlias = Header | RecordedRequest | PoolChanged | PoolRemoved | Missing
