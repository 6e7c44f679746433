"""Tests of ``dualmap trace``: output, exit codes, warnings, and files that are written at once or not at all."""

import errno
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dualmap.recordings.values import Missing, RecordedOutcome
from dualmap_cli.main import main
from dualmap_sim.recordings.reader import Reading
from recorded import CHANGED, HEADER, POOL, START_S, request, write

KEYS = {
    *(
        "version",
        "requests",
        "sample",
        "routers",
        "pools",
        "duration_s",
        "qps",
        "prompt_tokens",
        "output_tokens",
        "sessions",
    ),
    *("reuse_at_best", "hit_rate", "slo_attainment", "ttft_s", "outcomes", "damaged"),
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """Return a folder with the recording of four requests."""
    folder = tmp_path / "recording"
    write(
        folder / "requests-20260928T000000Z-0.jsonl.gz",
        CHANGED,
        request(0, blocks=(1, 2, 3), session=1),
        request(2, blocks=(1, 2, 4), session=1, cached_tokens=256, ttft_s=0.1),
        request(1, blocks=(5, 6), streamed=False, ttft_s=None),
        request(4, blocks=(7,), outcome=RecordedOutcome.REFUSED, receipt=None, ttft_s=None, cached_tokens=None),
        Missing(at_s=START_S + 5, unrouted=3),
    )
    return folder


def test_show_prints_figures_as_json(folder: Path) -> None:
    result = done("show", folder, "--json")
    shown = json.loads(result.stdout)
    assert shown.keys() >= KEYS
    assert result.stderr == ""
    assert {
        name: shown[name] for name in ("version", "requests", "sample", "routers", "pools", "duration_s", "qps")
    } == {
        "version": 1,
        "requests": 4,
        "sample": 1.0,
        "routers": ["router-a"],
        "pools": [POOL.id],
        "duration_s": 4.0,
        "qps": 1.0,
    }
    assert shown["prompt_tokens"] == {"mean": (384 * 2 + 256 + 128) / 4, "p50": 256, "p99": 384}
    assert shown["output_tokens"] == {"mean": 20.0, "p50": 20, "p99": 20}
    assert shown["ttft_s"] == {"p50": 0.1, "p90": 0.5, "p99": 0.5}
    assert shown["outcomes"] == {"ok": 3, "engine_error": 0, "client_gone": 0, "refused": 1}
    assert (shown["sessions"], shown["damaged"], shown["unrouted"]) == (1, [], 3)
    assert shown["reuse_at_best"] == 256 / 1152
    assert shown["hit_rate"] == 256 / 1024
    assert shown["slo_attainment"] == 2 / 3


def test_show_prints_text_for_people(folder: Path) -> None:
    shown = done("show", folder).stdout
    for words in ("4 in 4.0 s", "all sessions by 1 router", "llm/qwen 100.0%", "22.2% of the prompt tokens"):
        assert words in shown
    for words in ("qwen-0: 3 requests", "256 tokens (2 blocks", "refused 1", "3 requests found no pool", "within 2 s"):
        assert words in shown


def test_show_of_a_recording_without_requests_has_null_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    shown = json.loads(done("show", path, "--json").stdout)
    assert shown["requests"] == 0
    assert shown["pools"] == []
    assert (shown["qps"], shown["hit_rate"], shown["prompt_tokens"]["mean"]) == (None, None, None)
    assert "0" in done("show", path).stdout


def test_show_of_a_damaged_recording_warns_and_exits_with_0(folder: Path) -> None:
    broken = write(folder / "requests-20260928T000000Z-1.jsonl", request(9))
    with broken.open("ab") as file:
        file.write(b"{}\n" * 9)
    result = done("show", folder, "--json")
    shown = json.loads(result.stdout)
    assert (shown["requests"], shown["damaged_lines"]) == (5, 9)
    assert shown["damaged"][0].keys() == {"file", "line", "reason"}
    assert (shown["damaged"][0]["file"], shown["damaged"][0]["line"]) == (str(broken), 3)
    warnings = result.stderr.splitlines()
    assert len(warnings) == 6
    assert f"{broken}:3: left out" in warnings[0]
    assert "9 lines" in warnings[-1]


def test_show_warns_of_different_shares_and_keys(folder: Path) -> None:
    write(folder / "requests-20260928T000000Z-2.jsonl", header=HEADER._replace(sample=0.1, key="00bb"))
    result = done("show", folder, "--json")
    assert json.loads(result.stdout)["sample"] == 0.1
    assert "different shares of the sessions (0.1, 1)" in result.stderr
    assert "2 different keys" in result.stderr


@pytest.mark.parametrize("kind", ["missing", "empty", "foreign", "version"])
def test_show_of_something_else_exits_with_2_and_says_what_is_accepted(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "empty":
        path.mkdir()
    elif kind == "foreign":
        path.write_text('{"timestamp": 0}\n')
    elif kind == "version":
        path.write_text('{"kind":"recording","version":2}\n')
    result = run("show", path, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "give the folder of `dualmap router --record`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_show_plots_any_recording(folder: Path, tmp_path: Path, suffix: str) -> None:
    for number, path in enumerate((folder, write(tmp_path / "none.jsonl"))):
        chart = tmp_path / f"{number}.{suffix}"
        done("show", path, "--plot", chart)
        assert chart.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_show_refuses_another_kind_of_picture(folder: Path, tmp_path: Path) -> None:
    result = run("show", folder, "--plot", tmp_path / "a.gif")
    assert result.exit_code == 2
    assert ".png or .svg" in result.stderr


def test_merge_writes_all_requests_in_order_of_time(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b" / "1.jsonl", request(3, blocks=(1, 2)), header=HEADER._replace(router="router-b"))
    for name in ("merged.jsonl", "merged.jsonl.gz"):
        merged = tmp_path / name
        result = done("merge", folder, other.parent, "-o", merged)
        reading = Reading([merged])
        assert [each.arrived_s - START_S for each in reading.requests()] == [0, 1, 2, 3, 4]
        (source,) = reading.sources
        assert (source.header.router, source.header.key, source.header.sample) == ("router-a,router-b", "00aa", 1.0)
        assert merged.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
        assert "7 lines of 2 files" in result.stderr


def test_merge_counts_a_file_once_also_beside_its_merged_file(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.iterdir()
    merged, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    done("merge", folder, file, folder, "-o", merged)
    done("merge", merged, folder, "-o", again)
    assert merged.read_bytes() == again.read_bytes()
    assert json.loads(done("show", again, "--json").stdout) == {
        **json.loads(done("show", folder, "--json").stdout),
        "damaged": [],
    }


def test_merge_refuses_different_keys_unless_they_are_separate(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b.jsonl", request(3, blocks=(8, 9)), header=HEADER._replace(key="00bb"))
    merged = tmp_path / "merged.jsonl"
    result = run("merge", folder, other, "-o", merged)
    assert result.exit_code == 2
    assert str(other) in result.stderr
    assert "--separate-keys" in result.stderr
    assert not merged.exists()
    done("merge", folder, other, "-o", merged, "--separate-keys")
    reading = Reading([merged])
    assert len(list(reading.requests())) == 5
    assert reading.keys == {"00aa", "00bb"}
    # The merged file still has both keys.
    assert run("merge", merged, folder, "-o", tmp_path / "c.jsonl").exit_code == 2


def test_merge_never_writes_over_what_it_reads(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.iterdir()
    before = file.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(file)
    missing, device = tmp_path / "no" / "a.jsonl", Path("/dev/null")
    for output in (file, link, folder / "merged.jsonl", tmp_path, missing, device):
        result = run("merge", folder, file, "-o", output)
        assert result.exit_code == 2, output
        assert "-o" in result.stderr
    assert file.read_bytes() == before
    assert list(folder.iterdir()) == [file]


def test_merge_that_fails_leaves_the_old_file_and_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out" / "merged.jsonl"
    output.parent.mkdir()
    output.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run("merge", folder, "-o", output)
    assert result.exit_code == 1
    assert f"{output} cannot be written: No space left" in result.stderr
    assert output.read_text() == "old"
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("command", [[], ["show"], ["merge"], ["export"], ["import"]])
def test_help_has_an_example(command: list[str]) -> None:
    shown = done(*command, "--help").stdout
    assert "Example:" in shown
    assert "dualmap trace" in shown


def test_export_says_first_how_long_a_block_is(folder: Path, tmp_path: Path) -> None:
    for format in ("mooncake", "aiperf"):
        output = tmp_path / f"{format}.jsonl"
        result = done("export", folder, "--format", format, "-o", output)
        assert result.stderr.splitlines()[0] == "a block has 128 tokens"
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["timestamp"] for line in lines] == [0, 1000, 2000, 4000]
        assert lines[2]["hash_ids"][:2] == lines[0]["hash_ids"][:2] == [0, 1]


def test_export_of_nothing_or_over_its_input_exits_with_2(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.iterdir()
    before = file.read_bytes()
    assert run("export", file, "--format", "mooncake", "-o", file).exit_code == 2
    assert run("export", write(tmp_path / "a.jsonl"), "--format", "mooncake", "-o", tmp_path / "b").exit_code == 2
    assert run("export", folder, "--format", "csv", "-o", tmp_path / "b").exit_code == 2
    assert file.read_bytes() == before
    assert not (tmp_path / "b").exists()
