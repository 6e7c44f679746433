"""The command ``dualmap pd-proxy``: its options, its pool files, its signals and its metrics."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from dualmap_sidecar.main import pd_proxy
from dualmap_sidecar.metrics import SidecarMetrics
from dualmap_sidecar.outcomes import Continued, Reason, Where
from sidecar_site import RecordedEngine, decoded, prefilled
from waiting import until

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def pool_file(path: Path, *ports: int) -> Path:
    """Write a pool file, by rename as a ConfigMap does."""
    members = [{"id": f"p-{port}", "address": "127.0.0.1", "port": port} for port in ports]
    pool = {
        "apiVersion": "serving.dualmap.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "prefill", "namespace": "llm"},
        "spec": {"model": {"name": "qwen"}},
        "status": {"ring": {"version": 1, "members": members}},
    }
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(pool))
    return fresh.rename(path)


@asynccontextmanager
async def running(*arguments: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str, str], None]:
    """Yield a running proxy with the URLs of its two ports."""
    command = [sys.executable, "-m", "dualmap_cli", "pd-proxy", "--listen", "127.0.0.1:0", "--metrics-port", "0"]
    process = await asyncio.create_subprocess_exec(*command, *arguments, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = (await process.stderr.readline()).decode()
        ready = re.fullmatch(r"dualmap pd-proxy ready http=(\S+) metrics=(\S+)\n", line)
        assert ready, line
        yield process, f"http://{ready[1]}", f"http://{ready[2]}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def where(client: aiohttp.ClientSession, url: str, prefiller: str) -> str:
    headers = {"x-prefiller-host-port": prefiller}
    async with client.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        assert response.status == 200
        return response.headers["x-dualmap-prefill"]


async def test_members_of_a_pool_file_may_prefill_until_they_leave(tmp_path: Path) -> None:
    engine, prefiller = RecordedEngine(decoded), RecordedEngine(prefilled)
    await engine.start()
    await prefiller.start()
    file = pool_file(tmp_path / "prefill.yaml", prefiller.port)
    arguments = ("--engine", f"http://{engine.endpoint}", "--pool", str(file))
    async with running(*arguments) as (process, url, metrics), aiohttp.ClientSession() as client:
        assert await where(client, url, prefiller.endpoint) == "remote"
        pool_file(file, 9)

        async def left_out() -> bool:
            return await where(client, url, prefiller.endpoint) == "none"

        await until(left_out)
        async with client.get(f"{metrics}/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")
        async with client.get(f"{metrics}/metrics") as response:
            assert 'dualmap_pd_prefills_total{where="none"}' in await response.text()
        async with client.get(f"{metrics}/other") as response:
            assert response.status == 404
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    await engine.stop()
    await prefiller.stop()


async def test_health_of_the_engine_passes() -> None:
    engine = RecordedEngine(decoded)
    await engine.start()
    arguments = ("--engine", f"http://{engine.endpoint}", "--allow", "127.0.0.0/8")
    async with running(*arguments) as (process, url, metrics), aiohttp.ClientSession() as client:
        async with client.get(f"{url}/health") as response:
            assert response.status == 200
        await engine.stop()
        async with client.get(f"{url}/health") as response:
            assert response.status == 503
        async with client.get(f"{metrics}/healthz") as response:
            assert response.status == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --pool FILE, --allow CIDR or --kube"),
        (["--pool", "x.yaml", "--kube"], "--pool and --kube exclude each other"),
        (["--allow", "10.0.0.1/8"], "'10.0.0.1/8' is not accepted; give a network such as 10.0.0.0/8"),
        (["--allow", "prefill:8000"], "'prefill:8000' is not accepted"),
        (["--allow", "10.0.0.0/8", "--namespace", "llm"], "--namespace requires --kube"),
        (["--kube"], "--kube requires a namespace; give --namespace, or set POD_NAMESPACE"),
        (["--allow", "10.0.0.0/8", "--listen", "8000"], "'8000' is not accepted; give HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--listen", "::1:8000"], "'::1:8000' is not accepted; give HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--listen", "0.0.0.0:65536"], "is not accepted; give HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--engine", "https://x:1"], "is not accepted; give http://HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--engine", "http://u@x:1"], "is not accepted; give http://HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--engine", "http://x:1/v1"], "is not accepted; give http://HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--engine", "http://x"], "is not accepted; give http://HOST:PORT"),
        (["--allow", "10.0.0.0/8", "--prefill-timeout", "soon"], "'soon' is not accepted; give a number and a unit"),
    ],
)
def test_invalid_options_are_refused(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], message: str) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    result = CliRunner().invoke(pd_proxy, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("content", [None, "not: a pool"])
async def test_invalid_pool_file_ends_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "prefill.yaml"
    if content is not None:
        file.write_text(content)
    command = [sys.executable, "-m", "dualmap_cli", "pd-proxy", "--listen", "127.0.0.1:0", "--pool", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, output = await process.communicate()
    assert process.returncode == 2
    assert f"dualmap pd-proxy: {file}: ".encode() in output


async def test_port_in_use_ends_the_start() -> None:
    engine = RecordedEngine(decoded)
    await engine.start()
    command = [sys.executable, "-m", "dualmap_cli", "pd-proxy", "--listen", engine.endpoint, "--allow", "::/0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, output = await process.communicate()
    assert process.returncode == 1
    assert b"cannot listen on" in output
    assert b"give another --listen" in output
    await engine.stop()


def test_metrics_page_lists_exactly_the_exported_metrics() -> None:
    _, _, part = DOCUMENT.read_text().partition("## Metrics of pd-proxy")
    rows: list[Any] = re.findall(r"^\| `(dualmap_\w+)` \| (\w+) \| ([^|]*)\|", part, re.MULTILINE)
    page = SidecarMetrics().render().decode()
    exported = {
        f"{name}_total" if kind == "counter" and not name.endswith("_total") else name: kind
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE)
        if not name.endswith("_created")
    }
    assert {name: kind for name, kind, _ in rows} == exported


def test_metrics_page_lists_every_label_value() -> None:
    _, _, part = DOCUMENT.read_text().partition("## Metrics of pd-proxy")
    assert not [each.value for each in (*Where, *Reason, *Continued) if f"`{each.value}`" not in part]
