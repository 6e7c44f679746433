"""Envoy's generated bootstrap with --discover: clusters and endpoints come from the routers."""

import itertools
import warnings
from pathlib import Path

import pytest

from dualmap_extproc import names
from dualmap_extproc.envoy.config.settings import Mode
from dualmap_extproc.envoy.discovery.clusters import clusters_of
from extproc.envoy_configs import clusters, config, http_filter, pool_file, routes, run, validate

with warnings.catch_warnings():
    # envoy_data_plane 2.2 declares validators with an API that pydantic deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.cluster.v3 import Cluster

    from dualmap_extproc.envoy.config.clusters import pool_cluster
    from dualmap_extproc.envoy.config.sources import shared_stream


@pytest.mark.parametrize(("mode", "tls"), list(itertools.product(Mode, ["off", "on"])))
def test_real_envoy_accepts_a_bootstrap_without_pools(tmp_path: Path, mode: Mode, tls: str) -> None:
    result = run("--discover", "--mode", mode, "--tls", tls, "--status", "127.0.0.1:9902")
    assert result.exit_code == 0, result.output
    validate(tmp_path, result.stdout)


def test_discover_gets_clusters_and_endpoints_on_one_stream() -> None:
    document = config("--discover", "--router", "127.0.0.1:1", "--als", "127.0.0.1:2")
    assert set(clusters(document)) == {"dualmap-routers", "dualmap-access-log-0", names.ONLY_POOL}
    dynamic = document["dynamic_resources"]
    assert dynamic["ads_config"]["grpc_services"][0]["envoy_grpc"]["cluster_name"] == "dualmap-routers"
    assert "ads" in dynamic["cds_config"]
    unpicked = clusters(document)[names.ONLY_POOL]["eds_cluster_config"]["eds_config"]
    assert "ads" in unpicked
    for source in (dynamic["cds_config"], unpicked):
        assert source["initial_fetch_timeout"] == "5s", "Envoy opens its listener without routers too"


def test_longest_wait_option_sets_envoy_timeout_and_node_metadata() -> None:
    for options, wait_s in ([], 30), (["--longest-wait", "2m"], 120):
        document = config("--discover", *options)
        assert http_filter(document, "ext_proc")["message_timeout"] == f"{wait_s + 15}s"
        assert float(document["node"]["metadata"][names.LONGEST_WAIT_KEY]) == wait_s
        assert isinstance(document["node"]["metadata"][names.LONGEST_WAIT_KEY], str)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "no pools; give one or more --pool FILE, or --discover"),
        (["--discover", "--pool", "pool.yaml"], "--pool and --discover exclude each other"),
        (["--discover", "--static-endpoints"], "--static-endpoints and --discover exclude each other"),
        (["--pool", "pool.yaml", "--longest-wait", "30s"], "--longest-wait requires --discover"),
        (["--discover", "--longest-wait", "soon"], "'soon' is not accepted"),
    ],
)
def test_discover_option_with_conflicts_is_a_usage_error(options: list[str], reason: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert reason in result.stderr


def test_discovered_resources_equal_the_generated_config() -> None:
    found = clusters_of(["llm/qwen", "llm/llama"])
    assert list(found) == ["llm/qwen", "llm/llama"]
    for name, data in found.items():
        assert Cluster.parse(data) == pool_cluster(name, endpoints=shared_stream()), "run `make proto`"


def test_discover_has_the_same_routes_as_pool_files(tmp_path: Path) -> None:
    fixed = routes(config("--pool", pool_file(tmp_path)))
    discovered = routes(config("--discover"))
    assert discovered[2]["route"].pop("cluster") == names.ONLY_POOL
    assert fixed[2]["route"].pop("cluster") == "llm/qwen"
    assert discovered == fixed
