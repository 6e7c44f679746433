"""Tests of imports from Mooncake's traces and from logs of OpenAI requests: hashes, counts, and lines left out."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dualmap.recordings.lines import decode_line
from dualmap.recordings.values import Header, RecordedOutcome, RecordedRequest
from dualmap_sim.recordings import imports
from dualmap_sim.recordings.errors import CannotImport
from dualmap_sim.recordings.exports import Export, ExportFormat
from dualmap_sim.recordings.figures import compute_figures
from dualmap_sim.recordings.from_mooncake import MooncakeReader
from dualmap_sim.recordings.from_openai import OpenAiReader
from dualmap_sim.recordings.imports import LEFT_OUT_MAX, Import
from dualmap_sim.recordings.reader import Reading
from recorded import request, write
from shared_data import shared_file


class PlainKey:
    """Leaves hashes as they are; the real key encrypts them (tests/cli/test_trace_import.py)."""

    root_key = b"a key"
    fingerprint = "00aa"

    def blocks(self, hashes: Sequence[int]) -> tuple[int, ...]:
        return tuple(hashes)

    def session(self, value: int) -> int:
        return value


def write_objects(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def imported(path: Path, *, openai: bool = False) -> tuple[Import, list[RecordedRequest]]:
    read = OpenAiReader(PlainKey()) if openai else MooncakeReader(path, PlainKey())
    conversion = Import(path, read, key=PlainKey(), program="0.1.0")
    header, *requests = map(decode_line, conversion.lines())
    assert header == Header(router="imported", started_s=requests[0].arrived_s, key="00aa", program="0.1.0")
    return conversion, [each for each in requests if isinstance(each, RecordedRequest)]


def mooncake(at_ms: float, tokens: int, ids: Sequence[int], **fields: object) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 9, "hash_ids": list(ids), **fields}


def chat(*messages: str, **fields: object) -> dict[str, object]:
    return {"model": "qwen", "messages": [{"role": "user", "content": text} for text in messages], **fields}


def test_mooncake_line_becomes_a_request_without_measurements(tmp_path: Path) -> None:
    path = write_objects(tmp_path / "trace.jsonl", mooncake(1500, 1000, [7, 8]), mooncake(2000, 1024, [7, 9]))
    _, (first, second) = imported(path)
    assert (first.arrived_s, first.pool, first.prompt_tokens, first.block_tokens) == (
        1.5,
        "imported/trace.jsonl",
        1000,
        512,
    )
    assert (first.output_tokens, first.outcome, first.exact) == (9, RecordedOutcome.OK, True)
    absent = (
        first.receipt,
        first.ttft_s,
        first.duration_s,
        first.engine_prompt_tokens,
        first.cached_tokens,
        first.session,
    )
    assert set(absent) == {None}
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]


def test_mooncake_hashes_are_equal_exactly_for_equal_prefixes(tmp_path: Path) -> None:
    lines = [mooncake(0, 1536, ids) for ids in ([1, 4, 6], [0, 4, 6], [1, 4, 5], [-1, 10**40, 6])]
    _, requests = imported(write_objects(tmp_path / "trace.jsonl", *lines))
    one, other, third, _ = (each.blocks for each in requests)
    assert not set(one) & set(other)
    assert one[:2] == third[:2]
    assert len({block for each in requests for block in each.blocks}) == 10


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        (((6758, 14), (7322, 15)), 512),
        (((256, 2), (384, 3), (100, 1)), 128),
        (((300, 3), (100, 1), (191, 2), (201, 3)), 100),
        (((5, 1),), 512),
    ],
)
def test_mooncake_block_length_follows_from_the_lengths(
    tmp_path: Path, lengths: tuple[tuple[int, int], ...], found: int
) -> None:
    lines = [mooncake(0, tokens, range(count)) for tokens, count in lengths]
    _, requests = imported(write_objects(tmp_path / "trace.jsonl", *lines))
    assert {each.block_tokens for each in requests} == {found}


def test_mooncake_trace_with_contradicting_lengths_is_refused(tmp_path: Path) -> None:
    path = write_objects(
        tmp_path / "trace.jsonl", mooncake(0, 1000, [1, 2]), mooncake(0, 9000, [1, 2]), mooncake(0, 10, [1, 2])
    )
    with pytest.raises(CannotImport, match=r"line 2: 2 hash_ids for an input_length of 9000"):
        imported(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"timestamp": -1},
        {"timestamp": "0"},
        {"timestamp": 1e300},
        {"input_length": 0},
        {"input_length": True},
        {"output_length": -1},
        {"output_length": 1.5},
        {"hash_ids": []},
        {"hash_ids": [True]},
        {"hash_ids": None},
    ],
)
def test_mooncake_line_with_an_invalid_field_is_left_out(tmp_path: Path, changed: dict[str, object]) -> None:
    path = write_objects(
        tmp_path / "trace.jsonl", {**mooncake(0, 1000, [1, 2]), **changed}, [], mooncake(5, 1000, [1, 2])
    )
    conversion, requests = imported(path)
    assert len(requests) == 1
    assert [each.line for each in conversion.left_out] == [1, 2]
    assert f"{next(iter(changed))}: " in conversion.left_out[0].reason


def test_exported_and_imported_recordings_agree(tmp_path: Path) -> None:
    source = Reading(
        [
            write(
                tmp_path / "a.jsonl",
                *(
                    request(
                        number / 4,
                        blocks=(1, 2, 100 + number % 5, 200 + number),
                        prompt_tokens=400 + number,
                        engine_prompt_tokens=400 + number,
                        output_tokens=3 + number,
                    )
                    for number in range(40)
                ),
            )
        ]
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(Export(source.requests, ExportFormat.MOONCAKE).lines()))
    conversion = Import(trace, MooncakeReader(trace, PlainKey()), key=PlainKey(), program="")
    again = tmp_path / "again.jsonl.gz"
    again.write_bytes(gzip.compress("".join(conversion.lines()).encode()))
    before, after = compute_figures(source.events()), compute_figures(Reading([again]).events())
    for name in ("requests", "arrivals_s", "prompt_tokens", "output_tokens", "reuse_at_best", "duration_s"):
        assert getattr(before, name) == getattr(after, name), name
    assert [(each.blocks, each.requests) for each in before.hot_prefixes] == [
        (each.blocks, each.requests) for each in after.hot_prefixes
    ]
    second = tmp_path / "second.jsonl"
    second.write_text("".join(Export(Reading([again]).requests, ExportFormat.MOONCAKE).lines()))
    assert second.read_text() == trace.read_text()


def test_mooncakes_own_trace_is_imported_and_exported_again(tmp_path: Path) -> None:
    path = shared_file("traces/mooncake_conversation.jsonl")
    conversion = Import(path, MooncakeReader(path, PlainKey()), key=PlainKey(), program="")
    again = tmp_path / "again.jsonl"
    with again.open("w") as file:
        file.writelines(conversion.lines())
    assert conversion.left_out_lines == 0
    reading = Reading([again])
    exported = [json.loads(line) for line in Export(reading.requests, ExportFormat.MOONCAKE).lines()]
    given = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["timestamp"] for each in exported] == [each["timestamp"] for each in given]
    assert [each["output_length"] for each in exported] == [each["output_length"] for each in given]
    assert reading.damaged_lines == 0


def test_openai_line_has_counts_hashes_and_session_but_no_text(tmp_path: Path) -> None:
    body = chat("a secret of Ada" * 100, stream=True, session_id="Ada")
    usage = {"prompt_tokens": 321, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 256}}
    path = write_objects(tmp_path / "log", {"timestamp": 1.8e9, "request": body, "response": {"usage": usage}})
    conversion, (found,) = imported(path, openai=True)
    assert (found.arrived_s, found.model, found.pool, found.streamed) == (1.8e9, "qwen", "imported/qwen", True)
    assert (found.engine_prompt_tokens, found.output_tokens, found.cached_tokens) == (321, 12, 256)
    assert (found.outcome, found.ttft_s, found.receipt) == (RecordedOutcome.OK, None, None)
    assert len(found.blocks) == -(-found.prompt_tokens // 128) > 1
    assert found.session is not None
    assert "Ada" not in "".join(conversion.lines())


def test_openai_prompts_with_equal_beginnings_have_equal_hashes(tmp_path: Path) -> None:
    start = "x" * 2000
    bodies = [
        chat(start, "one"),
        chat(start, "two"),
        {**chat(start, "one"), "model": "other"},
        chat(start, "one", cache_salt="s"),
    ]
    path = write_objects(tmp_path / "log", *({"timestamp": 0, "request": body} for body in bodies))
    _, (one, two, other, salted) = imported(path, openai=True)
    assert one.blocks[:3] == two.blocks[:3]
    assert one.blocks[-1] != two.blocks[-1]
    assert not set(one.blocks) & (set(other.blocks) | set(salted.blocks))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (1_790_000_000, 1_790_000_000.0),
        ("2026-09-21T14:13:20Z", 1_790_000_000.0),
        ("2026-09-21T16:13:20.5+02:00", 1_790_000_000.5),
        ("2026-09-21 14:13:20", 1_790_000_000.0),
    ],
)
def test_openai_times_are_seconds_or_iso_8601(tmp_path: Path, time: object, seconds: float) -> None:
    path = write_objects(tmp_path / "log", {"timestamp": time, "request": chat("hello")})
    _, (found,) = imported(path, openai=True)
    assert found.arrived_s == seconds


@pytest.mark.parametrize(
    ("response", "counts", "outcome"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 6}}, (5, 6, None), "ok"),
        (
            {"usage": {"input_tokens": 5, "output_tokens": 6, "input_tokens_details": {"cached_tokens": 4}}},
            (5, 6, 4),
            "ok",
        ),
        (
            {
                "usage": {
                    "input_tokens": 5,
                    "output_tokens": 6,
                    "cache_read_input_tokens": 4,
                    "cache_creation_input_tokens": 2,
                }
            },
            (11, 6, 4),
            "ok",
        ),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "6"}}, (None, None, None), "ok"),
        ({"usage": None}, (None, None, None), "ok"),
        ({}, (None, None, None), "ok"),
        (None, (None, None, None), "client_gone"),
        ({"error": {"message": "out of memory"}}, (None, None, None), "engine_error"),
    ],
)
def test_openai_usage_of_every_api_is_read_and_never_invented(
    tmp_path: Path, response: object, counts: tuple[int | None, ...], outcome: str
) -> None:
    path = write_objects(tmp_path / "log", {"timestamp": 0, "request": chat("hello"), "response": response})
    _, (found,) = imported(path, openai=True)
    assert (found.engine_prompt_tokens, found.output_tokens, found.cached_tokens) == counts
    assert found.outcome == outcome


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": "yesterday", "request": chat("secret")},
        {"timestamp": True, "request": chat("secret")},
        {"timestamp": -5, "request": chat("secret")},
        {"request": chat("secret")},
        {"timestamp": 0, "request": "secret"},
        {"timestamp": 0},
        {"timestamp": 0, "request": {"messages": [{"content": "secret"}]}},
        {"timestamp": 0, "request": chat("secret"), "response": "secret"},
        ["secret"],
    ],
)
def test_openai_line_that_cannot_be_used_is_left_out_without_its_text(tmp_path: Path, line: object) -> None:
    path = write_objects(tmp_path / "log", line, {"timestamp": 0, "request": chat("hello")})
    conversion, requests = imported(path, openai=True)
    assert len(requests) == 1
    (left_out,) = conversion.left_out
    assert left_out.line == 1
    assert "secret" not in left_out.reason


def test_import_of_bad_lines_lists_some_and_counts_all(tmp_path: Path) -> None:
    path = write_objects(tmp_path / "log", *[0] * (LEFT_OUT_MAX + 5), {"timestamp": 0, "request": chat("hello")})
    conversion, _ = imported(path, openai=True)
    assert (len(conversion.left_out), conversion.left_out_lines) == (LEFT_OUT_MAX, LEFT_OUT_MAX + 5)


def test_import_of_a_line_that_is_too_long_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "IMPORT_LINE_BYTES_MAX", 200_000)
    lines = ({"timestamp": number, "request": chat("x" * size)} for number, size in enumerate((300_000, 10)))
    conversion, requests = imported(write_objects(tmp_path / "log", *lines), openai=True)
    assert [each.arrived_s for each in requests] == [1.0]
    assert "longer than 200000 bytes" in conversion.left_out[0].reason


def test_import_of_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    for content in ("", "not JSON\n", '{"timestamp": 0}\n', '{"kind":"recording","version":1}\n'):
        path = tmp_path / "file"
        path.write_text(content)
        for openai in (False, True):
            with pytest.raises(CannotImport, match="no line that can be imported"):
                imported(path, openai=openai)
    with pytest.raises(CannotImport, match="No such file"):
        imported(tmp_path / "missing", openai=True)
    with pytest.raises(CannotImport, match="not a regular file"):
        imported(tmp_path, openai=True)
