"""Tests of the physical blocks of an engine with KV events."""

from dualmap.engines.events import Cleared, Removed, Stored
from dualmap.engines.token_chain import pack_tokens
from dualmap_sim.block_pool import BlockPool, stand_in_tokens
from dualmap_sim.engine_requests import Content, EngineRequest

BLOCK = 10


def serve(pool: BlockPool, request_id: str, *blocks: int, tokens: int | None = None) -> None:
    """Compute and end a request whose prompt has the given blocks and one more token."""
    request = ask(request_id, *blocks, tokens=tokens)
    begin(pool, request)
    pool.fill(request_id, request.prompt_tokens)
    pool.end(request_id)


def ask(request_id: str, *blocks: int, tokens: int | None = None, content: Content | None = None) -> EngineRequest:
    length = len(blocks) * BLOCK + 1 if tokens is None else tokens
    return EngineRequest(request_id=request_id, prompt_tokens=length, output_tokens=1, blocks=blocks, content=content)


def begin(pool: BlockPool, request: EngineRequest) -> None:
    hits = pool.match(request.blocks[: (request.prompt_tokens - 1) // BLOCK])
    pool.begin(request, need_tokens=request.prompt_tokens + 1, cached_tokens=hits * BLOCK)


def removed(pool: BlockPool) -> list[int]:
    return [block for event in pool.take_events() if isinstance(event, Removed) for block in event.hashes]


def test_pool_uses_all_blocks_but_the_placeholder() -> None:
    pool = BlockPool(64, block_tokens=BLOCK)

    assert pool.usable_tokens == 63 * BLOCK
    assert pool.admits(63 * BLOCK)
    assert not pool.admits(63 * BLOCK + 1)


def test_pool_admits_as_if_nothing_were_shared() -> None:
    pool = BlockPool(11, block_tokens=BLOCK)
    serve(pool, "a", 1, 2, 3)
    begin(pool, ask("b", 1, 2, 3))

    assert pool.admits(6 * BLOCK)
    assert not pool.admits(6 * BLOCK + 1)


def test_store_has_the_blocks_behind_the_reused_ones() -> None:
    pool = BlockPool(64, block_tokens=BLOCK)
    serve(pool, "a", 1, 2)
    pool.take_events()
    serve(pool, "b", 1, 2, 3, 4)

    (event,) = pool.take_events()
    assert isinstance(event, Stored)
    assert (event.parent, event.hashes) == (2, (3, 4))
    assert event.tokens == stand_in_tokens((3, 4), block_tokens=BLOCK)
    assert event.new


def test_full_hit_causes_no_event() -> None:
    pool = BlockPool(64, block_tokens=BLOCK)
    serve(pool, "a", 1, 2)
    pool.take_events()
    serve(pool, "b", 1, 2)

    assert pool.take_events() == ()


def test_aligned_prompt_stores_its_last_block_a_second_time() -> None:
    pool = BlockPool(64, block_tokens=BLOCK)
    serve(pool, "a", 1, 2, tokens=20)
    pool.take_events()
    serve(pool, "b", 1, 2, tokens=20)

    (event,) = pool.take_events()
    assert isinstance(event, Stored)
    assert (event.parent, event.hashes) == (1, (2,))
    assert pool.copies == {1: 1, 2: 2}


def test_each_copy_is_removed_when_its_block_is_used_again() -> None:
    pool = BlockPool(7, block_tokens=BLOCK)
    serve(pool, "a", 1, 2, tokens=20)
    serve(pool, "b", 1, 2, tokens=20)
    pool.take_events()

    # Three of the six blocks are empty. The removals begin with the first copy of the prompt's last block.
    serve(pool, "c", 7, 8, 9, tokens=30)
    assert removed(pool) == []
    serve(pool, "d", 10, tokens=10)
    assert removed(pool) == [2]
    assert pool.copies[2] == 1
    serve(pool, "e", 11, 12, tokens=20)
    assert removed(pool) == [2, 1]
    assert 2 not in pool


def test_removal_comes_in_the_batch_before_the_store() -> None:
    pool = BlockPool(3, block_tokens=BLOCK)
    serve(pool, "a", 1, 2, tokens=20)
    pool.take_events()
    begin(pool, ask("b", 3, 4, tokens=20))
    assert pool.take_events() == ()
    pool.fill("b", 20)

    first, second = pool.take_events()
    assert first == Removed(hashes=(2, 1), group=0)
    assert isinstance(second, Stored)


def test_partly_filled_block_displaces_a_cached_one() -> None:
    pool = BlockPool(3, block_tokens=BLOCK)
    serve(pool, "a", 1, 2, tokens=20)
    pool.take_events()
    serve(pool, "b", 9, tokens=3)

    assert pool.take_events() == (Removed(hashes=(2,), group=0),)


def test_blocks_in_use_are_not_displaced() -> None:
    pool = BlockPool(5, block_tokens=BLOCK)
    begin(pool, ask("a", 1, 2, tokens=20))
    pool.fill("a", 20)
    serve(pool, "b", 3, 4, tokens=20)
    serve(pool, "c", 5, 6, tokens=20)

    assert pool.match((1, 2)) == 2
    assert pool.match((3,)) == 0


def test_shared_block_stays_until_its_last_request_ends() -> None:
    pool = BlockPool(4, block_tokens=BLOCK)
    serve(pool, "a", 1, tokens=10)
    begin(pool, ask("b", 1, tokens=11))
    begin(pool, ask("c", 1, tokens=11))
    pool.end("b")
    serve(pool, "d", 5, 6, tokens=20)

    assert pool.match((1,)) == 1
    pool.end("c")
    serve(pool, "e", 7, 8, 9, tokens=30)
    assert pool.match((1,)) == 0


def test_content_gives_tokens_adapter_and_salt() -> None:
    ids = list(range(21))
    content = Content(tokens=pack_tokens(ids), adapter="tuned", cache_salt="tenant")
    pool = BlockPool(9, block_tokens=BLOCK)
    begin(pool, ask("a", 1, 2, content=content))
    pool.fill("a", 10)
    pool.fill("a", 21)

    first, second = pool.take_events()
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.tokens, first.adapter, first.salt, first.new) == (pack_tokens(ids[:10]), "tuned", "tenant", False)
    assert (second.tokens, second.adapter, second.salt, second.new) == (pack_tokens(ids[10:20]), "tuned", "", True)


def test_reset_is_refused_while_a_request_is_in_flight() -> None:
    pool = BlockPool(9, block_tokens=BLOCK)
    begin(pool, ask("a", 1, 2))
    pool.fill("a", 21)
    pool.take_events()

    assert not pool.reset()
    assert pool.take_events() == ()
    pool.end("a")
    assert pool.reset()
    assert pool.take_events() == (Cleared(),)
    assert pool.match((1,)) == 0
    serve(pool, "b", 1, 2)
    assert removed(pool) == []


def test_insert_computes_a_prompt_as_far_as_blocks_are_free() -> None:
    pool = BlockPool(4, block_tokens=BLOCK)
    pool.insert((1, 2))
    pool.insert((1, 2, 3, 4, 5))

    assert pool.match((1, 2, 3, 4)) == 3
    assert pool.admits(30)
