"""Tests of the gateway benchmark: the peer's files, the engines' metrics, and what its targets are compared with."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from dualmap.engines.profile import read_metrics

# The library with Envoy's messages warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
US = {
    "Envoy alone": 0.0,
    "trivial picker": 1000.0,
    "1 router, h2": 500.0,
    "1 router with Redis": 600.0,
    "llm-d-router": 2000.0,
}


@pytest.fixture(name="gateway")
def _gateway(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("peer", "upstream", "report", "load"):
        importlib.import_module(f"bench.gateway.{name}")
    return importlib.import_module("bench.gateway.experiment")


def bench(name: str) -> Any:
    return importlib.import_module(f"bench.gateway.{name}")


def measured(gateway: ModuleType, stacks: dict[str, float], peer: Path | None) -> Any:
    """Return samples of 64 KB in a closed loop, with these CPU times."""
    plan = gateway.Plan(
        sections=("prompts",),
        transports=("h2",),
        rounds=1,
        seconds=1.0,
        idle_s=1.0,
        connections=1,
        rate=1.0,
        peer=peer,
    )
    cell = gateway.Cell(section="prompts", prompt_kb=64, chunks=0, rate=0)
    result = bench("load").Result(
        requests=1000, sent=1000, errors=0, seconds=1.0, cpu_s={}, ttfb_p50_ms=1.0, ttfb_p90_ms=1.0, ttfb_p99_ms=1.0
    )
    samples = [
        gateway.Sample(
            cell=cell, stack=name, round=1, messages=5.0, result=replace(result, cpu_s={"picker-0": us / 1e3})
        )
        for name, us in stacks.items()
    ]
    return gateway.Measured(plan=plan, samples=tuple(samples), idle=())


def test_peer_command_has_the_engines_and_ports_of_its_files(gateway: ModuleType, tmp_path: Path) -> None:
    (program, *options), address = bench("peer").command(
        Path("/opt/epp"), ["127.0.0.1:8001", "127.0.0.1:8002"], tmp_path
    )
    values = dict(each.removeprefix("--").split("=") for each in options)
    config = yaml.safe_load(Path(values["config-file"]).read_text())
    endpoints = yaml.safe_load(Path(config["plugins"][0]["parameters"]["path"]).read_text())["endpoints"]

    assert program == "/opt/epp"
    assert address == f"127.0.0.1:{values['grpc-port']}"
    assert len({values[name] for name in ("grpc-port", "grpc-health-port", "metrics-port")}) == 3
    assert [(each["address"], each["port"]) for each in endpoints] == [("127.0.0.1", "8001"), ("127.0.0.1", "8002")]


def test_engine_metrics_page_has_the_load_and_the_cache(gateway: ModuleType) -> None:
    head, _, page = bench("upstream").metrics_page().partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(page) in head
    profile = read_metrics("vLLM", page)
    assert (profile.running, profile.waiting, profile.kv_usage) == (0, 0, 0.0)
    assert profile.cache_tokens == 62_499 * 16
    assert not profile.reason


def test_report_with_the_peer_compares_with_its_measured_time(gateway: ModuleType) -> None:
    tables = bench("report").Tables(measured(gateway, US, Path("epp"))).markdown()
    assert "| 1 router, h2: CPU at 64 KB, at most 0.25 of llm-d-router's (measured) | 0.25 | yes |" in tables
    assert "| 64 KB | llm-d-router | 2000 | 2.00 | 1.00 |" in tables


def test_report_without_the_peer_compares_with_its_recorded_ratio(gateway: ModuleType) -> None:
    stacks = {name: us for name, us in US.items() if name != "llm-d-router"}
    tables = bench("report").Tables(measured(gateway, stacks, None)).markdown()
    recorded = "at most 0.25 of llm-d-router's (its recorded ratio to the trivial picker) | 0.12 | yes |"
    assert recorded in tables
    assert "| llm-d-router |" not in tables
