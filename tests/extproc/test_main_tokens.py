"""Tests ``dualmap router`` with a tokenizer: requests are tokenized; an unreadable folder stops the start."""

import json
from pathlib import Path

import grpc
import pytest
import yaml
from click.testing import CliRunner

from dualmap_extproc.app.main import router
from extproc.envoy_messages import chat, logging_as_it_was
from extproc.router_processes import picked, pool_document, running
from extproc.tokenizer_files import write_tokenizer
from waiting import until

pytestmark = pytest.mark.usefixtures("transport")


def pool_with(folder: Path, path: Path) -> Path:
    document = pool_document()
    document["spec"]["engine"] = {"tokenizer": {"source": "Files", "path": str(path)}}  # type: ignore[index]
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


async def test_router_tokenizes_requests_and_shows_the_source(tmp_path: Path) -> None:
    file = pool_with(tmp_path, write_tokenizer(tmp_path / "tokenizer"))
    async with running(file) as served, grpc.aio.insecure_channel(served.grpc) as channel:
        for body in (chat("hello"), chat("hello world " * 2000)):
            assert await picked(channel, body) is not None
        line = b'dualmap_tokenize_seconds_count{pool="llm/qwen"} 2.0'

        async def counted() -> bool:
            return line in await served.get("/metrics")

        await until(counted)
        shown = json.loads(await served.get("/pools/llm/qwen"))["tokenizer"]
        assert shown == {"source": "Files", "ready": True, "reason": "", "distrusted": []}


def test_router_with_unreadable_tokenizer_exits_with_one_line(tmp_path: Path) -> None:
    file = pool_with(tmp_path, tmp_path / "none")
    ports = ("--host", "127.0.0.1", "--grpc-port", "0", "--health-port", "0", "--metrics-port", "0", "--als-port", "0")
    with logging_as_it_was():
        result = CliRunner().invoke(router, ["--pool", str(file), *ports])
    assert result.exit_code == 2
    said = f"dualmap router: llm/qwen: spec.engine.tokenizer.path: {tmp_path}/none/tokenizer.json: No such file"
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1
