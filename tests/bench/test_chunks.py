"""Tests that the chunks benchmark passes its chunks through a real router, and that a lost connection ends it."""

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

# The library with Envoy's messages warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]


@pytest.fixture(name="chunks")
def _chunks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("bench.chunks")
    for name, value in {"PROMPTS": 20, "EVERY_S": 0.002, "RAMP_S": 0.5, "PAUSE_S": 0.0}.items():
        monkeypatch.setattr(module, name, value)
    return module


async def test_chunks_of_every_rate_come_back_from_a_router(
    chunks: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    await chunks.measure((500, 1000), 0.5)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["500", "1000"]
    assert all(int(row[1]) > 0 for row in rows)


async def test_replay_of_a_closed_connection_fails_with_its_reason(chunks: ModuleType) -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        _, replay = await asyncio.get_running_loop().create_connection(chunks.Replay, *server.sockets[0].getsockname())
        with pytest.raises(chunks.ReplayError, match="the connection was lost"):
            async with asyncio.timeout(60):
                await replay.run(1000)


async def test_replay_counts_messages_that_frames_join_or_cut(chunks: ModuleType) -> None:
    message = b"\0\0\0\0\3abc"
    call = chunks.ReplayedCall(1, 0.0)
    assert [call.received(piece) for piece in (message, message + message[:2], message[2:], message[:6])] == [
        1,
        1,
        1,
        0,
    ]
