"""Tests of the KV events of the engine model, and of their agreement with the router's account of held blocks."""

from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dualmap.engines.block_table import COPIES_MAX
from dualmap.engines.events import Batch, Cleared, Removed, Stored, read_batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.token_chain import TokenChain, chain_tokens, token_root
from dualmap.prompts.blocks import chain_blocks, chain_root
from dualmap_sim.block_pool import BlockPool, EventBatch
from dualmap_sim.engine import Engine, EngineEvent, EngineRequest, FirstToken
from dualmap_sim.engine_requests import Content
from dualmap_sim.kv_messages import message_of
from dualmap_sim.presets import EngineConfig
from engines import GROWING, ROUND, ask, first_tokens, run_out

BLOCK = 16
BLOCKS = 24
"""The physical blocks of the engine, of which one is the placeholder."""
SMALL = replace(GROWING, block_tokens=BLOCK, kv_memory_tokens=20 * BLOCK, cache_tokens=BLOCKS * BLOCK)
CHUNKED = replace(SMALL, chunk_tokens=40)


def with_events(config: EngineConfig) -> Engine:
    blocks = config.cache_tokens // config.block_tokens
    return Engine(config, cache=BlockPool(blocks, block_tokens=config.block_tokens))


def stores(batches: list[EventBatch]) -> list[tuple[float, tuple[int, ...]]]:
    return [(each.at_s, item.hashes) for each in batches for item in each.events if isinstance(item, Stored)]


def prompt(name: int, tokens: int) -> bytes:
    """Return packed token ids; all prompts share two blocks, and prompts of one name share everything."""
    ids = [n if n < 2 * BLOCK else 1000 * name + n for n in range(tokens)]
    return b"".join(each.to_bytes(4, "little") for each in ids)


def request_of(name: str, tokens: bytes, *, answer: bytes, salt: str = "", adapter: str = "") -> EngineRequest:
    root = chain_root(model="m", lora=adapter, cache_salt=salt)
    return EngineRequest(
        request_id=name,
        prompt_tokens=len(tokens) // 4,
        output_tokens=len(answer) // 4,
        blocks=chain_blocks(tokens + answer, root=root, block_tokens=BLOCK).cacheable,
        content=Content(tokens=tokens + answer, adapter=adapter, cache_salt=salt),
    )


def test_blocks_of_a_prompt_are_reported_with_its_first_token() -> None:
    engine = with_events(ROUND)
    engine.submit(0.0, ask("a", prompt=100, output=3, blocks=range(1, 11)))
    events = run_out(engine)

    assert stores(engine.take_event_batches()) == [(first_tokens(events)["a"], tuple(range(1, 11)))]


def test_blocks_of_a_long_prompt_are_reported_by_chunk() -> None:
    engine = with_events(replace(ROUND, chunk_tokens=45))
    engine.submit(0.0, ask("a", prompt=100, output=1, blocks=range(1, 11)))
    events = run_out(engine)

    reported = stores(engine.take_event_batches())
    assert [hashes for _, hashes in reported] == [(1, 2, 3, 4), (5, 6, 7, 8, 9), (10,)]
    assert all(before < after for before, after in pairwise(at_s for at_s, _ in reported))
    assert reported[-1][0] == first_tokens(events)["a"]


def test_blocks_of_an_answer_are_reported_when_complete() -> None:
    engine = with_events(ROUND)
    # The last token of the answer has no KV: the tokens 0 to 43 have it.
    engine.submit(0.0, ask("a", prompt=15, output=30, blocks=range(1, 6)))
    start_s = first_tokens(run_out(engine))["a"]

    # A step takes a quarter of a second. Step 5 computes token 19, and step 15 token 29.
    assert stores(engine.take_event_batches()) == [
        (start_s, (1,)),
        (pytest.approx(start_s + 5 * 0.25), (2,)),
        (pytest.approx(start_s + 15 * 0.25), (3,)),
        (pytest.approx(start_s + 25 * 0.25), (4,)),
    ]


def test_answer_block_without_a_hash_takes_memory_only() -> None:
    engine = with_events(replace(ROUND, cache_tokens=50))
    engine.submit(0.0, ask("a", prompt=15, output=20, blocks=(1,)))
    run_out(engine)
    engine.submit(engine.now_s, ask("b", prompt=31, blocks=(2, 3, 4)))
    run_out(engine)

    removals = [item for each in engine.take_event_batches() for item in each.events if isinstance(item, Removed)]
    assert removals == [Removed(hashes=(1,), group=0)] or removals == []
    assert engine.cached_tokens(ask("c", prompt=31, blocks=(2, 3, 4))) == 30


def test_next_event_time_contains_completed_answer_blocks() -> None:
    engine = with_events(ROUND)
    engine.submit(0.0, ask("a", prompt=19, output=30, blocks=range(1, 6)))
    (first,) = engine.advance(engine.next_event_s() or 0.0)
    engine.take_event_batches()

    assert engine.next_event_s() == pytest.approx(first.at_s + 0.25)
    assert engine.advance(first.at_s + 0.25) == []
    assert stores(engine.take_event_batches()) == [(pytest.approx(first.at_s + 0.25), (2,))]


def test_repeated_prompt_causes_no_event() -> None:
    engine = with_events(ROUND)
    engine.submit(0.0, ask("a", prompt=45, blocks=(1, 2, 3, 4)))
    run_out(engine)
    engine.take_event_batches()
    engine.submit(engine.now_s, ask("b", prompt=45, blocks=(1, 2, 3, 4)))
    (token, _) = run_out(engine)

    assert isinstance(token, FirstToken)
    assert token.cached_tokens == 40
    assert engine.take_event_batches() == []


def test_clear_event_of_a_reset_comes_with_the_next_step() -> None:
    engine = with_events(ROUND)
    engine.submit(0.0, ask("a", prompt=45, blocks=(1, 2, 3, 4)))
    run_out(engine)
    engine.take_event_batches()

    assert engine.reset_cache()
    engine.advance(engine.now_s + 100.0)
    assert engine.take_event_batches() == []
    engine.submit(engine.now_s, ask("b", prompt=15, blocks=(7,)))
    run_out(engine)
    (batch,) = engine.take_event_batches()
    assert batch.events[0] == Cleared()
    assert isinstance(batch.events[1], Stored)


def test_batches_are_numbered_from_0_in_each_life() -> None:
    for _ in range(2):
        engine = with_events(ROUND)
        for number in range(3):
            engine.submit(engine.now_s if number else 0.0, ask(str(number), prompt=15, blocks=(number,)))
            run_out(engine)
        assert [each.number for each in engine.take_event_batches()] == [0, 1, 2]


def test_reset_without_events_empties_the_cache() -> None:
    engine = Engine(ROUND)
    engine.submit(0.0, ask("a", prompt=45, blocks=(1, 2, 3, 4)))
    run_out(engine)

    assert engine.reset_cache()
    assert engine.cached_tokens(ask("b", prompt=45, blocks=(1, 2, 3, 4))) == 0
    assert engine.take_event_batches() == []


def test_requests_in_flight_share_the_memory_with_the_cache() -> None:
    engine = with_events(replace(ROUND, cache_tokens=310))
    assert engine.memory_tokens == 300
    engine.submit(0.0, ask("a", prompt=151, output=9, blocks=range(1, 16)))
    engine.submit(0.0, ask("b", prompt=151, output=9, blocks=range(21, 36)))
    engine.advance(0.0)

    assert engine.running == 1
    assert engine.waiting == 1
    run_out(engine)
    assert engine.running + engine.waiting == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What happens next: a request, an abort, or a reset."""

    kind: str
    name: int
    prompt: int
    answer: int
    salt: str
    adapter: str
    wait_s: float


ACTS = st.builds(
    Act,
    kind=st.sampled_from(("ask",) * 8 + ("abort", "reset")),
    name=st.integers(1, 5),
    # Prompts that end with a full block are frequent.
    prompt=st.integers(1, 9).map(lambda blocks: blocks * BLOCK) | st.integers(1, 9 * BLOCK),
    answer=st.integers(1, 60),
    salt=st.sampled_from(("", "", "", "tenant")),
    adapter=st.sampled_from(("", "", "", "tuned")),
    wait_s=st.sampled_from((0.0, 0.0, 0.1, 1.0, 30.0)),
)


class Router:
    """Follows an engine's events and predicts the cached tokens of its requests."""

    def __init__(self, *, as_arrays: bool) -> None:
        self.as_arrays = as_arrays
        self.residency = Residency(HeldBlocks(), model="m", capacity_blocks=BLOCKS - 1)

    def follow(self, engine: Engine) -> None:
        for each in engine.take_event_batches():
            message = message_of(each.events, at_s=each.at_s, as_arrays=self.as_arrays, adapters=("tuned",))
            batch = read_batch(msgspec.msgpack.decode(msgspec.msgpack.encode(message)))
            if not self.as_arrays:
                assert batch == Batch(events=each.events, sent_s=each.at_s)
            assert isinstance(batch, Batch)
            assert not batch.invalid_events
            assert not batch.unknown_fields
            self.residency.apply(0, batch)

    def cached_tokens(self, request: EngineRequest) -> int:
        assert request.content is not None
        content = request.content
        root = token_root(model="m", adapter=content.adapter, cache_salt=content.cache_salt)
        packed = content.tokens[: request.prompt_tokens * 4]
        chain: TokenChain = chain_tokens(packed, root=root, block_tokens=BLOCK)
        return self.residency.matched_tokens(chain)


@pytest.mark.parametrize("config", [SMALL, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("as_arrays", [False, True], ids=["maps", "arrays"])
@given(acts=st.lists(ACTS, max_size=30))
def test_residency_agrees_with_the_engine(config: EngineConfig, as_arrays: bool, acts: list[Act]) -> None:
    engine, router = with_events(config), Router(as_arrays=as_arrays)
    pool = engine.cache
    assert isinstance(pool, BlockPool)
    asked: list[EngineRequest] = []
    predicted: dict[str, int] = {}
    now, is_capped, is_reset = 0.0, False, False

    def is_exact() -> bool:
        """Return whether the router counts all copies. In maps, a copy of a first block looks like a report."""
        return not is_capped and not router.residency.counts.reported

    def check(events: list[EngineEvent]) -> None:
        for each in events:
            if isinstance(each, FirstToken) and each.request_id in predicted and is_exact():
                assert each.cached_tokens == predicted[each.request_id]

    for number, act in enumerate(acts):
        if act.kind == "abort" and asked:
            engine.abort(now, asked[-1].request_id)
        elif act.kind == "reset":
            is_reset |= engine.reset_cache()
        else:
            answer = prompt(act.name + 10, act.answer)
            request = request_of(
                str(number), prompt(act.name, act.prompt), answer=answer, salt=act.salt, adapter=act.adapter
            )
            if not engine.running + engine.waiting and not is_reset:
                predicted[request.request_id] = router.cached_tokens(request)
            asked.append(request)
            engine.submit(now, request)
        now += act.wait_s
        check(engine.advance(now))
        router.follow(engine)
        is_capped |= max(pool.copies.values(), default=0) > COPIES_MAX
        is_reset &= act.kind != "ask" or engine.running + engine.waiting > 0
    check(run_out(engine))
    # A removal or a reset after the last step is reported with the next one.
    engine.submit(max(engine.now_s, now), request_of("last", prompt(9, 20), answer=prompt(9, 1)))
    run_out(engine)
    router.follow(engine)

    assert router.residency.counts.drifts == 0
    event(f"exact: {is_exact()}")
    event(f"predictions: {any(predicted.values())}")
    event(f"copies: {any(copies > 1 for copies in pool.copies.values())}")
    event(f"removals: {router.residency.counts.removed > 0}")
    for request in asked:
        assert router.cached_tokens(request) <= engine.cached_tokens(request)
        if is_exact():
            assert router.cached_tokens(request) == engine.cached_tokens(request)
    if is_exact():
        assert router.residency.blocks == len(pool.copies)
        assert router.residency.counts.unknown_removals == 0


@pytest.mark.parametrize("config", [SMALL, CHUNKED], ids=["whole", "chunked"])
@given(acts=st.lists(ACTS.filter(lambda act: act.kind == "ask"), max_size=12))
def test_pool_with_ample_memory_changes_no_times(config: EngineConfig, acts: list[Act]) -> None:
    ample = replace(config, cache_tokens=100 * BLOCK * BLOCKS)

    def run(engine: Engine) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        now = 0.0
        for number, act in enumerate(acts):
            answer = b"".join((10**6 + 100 * number + n).to_bytes(4, "little") for n in range(act.answer))
            engine.submit(now, request_of(str(number), prompt(act.name, act.prompt), answer=answer))
            now += act.wait_s
            events += engine.advance(now)
        return events + run_out(engine)

    assert run(with_events(ample)) == run(Engine(ample))
