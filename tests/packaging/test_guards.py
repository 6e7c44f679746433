"""Tests that the repository's import contracts report a violation in a copy of the sources."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# The file, the added line, and the first words of the violated contract's name.
PLANTED = [
    ("core/dualmap/keys/rings.py", "import time", "The core is pure"),
    ("core/dualmap/keys/hotness.py", "import random", "The core is pure"),
    ("core/dualmap/router.py", "import grpc", "The core is pure"),
    ("core/dualmap/queue/request_queue.py", "import dualmap.fleet.load", "The core's folders"),
    ("core/dualmap/replicas/update.py", "import dualmap.keys.hotness", "The core's folders"),
    ("core/dualmap/replicas/update.py", "import dualmap.pools.pool", "The core's folders"),
    ("core/dualmap/policies/situation.py", "import dualmap.requests", "The core's folders"),
    ("core/dualmap/fleet/fleet.py", "import dualmap.chooser", "The core's folders"),
    ("core/dualmap/engines/residency.py", "import dualmap.fleet.fleet", "The core's folders"),
    ("core/dualmap/engines/events.py", "import dualmap.keys.rings", "The core's folders"),
    ("core/dualmap/engines/events.py", "import msgspec", "The core is pure"),
    ("core/dualmap/engines/source.py", "import zmq", "The core is pure"),
    ("core/dualmap/engines/source.py", "import dualmap.replicas.update", "What engines report"),
    ("core/dualmap/engines/held_blocks.py", "import dualmap.engines.residency", "The modules of engines"),
    ("core/dualmap/scaling/reports.py", "import dualmap.objects.pods", "The core's folders"),
    ("core/dualmap/router.py", "import dualmap.scaling.reports", "The core's folders"),
    (
        "core/dualmap/policies/single_signal/random.py",
        "import dualmap.policies.pair.dualmap",
        "Policies import downwards only",
    ),
    ("core/dualmap/policies/situation.py", "import dualmap.prompts.prompt", "Policies import keys and pools"),
    ("core/dualmap/policies/situation.py", "import dualmap.replicas.update", "Policies import keys and pools"),
    ("core/dualmap/objects/pods.py", "import dualmap.fleet.fleet", "Kubernetes objects are read"),
    ("core/dualmap/objects/pods.py", "import dualmap.keys.rings", "Kubernetes objects are read"),
    ("edge/dualmap_edge/kube/client.py", "import dualmap.requests", "Kubernetes objects are read"),
    ("core/dualmap/scaling/scaling.py", "import dualmap.queue.request_queue", "Scaling is computed"),
    ("core/dualmap/recordings/values.py", "import dualmap.requests", "The format of recordings"),
    (
        "extproc/dualmap_extproc/recording/files.py",
        "import dualmap_extproc.recording.writer",
        "The modules of the recording",
    ),
    (
        "extproc/dualmap_extproc/recording/recorder.py",
        "import dualmap.prompts.prompt",
        "The recording reaches no server",
    ),
    ("sim/dualmap_sim/recordings/lines.py", "import dualmap_sim.recordings.reader", "The modules of recordings"),
    ("sim/dualmap_sim/recordings/reader.py", "import time", "Simulations reach no server"),
    ("sim/dualmap_sim/fitting/service.py", "import dualmap_sim.fitting.fit", "The modules of fitting"),
    ("sim/dualmap_sim/fitting/cache.py", "import numpy", "Only fits import numpy"),
    ("sim/dualmap_sim/fitting/fit.py", "import time", "Simulations reach no server"),
    ("sim/dualmap_sim/planning/capacity.py", "import time", "Simulations reach no server"),
    ("core/dualmap/router.py", "import dualmap_extproc.names", "Layers import downwards only"),
    ("extproc/dualmap_extproc/request/picker.py", "import dualmap_sim.presets", "Layers import downwards only"),
    ("sim/dualmap_sim/engine.py", "import dualmap_extproc.names", "Layers import downwards only"),
    ("extproc/dualmap_extproc/names.py", "import dualmap_sidecar.targets", "Layers import downwards only"),
    ("sidecar/dualmap_sidecar/targets.py", "import dualmap_sidecar.prefill", "The sidecar's modules import downwards"),
    ("sidecar/dualmap_sidecar/proxy.py", "import dualmap_extproc.request.body", "The sidecar imports neither"),
    ("sidecar/dualmap_sidecar/prefill.py", "import dualmap_sim.engine", "The sidecar imports neither"),
    ("operator/dualmap_operator/run/reconciler.py", "import dualmap_extproc.names", "Layers import downwards only"),
    ("operator/dualmap_operator/decide/ring.py", "import time", "The decide package is pure"),
    (
        "operator/dualmap_operator/decide/workload/checks.py",
        "import dualmap_edge.logs",
        "The decide package is pure",
    ),
    ("operator/dualmap_operator/decide/ring.py", "import dualmap_operator.observe.routers", "The operator's packages"),
    ("operator/dualmap_operator/decide/ring.py", "import subprocess", "The decide package is pure"),
    ("operator/dualmap_operator/decide/ring.py", "import threading", "The decide package is pure"),
    ("operator/dualmap_operator/decide/ring.py", "import pathlib", "The decide package is pure"),
    (
        "operator/dualmap_operator/decide/workload/children.py",
        "import dualmap_operator.decide.plan",
        "The parts of the operator's plan import downwards only",
    ),
    ("operator/dualmap_operator/observe/gather.py", "import dualmap_operator.decide.plan", "Only wiring imports"),
    (
        "operator/dualmap_operator/act/events.py",
        "import dualmap_operator.observe.routers",
        "The act package does not import the clients of routers and engines",
    ),
    ("operator/dualmap_operator/act/apply.py", "import dualmap_operator.run.leader", "The operator's packages"),
    ("operator/dualmap_operator/run/health.py", "import dualmap_operator.wiring", "The operator's packages"),
    ("operator/dualmap_operator/observe/gather.py", "import kopf", "Below its run package the operator"),
    ("operator/dualmap_operator/act/events.py", "import aiohttp", "Only HTTP servers and clients import aiohttp"),
    ("edge/dualmap_edge/kube/client.py", "import dualmap_edge.kube.watch", "Kubernetes access imports"),
    ("operator/dualmap_operator/run/reconciler.py", "import kubernetes", "Only the API client imports kubernetes"),
    ("extproc/dualmap_extproc/request/picker.py", "import matplotlib", "One module each imports structlog"),
    ("extproc/dualmap_extproc/request/picker.py", "import grpc", "Only servers and servicers import gRPC"),
    (
        "extproc/dualmap_extproc/request/stream.py",
        "import prometheus_client",
        "Only metrics modules import prometheus_client",
    ),
    (
        "extproc/dualmap_extproc/envoy/discovery/endpoints.py",
        "import envoy_data_plane",
        "Only the configuration generator imports Envoy's types",
    ),
    ("extproc/dualmap_extproc/request/stream.py", "import structlog", "One module each imports structlog"),
    ("extproc/dualmap_extproc/request/stream.py", "import cryptography", "One module each imports structlog"),
    ("extproc/dualmap_extproc/peers/codec.py", "import grpc", "Only servers and servicers import gRPC"),
    ("extproc/dualmap_extproc/peers/peers.py", "import dualmap_extproc.transport.tls", "The router's packages import"),
    ("extproc/dualmap_extproc/request/stream.py", "import grpc_health", "One module each imports structlog"),
    ("extproc/dualmap_extproc/request/stream.py", "import rich", "One module each imports structlog"),
    ("extproc/dualmap_extproc/request/stream.py", "import yaml", "Only readers and writers of files import YAML"),
    ("extproc/dualmap_extproc/request/stream.py", "import aiohttp", "Only HTTP servers and clients import aiohttp"),
    (
        "extproc/dualmap_extproc/request/stream.py",
        "import orjson",
        "Only readers of bodies and writers of answers import orjson",
    ),
    ("extproc/dualmap_extproc/store/exchange.py", "import redis", "Only clients of Redis import redis"),
    ("extproc/dualmap_extproc/engines/profiles.py", "import zmq", "Only publishers of and subscribers to KV events"),
    (
        "extproc/dualmap_extproc/engines/kv_events.py",
        "import msgspec",
        "Only publishers of and subscribers to KV events",
    ),
    ("extproc/dualmap_extproc/request/stream.py", "import opentelemetry", "Only tracing imports OpenTelemetry"),
    ("core/dualmap/replicas/update.py", "import redis", "The core is pure"),
    ("core/dualmap/kv_store/view.py", "import dualmap.prompts.blocks", "What a KV store holds is known without"),
    (
        "extproc/dualmap_extproc/kv_stores/mooncake.py",
        "import dualmap_extproc.kv_stores.lookups",
        "The modules of KV stores import downwards only",
    ),
    (
        "extproc/dualmap_extproc/telemetry/dashboard/verdict.py",
        "import dualmap_extproc.telemetry.counts",
        "Telemetry's modules",
    ),
    (
        "extproc/dualmap_extproc/envoy/access_log/entry.py",
        "import dualmap_extproc.envoy.config.settings",
        "Discovery, the configuration generator",
    ),
    ("extproc/dualmap_extproc/pools/file.py", "import dualmap_extproc.autoscaling.demand", "Only app and telemetry"),
    (
        "extproc/dualmap_extproc/store/exchange.py",
        "import dualmap_extproc.request.picker",
        "The store, pools, Envoy's configuration",
    ),
    (
        "extproc/dualmap_extproc/envoy/config/bootstrap.py",
        "import dualmap_extproc.request.body",
        "The store, pools, Envoy's configuration",
    ),
    ("extproc/dualmap_extproc/request/picked.py", "import time", "Request code reads no clock and does no I/O"),
    ("extproc/dualmap_extproc/epp/pools.py", "import click", "The flags and plugins of other pickers import pools"),
    (
        "extproc/dualmap_extproc/epp/pools.py",
        "import dualmap_extproc.request.picker",
        "The flags and plugins of other pickers import pools",
    ),
    (
        "extproc/dualmap_extproc/epp/plugins.py",
        "import yaml",
        "Flags and plugins of other pickers are read without I/O",
    ),
    (
        "extproc/dualmap_extproc/epp/other_flags.py",
        "import dualmap_edge.logs",
        "Flags and plugins of other pickers are read without I/O",
    ),
    ("extproc/dualmap_extproc/transport/http2/connection.py", "import time", "The HTTP/2 server reads no clock"),
    (
        "extproc/dualmap_extproc/transport/http2/flow.py",
        "import dualmap_extproc.transport.http2.stream",
        "The HTTP/2 server's modules import downwards only",
    ),
    ("operator/dualmap_operator/observe/mirror.py", "import yaml", "Below its run package the operator"),
    ("sim/dualmap_sim/workloads/pacing.py", "import time", "Simulations reach no server"),
    ("sim/dualmap_sim/block_pool.py", "import msgspec", "Only publishers of and subscribers"),
    ("sim/dualmap_sim/http_server.py", "import zmq", "Only publishers of and subscribers to KV events"),
]
# Each added line imports only another module of the router, which imports the library.
PLANTED_INDIRECT = [
    (
        "extproc/dualmap_extproc/request/picker.py",
        "import dualmap_extproc.envoy.access_log.sink",
        "Request and demand code reaches no server",
    ),
    (
        "extproc/dualmap_extproc/reading/worker.py",
        "import dualmap_extproc.transport.processor",
        "Request and demand code reaches no server",
    ),
    (
        "extproc/dualmap_extproc/autoscaling/demand.py",
        "import dualmap_extproc.autoscaling.scaler",
        "Request and demand code reaches no server",
    ),
    (
        "extproc/dualmap_extproc/transport/http2/stream.py",
        "import dualmap_extproc.transport.processor",
        "The HTTP/2 server reads no clock",
    ),
    (
        "extproc/dualmap_extproc/store/exchange.py",
        "import dualmap_extproc.transport.tls",
        "The store, pools, telemetry and Envoy's configuration never reach gRPC",
    ),
    (
        "extproc/dualmap_extproc/telemetry/http_status.py",
        "import dualmap_extproc.store.redis",
        "Only the store reaches Redis",
    ),
    (
        "extproc/dualmap_extproc/telemetry/metrics.py",
        "import dualmap_extproc.telemetry.tracing",
        "Only tracing reaches OpenTelemetry",
    ),
    (
        "extproc/dualmap_extproc/envoy/discovery/service.py",
        "import dualmap_extproc.telemetry.http_status",
        "The gRPC side and the store never reach aiohttp",
    ),
    (
        "extproc/dualmap_extproc/autoscaling/scaler.py",
        "import dualmap_extproc.telemetry.counts",
        "Servers and autoscaling never reach prometheus_client",
    ),
    (
        "extproc/dualmap_extproc/envoy/discovery/service.py",
        "import dualmap_extproc.envoy.config.clusters",
        "Only the configuration generator reaches Envoy's typed configuration",
    ),
    (
        "extproc/dualmap_extproc/request/stream.py",
        "import dualmap_extproc.telemetry.dashboard.history",
        "The router's packages import downwards only",
    ),
    (
        "extproc/dualmap_extproc/store/exchange.py",
        "import dualmap_extproc.pools.changes",
        "The router's packages import downwards only",
    ),
    (
        "operator/dualmap_operator/act/apply.py",
        "import dualmap_operator.run.metrics",
        "Below its run package the operator",
    ),
    ("sim/dualmap_sim/engine.py", "import dualmap_sim.metrics", "Simulations reach no server"),
]
# A new module or folder in a package with a contract that lists every layer.
UNLISTED = [
    ("core/dualmap/planted.py", "dualmap.planted", "The core's folders"),
    ("core/dualmap/policies/planted.py", "dualmap.policies.planted", "Policies import downwards only"),
    ("operator/dualmap_operator/planted.py", "dualmap_operator.planted", "The operator's packages"),
    ("sidecar/dualmap_sidecar/planted.py", "dualmap_sidecar.planted", "The sidecar's modules import downwards"),
    (
        "operator/dualmap_operator/decide/planted.py",
        "dualmap_operator.decide.planted",
        "The parts of the operator's plan import downwards only",
    ),
    ("extproc/dualmap_extproc/telemetry/planted.py", "dualmap_extproc.telemetry.planted", "Telemetry's modules"),
    (
        "extproc/dualmap_extproc/transport/http2/planted.py",
        "dualmap_extproc.transport.http2.planted",
        "The HTTP/2 server's modules import downwards only",
    ),
    (
        "extproc/dualmap_extproc/envoy/planted.py",
        "dualmap_extproc.envoy.planted",
        "Discovery, the configuration generator",
    ),
    (
        "extproc/dualmap_extproc/attic/__init__.py",
        "dualmap_extproc.attic",
        "The router's packages import downwards only",
    ),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied(tmp_path)


def copied(folder: Path) -> Path:
    for name in ("core", "edge", "operator", "extproc", "sim", "sidecar", "cli", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PYTHONPATH": ":".join(
            str(copy / name) for name in ("core", "edge", "operator", "extproc", "sim", "sidecar", "cli")
        ),
        "PATH": str(BIN),
        "COLUMNS": "1000",  # The report has no shortened lines.
    }
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=copy, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def violations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The import linter's report on a copy with all violations, by the contract's name."""
    copy = copied(tmp_path_factory.mktemp("planted"))
    for path, _, _ in UNLISTED:
        (copy / path).parent.mkdir(exist_ok=True)
        (copy / path).write_text('"""Planted."""\n')
    for module, line, _ in (*PLANTED, *PLANTED_INDIRECT):
        text = (copy / module).read_text()
        (copy / module).write_text(f"{text}\n{line}\n")
    result = run(copy, "lint-imports", "--no-cache")
    assert result.returncode != 0
    _, _, broken = result.stdout.partition("Broken contracts\n")
    # A contract's name and a line of dashes precede its violations.
    titles_and_texts = re.split(r"^(\S.*)\n-{4,}\n", broken, flags=re.MULTILINE)[1:]
    return dict(zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True))


def reported(violations: dict[str, str], contract: str) -> str:
    """Return the violations of the only contract with a name that starts with ``beginning``."""
    (text,) = [text for title, text in violations.items() if title.startswith(contract)]
    return text


def link(module: str, line: str) -> str:
    """Return the import linter's report of an import."""
    importer = module.partition("/")[2].removesuffix(".py").replace("/", ".")
    return f"{importer} -> {line.removeprefix('import ')} ("


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED)
def test_import_linter_finds_a_forbidden_import(
    violations: dict[str, str], module: str, line: str, contract: str
) -> None:
    assert link(module, line) in reported(violations, contract)


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED_INDIRECT)
def test_import_linter_finds_a_forbidden_indirect_import(
    violations: dict[str, str], module: str, line: str, contract: str
) -> None:
    assert link(module, line) in reported(violations, contract)


@pytest.mark.parametrize(("path", "module", "contract"), UNLISTED)
def test_import_linter_finds_a_module_without_a_layer(
    violations: dict[str, str], path: str, module: str, contract: str
) -> None:
    assert f"\n- {module}\n" in reported(violations, contract)


def test_mypy_finds_an_inserted_type_error(copy: Path) -> None:
    (copy / "core/dualmap/planted.py").write_text('"""Planted."""\n\n\ndef double(x):\n    return x * 2\n')
    result = run(copy, "mypy", "-p", "dualmap")
    assert "planted.py" in result.stdout
    assert result.returncode != 0


def test_ruff_finds_an_inserted_environment_variable_read(copy: Path) -> None:
    (copy / "core/dualmap/planted.py").write_text('"""Planted."""\n\nimport os\n\nHOME = os.environ["HOME"]\n')
    result = run(copy, "ruff", "check", "core")
    assert "TID251" in result.stdout
    assert result.returncode != 0
