"""Tests that minimal runs of the benchmarks with a real Envoy measure everything that they should.

A short run gives no meaningful figures, so the tests assert no figures.
"""

import asyncio
import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SHORTEST = ("--rounds", "1", "--seconds", "0.5", "--idle-seconds", "0.5", "--connections", "4", "--rate", "50")
LOADS = {"prompts": 3 * 2 * 5, "chunks": 2 * 5, "duplex": 2 * 4, "routers": 4}
ROWS = {
    "Prompts": 3 * 5,
    "Event streams, 1 KB": 5,
    "Event streams of 50": 4,
    "Several routers": 4,
    "Idle": 1,
    "Targets": 3 + 2 * 6 + 1 + 1,
}
LIMIT_S = 400.0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
async def test_gateway_bench_tables_have_a_row_for_each_stack(tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench", "gateway", *SHORTEST, "--json", str(samples)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, progress = await asyncio.wait_for(bench.communicate(), LIMIT_S)
    finally:
        if bench.returncode is None:
            # The child processes end too.
            bench.kill()
            await bench.wait()
    assert bench.returncode == 0, progress.decode()[-4000:]

    tables = {table.partition("\n")[0]: table for table in printed.decode().split("\n\n### ")}
    for title, rows in ROWS.items():
        table = next(text for name, text in tables.items() if name.startswith(title))
        # The first two lines are the Markdown table's header.
        cells = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")][2:]
        assert len(cells) == rows, table
        assert all(cell.strip() != "-" for row in cells for cell in row), table

    measured = json.loads(samples.read_text())["samples"]
    assert {section: sum(each["cell"]["section"] == section for each in measured) for section in LOADS} == LOADS
    # A busy machine may complete no request in the short time of a measurement.
    busy = [each["cell"]["section"] for each in measured if each["result"]["requests"] > 0]
    assert all(busy.count(section) > wanted // 2 for section, wanted in LOADS.items())


async def test_gateway_bench_with_invalid_option_exits_2() -> None:
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench", "gateway", "--rounds", "0"),
        cwd=REPOSITORY,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await bench.communicate()
    assert bench.returncode == 2
    assert b"--rounds" in said


async def rows_of(*arguments: str) -> list[str]:
    """Run a benchmark; return the first cell of each row of its table."""
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench", *arguments),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, progress = await bench.communicate()
    assert bench.returncode == 0, progress.decode()[-4000:]
    # The first two lines are the Markdown table's header.
    return [line.split("|")[1].strip() for line in printed.decode().splitlines() if line.startswith("|")][2:]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hostile_bench_table_has_a_row_for_each_attack() -> None:
    rows = await rows_of("hostile", "--rounds", "1", "--seconds", "2", "--connections", "2")
    assert rows == ["none", "8,000,000 numbers", "941,000 numbers"]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_truth_bench_with_processes_has_a_row_for_each_kind(tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    rows = await rows_of("truth", "--processes", "--quick", "--json", str(samples))
    assert rows == ["round robin", "records and usage", "KV events"]
    answered = json.loads(samples.read_text())
    assert all(each["ttft_s"] is not None for kind in answered.values() for each in kind)
    assert {kind for kind, each in answered.items() if any(one["by_events"] for one in each)} == {"KV events"}
