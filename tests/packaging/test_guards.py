"""The repository's import contracts report a violation that is planted in a copy of the sources."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# The file of the planted line, the line, and the beginning of the name of the contract that forbids it.
PLANTED = [
    ("core/dualmap/keys/rings.py", "import time", "The core is pure"),
    ("core/dualmap/keys/hotness.py", "import random", "The core is pure"),
    ("core/dualmap/router.py", "import grpc", "The core is pure"),
    ("core/dualmap/queue/request_queue.py", "import dualmap.fleet.load", "The core's folders"),
    ("core/dualmap/replicas/update.py", "import dualmap.keys.hotness", "The core's folders"),
    ("core/dualmap/replicas/update.py", "import dualmap.pools.pool", "The core's folders"),
    ("core/dualmap/policies/situation.py", "import dualmap.requests", "The core's folders"),
    ("core/dualmap/fleet/fleet.py", "import dualmap.chooser", "The core's folders"),
    ("core/dualmap/scaling/reports.py", "import dualmap.objects.pods", "The core's folders"),
    ("core/dualmap/router.py", "import dualmap.scaling.reports", "The core's folders"),
    ("core/dualmap/policies/single_signal/random.py", "import dualmap.policies.pair.dualmap", "Policies import"),
    ("core/dualmap/policies/situation.py", "import dualmap.prompts.prompt", "Policies see keys and pools"),
    ("core/dualmap/policies/situation.py", "import dualmap.replicas.update", "Policies see keys and pools"),
    ("core/dualmap/objects/pods.py", "import dualmap.fleet.fleet", "Kubernetes objects are read"),
    ("core/dualmap/objects/pods.py", "import dualmap.keys.rings", "Kubernetes objects are read"),
    ("edge/dualmap_edge/kube/client.py", "import dualmap.requests", "Kubernetes objects are read"),
    ("core/dualmap/scaling/scaling.py", "import dualmap.queue.request_queue", "Scaling is computed"),
    ("core/dualmap/router.py", "import dualmap_extproc.names", "The core knows nobody"),
    ("extproc/dualmap_extproc/request/picker.py", "import dualmap_sim.presets", "The core knows nobody"),
    ("sim/dualmap_sim/engine.py", "import dualmap_extproc.names", "The core knows nobody"),
    ("operator/dualmap_operator/run/reconciler.py", "import dualmap_extproc.names", "The core knows nobody"),
    ("operator/dualmap_operator/decide/ring.py", "import time", "What the operator decides is pure"),
    (
        "operator/dualmap_operator/decide/workload/checks.py",
        "import dualmap_edge.logs",
        "What the operator decides",
    ),
    ("operator/dualmap_operator/decide/ring.py", "import dualmap_operator.observe.routers", "The operator's rooms"),
    ("operator/dualmap_operator/decide/ring.py", "import subprocess", "What the operator decides is pure"),
    ("operator/dualmap_operator/decide/ring.py", "import threading", "What the operator decides is pure"),
    ("operator/dualmap_operator/decide/ring.py", "import pathlib", "What the operator decides is pure"),
    (
        "operator/dualmap_operator/decide/workload/children.py",
        "import dualmap_operator.decide.plan",
        "The operator's plan is",
    ),
    ("operator/dualmap_operator/observe/gather.py", "import dualmap_operator.decide.plan", "Only wiring imports"),
    ("operator/dualmap_operator/act/events.py", "import dualmap_operator.observe.routers", "Acting asks no router"),
    ("operator/dualmap_operator/act/apply.py", "import dualmap_operator.run.leader", "The operator's rooms"),
    ("operator/dualmap_operator/run/health.py", "import dualmap_operator.wiring", "The operator's rooms"),
    ("operator/dualmap_operator/observe/gather.py", "import kopf", "Below its run room the operator"),
    ("operator/dualmap_operator/act/events.py", "import aiohttp", "aiohttp serves"),
    ("edge/dualmap_edge/kube/client.py", "import dualmap_edge.kube.watch", "Kubernetes access imports"),
    ("operator/dualmap_operator/run/reconciler.py", "import kubernetes", "kubernetes is the client's"),
    ("extproc/dualmap_extproc/request/picker.py", "import matplotlib", "structlog, cryptography"),
    ("extproc/dualmap_extproc/request/picker.py", "import grpc", "gRPC is spoken"),
    ("extproc/dualmap_extproc/request/stream.py", "import prometheus_client", "prometheus_client lives"),
    (
        "extproc/dualmap_extproc/envoy/discovery/endpoints.py",
        "import envoy_data_plane",
        "Envoy's typed configuration",
    ),
    ("extproc/dualmap_extproc/request/stream.py", "import structlog", "structlog, cryptography"),
    ("extproc/dualmap_extproc/request/stream.py", "import cryptography", "structlog, cryptography"),
    ("extproc/dualmap_extproc/request/stream.py", "import grpc_health", "structlog, cryptography"),
    ("extproc/dualmap_extproc/request/stream.py", "import rich", "structlog, cryptography"),
    ("extproc/dualmap_extproc/request/stream.py", "import yaml", "YAML is read"),
    ("extproc/dualmap_extproc/request/stream.py", "import aiohttp", "aiohttp serves"),
    ("extproc/dualmap_extproc/request/stream.py", "import orjson", "orjson reads"),
    ("extproc/dualmap_extproc/store/exchange.py", "import redis", "Redis is spoken"),
    ("extproc/dualmap_extproc/request/stream.py", "import opentelemetry", "OpenTelemetry is an extra"),
    ("core/dualmap/replicas/update.py", "import redis", "The core is pure"),
    (
        "extproc/dualmap_extproc/telemetry/dashboard/verdict.py",
        "import dualmap_extproc.telemetry.counts",
        "Telemetry's modules",
    ),
    (
        "extproc/dualmap_extproc/envoy/access_log/entry.py",
        "import dualmap_extproc.envoy.config.settings",
        "Discovery imports the generator",
    ),
    ("extproc/dualmap_extproc/pools/file.py", "import dualmap_extproc.autoscaling.demand", "Only app and telemetry"),
    ("extproc/dualmap_extproc/store/exchange.py", "import dualmap_extproc.request.picker", "The store, pools, Envoy's"),
    (
        "extproc/dualmap_extproc/envoy/config/bootstrap.py",
        "import dualmap_extproc.request.body",
        "The store, pools, Envoy's",
    ),
    ("extproc/dualmap_extproc/request/picked.py", "import time", "A request's way reads no clock"),
    ("operator/dualmap_operator/observe/mirror.py", "import yaml", "Below its run room the operator"),
    ("sim/dualmap_sim/workloads/pacing.py", "import time", "Simulations reach no server"),
]
# Each module planted here imports only another module of the router, which reaches the library.
PLANTED_INDIRECT = [
    (
        "extproc/dualmap_extproc/request/picker.py",
        "import dualmap_extproc.envoy.access_log.sink",
        "A request's way and its demand reach no server",
    ),
    (
        "extproc/dualmap_extproc/reading/worker.py",
        "import dualmap_extproc.transport.processor",
        "A request's way and its demand reach no server",
    ),
    (
        "extproc/dualmap_extproc/autoscaling/demand.py",
        "import dualmap_extproc.autoscaling.scaler",
        "A request's way and its demand reach no server",
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
        "extproc/dualmap_extproc/pools/file.py",
        "import dualmap_extproc.envoy.discovery.service",
        "Only discovery and the generator reach Envoy's typed configuration",
    ),
    (
        "extproc/dualmap_extproc/request/stream.py",
        "import dualmap_extproc.telemetry.dashboard.history",
        "Rooms of the router import downwards only",
    ),
    (
        "extproc/dualmap_extproc/store/exchange.py",
        "import dualmap_extproc.pools.changes",
        "Rooms of the router import downwards only",
    ),
    (
        "operator/dualmap_operator/act/apply.py",
        "import dualmap_operator.run.metrics",
        "Below its run room the operator",
    ),
    ("sim/dualmap_sim/engine.py", "import dualmap_sim.metrics", "Simulations reach no server"),
]
# A module or folder of a package whose contract lists every layer, and is not one of them.
UNLISTED = [
    ("core/dualmap/planted.py", "dualmap.planted", "The core's folders"),
    ("core/dualmap/policies/planted.py", "dualmap.policies.planted", "Policies import"),
    ("operator/dualmap_operator/planted.py", "dualmap_operator.planted", "The operator's rooms"),
    (
        "operator/dualmap_operator/decide/planted.py",
        "dualmap_operator.decide.planted",
        "The operator's plan is",
    ),
    ("extproc/dualmap_extproc/telemetry/planted.py", "dualmap_extproc.telemetry.planted", "Telemetry's modules"),
    ("extproc/dualmap_extproc/envoy/planted.py", "dualmap_extproc.envoy.planted", "Discovery imports the generator"),
    ("extproc/dualmap_extproc/attic/__init__.py", "dualmap_extproc.attic", "Rooms of the router"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copied(tmp_path)


def copied(folder: Path) -> Path:
    for name in ("core", "edge", "operator", "extproc", "sim", "cli", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PYTHONPATH": ":".join(str(copy / name) for name in ("core", "edge", "operator", "extproc", "sim", "cli")),
        "PATH": str(BIN),
        "COLUMNS": "1000",  # Nothing is folded.
    }
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=copy, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def violations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the import linter reports on a copy with every violation planted, by the contract's name."""
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
    # A contract's name and a line of dashes stand before its violations.
    titles_and_texts = re.split(r"^(\S.*)\n-{4,}\n", broken, flags=re.MULTILINE)[1:]
    return dict(zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True))


def reported(violations: dict[str, str], contract: str) -> str:
    """Return the violations of the one contract whose name begins with ``beginning``."""
    (text,) = [text for title, text in violations.items() if title.startswith(contract)]
    return text


def link(module: str, line: str) -> str:
    """Return the import linter's report of an import."""
    importer = module.partition("/")[2].removesuffix(".py").replace("/", ".")
    return f"{importer} -> {line.removeprefix('import ')} ("


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED)
def test_import_linter_finds_a_planted_import(
    violations: dict[str, str], module: str, line: str, contract: str
) -> None:
    assert link(module, line) in reported(violations, contract)


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED_INDIRECT)
def test_import_linter_finds_a_planted_indirect_import(
    violations: dict[str, str], module: str, line: str, contract: str
) -> None:
    assert link(module, line) in reported(violations, contract)


@pytest.mark.parametrize(("path", "module", "contract"), UNLISTED)
def test_import_linter_finds_a_module_without_a_layer(
    violations: dict[str, str], path: str, module: str, contract: str
) -> None:
    assert f"\n- {module}\n" in reported(violations, contract)


def test_mypy_finds_a_planted_type_error(copy: Path) -> None:
    (copy / "core/dualmap/planted.py").write_text('"""Planted."""\n\n\ndef double(x):\n    return x * 2\n')
    result = run(copy, "mypy", "-p", "dualmap")
    assert "planted.py" in result.stdout
    assert result.returncode != 0


def test_ruff_finds_a_planted_environment_read(copy: Path) -> None:
    (copy / "core/dualmap/planted.py").write_text('"""Planted."""\n\nimport os\n\nHOME = os.environ["HOME"]\n')
    result = run(copy, "ruff", "check", "core")
    assert "TID251" in result.stdout
    assert result.returncode != 0
