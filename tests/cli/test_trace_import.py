"""Tests of ``dualmap trace import``: the key, what is written, and agreement with a router's hashes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dualmap.recordings.values import RecordedRequest
from dualmap_cli.main import main
from dualmap_extproc.recording.folder import RecordingFolder
from dualmap_sim.recordings.reader import Reading

BODY = {"model": "qwen", "messages": [{"role": "user", "content": "a secret of Ada" * 200}], "session_id": "Ada"}
LINE = {
    "timestamp": "2026-11-28T01:00:00Z",
    "request": BODY,
    "response": {"usage": {"prompt_tokens": 800, "completion_tokens": 12}},
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(LINE)}\nnot JSON\n{json.dumps(LINE)}\n")
    return path


@pytest.fixture(name="key")
def _key(tmp_path: Path) -> Path:
    """Return the key of a router's folder."""
    folder = RecordingFolder(tmp_path / "recording")
    folder.open()
    folder.close()
    return tmp_path / "recording" / "key"


def requests_of(path: Path) -> list[RecordedRequest]:
    return list(Reading([path]).requests())


def test_import_writes_a_recording_without_text(log: Path, key: Path, tmp_path: Path) -> None:
    output = tmp_path / "imported.jsonl"
    result = done("import", log, "--format", "openai", "-o", output, "--key", key)
    assert result.stderr.splitlines() == [
        f"warning: {log}:2: left out: the line is no JSON object (Expecting value: line 1 column 1 (char 0))",
        f"{output}: 2 requests",
    ]
    first, second = requests_of(output)
    assert first == second
    for text in ("Ada", "secret"):
        assert text not in output.read_text()
    shown = json.loads(done("show", output, "--json").stdout)
    assert (shown["requests"], shown["sessions"], shown["output_tokens"]["mean"]) == (2, 1, 12)
    assert (shown["ttft_s"]["p50"], shown["slo_attainment"], shown["hit_rate"]) == (None, None, None)


def test_imports_with_one_key_have_common_hashes_and_merge(log: Path, key: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / f"{number}.jsonl.gz" for number in range(4)]
    for output, options in zip(outputs, (["--key", key], ["--key", key], [], []), strict=True):
        done("import", log, "--format", "openai", "-o", output, *options)
    blocks = [requests_of(output)[0].blocks for output in outputs]
    assert blocks[0] == blocks[1]
    assert not set(blocks[0]) & set(blocks[2])
    assert not set(blocks[2]) & set(blocks[3])
    done("merge", outputs[0], outputs[1], "-o", tmp_path / "merged.jsonl")
    hash_key = tmp_path / "hash-key"
    hash_key.write_text("a key of many random bytes")
    own = tmp_path / "own.jsonl"
    done("import", log, "--format", "openai", "-o", own, "--key", key, "--hash-key-file", hash_key)
    assert not set(blocks[0]) & set(requests_of(own)[0].blocks)
    assert run("merge", outputs[0], own, "-o", tmp_path / "other.jsonl").exit_code == 2
    assert run("merge", outputs[0], outputs[2], "-o", tmp_path / "other.jsonl").exit_code == 2


def test_imported_trace_is_exported_as_it_was(key: Path, tmp_path: Path) -> None:
    trace, output, again = tmp_path / "trace.jsonl", tmp_path / "imported.jsonl", tmp_path / "again.jsonl"
    lines = [{"timestamp": 100 * n, "input_length": 900, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(9)]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = done("import", trace, "--format", "mooncake", "-o", output, "--key", key)
    assert result.stderr.splitlines()[0] == "a block has 512 tokens"
    assert done("export", output, "--format", "mooncake", "-o", again).stderr.startswith("a block has 512 tokens\n")
    assert again.read_bytes() == trace.read_bytes()


def test_import_with_a_key_that_is_none_exits_with_2(log: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("secret")
    (tmp_path / "folder").mkdir()
    for key in (wrong, tmp_path / "missing", tmp_path / "folder"):
        result = run("import", log, "--format", "openai", "-o", tmp_path / "out", "--key", key)
        assert result.exit_code == 2
        assert "--key" in result.stderr
    assert not (tmp_path / "out").exists()


def test_import_never_writes_over_its_input_or_key(log: Path, key: Path) -> None:
    for output in (log, key):
        before = output.read_bytes()
        assert run("import", log, "--format", "openai", "-o", output, "--key", key).exit_code == 2
        assert output.read_bytes() == before


def test_import_of_a_file_that_cannot_be_imported_exits_with_2(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for path, format in ((log, "mooncake"), (tmp_path / "missing", "openai"), (tmp_path, "mooncake"), (log, "csv")):
        result = run("import", path, "--format", format, "-o", output)
        assert result.exit_code == 2
        assert not output.exists()
