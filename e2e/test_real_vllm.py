"""Compares the engine model with a new recording of a real vLLM, shorter than the recordings in tests/sim/fixtures.

`make vllm ARGS=e2e/test_real_vllm.py` installs vLLM and runs the test, which takes ten minutes on one core.
"""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYTHON = os.environ.get("DUALMAP_VLLM_PYTHON")
LIMIT_S = 1500.0
ERROR_PERCENT = 25.0
"""The largest accepted error of the median TTFT with a rate per group.

The error is 2 % if the engine has its own core.
"""

pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="`make vllm ARGS=e2e/test_real_vllm.py` runs the test with a real vLLM"
)


async def bench(*arguments: str | Path) -> str:
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.engine", *map(str, arguments)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, progress = await asyncio.wait_for(command.communicate(), LIMIT_S)
    finally:
        if command.returncode is None:
            # On SIGINT the recorder stops its engine.
            command.send_signal(signal.SIGINT)
            await command.wait()
    assert command.returncode == 0, progress.decode()[-4000:]
    return printed.decode()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
async def test_engine_model_predicts_a_fresh_vllm_recording(tmp_path: Path) -> None:
    assert PYTHON is not None
    recording = tmp_path / "vllm.jsonl"
    await bench("record", "--python", PYTHON, "--step-tokens", "512", "--rounds", "2", "--out", recording)

    printed = await bench("fit", recording)

    mode = printed.partition("### Model with 512 tokens a step")[2]
    head, all_of_them = (re.search(rf"^\| {name} \|.*$", mode, re.MULTILINE) for name in ("scenario", "all"))
    assert head is not None
    assert all_of_them is not None
    cells = dict(zip(head[0].split(" | "), all_of_them[0].removesuffix(" |").split(" | "), strict=False))
    assert float(cells["at it, median %"]) <= ERROR_PERCENT, printed
    right, requests = cells["cached tokens as predicted |"].split(" of ")
    assert int(right) >= 0.95 * int(requests), printed
