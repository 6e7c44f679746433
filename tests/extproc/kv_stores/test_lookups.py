"""Tests of lookups with a client whose answers the test gives."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from prometheus_client import CollectorRegistry

from dualmap.kv_store.availability import FAILURES_MAX
from dualmap.kv_store.view import NO_MATCH, Chunk, StoreMatch
from dualmap_extproc.kv_stores.contract import Question, StoreError
from dualmap_extproc.kv_stores.lookups import QUESTIONS_MAX, Lookups
from dualmap_extproc.kv_stores.metrics import KvStoreMetrics, LookupResult
from waiting import until

POOL = "llm/qwen"
ENDPOINT = "http://10.0.0.9:9003"
IDS = array("I", range(1024))
KEYS = ("a", "b", "c", "d")
HELD = {"a": Chunk(True), "b": Chunk(True)}
FOUND = StoreMatch(512)


class Client:
    """A client whose questions wait for ``answer`` or ``fail``."""

    def __init__(self) -> None:
        self.questions: list[tuple[Question, asyncio.Future[Mapping[str, Chunk]]]] = []
        self.asked = asyncio.Event()
        self.closed = False

    async def ask(self, question: Question) -> Mapping[str, Chunk]:
        answer = asyncio.get_running_loop().create_future()
        self.questions.append((question, answer))
        self.asked.set()
        return await answer

    async def close(self) -> None:
        self.closed = True

    async def arrived(self, questions: int = 1) -> None:
        while len(self.questions) < questions:
            self.asked.clear()
            await self.asked.wait()

    def answer(self, held: Mapping[str, Chunk] = HELD) -> None:
        self.questions[-1][1].set_result(held)

    def fail(self, reason: str) -> None:
        self.questions[-1][1].set_exception(StoreError(reason))


class Desk:
    """A pool's lookups, and the matches of requests in the order of their answers."""

    def __init__(self, timeout_s: float) -> None:
        self.client = Client()
        self.registry = CollectorRegistry()
        metrics = KvStoreMetrics(self.registry)
        metrics.set_pools([POOL])
        self.lookups = Lookups(POOL, ENDPOINT, self.client, metrics, chunk_tokens=256, timeout_s=timeout_s)
        self.answers = asyncio.Queue[StoreMatch]()

    def ask(self, keys: tuple[str, ...] = KEYS) -> StoreMatch | Callable[[], None]:
        return self.lookups.match(keys, IDS, "", self.answers.put_nowait)

    def counted(self, result: LookupResult) -> float | None:
        labels = {"pool": POOL, "result": result}
        return self.registry.get_sample_value("dualmap_kv_store_lookups_total", labels)

    @property
    def up(self) -> float | None:
        return self.registry.get_sample_value("dualmap_kv_store_up", {"pool": POOL})


@pytest.fixture
async def patient() -> AsyncIterator[Desk]:
    """Lookups that wait for every answer of the test."""
    desk = Desk(timeout_s=60.0)
    yield desk
    await desk.lookups.close()


@pytest.fixture
async def hasty() -> AsyncIterator[Desk]:
    """Lookups that wait for no answer."""
    desk = Desk(timeout_s=0.001)
    yield desk
    await desk.lookups.close()


def answers_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every answer be old, and none too old, however slow the machine is."""
    monkeypatch.setattr("dualmap.kv_store.view.FRESH_S", 0.0)
    monkeypatch.setattr("dualmap.kv_store.view.STALE_S", 3600.0)


async def test_answer_in_time_is_the_match(patient: Desk) -> None:
    assert callable(patient.ask())
    await patient.client.arrived()
    patient.client.answer()

    assert await patient.answers.get() == FOUND
    assert patient.counted(LookupResult.HIT) == 1
    assert patient.registry.get_sample_value("dualmap_kv_store_lookup_seconds_count", {"pool": POOL}) == 1


async def test_answer_at_hand_needs_no_question(patient: Desk) -> None:
    patient.ask()
    await patient.client.arrived()
    patient.client.answer()
    await patient.answers.get()

    assert patient.ask() == FOUND
    assert patient.ask((*KEYS[:2], "x")) == FOUND or len(patient.client.questions) == 1
    assert patient.counted(LookupResult.HIT) == 2


async def test_longer_prompt_asks_only_for_its_new_chunks(patient: Desk) -> None:
    patient.ask(KEYS[:2])
    await patient.client.arrived()
    patient.client.answer()
    await patient.answers.get()

    patient.ask()
    await patient.client.arrived(2)
    patient.client.answer({})

    assert await patient.answers.get() == FOUND
    assert patient.client.questions[1][0].keys == ("c", "d")


async def test_old_answer_is_the_match_at_once_and_renewed_behind(
    patient: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.ask(KEYS[:2])
    await patient.client.arrived()
    patient.client.answer()
    await patient.answers.get()

    answers_are_old(monkeypatch)
    assert patient.ask(KEYS[:2]) == patient.ask(KEYS[:2]) == FOUND
    await patient.client.arrived(2)
    assert len(patient.client.questions) == 2
    assert patient.client.questions[1][0].keys == KEYS[:2]
    assert patient.counted(LookupResult.HIT) == 3

    monkeypatch.setattr("dualmap.kv_store.view.FRESH_S", 60.0)
    patient.client.answer({})
    await until(lambda: patient.ask(KEYS[:2]) == NO_MATCH)


async def test_old_answer_about_a_missing_chunk_is_awaited(patient: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.ask()
    await patient.client.arrived()
    patient.client.answer({})
    await patient.answers.get()

    answers_are_old(monkeypatch)
    assert callable(patient.ask())
    await patient.client.arrived(2)
    patient.client.answer()

    assert await patient.answers.get() == FOUND


async def test_late_renewals_in_a_row_leave_the_store_alone(hasty: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first answer is late, too.
    hasty.ask(KEYS[:2])
    await hasty.answers.get()
    await hasty.client.arrived()
    hasty.client.answer()
    await until(lambda: hasty.ask(KEYS[:2]) == FOUND)

    answers_are_old(monkeypatch)
    for keys in ("a",), ("a", "b"):
        assert isinstance(hasty.ask(keys), StoreMatch)

    await until(lambda: not hasty.lookups.availability.is_up)
    assert hasty.ask(KEYS[:2]) == FOUND


async def test_equal_prompts_share_a_question(patient: Desk) -> None:
    patient.ask()
    patient.ask()
    await patient.client.arrived()
    patient.client.answer()

    assert [await patient.answers.get() for _ in range(2)] == [FOUND, FOUND]
    assert len(patient.client.questions) == 1


async def test_missing_prompt_counts_as_a_miss(patient: Desk) -> None:
    patient.ask()
    await patient.client.arrived()
    patient.client.answer({})

    assert await patient.answers.get() == NO_MATCH
    assert patient.counted(LookupResult.MISS) == 1


async def test_failed_question_costs_its_hit_only(patient: Desk) -> None:
    patient.ask()
    await patient.client.arrived()
    patient.client.fail("refused")

    assert await patient.answers.get() == NO_MATCH
    assert patient.counted(LookupResult.ERROR) == 1
    assert patient.up == 1


async def test_cancelled_request_gets_no_answer(patient: Desk) -> None:
    cancel = patient.ask()
    assert callable(cancel)
    await patient.client.arrived()
    cancel()
    patient.ask()
    patient.client.answer()

    await patient.answers.get()
    assert patient.answers.empty()


async def test_store_that_fails_in_a_row_is_left_alone(patient: Desk, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(FAILURES_MAX):
        patient.ask((f"{number}",))
        await patient.client.arrived(number + 1)
        patient.client.fail("the master is gone")
        await patient.answers.get()

    assert patient.ask() == NO_MATCH
    assert len(patient.client.questions) == FAILURES_MAX
    assert patient.counted(LookupResult.SKIPPED) == 1
    assert patient.up == 0
    assert patient.lookups.availability.reason == "the master is gone"
    (line,) = caplog.records
    assert line.__dict__["details"] == {"pool": POOL, "endpoint": ENDPOINT, "reason": "the master is gone"}


async def test_late_answer_is_for_the_next_request(hasty: Desk) -> None:
    hasty.ask()
    assert await hasty.answers.get() == NO_MATCH
    assert hasty.counted(LookupResult.TIMEOUT) == 1
    # Another request does not wait for the late answer.
    assert hasty.ask() == NO_MATCH

    await hasty.client.arrived()
    hasty.client.answer()
    await until(lambda: hasty.ask() == FOUND)


async def test_store_that_is_late_in_a_row_is_left_alone(hasty: Desk) -> None:
    for number in range(FAILURES_MAX):
        hasty.ask((f"{number}",))
        await hasty.answers.get()

    assert hasty.ask(("x",)) == NO_MATCH
    assert hasty.lookups.availability.reason == "no answer within 1 ms"


async def test_question_without_an_answer_ends(hasty: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap_extproc.kv_stores.lookups.QUESTION_S", 0.002)
    hasty.ask()
    await hasty.answers.get()
    await hasty.client.arrived()

    await until(lambda: hasty.client.questions[0][1].cancelled())


async def test_unexpected_error_of_a_client_is_a_failure(patient: Desk) -> None:
    patient.ask()
    await patient.client.arrived()
    patient.client.questions[-1][1].set_exception(KeyError("x"))

    assert await patient.answers.get() == NO_MATCH
    assert patient.counted(LookupResult.ERROR) == 1


async def test_questions_at_the_same_time_are_bounded(patient: Desk) -> None:
    for number in range(QUESTIONS_MAX):
        assert callable(patient.ask((f"{number}",)))

    assert patient.ask(("more",)) == NO_MATCH
    assert patient.counted(LookupResult.SKIPPED) == 1


async def test_released_requests_get_what_is_known(patient: Desk) -> None:
    patient.ask()
    patient.lookups.release()

    assert await patient.answers.get() == NO_MATCH


async def test_closed_lookups_close_the_client(patient: Desk) -> None:
    patient.ask()
    await patient.lookups.close()

    assert patient.client.closed
