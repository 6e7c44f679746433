"""Tests of Mooncake's JSONL: the fields that are read, and the error messages."""

import json

import pytest

from dualmap_sim.workloads.mooncake import TraceError, parse_mooncake, read_mooncake
from dualmap_sim.workloads.statistics import measure
from shared_data import shared_file


def line(**changes) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def test_mooncake_reader_reads_seconds_blocks_and_lengths():
    trace = parse_mooncake([line(), line(timestamp=1500, hash_ids=[0, 7], input_length=1024)], source="a/b.jsonl")

    assert (trace.name, trace.block_tokens) == ("b.jsonl", 512)
    first, second = trace.requests
    assert (first.arrival_s, first.blocks, first.input_tokens, first.output_tokens) == (0.0, (0, 1), 600, 5)
    assert (second.arrival_s, second.blocks, second.input_tokens) == (1.5, (0, 7), 1024)
    assert (first.session, first.turn) == (None, 0)


def test_equal_timestamps_stay_in_order_after_rounding():
    lines = [line(timestamp=stamp) for stamp in range(3000, 3100) for _ in range(2)]

    assert len(parse_mooncake(lines, source="t").requests) == 200


def test_trace_window_reads_only_its_own_lines():
    lines = ["not json", line(timestamp=1), "", line(timestamp=2), line(timestamp=3), "not json"]

    trace = parse_mooncake(lines, source="t", start=1, limit=2)

    assert [r.arrival_s for r in trace.requests] == [0.001, 0.002]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", ["not JSON", "one JSON object per line"]),
        ("[1, 2]", ["[1, 2]", "one JSON object per line"]),
        (line(timestamp="0"), ["timestamp", '"0"', "milliseconds"]),
        (line(timestamp=True), ["timestamp", "true"]),
        (line(timestamp=None), ["timestamp", "nothing"]),
        (line(timestamp=float("nan")), ["timestamp", "NaN"]),
        (line(timestamp=float("inf")), ["timestamp", "Infinity"]),
        (line(timestamp=-1), ["timestamp", "-1"]),
        (line(timestamp=4), ["timestamp", "4", "not before the previous request's (5)"]),
        (line(timestamp=9, input_length=0), ["input_length", "0", "at least 1"]),
        (line(timestamp=9, input_length=1.5), ["input_length", "1.5", "a whole number"]),
        (line(timestamp=9, output_length=None), ["output_length", "nothing", "at least 1"]),
        (line(timestamp=9, hash_ids="01"), ["hash_ids", '"01"', "a list of 2 whole numbers"]),
        (line(timestamp=9, hash_ids=[1]), ["hash_ids", "[1]", "a list of 2 whole numbers"]),
        (line(timestamp=9, hash_ids=[1, "x"]), ["hash_ids[1]", '"x"', "a whole number"]),
        (line(timestamp=9, hash_ids=list(range(400))), ["hash_ids", "..."]),
    ],
)
def test_invalid_line_is_rejected_with_line_and_accepted_value(bad, words):
    with pytest.raises(TraceError) as refusal:
        parse_mooncake([line(timestamp=5), bad], source="some/trace.jsonl")

    message = str(refusal.value)
    assert message.startswith("some/trace.jsonl:2: ")
    assert "give " in message
    for word in words:
        assert word in message
    assert len(message) < 250


def test_trace_without_requests_is_rejected():
    with pytest.raises(TraceError, match="no request at or after number 3"):
        parse_mooncake([line(), ""], source="t", start=3)


def test_unreadable_trace_file_is_rejected(tmp_path):
    with pytest.raises(TraceError, match="readable file"):
        read_mooncake(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_mooncake(tmp_path / "binary.jsonl")


def test_conversation_trace_matches_the_papers_statistics():
    """A.2.1, table 1: 12,035 input and 343 output tokens on average, about 40 % of it reusable."""
    facts = measure(read_mooncake(shared_file("traces/mooncake_conversation.jsonl")))

    assert facts.requests == 12_031
    assert facts.input_tokens_mean == pytest.approx(12_035, abs=1)
    assert facts.output_tokens_mean == pytest.approx(343, abs=1)
    assert facts.ideal_hit_rate == pytest.approx(0.40, abs=0.04)
