"""What engines' token counts correct: the tokens of a block, and index entries that an engine no longer caches."""

from dataclasses import replace
from gc import collect
from itertools import count
from random import Random
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import chain, pool, request, text_of
from dualmap.engines.profile import EngineProfile
from dualmap.fleet.prefix_index import PrefixIndex
from dualmap.pools.pool import Engine, Prefix, Routing
from dualmap.prompts.blocks import chain_blocks
from dualmap.receipt import Receipt
from dualmap.requests import Decision, Usage
from dualmap.router import PoolRouter

TOKENS = 1024
OLD = tuple(f"old {number}" for number in range(8))
"""Prompts that every site has computed, oldest first; enough to know how far prompts differ."""


class Site:
    """A router with one member, whose engine reports what each test says. All prompts have 1024 tokens of 4 bytes."""

    def __init__(
        self, *, tokens: float = 1.0, client: int = 0, old: tuple[str, ...] = OLD, engine: Engine | None = None
    ) -> None:
        self.router = PoolRouter(pool(1, engine=engine))
        self.now = 0.0
        self.tokens = tokens
        self._ids = count()
        for text in old:
            self.serve(text, cached=0, client=client)

    def send(self, text: str, *, client: int = 0, tokens: int = TOKENS, **fields: bool) -> tuple[str, Receipt]:
        name = str(next(self._ids))
        self.now += 1.0
        asked = request(name, text_of(tokens, text), now=self.now, client=client)._replace(**fields)
        decision = self.router.on_request(self.now, asked).answer
        assert isinstance(decision, Decision)
        return name, decision.receipt

    def serve(
        self,
        text: str,
        *,
        cached: int,
        client: int = 0,
        prompt: int | None = None,
        tokens: int = TOKENS,
        late: bool = False,
        **fields: bool,
    ) -> Receipt:
        """Send a prompt, a request with ``fields``; the engine reports ``cached`` tokens of ``prompt``."""
        name, receipt = self.send(text, client=client, tokens=tokens, **fields)
        self.router.on_first_token(self.now, name)
        usage = Usage(prompt_tokens=prompt or round(tokens * self.tokens), cached_tokens=cached)
        self.router.on_finished(self.now, name, None if late else usage)
        if late:
            self.router.on_usage(self.now, name, usage)
        return receipt

    def matched(self, text: str) -> int:
        """Return how many tokens of a prompt the router expects in the cache; the prompt is not served."""
        name, receipt = self.send(text)
        self.router.on_aborted(self.now, name)
        return receipt.matched_tokens

    @property
    def blocks(self) -> int:
        return self.router.status().endpoints[0].indexed_blocks


# Stale entries.


@pytest.mark.parametrize("late", [False, True], ids=["with the end", "after the end"])
def test_index_two_reports_of_missing_blocks_drop_older_entries(late: bool) -> None:
    site = Site()
    assert site.serve(OLD[6], cached=0, late=late).matched_tokens == TOKENS
    assert site.blocks == 8 * 8
    assert site.serve(OLD[5], cached=0, late=late).matched_tokens == TOKENS
    # The two prompts and the prompt that was computed after them remain.
    assert site.blocks == 3 * 8
    assert [site.matched(text) for text in OLD] == [0] * 5 + [TOKENS] * 3


def test_index_one_report_of_missing_blocks_drops_nothing() -> None:
    site = Site()
    site.serve(OLD[7], cached=0)
    site.serve(OLD[7], cached=TOKENS - 16)
    assert site.blocks == 8 * 8


def test_index_two_reports_about_one_prefix_drop_nothing() -> None:
    site = Site()
    site.serve(OLD[7], cached=0)
    site.serve(OLD[7], cached=0)
    site.serve(OLD[7], cached=0)
    assert site.blocks == 8 * 8


def test_index_reports_of_one_client_among_several_drop_nothing() -> None:
    site = Site(client=1)
    for number in (6, 5, 4):
        site.serve(OLD[number], cached=0, client=2)
    assert site.blocks == 8 * 8
    site.serve(OLD[3], cached=0, client=1)
    assert site.matched(OLD[0]) == 0


def test_index_report_that_found_an_older_block_cancels_missing_blocks() -> None:
    site = Site()
    site.serve(OLD[6], cached=0)
    site.serve(OLD[2], cached=TOKENS - 16)
    site.serve(OLD[5], cached=0)
    assert site.blocks == 8 * 8


def test_index_salts_are_not_different_clients() -> None:
    site = Site(client=1)
    for client, number in ((2, 6), (3, 5), (4, 4)):
        site.serve(OLD[number], cached=0, client=client, client_is_salt=True)
    assert site.blocks == 8 * 8


def test_index_report_that_cannot_be_compared_drops_nothing() -> None:
    site = Site()
    for number in (6, 5, 4):
        site.serve(OLD[number], cached=0, comparable=False)
    assert site.blocks == 8 * 8


@pytest.mark.parametrize(("ranks", "left"), [((), 3), ((0,), 3), ((3,), 3), ((0, 1), 8)])
def test_index_of_several_ranks_is_not_corrected(ranks: tuple[int, ...], left: int) -> None:
    site = Site()
    site.router.on_profile(site.now, "m-0", EngineProfile(ranks=ranks, block_tokens=16))
    for number in (6, 5):
        site.serve(OLD[number], cached=0)
    assert site.blocks == left * 8


def test_index_clients_of_short_prompts_are_rivals() -> None:
    site = Site(client=1)
    for number in (6, 5, 4):
        site.now += 120.0
        site.serve("short", cached=0, client=1, tokens=100)
        site.serve(OLD[number], cached=0, client=2)
    assert site.blocks == 8 * 8


def test_index_refuted_drop_makes_later_drops_need_more_reports() -> None:
    site = Site()
    site.router.on_profile(site.now, "m-0", EngineProfile(block_tokens=16))
    for number in (6, 5):
        site.serve(OLD[number], cached=0)
    assert site.blocks == 3 * 8
    assert site.serve(OLD[0], cached=TOKENS - 16).matched_tokens == 0
    for text in ("a", "b", "c", "d"):
        site.serve(text, cached=0)
    for text, left in (("a", 8), ("b", 8), ("c", 8), ("d", 4)):
        site.serve(text, cached=0)
        assert site.blocks == left * 8
    site.now += 600.0
    for text in ("d", "c"):
        site.serve(text, cached=0)
    assert site.blocks == 2 * 8, "an old refutation has no effect"


def test_index_dropped_prompt_that_is_not_found_refutes_nothing() -> None:
    site = Site()
    for number in (6, 5):
        site.serve(OLD[number], cached=0)
    site.serve(OLD[0], cached=0)
    for text in ("a", "b", "a", "b"):
        site.serve(text, cached=0)
    assert site.blocks == 2 * 8


def test_index_divisor_of_cached_tokens_recovers() -> None:
    site = Site()
    site.serve("odd", cached=513)
    for number in range(32):
        site.serve(f"even {number}", cached=512)
    site.serve("even 1", cached=512)
    site.serve("even 2", cached=512)
    assert site.matched(OLD[0]) == TOKENS, "half a prompt may be one block of the engine"


# Reports that never come, or come for requests that did not end.


def test_index_stream_without_usage_teaches_nothing() -> None:
    site = Site()
    for text in (*OLD, *OLD):
        name, _ = site.send(text)
        site.router.on_first_token(site.now, name)
        site.router.on_finished(site.now, name, None)
    assert site.blocks == 8 * 8
    assert site.send("next")[1].prompt_tokens == TOKENS


def test_index_usage_of_an_aborted_request_counts() -> None:
    site = Site()
    for text in (OLD[6], OLD[5]):
        name, _ = site.send(text)
        site.router.on_first_token(site.now, name)
        site.router.on_aborted(site.now, name)
        site.router.on_usage(site.now, name, Usage(prompt_tokens=TOKENS, cached_tokens=0))
    assert site.blocks == 3 * 8


def test_index_usage_without_cached_tokens_drops_nothing() -> None:
    site = Site()
    for text in (OLD[6], OLD[5]):
        name, _ = site.send(text)
        site.router.on_first_token(site.now, name)
        site.router.on_aborted(site.now, name)
        site.router.on_usage(site.now, name, Usage(prompt_tokens=TOKENS))
    assert site.blocks == 8 * 8


def test_predictions_of_ended_requests_keep_no_index() -> None:
    site = Site()
    name, _ = site.send(OLD[0])
    site.router.on_finished(site.now, name, None)
    index = ref(site.router._fleet._caches.index("m-0").tree)
    smaller = replace(pool(1), routing=Routing(prefix=Prefix(block_tokens=64)))
    site.router.on_pool(site.now, replace(smaller, ring_version=2))
    collect()
    assert index() is None
    site.router.on_usage(site.now, name, Usage(prompt_tokens=TOKENS, cached_tokens=0))


def test_completion_that_cannot_be_compared_is_no_stale_hit() -> None:
    site = Site()
    for comparable in (True, False):
        name, _ = site.send(OLD[0], comparable=comparable)
        site.router.on_first_token(site.now, name)
        completion = site.router.on_finished(site.now, name, Usage(prompt_tokens=TOKENS, cached_tokens=0)).answer
        assert completion is not None
        assert (completion.predicted_hit, completion.stale_hit) == (comparable, comparable)


@pytest.mark.parametrize("cached", [TOKENS - 1, TOKENS - 16, TOKENS - 128, TOKENS - 180])
def test_index_shortfall_within_rounding_drops_nothing(cached: int) -> None:
    site = Site()
    site.serve("block of the engine", cached=16)
    for number in (6, 5, 4):
        site.serve(OLD[number], cached=cached)
    assert site.blocks == 9 * 8


@pytest.mark.parametrize("prompt", [TOKENS * 3 // 4, TOKENS * 5 // 4])
def test_index_report_about_another_prompt_length_drops_nothing(prompt: int) -> None:
    site = Site()
    for number in (6, 5, 4):
        site.serve(OLD[number], cached=0, prompt=prompt)
    assert site.blocks == 8 * 8


def test_index_report_of_more_cached_than_prompt_tokens_is_ignored() -> None:
    site = Site()
    site.serve(OLD[6], cached=10**9)
    assert site.blocks == 8 * 8


def test_index_reports_are_ignored_while_few_prompts_were_counted() -> None:
    site = Site(old=OLD[:3])
    for number in (2, 1):
        site.serve(OLD[number], cached=0)
    assert site.blocks == 3 * 8


def test_index_blocks_that_no_prefill_computed_are_no_evidence() -> None:
    site = Site()
    begun = [site.send(text)[0] for text in ("new 1", "new 2")]
    for text in ("new 1", "new 2"):
        assert site.serve(text, cached=0).matched_tokens == TOKENS
    assert site.blocks == 10 * 8
    for name in begun:
        site.router.on_finished(site.now, name, None)


def test_index_entries_used_after_the_missing_blocks_stay() -> None:
    site = Site()
    (in_flight, _), (other, _) = site.send(OLD[0]), site.send("in flight")
    site.serve(OLD[6], cached=0)
    site.serve(OLD[5], cached=0)
    assert [site.matched(text) for text in (OLD[0], "in flight", OLD[1])] == [TOKENS, TOKENS, 0]
    for name in (in_flight, other):
        site.router.on_finished(site.now, name, None)


def test_index_report_of_a_response_without_stream_counts() -> None:
    site = Site()
    for text in ("plain 1", "plain 2", "plain 1", "plain 2"):
        name = text + str(site.now)
        site.now += 1.0
        asked = request(name, text_of(TOKENS, text), now=site.now)
        site.router.on_request(site.now, asked._replace(streamed=False))
        site.now += 1.0
        site.router.on_finished(site.now, name, Usage(prompt_tokens=TOKENS, cached_tokens=0))
    assert [site.matched(text) for text in (*OLD, "plain 2")] == [0] * 8 + [TOKENS]


def test_index_report_of_a_member_that_restarted_meanwhile_is_ignored() -> None:
    site = Site()
    names = [site.send(text)[0] for text in OLD[5:7]]
    (member,) = pool(1).members
    site.router.on_pool(site.now, replace(pool(1), members=(replace(member, incarnation="2"),)))
    site.serve("after the restart", cached=0)
    for name in names:
        site.router.on_finished(site.now, name, Usage(prompt_tokens=TOKENS, cached_tokens=0))
    assert site.matched("after the restart") == TOKENS


# What the engine's profile says.


@pytest.mark.parametrize(("block_tokens", "left"), [(None, 8), (16, 3), (512, 8)])
def test_index_block_of_the_profile_decides_what_rounding_explains(block_tokens: int | None, left: int) -> None:
    site = Site()
    if block_tokens is not None:
        site.router.on_profile(site.now, "m-0", EngineProfile(block_tokens=block_tokens))
    # Without the profile, the block may be as large as the divisor of these counts.
    for text in (OLD[6], OLD[5]):
        assert site.serve(text, cached=512).matched_tokens == TOKENS
    assert site.blocks == left * 8


def test_index_profile_of_another_process_ends_what_usage_taught() -> None:
    site = Site()
    site.router.on_profile(site.now, "m-0", EngineProfile(started_s=100.0))
    site.serve(OLD[6], cached=0)
    cache = site.router._fleet._caches._caches["m-0"]
    assert cache.reports._witnesses
    site.router.on_profile(site.now, "m-0", EngineProfile(started_s=200.0))
    assert site.blocks == 0
    assert cache.reports._witnesses == []
    assert cache.reports.tokens_per_block is None


def test_tokens_per_block_change_the_blocks_of_a_discovered_cache() -> None:
    router = PoolRouter(pool(2))
    indexes = [router._fleet._caches.index(member) for member in ("m-0", "m-1")]
    router.on_profile(0.0, "m-0", EngineProfile(cache_tokens=128 * 100))
    router.on_profile(0.0, "m-1", EngineProfile(cache_tokens=128 * 300))
    assert [index._capacity for index in indexes] == [100, 300]
    for number in range(40):
        router.on_request(float(number), request(str(number), text_of(TOKENS, str(number)), now=float(number)))
        router.on_first_token(float(number), str(number))
        router.on_finished(float(number), str(number), Usage(prompt_tokens=512))
    assert [index._capacity for index in indexes] == [200, 600]
    router.on_profile(50.0, "m-0", EngineProfile(cache_tokens=128 * 50))
    router.on_pool(51.0, replace(pool(3), ring_version=2))
    indexes.append(router._fleet._caches.index("m-2"))
    assert [index._capacity for index in indexes] == [100, 600, Engine().cache_tokens // 64]


def test_tokens_ignore_counts_of_prompts_cut_at_the_discovered_length() -> None:
    site = Site(tokens=0.75)
    site.router.on_profile(0.0, "m-0", EngineProfile(max_model_len=TOKENS))
    for number in range(40):
        assert site.serve(f"prompt {number}", cached=0).prompt_tokens == TOKENS
    site.router.on_profile(1.0, "m-0", EngineProfile(max_model_len=TOKENS + 1))
    for number in range(40):
        receipt = site.serve(f"again {number}", cached=0)
    assert receipt.prompt_tokens == 768


def test_tokens_ignore_counts_of_requests_before_another_block_size() -> None:
    site = Site()
    names = [site.send(f"before {number}")[0] for number in range(40)]
    smaller = replace(pool(1), routing=Routing(prefix=Prefix(block_tokens=64)))
    site.router.on_pool(site.now, replace(smaller, ring_version=2))
    for name in names:
        site.router.on_finished(site.now, name, Usage(prompt_tokens=TOKENS, cached_tokens=0))
    asked = request("whole", "", now=site.now)
    decision = site.router.on_request(
        site.now, asked._replace(chain=chain(text_of(TOKENS, "whole"), block_tokens=64))
    ).answer
    assert isinstance(decision, Decision)
    assert decision.receipt.prompt_tokens == TOKENS


# The limit of an index.


def filled(index: PrefixIndex, prompts: range) -> None:
    for prompt in prompts:
        index.add([1000 * prompt + block for block in range(10)], computed=True)


def test_index_keeps_its_capacity_after_a_drop() -> None:
    index = PrefixIndex(80)
    filled(index, range(8))
    assert index.drop_unused_since(1) == [0]
    assert len(index) == 70
    filled(index, range(10, 20))
    assert len(index) == 80


def test_index_smaller_capacity_evicts_two_blocks_for_each_new_block() -> None:
    index = PrefixIndex(80)
    filled(index, range(8))
    index.approach(50)
    assert len(index) == 80
    filled(index, range(10, 11))
    assert len(index) == 70
    index.approach(80)
    filled(index, range(11, 12))
    assert len(index) == 80
    index.approach(50)
    filled(index, range(20, 40))
    assert len(index) == 50


def test_index_capacity_follows_what_the_member_computed() -> None:
    site = Site(engine=Engine(cache_tokens=128 * 96))
    index = site.router._fleet._caches.index("m-0")
    assert index._capacity == 96
    # The last 96 blocks of 128 tokens that the engine computed: half of them are in prompts with twice the tokens.
    for number in range(3):
        site.serve(f"dense {number}", cached=0, prompt=2 * TOKENS)
    assert index._capacity == 96 * (8 + 3) // (8 + 6)
    for _ in range(100):
        site.serve("dense 0", cached=2 * TOKENS, prompt=2 * TOKENS)
    assert index._capacity == 96 * (8 + 3) // (8 + 6), "cached tokens were counted before"
    for number in range(20):
        site.serve(f"thin {number}", cached=0)
    assert index._capacity > 90


def test_index_mix_of_languages_evicts_nothing() -> None:
    site = Site()
    chance = Random(1)
    tokens_per_block, changes, blocks = site.router._fleet._caches._usage.block_tokens, 0, site.blocks
    for number in range(2000):
        dense = chance.random() < 0.5
        text = f"{'dense' if dense else 'thin'} {number % 20}"
        prompt = 2400 if dense else TOKENS
        site.serve(text, cached=prompt - 16 if site.matched(text) else 0, prompt=prompt)
        assert site.blocks >= blocks
        blocks = site.blocks
        changes += tokens_per_block != site.router._fleet._caches._usage.block_tokens
        tokens_per_block = site.router._fleet._caches._usage.block_tokens
    assert changes <= 20


# Tokens of a block.


@given(st.integers(0, 5000), st.sampled_from([1, 16, 128, 512]), st.integers(1, 1500))
def test_chain_recounted_keeps_blocks_and_keys(length: int, block_tokens: int, recounted: int) -> None:
    chain = chain_blocks(b"x" * length, root=1, block_tokens=block_tokens)
    again = chain.recounted(recounted)
    assert (again.hashes, again.cacheable) == (chain.hashes, chain.cacheable)
    assert again.recounted(recounted) == again
    for blocks in range(len(chain.cacheable) + 1):
        assert again.tokens_of(blocks) == blocks * recounted


def test_tokens_follow_the_engines_counts() -> None:
    site = Site(tokens=0.75)
    for number in range(30):
        first = site.serve(f"prompt {number}", cached=0)
    receipt = site.serve("prompt 0", cached=720)
    assert (receipt.prompt_tokens, receipt.matched_tokens) == (768, 768)
    assert receipt.key.blocks == first.key.blocks
    assert receipt.key.hash == key_without_counts("prompt 0")


def key_without_counts(text: str) -> int:
    """Return the key of a prompt in a router that has no counts."""
    decision = PoolRouter(pool(1)).on_request(0.0, request("a", text_of(TOKENS, text), now=0.0)).answer
    assert isinstance(decision, Decision)
    return decision.receipt.key.hash


def test_tokens_stay_while_counts_agree_within_two_percent() -> None:
    site = Site(tokens=1.019)
    for number in range(40):
        assert site.serve(f"prompt {number}", cached=0).prompt_tokens == TOKENS


@pytest.mark.parametrize("tokens", [0.01, 0.45, 2.8, 1000.0])
def test_tokens_ignore_counts_outside_the_bounds(tokens: float) -> None:
    site = Site(tokens=tokens)
    for number in range(40):
        assert site.serve(f"prompt {number}", cached=0).prompt_tokens == TOKENS


def test_tokens_ignore_counts_of_short_prompts() -> None:
    site = Site(tokens=1.0)
    for number in range(40):
        site.serve(f"prompt {number}", cached=0, tokens=511, prompt=800)
    assert site.send("whole")[1].prompt_tokens == TOKENS


def test_tokens_one_client_among_several_does_not_decide() -> None:
    site = Site(client=1)
    for number in range(400):
        site.serve(f"hostile {number}", cached=0, prompt=2700, client=2)
        if number % 20 == 0:
            site.serve(f"honest {number}", cached=0, client=1)
    assert site.send("whole")[1].prompt_tokens == TOKENS


def test_index_correction_stays_on_while_one_client_sends_other_prompts() -> None:
    site = Site(client=1)
    site.router.on_profile(site.now, "m-0", EngineProfile(block_tokens=16))
    for number in range(100):
        site.serve(f"hostile {number}", cached=0, prompt=2700 if number % 2 else 600, client=2)
        if number % 10 == 0:
            site.serve(OLD[number // 20], cached=TOKENS - 16, client=1)
    for number in (7, 6):
        site.serve(OLD[number], cached=0, client=number)
    assert site.matched(OLD[5]) == 0


def test_tokens_of_token_ids_are_exact() -> None:
    site = Site(tokens=0.75)
    for number in range(30):
        site.serve(f"prompt {number}", cached=0)
    ids = chain_blocks(text_of(TOKENS, "ids").encode(), root=1, block_tokens=128, exact=True)
    asked = request("ids", "", now=site.now)
    decision = site.router.on_request(site.now, asked._replace(chain=ids)).answer
    assert isinstance(decision, Decision)
    assert decision.receipt.prompt_tokens == TOKENS


def test_tokens_per_block_change_the_blocks_of_a_cache() -> None:
    small = replace(pool(1), engine=Engine(cache_tokens=128 * 100))
    router = PoolRouter(small)
    index = router._fleet._caches.index("m-0")
    assert index._capacity == 100
    for number in range(40):
        router.on_request(float(number), request(str(number), text_of(TOKENS, str(number)), now=float(number)))
        router.on_first_token(float(number), str(number))
        router.on_finished(float(number), str(number), Usage(prompt_tokens=512))
    assert index._capacity == 200
