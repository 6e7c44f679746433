"""Messages that real engines published: recordings in ``recorded``, and others outside the repository.

e2e/record_kv_events.py makes the recordings of the repository. tests/shared_data.py finds the others.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dualmap.engines.events import Batch, Cleared, Removed, Stored, read_batch
from dualmap.engines.held_blocks import HeldBlocks
from dualmap.engines.residency import Residency
from dualmap.engines.source import Apply, Clear, Effect, EventSource, Message, ReplayEnd, SourceState, read_frames
from dualmap.engines.token_chain import chain_tokens, pack_tokens, token_root
from shared_data import shared_file

RECORDINGS = sorted((Path(__file__).parent / "recorded").glob("*.json"))
# The engine has 64 blocks, and one of them is never used.
USABLE = 63


class Follower:
    """Follows one recorded engine as a router does: a source, and what the engine holds."""

    def __init__(self, recording: dict[str, Any]) -> None:
        self.usable = recording["blocks"] - 1
        self.source = EventSource(replays=False)
        self.residency = Residency(HeldBlocks(), model="m", capacity_blocks=self.usable)
        self.source.start(0.0)
        self._block_tokens = recording["block_tokens"]

    def hear(self, messages: Iterable[Iterable[str]]) -> None:
        """Apply the frames of live messages."""
        for frames in messages:
            message = read_frames([base64.b64decode(frame) for frame in frames])
            assert isinstance(message, Message)
            self.apply(self.source.on_live(0.0, message))

    def apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self.residency.apply(0, read(effect.message.payload))
            else:
                assert effect == Clear()
                self.residency.clear(0)

    def predicted(self, step: dict[str, Any]) -> int:
        """Return the tokens of a request that the engine reuses, before the request's own events."""
        root = token_root(model="m", cache_salt=step["cache_salt"])
        tokens = pack_tokens(step["tokens"])
        return self.residency.matched_tokens(chain_tokens(tokens, root=root, block_tokens=self._block_tokens))


def recording_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("told", [True, False], ids=["restart is known", "restart is unknown"])
def test_recording_replayed_predicts_the_cached_tokens(path: Path, told: bool) -> None:
    recording = recording_of(path)
    follower = Follower(recording)
    before, wrong = "", []
    for step in recording["steps"]:
        if "tokens" in step:
            assert len(step["tokens"]) == step["prompt_tokens"]
            if abs(follower.predicted(step) - step["cached_tokens"]) > recording["block_tokens"]:
                wrong.append(before)
        elif step["step"] == "restart" and told:
            # A profile with a later start time.
            follower.apply(follower.source.on_restart(0.0))
        follower.hear(step["messages"])
        assert follower.residency.blocks <= follower.usable
        before = step["step"]
    # Without the profile, the first message of the engine's new life shows the restart.
    assert wrong == ([] if told else ["restart"])
    residency, counts = follower.residency, follower.residency.counts
    assert (counts.drifts, counts.unknown_removals, residency.parked, residency.fault(0)) == (0, 0, 0, "")
    assert (follower.source.state, follower.source.gaps) == (SourceState.LIVE, 0)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recording_has_stores_copies_removals_and_a_clear(path: Path) -> None:
    recording = recording_of(path)
    follower = Follower(recording)
    for step in recording["steps"]:
        follower.hear(step["messages"])
    counts = follower.residency.counts
    assert min(counts.stored, counts.copied, counts.removed, counts.cleared) > 0
    cached = [step["cached_tokens"] for step in recording["steps"] if "tokens" in step]
    assert 0 < sum(each > 0 for each in cached) < len(cached)


def frames(record: dict[str, list[str]]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in record["frames_hex"]]


def read(payload: bytes) -> Batch:
    batch = read_batch(msgspec.msgpack.decode(payload))
    assert isinstance(batch, Batch)
    assert (batch.unknown_events, batch.unknown_fields, batch.invalid_events) == (0, 0, 0)
    return batch


def recorded() -> list[tuple[str, Batch]]:
    """Return phase and events of each message of one engine's life."""
    lines = shared_file("fixtures/vllm/int64_sha256_events.jsonl").read_text().splitlines()
    found = []
    for number, record in enumerate(map(json.loads, lines)):
        message = read_frames(frames(record))
        assert isinstance(message, Message)
        assert message.number == record["seq"] == number
        found.append((record["phase"], read(message.payload)))
    return found


def test_recorded_life_never_exceeds_the_engines_memory() -> None:
    residency = Residency(HeldBlocks(), model="tiny", capacity_blocks=USABLE)
    blocks = {}
    for phase, batch in recorded():
        residency.apply(0, batch)
        blocks[phase] = residency.blocks
        assert (residency.parked, residency.fault(0)) == (0, "")
    counts = residency.counts
    assert (counts.drifts, counts.unknown_removals, counts.reported, counts.copied) == (0, 0, 7, 0)
    evicted = [f"evict_{n}" for n in range(1, 6)]
    assert [blocks[phase] for phase in (*evicted, "A_after_evict")] == [USABLE - 1] * 6
    assert (blocks["after_reset"], blocks["A_after_reset"]) == (0, 7)


def test_counted_report_in_the_recording_would_leave_blocks_too_many() -> None:
    # The check of the check: the recording has one report, and its seven blocks drift if they are counted.
    residency = Residency(HeldBlocks(), model="tiny", capacity_blocks=USABLE)
    for _, batch in recorded():
        events = tuple(
            Stored(hashes=each.hashes, parent=each.parent, tokens=each.tokens, block_tokens=each.block_tokens, group=0)
            if isinstance(each, Stored)
            else each
            for each in batch.events
        )
        residency.apply(0, Batch(events=events))
    assert residency.counts.drifts == 1


def test_recorded_predictions_equal_the_measured_cached_tokens() -> None:
    requests = json.loads(shared_file("fixtures/vllm/int64_sha256_requests.json").read_text())
    cached = {each["phase"]: each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in requests}
    residency = Residency(HeldBlocks(), model="tiny", capacity_blocks=USABLE)
    prompt = b""
    predicted = {}
    for phase, batch in recorded():
        if phase in ("A_after_evict", "A_after_reset"):
            # A longer prompt, because the recording has only the tokens of full blocks.
            chain = chain_tokens(prompt + bytes(4), root=token_root(model="tiny"), block_tokens=32)
            predicted[phase] = residency.matched_tokens(chain)
        residency.apply(0, batch)
        if phase == "A_first":
            (event,) = batch.events
            assert isinstance(event, Stored)
            prompt = event.tokens
            chain = chain_tokens(prompt + bytes(4), root=token_root(model="tiny"), block_tokens=32)
            assert residency.matched_tokens(chain) == cached["A_repeat"] == 224
    assert predicted == {phase: cached[phase] for phase in predicted} == {"A_after_evict": 0, "A_after_reset": 0}


def test_recorded_salt_is_the_root_of_its_chain() -> None:
    residency = Residency(HeldBlocks(), model="tiny")
    batches = [batch for phase, batch in recorded() if phase == "cache_salt"]
    (event,) = batches[0].events
    assert isinstance(event, Stored)
    residency.apply(0, batches[0])
    matched = {
        salt: residency.matched_tokens(
            chain_tokens(event.tokens + bytes(4), root=token_root(model="tiny", cache_salt=salt), block_tokens=32)
        )
        for salt in ("", "tenant-1", "tenant-2")
    }
    assert matched == {"": 0, "tenant-1": 224, "tenant-2": 0}


def test_recorded_samples_have_equal_events_with_integers_and_bytes() -> None:
    samples = json.loads(shared_file("fixtures/vllm/samples.json").read_text())
    assert len(samples) == 12
    kinds: dict[str, list[list[tuple[str, int]]]] = {}
    for sample in samples:
        message = read_frames(frames(sample))
        assert isinstance(message, Message)
        events = read(message.payload).events
        kinds.setdefault(sample["name"].partition("/")[2], []).append(
            [(type(each).__name__, 0 if isinstance(each, Cleared) else len(each.hashes)) for each in events]
        )
    # Phases that were recorded with both kinds of hashes have the same events.
    assert all(each == phases[0] for phases in kinds.values() for each in phases)
    assert [len(kinds[name]) for name in ("A_first", "B_shares_prefix_with_A", "evict_1", "after_reset")] == [2] * 4
    assert kinds["evict_1"][0] == [("Removed", 17), ("Stored", 20)]


def test_recorded_replay_has_answers_and_an_end() -> None:
    replay = json.loads(shared_file("fixtures/vllm/int64_sha256_replay.json").read_text())
    first = read_frames([bytes.fromhex(frame) for frame in replay["first"]])
    assert isinstance(first, Message)
    assert (first.number, len(read(first.payload).events)) == (0, 1)
    ends = [each for each in replay.values() if isinstance(each, list) and "ff" * 8 in each]
    assert [read_frames([bytes.fromhex(frame) for frame in each]) for each in ends] == [ReplayEnd.END]


def releases() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(shared_file("fixtures/vllm/schema_by_version.json").read_text())[
        "versions"  # type: ignore[assignment]
    ]
    return found


def test_message_of_every_release_is_read() -> None:
    assert len(releases()) == 12
    for release, schema in releases().items():
        stored, removed, cleared = read(bytes.fromhex(schema["payload_hex"])).events
        assert isinstance(stored, Stored), release
        assert (stored.hashes, stored.parent) == ((9881291378385388047, 17115228836165790177), None)
        assert (stored.block_tokens, len(stored.tokens), stored.on_gpu, stored.dense) == (16, 128, True, True)
        # Only releases whose events are arrays have no reports.
        assert stored.new is bool(schema["event_array_like"])
        assert isinstance(removed, Removed)
        assert (removed.hashes, removed.on_gpu, removed.group) == (stored.hashes[:1], True, stored.group)
        assert cleared == Cleared()


def test_recordings_without_the_shared_folder_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALMAP_SHARED", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match=r"/nowhere/fixtures/vllm/schema_by_version\.json does not exist"):
        releases()
