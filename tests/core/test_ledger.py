from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from builders import chain, text_of
from dualmap.fleet.in_flight import InFlightRequest, Stage
from dualmap.fleet.kv import SILENT_DECODE_S
from dualmap.fleet.ledger import IN_FLIGHT_TTL_S, Ledger
from dualmap.fleet.load import MemberLoad
from dualmap.fleet.prefills import SILENT_PREFILL_S
from dualmap.fleet.prefix_index import PrefixIndex
from dualmap.fleet.usage import MemberReports, Origin, Prediction, predict
from dualmap.prompts.blocks import BlockChain

SPEED = 1000.0


def entry(
    id: str, member: str, now: float, *, tokens: int = 1000, matched: int = 0, streamed: bool = True
) -> InFlightRequest:
    prompt = chain(text_of(tokens, id))
    return InFlightRequest(
        request_id=id,
        member=member,
        chain=prompt,
        matched_tokens=matched,
        prediction=prediction(now, prompt, matched),
        arrived_s=now,
        dispatched_s=now,
        predicted_ttft_s=0.0,
        compute_s=(tokens - matched) / SPEED,
        heard_s=now,
        streamed=streamed,
    )


def prediction(now: float, prompt: BlockChain, matched: int) -> Prediction:
    return predict(
        now,
        prompt,
        member="m",
        index=PrefixIndex(0),
        reports=MemberReports(),
        origin=Origin(client=0, comparable=True),
        matched_tokens=matched,
    )


class LedgerMachine(RuleBasedStateMachine):
    """For any order of events, including wrong and repeated events, the sums equal those of the open requests."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SPEED)
        self.now = 0.0
        self.ids = 0

    names = st.integers(0, 30).map(str)

    @rule(
        member=st.sampled_from("abc"),
        tokens=st.integers(0, 3000),
        part=st.floats(0, 1),
        dt=st.floats(0, 5),
        streamed=st.booleans(),
    )
    def enter(self, member: str, tokens: int, part: float, dt: float, streamed: bool) -> None:
        self.now += dt
        self.ids += 1
        made = entry(str(self.ids), member, self.now, tokens=tokens, matched=int(tokens * part), streamed=streamed)
        self.ledger.enter(self.now, made)

    @rule(member=st.sampled_from("abc"), dt=st.floats(0, 5) | st.sampled_from([SILENT_PREFILL_S, SILENT_DECODE_S]))
    def settle(self, member: str, dt: float) -> None:
        self.now += dt
        self.ledger.loads[member].end_overdue(self.now)

    @rule(name=names, dt=st.floats(0, 5))
    def first_token(self, name: str, dt: float) -> None:
        self.now += dt
        self.ledger.first_token(self.now, name)

    @rule(name=names, dt=st.floats(0, 100))
    def heard(self, name: str, dt: float) -> None:
        self.now += dt
        self.ledger.heard(self.now, name)

    @rule(name=names)
    def finish(self, name: str) -> None:
        self.ledger.finish(self.now, name)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.ledger.leave(self.now, name)

    @rule(name=names, to=st.sampled_from("abcd"))
    def move(self, name: str, to: str) -> None:
        if live := self.ledger.request(name):
            moved = prediction(self.now, live.chain, 0)
            self.ledger.move(self.now, live, to=to, prediction=moved, compute_s=live.chain.tokens / SPEED)

    @rule(dt=st.sampled_from([1.0, IN_FLIGHT_TTL_S / 2, IN_FLIGHT_TTL_S]))
    def expire(self, dt: float) -> None:
        self.now += dt
        self.ledger.expire(self.now)
        assert (expiry := self.ledger.next_expiry()) is None or expiry > self.now

    @rule(members=st.sets(st.sampled_from("abcd")))
    def retain(self, members: set[str]) -> None:
        self.ledger.retain(members)

    @invariant()
    def loads_are_the_sums_of_live_requests(self) -> None:
        live = [found for n in range(self.ids + 1) if (found := self.ledger.request(str(n)))]
        for member in "abcd":
            load, own = self.ledger.loads[member], [each for each in live if each.member == member]
            pending = [each for each in own if each.stage is Stage.PENDING]
            working = [each for each in own if each.stage is not Stage.SILENT]
            assert not any(each.prefilled for each in pending)
            assert load.in_flight == len(own)
            assert load.working == len(working)
            assert load.kv.tokens == sum(each.chain.tokens for each in working)
            assert load.prefills.tokens == sum(each.new_tokens for each in pending)
            assert load.queue_s(self.now, 3.0) >= 0.0
            if not load.prefills.tokens:
                assert load.queue_s(self.now, 3.0) < 1e-6 or pending


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase


def test_ledger_queue_time_shrinks_during_a_prefill() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    ledger.enter(0.0, entry("2", "a", 0.0))
    load = ledger.loads["a"]
    assert load.queue_s(0.0, 3.0) == 2.0
    assert load.queue_s(0.4, 3.0) == 1.6
    # The first prefill is late: its estimated second has passed, but the second prefill's second remains.
    assert load.queue_s(2.0, 3.0) == 1.0
    ledger.first_token(2.0, "1")
    assert load.queue_s(2.0, 3.0) == 1.0


def test_ledger_adds_decode_stalls_to_the_queue_time() -> None:
    # Paper section A.7: no prefill completed for T = 3 s with a non-empty queue. The first prefill's own time does not
    # count as a stall.
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    load = ledger.loads["a"]
    assert load.queue_s(4.0, 3.0) == 0.0
    assert load.queue_s(4.1, 3.0) == 4.1
    ledger.first_token(5.0, "1")
    assert load.queue_s(5.0, 3.0) == 0.0


def test_ledger_speed_estimate_excludes_time_in_queue() -> None:
    ledger = Ledger(SPEED)
    for n in range(50):
        ledger.enter(0.0, entry(str(n), "a", 0.0))
    for n in range(50):
        ledger.first_token(n + 1.0, str(n))
    assert 950 < ledger.loads["a"].speed.current.tokens_per_second < 1050


def test_ledger_starts_next_prefill_after_abort_of_the_first() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    ledger.enter(0.0, entry("2", "a", 0.0))
    ledger.leave(10.0, "1")
    assert ledger.loads["a"].queue_s(10.5, 3.0) == 0.5


def test_ledger_ends_unobserved_prefill_at_the_predicted_time() -> None:
    # A response without streaming reports no first token, so the member must not count as stalled during the decoding.
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0, streamed=False))
    ledger.enter(0.0, entry("2", "a", 0.0, streamed=False))
    ledger.enter(0.0, entry("3", "a", 0.0))
    load = ledger.loads["a"]
    before = load.speed.current
    load.end_overdue(1.5)
    assert (load.prefills.tokens, load.queue_s(1.5, 3.0)) == (2000, 1.5)
    load.end_overdue(30.0)
    assert (load.prefills.tokens, load.in_flight) == (1000, 3)
    assert load.speed.current == before
    ledger.first_token(30.0, "1")
    ledger.leave(30.0, "1")
    assert load.in_flight == 2


def test_ledger_restarts_learning_after_a_changed_speed_prior() -> None:
    ledger = Ledger(SPEED)
    ledger.loads["a"]
    ledger.set_prior(5000.0)
    speeds = [ledger.loads[member].speed.current.tokens_per_second for member in "ab"]
    assert [round(each) for each in speeds] == [5000, 5000]


def test_ledger_requests_expire_after_ten_minutes() -> None:
    assert IN_FLIGHT_TTL_S == 600.0


def test_ledger_request_update_postpones_its_expiry() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("1", "a", 0.0))
    ledger.enter(1.0, entry("2", "a", 1.0))
    ledger.first_token(IN_FLIGHT_TTL_S - 1, "1")
    assert [each.request_id for each in ledger.expire(IN_FLIGHT_TTL_S + 1)] == ["2"]
    assert [each.request_id for each in ledger.expire(2 * IN_FLIGHT_TTL_S - 1)] == ["1"]
    assert ledger.loads["a"].in_flight == 0


def test_ledger_update_reads_only_members_whose_summary_is_no_longer_valid() -> None:
    ledger = Ledger(SPEED)
    for n, member in enumerate("abcdefgh", start=1):
        ledger.enter(0.0, entry(member, member, 0.0, tokens=1000 * n))
    ledger.update(0.0, 3.0)
    with patch.object(MemberLoad, "update", autospec=True, side_effect=MemberLoad.update) as update:
        # A stall of the member "a" counts from 4 s on, and one of "b" from 5 s on.
        ledger.update(3.9, 3.0)
        assert update.call_args_list == []
        ledger.update(4.5, 3.0)
        assert [call.args[0] for call in update.call_args_list] == [ledger.loads["a"]]
        update.reset_mock()
        ledger.enter(4.6, entry("again", "c", 4.6))
        ledger.update(5.5, 3.0)
    read = {id(call.args[0]) for call in update.call_args_list}
    assert read == {id(ledger.loads[member]) for member in "abc"}


def test_ledger_excludes_overtaking_prefill_from_speed_samples() -> None:
    ledger = Ledger(SPEED)
    ledger.enter(0.0, entry("long", "a", 0.0, tokens=10_000))
    ledger.enter(0.0, entry("short", "a", 0.0, tokens=100))
    before = ledger.loads["a"].speed.current
    ledger.first_token(0.2, "short")
    assert ledger.loads["a"].speed.current == before


class TestLostReports:
    def test_overtaken_prefill_without_report_counts_as_ended(self) -> None:
        ledger = Ledger(SPEED)
        for n in range(4):
            ledger.enter(0.0, entry(str(n), "a", 0.0))
        load, before = ledger.loads["a"], ledger.loads["a"].speed.current
        ledger.first_token(3.0, "2")
        assert (load.prefills.tokens, load.queue_s(3.0, 3.0)) == (1000, 1.0)
        assert load.in_flight == load.working == 4
        # Overtaken prefills are no speed samples when their first tokens arrive later.
        assert ledger.first_token(3.5, "0") is not None
        assert load.speed.current == before

    def test_long_prefill_without_report_counts_as_ended(self) -> None:
        ledger = Ledger(SPEED)
        ledger.enter(0.0, entry("1", "a", 0.0))
        load = ledger.loads["a"]
        load.end_overdue(SILENT_PREFILL_S - 0.1)
        assert load.queue_s(SILENT_PREFILL_S - 0.1, 3.0) == SILENT_PREFILL_S - 0.1
        load.end_overdue(SILENT_PREFILL_S)
        assert (load.prefills.tokens, load.queue_s(SILENT_PREFILL_S, 3.0)) == (0, 0.0)
        assert load.in_flight == 1

    def test_longer_prefill_without_report_has_a_longer_time_limit(self) -> None:
        ledger = Ledger(SPEED)
        ledger.enter(0.0, entry("1", "a", 0.0, tokens=50_000))
        load = ledger.loads["a"]
        load.end_overdue(499.0)
        assert load.prefills.tokens == 50_000
        load.end_overdue(500.0)
        assert load.prefills.tokens == 0

    def test_stalled_member_loses_one_prefill_per_silent_period(self) -> None:
        ledger = Ledger(SPEED)
        for n in range(3):
            ledger.enter(0.0, entry(str(n), "a", 0.0))
        load = ledger.loads["a"]
        for given_up in range(1, 3):
            now = given_up * SILENT_PREFILL_S
            load.end_overdue(now)
            assert load.prefills.tokens == 1000 * (3 - given_up)
            assert load.queue_s(now, 3.0) >= now

    def test_late_first_token_after_assumed_end_is_counted(self) -> None:
        ledger = Ledger(SPEED)
        for n in range(2):
            ledger.enter(0.0, entry(str(n), "a", 0.0))
        load = ledger.loads["a"]
        before = load.speed.current
        load.end_overdue(SILENT_PREFILL_S)
        late = ledger.first_token(SILENT_PREFILL_S + 5.0, "0")
        assert late is not None
        assert late.prefilled
        assert ledger.first_token(SILENT_PREFILL_S + 5.0, "0") is None
        # The other prefill begins at this moment, and the stall did not change the speed estimate.
        assert load.queue_s(SILENT_PREFILL_S + 5.0, 3.0) == 1.0
        assert load.speed.current == before

    def test_silent_request_stays_in_flight_without_kv_tokens(self) -> None:
        ledger = Ledger(SPEED)
        ledger.enter(0.0, entry("1", "a", 0.0))
        ledger.first_token(1.0, "1")
        load = ledger.loads["a"]
        load.end_overdue(SILENT_DECODE_S + 0.9)
        assert (load.kv.tokens, load.working) == (1000, 1)
        load.end_overdue(SILENT_DECODE_S + 1.0)
        assert (load.kv.tokens, load.working, load.in_flight) == (0, 0, 1)
        ledger.heard(SILENT_DECODE_S + 2.0, "1")
        assert (load.kv.tokens, load.working, load.in_flight) == (1000, 1, 1)
        load.end_overdue(2 * SILENT_DECODE_S + 2.0)
        ledger.leave(2 * SILENT_DECODE_S + 2.0, "1")
        assert (load.kv.tokens, load.working, load.in_flight) == (0, 0, 0)

    def test_slow_responses_extend_the_silence_limit(self) -> None:
        ledger = Ledger(SPEED)
        now = 0.0
        for n in range(200):
            ledger.enter(now, entry(str(n), "a", now))
            ledger.first_token(now + 1.0, str(n))
            ledger.finish(now + 51.0, str(n))
            now += 51.0
        ledger.enter(now, entry("last", "a", now))
        ledger.first_token(now, "last")
        load = ledger.loads["a"]
        load.end_overdue(now + 150.0)
        assert load.kv.tokens == 1000
        load.end_overdue(now + IN_FLIGHT_TTL_S)
        assert load.kv.tokens == 0
