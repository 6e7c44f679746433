"""Tests of the cached tokens that are predicted for a queued request when it is sent to its member."""

from dataclasses import replace

from builders import MODEL, request, text_of
from core.queue_pools import slow_pool
from dualmap.engines.events import Batch, Event, Removed, Stored
from dualmap.engines.profile import EngineProfile
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.engines.token_chain import pack_tokens, token_root
from dualmap.pools.pool import KvEvents, Pool
from dualmap.prompts.blocks import chain_blocks
from dualmap.receipt import Receipt
from dualmap.requests import Decision, Effects, Queued, Request, Usage
from dualmap.router import PoolRouter

IDS = list(range(1, 1026))
OTHER_IDS = list(range(5001, 8001))


def receipt(effects: Effects[object], request_id: str) -> Receipt:
    (decision,) = (each for each in effects.outcomes if each.request_id == request_id)
    assert isinstance(decision, Decision)
    return decision.receipt


class TestRecords:
    def test_prediction_after_a_restart_in_the_queue_is_a_miss(self) -> None:
        router = PoolRouter(slow_pool())
        router.on_profile(0.0, "m-0", EngineProfile(started_s=100.0))
        router.on_request(0.0, request("a", text_of(1024, "a")))
        router.on_finished(10.0, "a")
        router.on_request(10.0, request("busy", text_of(2000, "busy"), now=10.0))
        assert isinstance(router.on_request(10.0, request("b", text_of(1024, "a"), now=10.0)).answer, Queued)
        router.on_profile(11.0, "m-0", EngineProfile(started_s=200.0))
        assert receipt(router.on_finished(12.0, "busy"), "b").matched_tokens == 0
        completion = router.on_finished(13.0, "b", Usage(prompt_tokens=1024, cached_tokens=0)).answer
        assert completion is not None
        assert (completion.predicted_cached_tokens, completion.stale_hit) == (0, False)

    def test_prediction_without_a_change_stays(self) -> None:
        router = PoolRouter(slow_pool())
        router.on_request(0.0, request("a", text_of(1024, "a")))
        router.on_finished(10.0, "a")
        router.on_request(10.0, request("busy", text_of(2000, "busy"), now=10.0))
        router.on_request(10.0, request("b", text_of(1024, "a"), now=10.0))
        assert receipt(router.on_finished(12.0, "busy"), "b").matched_tokens == 1024

    def test_prompt_whose_first_request_is_aborted_is_a_miss(self) -> None:
        router = PoolRouter(slow_pool())
        for each in ("busy", "a", "b"):
            router.on_request(0.0, request(each, text_of(2048, "busy" if each == "busy" else "a")))
        router.on_aborted(1.0, "a")
        assert receipt(router.on_finished(2.0, "busy"), "b").matched_tokens == 0


class TestEvents:
    def setup_method(self) -> None:
        self.router = PoolRouter(events_pool())
        self.send(Stored(hashes=tuple(range(20)), parent=None, tokens=pack_tokens(IDS[:320]), block_tokens=16))
        self.ask("busy", OTHER_IDS)

    def send(self, *events: Event) -> None:
        status = SourceStatus(state=SourceState.LIVE, sequence=0)
        self.router.on_kv_events("m-0", 0, [Batch(events=events)], status)

    def ask(self, request_id: str, ids: list[int]) -> object:
        packed = pack_tokens(ids)
        tokens = PromptTokens(packed, root=token_root(model=MODEL))
        chain = chain_blocks(packed, root=7, block_tokens=128, exact=True)
        return self.router.on_request(0.0, Request(id=request_id, chain=chain, arrived_s=0.0, tokens=tokens)).answer

    def test_removed_blocks_are_not_predicted(self) -> None:
        assert isinstance(self.ask("a", IDS), Queued)
        self.send(Removed(hashes=tuple(range(10, 20))))
        said = receipt(self.router.on_finished(1.0, "busy"), "a")
        assert (said.matched_tokens, said.source) == (160, "events")

    def test_blocks_that_were_stored_meanwhile_are_predicted(self) -> None:
        self.ask("a", IDS)
        tokens = pack_tokens(IDS[320:480])
        self.send(Stored(hashes=tuple(range(20, 30)), parent=19, tokens=tokens, block_tokens=16))
        assert receipt(self.router.on_finished(1.0, "busy"), "a").matched_tokens == 480

    def test_first_of_equal_prompts_is_not_predicted_by_later_ones(self) -> None:
        for each in ("a", "b"):
            self.ask(each, IDS)
        effects = self.router.on_finished(1.0, "busy")
        assert receipt(effects, "a").matched_tokens == 320
        # The second request's prompt is claimed by the first one.
        assert receipt(effects, "b").matched_tokens == 1024

    def test_member_that_is_no_longer_followed_is_predicted_by_the_record(self) -> None:
        self.ask("a", IDS)
        failed = SourceStatus(state=SourceState.FAILED, sequence=0)
        self.router.on_kv_events("m-0", 0, [], failed)
        said = receipt(self.router.on_finished(1.0, "busy"), "a")
        assert (said.matched_tokens, said.source) == (320, "records")


def events_pool() -> Pool:
    slow = slow_pool()
    return replace(slow, engine=replace(slow.engine, kv_events=KvEvents(enabled=True)))
