"""Convert a trace into the two forms a cluster needs: the router's block chains and the engine's requests.

``workloads`` makes the traces, and ``cluster`` replays the arrivals. In production, the router and the engine each cut
the prompt's text into blocks and hash them. Router and engine may use different block lengths. The simulation uses the
trace's block ids instead of the text.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from dualmap.keys.sessions import session_key
from dualmap.prompts.blocks import BlockChain, chain_root
from dualmap_sim.engine import EngineRequest
from dualmap_sim.workloads.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a workload: its arrival time, and its data for the router and for the engine.

    In a closed loop, each later request of a session follows an earlier request: ``follows`` is the earlier request's
    id. The later request arrives ``pause_s`` after the earlier request ends. The ``at_s`` of the later request is
    nominal: the arrival time on an infinitely fast system.
    """

    at_s: float
    chain: BlockChain
    session: int | None
    work: EngineRequest
    follows: str | None = None
    pause_s: float = 0.0

    @property
    def request_id(self) -> str:
        """The request's id, the same in the router and in the engine."""
        return self.work.request_id


def arrivals(trace: Trace, *, router_block_tokens: int, engine_block_tokens: int) -> tuple[Arrival, ...]:
    """Return a trace's requests in order. A request's id is its number in the trace. Block lengths may differ."""
    root, names = chain_root(model=trace.name), _PrefixNames(trace.block_tokens)
    made = []
    for number, (request, follows) in enumerate(zip(trace.requests, _followed(trace), strict=True)):
        hashes = names.of(request, every_tokens=router_block_tokens)
        blocks = hashes
        if engine_block_tokens != router_block_tokens:
            blocks = names.of(request, every_tokens=engine_block_tokens)
        made.append(
            Arrival(
                at_s=request.arrival_s,
                chain=BlockChain(hashes=hashes, block_tokens=router_block_tokens, tokens=request.input_tokens),
                session=None if request.session is None else session_key(str(request.session), root),
                work=EngineRequest(
                    request_id=str(number),
                    prompt_tokens=request.input_tokens,
                    output_tokens=request.output_tokens,
                    blocks=blocks,
                ),
                follows=follows,
                pause_s=request.pause_s if follows is not None else 0.0,
            )
        )
    return tuple(made)


def _followed(trace: Trace) -> Iterator[str | None]:
    """Return, for each request of a closed loop, the previous request of its session; otherwise None."""
    last: dict[int, str] = {}
    for number, request in enumerate(trace.requests):
        if not trace.closed_loop or request.session is None:
            yield None
        else:
            yield last.get(request.session)
            last[request.session] = str(number)


class _PrefixNames:
    """Assigns a number to each prefix of the prompts, so that a million prompts fit into memory."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[tuple[int, int], int] = {}

    def of(self, request: TraceRequest, *, every_tokens: int) -> tuple[int, ...]:
        """Return the prompt's chained hashes: one for each multiple of ``every_tokens``, and one for the full prompt.

        A trace's block id identifies the block and all blocks before it. So the id of a prefix's last block and the
        prefix's length within that block identify the prefix.
        """
        names = []
        for start in range(0, request.input_tokens, every_tokens):
            last = min(start + every_tokens, request.input_tokens) - 1
            block, offset = divmod(last, self._block_tokens)
            end = request.blocks[block], offset
            name = self._names.get(end)
            if name is None:
                name = self._names[end] = xxh3_64_intdigest(b"%d %d" % end)
            names.append(name)
        return tuple(names)
