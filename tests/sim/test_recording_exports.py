"""Tests of exported traces: times, lengths, ids, and what the formats require."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.recordings.values import RecordedRequest
from dualmap_sim.recordings.errors import RecordingError
from dualmap_sim.recordings.exports import Export, ExportFormat
from dualmap_sim.recordings.reader import Reading
from dualmap_sim.workloads.mooncake import parse_mooncake
from recorded import request, write


def exported(
    folder: Path, *requests: RecordedRequest, format: ExportFormat = ExportFormat.MOONCAKE
) -> tuple[Export, list[dict[str, object]]]:
    export = Export(Reading([write(folder / "a.jsonl", *requests)]).requests, format)
    return export, [json.loads(line) for line in export.lines()]


def test_mooncake_line_has_time_lengths_and_ids(tmp_path: Path) -> None:
    export, lines = exported(
        tmp_path,
        request(10.0, blocks=(71, 72, 73), output_tokens=9),
        request(10.25, blocks=(71, 72, 74, 75), prompt_tokens=400, engine_prompt_tokens=400),
    )
    assert export.block_tokens == 128
    assert lines == [
        {"timestamp": 0, "input_length": 384, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"timestamp": 250, "input_length": 400, "output_length": 20, "hash_ids": [0, 1, 3, 4]},
    ]
    assert export.changes.adjusted == 0


def test_unknown_output_is_absent_for_aiperf_and_1_for_mooncake(tmp_path: Path) -> None:
    for format in ExportFormat:
        export, (line,) = exported(tmp_path, request(output_tokens=None), format=format)
        assert line.get("output_length") == (1 if format is ExportFormat.MOONCAKE else None)
        assert export.changes.without_output == 1


def test_block_has_the_length_that_engines_count(tmp_path: Path) -> None:
    export, lines = exported(
        tmp_path,
        request(0, blocks=(1, 2, 3, 4), engine_prompt_tokens=400),
        request(1, blocks=(1, 2, 3, 5), prompt_tokens=500, engine_prompt_tokens=None),
        request(2, blocks=(1, 2, 3, 5), prompt_tokens=500, engine_prompt_tokens=392),
    )
    assert (export.router_block_tokens, export.block_tokens) == (128, 100)
    # The partial block has the length of its first occurrence.
    assert [line["input_length"] for line in lines] == [400, 391, 391]
    assert export.changes.adjusted == 2


def test_blocks_of_different_lengths_are_joined(tmp_path: Path) -> None:
    fields = {"block_tokens": 64, "engine_prompt_tokens": None}
    export, lines = exported(
        tmp_path,
        request(0, blocks=(1, 2)),
        request(1, blocks=(11, 12, 13, 14), prompt_tokens=256, **fields),
        request(2, blocks=(11, 12, 15), prompt_tokens=192, **fields),
    )
    assert export.block_tokens == 128
    assert [(line["input_length"], line["hash_ids"]) for line in lines] == [
        (256, [0, 1]),
        (256, [2, 3]),
        (192, [2, 4]),
    ]


def test_request_without_a_prompt_is_left_out(tmp_path: Path) -> None:
    export, lines = exported(tmp_path, request(0, blocks=()), request(3, blocks=(1,)))
    assert [line["timestamp"] for line in lines] == [0]
    assert export.changes.without_prompt == 1


def test_recording_without_requests_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no requests"):
        exported(tmp_path)


_PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=5),
        st.integers(1, 128),
        st.one_of(st.none(), st.integers(1, 2000)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100)
@given(prompts=_PROMPTS)
def test_lines_have_equal_ids_for_equal_prefixes_and_fit_their_blocks(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[tuple[list[int], int, int | None]]
) -> None:
    requests = []
    for number, (names, last_tokens, engine_tokens) in enumerate(prompts):
        # A chained hash names all blocks before it, and a partial block is another block than a full one.
        hashes = [hash((tuple(names[: end + 1]), 128)) % 2**64 for end in range(len(names) - 1)]
        hashes.append(hash((tuple(names), last_tokens)) % 2**64)
        requests.append(
            request(
                number,
                blocks=hashes,
                prompt_tokens=128 * (len(names) - 1) + last_tokens,
                engine_prompt_tokens=engine_tokens,
            )
        )
    export, lines = exported(tmp_path_factory.getbasetemp(), *requests)
    sizes: dict[int, int] = {}
    names_of: dict[int, int] = {}
    for line, each in zip(lines, requests, strict=True):
        ids, length = line["hash_ids"], line["input_length"]
        assert isinstance(ids, list)
        assert isinstance(length, int)
        assert len(ids) == len(each.blocks) == -(-length // export.block_tokens)
        for place, (name, block) in enumerate(zip(ids, each.blocks, strict=True)):
            assert names_of.setdefault(name, block) == block
            size = min(export.block_tokens, length - place * export.block_tokens)
            assert sizes.setdefault(name, size) == size
    assert len(names_of) == len({block for each in requests for block in each.blocks})


def test_mooncake_lines_of_512_tokens_are_read_by_the_simulator(tmp_path: Path) -> None:
    _, lines = exported(
        tmp_path,
        request(0, blocks=(1, 2), block_tokens=512, prompt_tokens=1000, engine_prompt_tokens=1000),
        request(1, blocks=(1, 3), block_tokens=512, prompt_tokens=1024, engine_prompt_tokens=1024),
    )
    trace = parse_mooncake(map(json.dumps, lines), source="trace")
    assert [each.blocks for each in trace.requests] == [(0, 1), (0, 2)]
