"""The recorder at a real picker and folder: what a line says about each way in which a request ends."""

from pathlib import Path

import pytest

from dualmap.recordings.values import (
    Header,
    Missing,
    PoolChanged,
    PoolRemoved,
    RecordedOutcome,
)
from dualmap.requests import Usage
from dualmap_extproc.recording import recorder as recorders
from dualmap_extproc.recording.hashing import KeyedHashes, Purpose, fingerprint
from dualmap_extproc.request.picked import AnswerLater, Picked
from extproc.envoy_messages import (
    NO_WAIT,
    Conversation,
    chat,
    crowded_pool,
    pool,
    refused_with,
    request_body,
    request_headers,
)
from extproc.recording_desks import EPOCH_S, HASH_KEY, RecordingDesk, entry_of
from recorded_folder import everything_in, files_of, requests_of

LONG = "the quick brown fox " * 100


def test_recording_begins_with_its_first_line_and_the_pools(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, pool("a"), pool("b", model="n"), sample=0.25)
    desk.tick()

    header, *rest = desk.lines()

    secret = desk.folder.secret
    assert secret is not None
    key = fingerprint(secret, HASH_KEY)
    assert header == Header(router="r1", started_s=EPOCH_S + 20.0, key=key, sample=0.25, program="0.1.0")
    assert {line.pool.id for line in rest if isinstance(line, PoolChanged)} == {"llm/a", "llm/b"}


def test_recorded_request_has_decision_and_measurements(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    body = chat(LONG, stream=True, cache_salt="pepper")
    picked = desk.ask(body, now=10.0, x_session_id="s", x_request_id="4711")
    assert isinstance(picked, Picked)
    desk.picker.first_token(10.25, picked.request_id)
    desk.picker.access_log(12.0, entry_of(picked))
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert picked.decision is not None
    receipt = picked.decision.receipt
    assert desk.writer.hashes is not None
    assert request.request == desk.writer.hashes.text("4711", Purpose.REQUEST)
    assert request.arrived_s == EPOCH_S + 10.0
    assert (request.pool, request.model, request.streamed) == ("llm/qwen", "m", True)
    assert (request.ttft_s, request.duration_s, request.attempts) == (0.25, 1.5, 1)
    assert (request.engine_prompt_tokens, request.output_tokens, request.cached_tokens) == (7, 3, 0)
    assert (request.outcome, request.served, request.code) == (RecordedOutcome.OK, "", "")
    assert len(request.blocks) == -(-request.prompt_tokens // request.block_tokens)
    assert request.receipt is not None
    assert (request.receipt.chosen, request.receipt.rule) == (receipt.chosen, receipt.rule)
    assert request.receipt.pair == receipt.pair
    assert {each.id for each in request.receipt.candidates} == {receipt.chosen, *receipt.pair}
    assert request.client is not None


def test_recording_has_no_text_in_clear(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    desk.serve(chat(LONG, cache_salt="pepper"), x_session_id="session of Ada", x_request_id="request 4711")
    desk.tick()

    everything = everything_in(tmp_path)

    assert len(requests_of(tmp_path)) == 1
    for text in (b"quick brown", b"pepper", b"session of Ada", b"4711"):
        assert text not in everything


def test_equal_prompts_and_sessions_have_equal_hashes_with_a_copied_key(tmp_path: Path) -> None:
    first = RecordingDesk(tmp_path / "first")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "key").write_bytes((tmp_path / "first" / "key").read_bytes())
    second, other = RecordingDesk(tmp_path / "second"), RecordingDesk(tmp_path / "other")
    for desk in (first, second, other):
        desk.serve(chat(LONG), x_session_id="s", x_request_id="4711")
        desk.tick()

    (one,), (same,), (different,) = (requests_of(each.path) for each in (first, second, other))

    assert (one.blocks, one.session, one.request) == (same.blocks, same.session, same.request)
    assert not {*one.blocks, one.session, one.request} & {*different.blocks, different.session, different.request}
    assert _fingerprint(first) == _fingerprint(second) != _fingerprint(other)


def _fingerprint(desk: RecordingDesk) -> str:
    header = desk.lines()[0]
    assert isinstance(header, Header)
    return header.key


def test_hashes_differ_by_purpose_and_equal_those_of_the_single_hash() -> None:
    hashes = KeyedHashes(b"s" * 32)

    assert hashes.keyed((1, 2, 1), Purpose.BLOCK) == tuple(hashes.one(each, Purpose.BLOCK) for each in (1, 2, 1))
    assert len({hashes.one(1, each) for each in Purpose}) == len(Purpose)
    assert hashes.keyed((), Purpose.BLOCK) == ()


def test_fingerprint_differs_for_other_keys_of_prompts() -> None:
    assert len({fingerprint(secret, key) for secret in (b"a", b"b") for key in (b"c", b"d")}) == 4


def test_shared_prefix_has_equal_leading_blocks(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    desk.serve(chat(LONG + "one" * 500))
    desk.serve(chat(LONG + "two" * 500), now=11.0)
    desk.tick()

    one, two = requests_of(tmp_path)

    common = [left == right for left, right in zip(one.blocks, two.blocks, strict=True)]
    assert common == sorted(common, reverse=True)
    assert True in common
    assert False in common


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ({}, RecordedOutcome.OK),
        ({"status": 500, "usage": None}, RecordedOutcome.ENGINE_ERROR),
        ({"status": 400, "usage": None}, RecordedOutcome.ENGINE_ERROR),
        ({"status": 429, "usage": None}, RecordedOutcome.ENGINE_ERROR),
        ({"status": 503, "flags": ("upstream_connection_failure",), "usage": None}, RecordedOutcome.ENGINE_ERROR),
        ({"flags": ("downstream_connection_termination",), "usage": None}, RecordedOutcome.CLIENT_GONE),
        ({"flags": ("downstream_connection_termination",)}, RecordedOutcome.OK),
        ({"status": None, "usage": None}, RecordedOutcome.CLIENT_GONE),
    ],
    ids=str,
)
def test_recorded_outcome_follows_the_access_log(
    tmp_path: Path, end: dict[str, object], outcome: RecordedOutcome
) -> None:
    desk = RecordingDesk(tmp_path)
    picked = desk.ask()
    assert isinstance(picked, Picked)
    desk.picker.access_log(12.0, entry_of(picked, **end))
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert request.outcome is outcome


def test_request_ended_by_the_stream_waits_for_its_usage(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    first, second = desk.ask(now=10.0), desk.ask(now=10.0)
    assert isinstance(first, Picked)
    assert isinstance(second, Picked)
    for picked in (first, second):
        desk.picker.finished(11.0, picked.request_id, None)
    desk.picker.access_log(12.0, entry_of(first))
    desk.tick(12.5)
    assert [each.output_tokens for each in requests_of(tmp_path)] == [3]

    desk.tick(13.5)

    assert [(each.output_tokens, each.duration_s) for each in requests_of(tmp_path)] == [(3, 1.5), (None, 1.0)]


def test_more_cached_tokens_than_the_prompt_has_are_not_recorded(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    picked = desk.ask()
    assert isinstance(picked, Picked)
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=8)
    desk.picker.access_log(12.0, entry_of(picked, usage=usage))
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert (request.engine_prompt_tokens, request.cached_tokens) == (7, None)


def test_request_served_by_another_member_names_it(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    picked = desk.ask()
    assert isinstance(picked, Picked)
    other = next(each for each in pool().members if each.endpoint != picked.destination.split(",")[0])
    desk.picker.access_log(12.0, entry_of(picked, served_endpoint=other.endpoint, attempts=2))
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert (request.served, request.attempts) == (other.id, 2)


def test_refused_and_unrouted_requests_are_told_apart(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, pool(members=0))
    desk.ask(chat(LONG), now=10.0)
    desk.ask(chat(model="unknown"), now=11.0)
    desk.ask(b"{}", now=11.0)
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert (request.outcome, request.code, request.receipt) == (RecordedOutcome.REFUSED, "no_endpoint", None)
    assert request.blocks
    assert [line for line in desk.lines() if isinstance(line, Missing)] == [Missing(EPOCH_S + 20.0, 2, 0)]


def test_request_with_too_large_body_counts_as_unrouted(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, pool(max_body_bytes=1000))
    talk = Conversation(picker=desk.picker)
    assert refused_with(talk.send(request_headers(NO_WAIT), request_body(chat(LONG)))) == 413
    desk.tick()

    assert requests_of(tmp_path) == []
    assert [line for line in desk.lines() if isinstance(line, Missing)] == [Missing(EPOCH_S + 20.0, 1, 0)]


def test_request_whose_body_grows_too_large_after_the_pick_has_a_line_and_is_not_missing(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, pool(max_body_bytes=1000))
    talk = Conversation(picker=desk.picker, now=10.0)
    talk.send(request_headers(NO_WAIT), request_body(chat(), end=False))
    assert talk.stream.deadline_s is not None
    assert talk.stream.on_deadline(talk.stream.deadline_s)
    assert refused_with(talk.send(request_body(b" " * 1000, end=False))) == 413
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert request.outcome is RecordedOutcome.CLIENT_GONE
    assert [line for line in desk.lines() if isinstance(line, Missing)] == []


def test_queued_request_that_is_abandoned_or_rejected_has_its_wait(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, crowded_pool(max_held=1))
    desk.ask(chat(LONG), now=10.0)
    waiting = desk.ask(chat(LONG), now=11.0)
    assert isinstance(waiting, AnswerLater)
    desk.ask(chat(LONG), now=12.0)
    desk.picker.aborted(13.0, waiting.request_id)
    desk.tick()

    gone, full = requests_of(tmp_path)

    assert (gone.outcome, gone.queued_s, gone.duration_s) == (RecordedOutcome.CLIENT_GONE, 2.0, 2.0)
    assert (full.outcome, full.code, full.queued_s) == (RecordedOutcome.REFUSED, "queue_full", None)


def test_changes_of_pools_are_lines_in_their_order(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, pool(members=2), pool("b", model="n"))
    desk.tick()
    desk.picker.set_pools(21.0, (pool(members=3),))
    desk.picker.set_pools(22.0, (pool(members=3),))
    desk.tick(23.0)

    changed, removed = desk.lines()[-2:]

    assert changed == PoolChanged(EPOCH_S + 21.0, pool(members=3))
    assert removed == PoolRemoved(EPOCH_S + 21.0, "llm/b")


def test_sample_keeps_whole_sessions_and_about_the_share(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path, sample=0.5)
    for number in range(200):
        for turn in range(2):
            desk.serve(chat(LONG), now=10.0 + number, x_session_id=f"s{number}", x_request_id=f"{number}-{turn}")
    for number in range(200):
        desk.serve(chat(LONG), now=300.0 + number)
    desk.tick(600.0)

    requests = requests_of(tmp_path)

    in_sessions = [each.session for each in requests if each.session is not None]
    assert len(in_sessions) == 2 * len(set(in_sessions))
    assert 60 < len(set(in_sessions)) < 140
    assert 60 < len(requests) - len(in_sessions) < 140


def test_sampled_sessions_are_the_same_for_routers_with_the_same_key(tmp_path: Path) -> None:
    first = RecordingDesk(tmp_path / "first", sample=0.5)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "key").write_bytes((tmp_path / "first" / "key").read_bytes())
    second = RecordingDesk(tmp_path / "second", sample=0.5)
    for desk in (first, second):
        for number in range(50):
            desk.serve(chat(LONG), x_session_id=f"s{number}")
        desk.tick()

    sessions = [{each.session for each in requests_of(desk.path)} for desk in (first, second)]

    assert sessions[0] == sessions[1]
    assert 0 < len(sessions[0]) < 50


async def test_close_writes_requests_without_an_end(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    desk.writer.start()
    desk.ask()

    await desk.recorder.close()

    (request,) = requests_of(tmp_path)
    assert (request.outcome, request.duration_s) == (RecordedOutcome.CLIENT_GONE, None)


def test_open_requests_above_the_bound_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "OPEN_MAX", 2)
    desk = RecordingDesk(tmp_path)
    picks = [desk.ask(now=10.0 + number) for number in range(3)]
    for picked in picks:
        assert isinstance(picked, Picked)
        desk.picker.access_log(20.0, entry_of(picked))
    desk.tick()

    assert [each.arrived_s for each in requests_of(tmp_path)] == [EPOCH_S + 11.0, EPOCH_S + 12.0]
    assert desk.metric("dropped_total") == 1
    assert Missing(EPOCH_S + 20.0, 0, 1) in desk.lines()


@pytest.mark.parametrize("bound", ["UNWRITTEN_MAX", "UNWRITTEN_BLOCKS_MAX"])
def test_unwritten_requests_above_the_bound_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(recorders, bound, 2)
    desk = RecordingDesk(tmp_path)
    for number in range(4):
        desk.serve(now=10.0 + number)
    desk.tick()
    desk.serve(now=30.0)
    desk.tick(40.0)

    assert len(requests_of(tmp_path)) == 3
    assert desk.metric("dropped_total") == 2


def test_restarted_router_adds_a_file_with_the_same_key(tmp_path: Path) -> None:
    for _ in range(2):
        desk = RecordingDesk(tmp_path)
        desk.serve(chat(LONG))
        desk.tick()
        desk.folder.close()

    first, second = requests_of(tmp_path)

    assert len(files_of(tmp_path)) == 2
    assert first.blocks == second.blocks


def test_outcome_of_an_unlogged_request_follows_its_ending(tmp_path: Path) -> None:
    desk = RecordingDesk(tmp_path)
    picked = desk.ask()
    assert isinstance(picked, Picked)
    desk.picker.failed(12.0, picked.request_id)
    desk.tick()

    (request,) = requests_of(tmp_path)

    assert (request.outcome, request.duration_s) == (RecordedOutcome.ENGINE_ERROR, 2.0)
