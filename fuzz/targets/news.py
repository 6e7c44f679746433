"""Fuzzes the decoding of other replicas' updates. Any writer to the store can send any bytes."""

from contextlib import suppress
from dataclasses import replace
from typing import Final

from dualmap.pools.pool import Member, Model, Pool
from dualmap.prompts.blocks import chain_blocks, chain_root
from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.requests import Rejection, Request
from dualmap.router import PoolRouter
from dualmap_extproc.store.codec import LONGEST_S, UnreadableUpdate, decode_update, encode_update
from fuzz.choices import Choices

_SECONDS: Final = (0.0, 0.25, 1.0, LONGEST_S, 1e300, float("inf"), -1.0)
_POOL: Final = Pool(
    namespace="llm",
    name="m",
    model=Model(name="m"),
    members=(Member(id="a", address="10.0.0.1", port=8000), Member(id="b", address="fd00::1", port=8000)),
    ring_version=1,
)
_CHAIN: Final = chain_blocks(b"what is fuzzing? " * 100, root=chain_root(model="m"), block_tokens=128)
_TEXTS: Final = ("", "a", "10.0.0.1:8000", "[fd00::1]:8000", "é\N{SNOWMAN}", "x" * 1024)


def check(data: bytes) -> None:
    """Check that bytes are either rejected with UnreadableUpdate or read as an update within bounds.

    An update must be equal after encoding and decoding. The input is used twice: as an entry of the store's streams,
    and as choices that build updates. The store's two streams have the same format.
    """
    with suppress(UnreadableUpdate):
        update = decode_update(data)
        _check_times(update)
        assert decode_update(encode_update(update)) == update
        _check_taken(update)
    made = _news(Choices(data))
    read = decode_update(encode_update(made))
    _check_times(read)
    assert read == _as_sent(made)
    _check_taken(read)
    with suppress(UnreadableUpdate):
        decode_update(encode_update(made)[:-1])
        raise AssertionError("decode_update accepted an update without its last byte")


def _check_times(update: ReplicaUpdate) -> None:
    loads, bindings = update.loads.values(), update.bindings
    assert all(0.0 <= seconds <= LONGEST_S for load in loads for seconds in (load.backlog_s, load.held_s))
    assert all(0.0 <= binding.moved_ago_s <= LONGEST_S for binding in bindings)


def _check_taken(update: ReplicaUpdate) -> None:
    """Check that after any update the router still routes requests and encodes its own updates."""
    router = PoolRouter(_POOL, replicated=True)
    router.on_update(1.0, "peer", update, 0.5)
    router.on_bindings(1.0, update.bindings)
    session = update.bindings[0].session if update.bindings else 1
    outcome = router.on_request(1.5, Request(id="r", chain=_CHAIN, arrived_s=1.5, session=session)).answer
    assert not isinstance(outcome, Rejection)
    decode_update(encode_update(router.take_update(2.0)))
    router.on_aborted(2.0, "r")
    status = router.status()
    assert status.held == 0
    assert all(each.in_flight == 0 and each.pending_prefill_tokens == 0 for each in status.endpoints)


def _as_sent(update: ReplicaUpdate) -> ReplicaUpdate:
    """Return an update as decoded by other replicas."""
    loads = {
        member: replace(load, backlog_s=_bounded(load.backlog_s), held_s=_bounded(load.held_s))
        for member, load in update.loads.items()
    }
    bindings = tuple(replace(each, moved_ago_s=_bounded(each.moved_ago_s)) for each in update.bindings)
    return replace(update, loads=loads, bindings=bindings, wanted=())


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), LONGEST_S)


def _news(choices: Choices) -> ReplicaUpdate:
    nodes: dict[int, int] = {}
    loads: dict[str, SharedLoad] = {}
    placements: list[Placement] = []
    bindings: list[SharedBinding] = []
    requests = choices.number(4)
    while choices.more:
        match choices.number() % 4:
            case 0:
                nodes[choices.number(8)] = choices.number(4) or 1
            case 1:
                loads[choices.pick(_TEXTS)] = SharedLoad(
                    pending_prefill_tokens=choices.number(8),
                    backlog_s=choices.pick(_SECONDS),
                    held_s=choices.pick(_SECONDS),
                    in_flight=choices.number(4),
                    active_kv_tokens=choices.number(8),
                )
            case 2:
                hashes = tuple(choices.number(8) for _ in range(choices.number() % 8))
                placements.append(Placement(endpoint=choices.pick(_TEXTS), hashes=hashes))
            case 3:
                bindings.append(
                    SharedBinding(
                        session=choices.number(8),
                        host=choices.pick(_TEXTS),
                        tokens=choices.number(8),
                        version=choices.number(4),
                        moved_ago_s=choices.pick(_SECONDS),
                    )
                )
    return ReplicaUpdate(
        hotness=HotnessCounts(requests=requests, nodes=nodes, split=tuple(nodes)[: requests % 4]),
        loads=loads,
        placements=tuple(placements),
        bindings=tuple(bindings),
        wanted=(requests,),
    )
