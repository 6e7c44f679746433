"""Tests of Envoy's generated bootstrap with --discover: Envoy receives routes and clusters from the routers."""

import itertools
import warnings
from pathlib import Path

import pytest

from dualmap_extproc import names
from dualmap_extproc.envoy.config.settings import Mode
from extproc.envoy_configs import clusters, config, http_filter, manager, run, validate

with warnings.catch_warnings():
    # envoy_data_plane 2.2 declares validators with an API that pydantic deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.cluster.v3 import Cluster
    from envoy_data_plane.envoy.config.route.v3 import RouteConfiguration

    from dualmap_extproc.envoy.config.clusters import pool_cluster
    from dualmap_extproc.envoy.config.discovered import Written
    from dualmap_extproc.envoy.config.http.listeners import routes as written_routes
    from dualmap_extproc.envoy.config.sources import shared_stream


@pytest.mark.parametrize(("mode", "tls"), list(itertools.product(Mode, ["off", "on"])))
def test_real_envoy_accepts_a_bootstrap_without_pools(tmp_path: Path, mode: Mode, tls: str) -> None:
    result = run("--discover", "--mode", mode, "--tls", tls, "--status", "127.0.0.1:9902")
    assert result.exit_code == 0, result.output
    validate(tmp_path, result.stdout)


def test_discover_option_gets_routes_and_clusters_on_one_stream() -> None:
    document = config("--discover", "--router", "127.0.0.1:1", "--als", "127.0.0.1:2")
    assert set(clusters(document)) == {"dualmap-routers", "dualmap-access-log-0"}
    dynamic = document["dynamic_resources"]
    assert dynamic["ads_config"]["grpc_services"][0]["envoy_grpc"]["cluster_name"] == "dualmap-routers"
    assert "ads" in dynamic["cds_config"]
    assert "route_config" not in manager(document)
    assert manager(document)["rds"]["route_config_name"] == names.ROUTES
    assert "ads" in manager(document)["rds"]["config_source"]
    for source in (dynamic["cds_config"], manager(document)["rds"]["config_source"]):
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
    written = Written()
    found = written.clusters(["llm/qwen", "llm/llama"])
    assert list(found) == ["llm/qwen", "llm/llama"]
    for name, data in found.items():
        assert Cluster.parse(data) == pool_cluster(name, endpoints=shared_stream())
    for unpicked in ("llm/qwen", None):
        assert RouteConfiguration.parse(written.routes(unpicked)) == written_routes(unpicked=unpicked)


def test_discovered_routes_of_several_pools_reject_without_pick() -> None:
    (host,) = written_routes(unpicked=None).virtual_hosts
    last = host.routes[-1]
    assert last.direct_response is not None
    assert last.direct_response.status == 503
    assert last.route is None
