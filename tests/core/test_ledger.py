from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from builders import chain, text_of
from dualmap.ledger import ENTRY_TTL_S, Entry, Ledger

SPEED = 1000.0


def entry(id: str, member: str, now: float, *, tokens: int = 1000, matched: int = 0) -> Entry:
    prompt = chain(text_of(tokens, id))
    return Entry(
        request_id=id,
        member=member,
        chain=prompt,
        matched_tokens=matched,
        arrived_s=now,
        dispatched_s=now,
        predicted_ttft_s=0.0,
        compute_s=(tokens - matched) / SPEED,
        heard_s=now,
    )


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, wrong and repeated ones too: the sums are those of the live requests, always."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SPEED)
        self.now = 0.0
        self.ids = 0

    names = st.integers(0, 30).map(str)

    @rule(member=st.sampled_from("abc"), tokens=st.integers(0, 3000), part=st.floats(0, 1), dt=st.floats(0, 5))
    def enter(self, member: str, tokens: int, part: float, dt: float) -> None:
        self.now += dt
        self.ids += 1
        self.ledger.enter(self.now, entry(str(self.ids), member, self.now, tokens=tokens, matched=int(tokens * part)))

    @rule(name=names, dt=st.floats(0, 5))
    def first_token(self, name: str, dt: float) -> None:
        self.now += dt
        self.ledger.first_token(self.now, name)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.ledger.leave(self.now, name)

    @rule(name=names, to=st.sampled_from("abcd"))
    def move(self, name: str, to: str) -> None:
        if live := self.ledger.entry(name):
            self.ledger.move(self.now, live, to=to, matched_tokens=0, compute_s=live.chain.tokens / SPEED)

    @rule(dt=st.sampled_from([1.0, ENTRY_TTL_S / 2, ENTRY_TTL_S]))
    def expire(self, dt: float) -> None:
        self.now += dt
        self.ledger.expire(self.now)
        assert (expiry := self.ledger.next_expiry()) is None or expiry > self.now

    @rule(members=st.sets(st.sampled_from("abcd")))
    def retain(self, members: set[str]) -> None:
        self.ledger.retain(members)

    @invariant()
    def loads_are_the_sums_of_live_requests(self) -> None:
        live = [found for n in range(self.ids + 1) if (found := self.ledger.entry(str(n)))]
        assert len(live) == self.ledger.live_requests()
        for member in "abcd":
            load, own = self.ledger.load(member), [each for each in live if each.member == member]
            assert load.in_flight == len(own)
            assert load.active_kv_tokens == sum(each.chain.tokens for each in own)
            assert load.pending_prefill_tokens == sum(each.new_tokens for each in own if not each.prefilled)
            assert load.queue_s(self.now, 3.0) >= 0.0
            if not load.pending_prefill_tokens:
                assert load.queue_s(self.now, 3.0) < 1e-6 or any(not each.prefilled for each in own)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_the_queue_shrinks_while_its_head_is_computed() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    ledger.enter(0.0, entry("2", "a", 0.0))
    load = ledger.load("a")
    assert load.queue_s(0.0, 3.0) == 2.0
    assert load.queue_s(0.4, 3.0) == 1.6
    # The head is late: its own second is spent, the other's is still to come.
    assert load.queue_s(2.0, 3.0) == 1.0
    ledger.first_token(2.0, "1")
    assert load.queue_s(2.0, 3.0) == 1.0


def test_a_decode_stall_adds_the_time_without_a_completed_prefill() -> None:
    # Paper section A.7: no prefill completed for T = 3 s with a non-empty queue. The head may take its own time first.
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    load = ledger.load("a")
    assert load.queue_s(4.0, 3.0) == 0.0
    assert load.queue_s(4.1, 3.0) == 4.1
    ledger.first_token(5.0, "1")
    assert load.queue_s(5.0, 3.0) == 0.0


def test_news_puts_off_expiry() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    ledger.enter(1.0, entry("2", "a", 1.0))
    ledger.first_token(ENTRY_TTL_S - 1, "1")
    assert [each.request_id for each in ledger.expire(ENTRY_TTL_S + 1)] == ["2"]
    assert [each.request_id for each in ledger.expire(2 * ENTRY_TTL_S - 1)] == ["1"]
    assert ledger.load("a").in_flight == 0


def test_a_prefill_that_overtakes_does_not_teach_speed() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("long", "a", 0.0, tokens=10_000))
    ledger.enter(0.0, entry("short", "a", 0.0, tokens=100))
    before = ledger.load("a").speed
    ledger.first_token(0.2, "short")
    assert ledger.load("a").speed == before
    ledger.first_token(20.0, "long")
    assert ledger.load("a").speed.tokens_per_second < before.tokens_per_second
