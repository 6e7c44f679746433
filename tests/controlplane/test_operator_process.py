"""Tests ``dualmap operator`` as a process without an API server: its output and its exit."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

ARGV = [sys.executable, "-m", "dualmap_cli", "operator", "--host", "127.0.0.1", "--metrics-port", "0"]


def kubeconfig(folder: Path) -> Path:
    """Write a kubeconfig with the address of a server that does not run."""
    file = folder / "kubeconfig"
    parts = {
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(json.dumps(parts))
    return file


@asynccontextmanager
async def operator(kubeconfig: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *ARGV,
        *arguments,
        env={"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_operator_without_kubeconfig_error_names_the_settings(tmp_path: Path) -> None:
    async with operator(tmp_path / "absent", "--health-port", "0") as process:
        _, said = await process.communicate()

    assert process.returncode == 2
    assert re.search(r"dualmap operator: kubeconfig .*absent does not exist; set KUBECONFIG", said.decode())


async def test_operator_port_in_use_is_named_in_the_error(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        async with operator(kubeconfig(tmp_path), "--health-port", str(port)) as process:
            _, said = await process.communicate()

    assert process.returncode == 1
    assert f"dualmap operator: cannot listen on 127.0.0.1:{port}" in said.decode()
    assert "give another --health-port" in said.decode()


@pytest.mark.parametrize("flags", [(), ("--leader-election",)])
async def test_operator_without_api_server_waits_and_stops_on_signal(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with operator(kubeconfig(tmp_path), "--health-port", "0", *flags) as process:
        assert process.stderr is not None
        ready = (await process.stderr.readline()).decode()
        found = re.fullmatch(r"dualmap operator ready health=127\.0\.0\.1:(\d+) metrics=127\.0\.0\.1:(\d+)\n", ready)
        assert found, ready
        trouble = (await process.stderr.readline()).decode()
        assert "the API server cannot be reached" in trouble

        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{found[1]}/healthz") as response:
                assert response.status == 200
            async with session.get(f"http://127.0.0.1:{found[2]}/metrics") as response:
                page = await response.text()
        assert f"dualmap_operator_leader {0.0 if flags else 1.0}" in page
        process.send_signal(signal.SIGTERM)
        await process.communicate()

    assert process.returncode == 0
