"""Tests of Envoy's generated bootstrap: the effect of each setting, and validation by the real Envoy."""

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualmap.prompts.api import PATHS
from dualmap_extproc import names
from dualmap_extproc.envoy.config.settings import Address, EnvoySettings, Mode
from dualmap_extproc.pools.file import load_pool_files
from dualmap_extproc.settings import Limits
from extproc.envoy_configs import (
    all_routes,
    clusters,
    config,
    hosts,
    http_filter,
    manager,
    pool_file,
    routes,
    run,
    validate,
)

with warnings.catch_warnings():
    # envoy_data_plane 2.2 declares validators with an API that pydantic deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from dualmap_extproc.envoy.config.bootstrap import bootstrap, to_yaml


@pytest.mark.parametrize(
    ("mode", "tls", "endpoints"), list(itertools.product(Mode, ["off", "on"], ["eds", "--static-endpoints"]))
)
def test_real_envoy_accepts_every_option_combination(tmp_path: Path, mode: Mode, tls: str, endpoints: str) -> None:
    pools = ["--pool", pool_file(tmp_path), "--pool", pool_file(tmp_path, "other")]
    arguments = [*pools, "--mode", mode, "--tls", tls]
    arguments += ["--router", "127.0.0.1:9002,[::1]:9002,router.example:9002", "--als", "127.0.0.1:9004"]
    result = run(*arguments, *([endpoints] if endpoints != "eds" else []))
    assert result.exit_code == 0, result.output
    validate(tmp_path, result.stdout)


def test_bootstrap_listens_on_the_given_address(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--listen", "127.0.0.1:0", "--admin", "[::1]:9999")
    (listener,) = document["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 0}
    assert document["admin"]["address"]["socket_address"] == {"address": "::1", "port_value": 9999}


def test_bootstrap_ipv6_wildcard_accepts_ipv4_clients(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--listen", "[::]:8080")
    (listener,) = document["static_resources"]["listeners"]
    address = {"address": "::", "port_value": 8080, "ipv4_compat": True}
    assert listener["address"]["socket_address"] == address


def test_bootstrap_defaults_match_the_router_defaults(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path))
    assert hosts(clusters(document)["dualmap-routers"]) == ["127.0.0.1 9002"]
    assert hosts(clusters(document)["dualmap-access-log-0"]) == ["127.0.0.1 9002"]


def test_bootstrap_has_a_router_cluster_and_a_log_sink_per_router(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--router", "10.1.0.1:9002, 10.1.0.2:9002,10.1.0.1:9002")
    found = clusters(document)
    assert hosts(found["dualmap-routers"]) == ["10.1.0.1 9002", "10.1.0.2 9002"]
    sinks = [log["typed_config"]["common_config"] for log in manager(document)["access_log"]]
    named = [sink["grpc_service"]["envoy_grpc"]["cluster_name"] for sink in sinks]
    assert [hosts(found[name]) for name in named] == [["10.1.0.1 9002"], ["10.1.0.2 9002"]]


def test_bootstrap_resolves_router_host_name_by_dns(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--router", "dualmap-router.llm.svc:9002", "--als", "localhost:9")
    assert clusters(document)["dualmap-routers"]["cluster_type"]["name"] == "envoy.cluster.dns"
    assert hosts(clusters(document)["dualmap-access-log-0"]) == ["127.0.0.1 9"]


def test_bootstrap_resolves_host_names_every_second(tmp_path: Path) -> None:
    routers = "router-0.routers.llm:9004,router-1.routers.llm:9004"
    found = clusters(config("--pool", pool_file(tmp_path), "--router", routers))
    for name in ("dualmap-routers", "dualmap-access-log-0", "dualmap-access-log-1"):
        assert found[name]["cluster_type"]["name"] == "envoy.cluster.dns"
        assert found[name]["cluster_type"]["typed_config"]["dns_refresh_rate"] == "1s"
    assert hosts(found["dualmap-access-log-1"]) == ["router-1.routers.llm 9004"]
    assert "cluster_type" not in clusters(config("--pool", pool_file(tmp_path)))["dualmap-access-log-0"]


def test_access_log_of_one_name_goes_to_a_healthy_router(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--router", "dualmap-router.llm:9002")
    (log,) = manager(document)["access_log"]
    assert log["typed_config"]["common_config"]["log_name"] == names.SHARED_ACCESS_LOG
    sink, routers = (clusters(document)[name] for name in ("dualmap-access-log-0", "dualmap-routers"))
    assert hosts(sink) == ["dualmap-router.llm 9002"]
    for of in (sink, routers):
        of["load_assignment"].pop("cluster_name")
        of.pop("name")
    assert sink == routers


def test_access_log_of_one_sink_name_is_shared_without_checks(tmp_path: Path) -> None:
    """The sink may be a program without a health service."""
    document = config("--pool", pool_file(tmp_path), "--router", "routers.llm:9002", "--als", "routers.llm:9004")
    (log,) = manager(document)["access_log"]
    assert log["typed_config"]["common_config"]["log_name"] == names.SHARED_ACCESS_LOG
    assert "health_checks" not in clusters(document)["dualmap-access-log-0"]


@pytest.mark.parametrize("routers", ["10.1.0.1:9002", "10.1.0.1:9002,10.1.0.2:9002", "a:9002,b:9002"])
def test_access_log_of_listed_routers_goes_to_each(tmp_path: Path, routers: str) -> None:
    document = config("--pool", pool_file(tmp_path), "--router", routers)
    logs = [log["typed_config"]["common_config"] for log in manager(document)["access_log"]]
    assert [log["log_name"] for log in logs] == [names.ACCESS_LOG] * len(routers.split(","))
    for log in logs:
        assert "health_checks" not in clusters(document)[log["grpc_service"]["envoy_grpc"]["cluster_name"]]


def test_routes_with_several_pools_lead_nowhere_without_a_pick(tmp_path: Path) -> None:
    for options in ([], ["--static-endpoints"]):
        document = config("--pool", pool_file(tmp_path), "--pool", pool_file(tmp_path, "other"), *options)
        assert routes(document)[2]["route"]["cluster"] == names.ONLY_POOL
        cluster = clusters(document)[names.ONLY_POOL]
        assert cluster["type"] == "STATIC"
        assert "endpoints" not in cluster["load_assignment"]
    assert names.ONLY_POOL not in clusters(config("--pool", pool_file(tmp_path)))


def test_routes_select_the_picked_cluster_or_the_only_pool(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path))
    *named, default, _ = routes(document)
    for route, without_retries in zip(named, (True, False), strict=True):
        present = [header["name"] for header in route["match"]["headers"] if header["present_match"]]
        assert present == [names.CLUSTER_HEADER, *([names.NO_RETRY_HEADER] if without_retries else [])]
        assert route["route"]["cluster_header"] == names.CLUSTER_HEADER
        assert ("retry_policy" in route["route"]) != without_retries
    assert "headers" not in default["match"]
    assert default["route"]["cluster"] == "llm/qwen"
    assert "retry_policy" not in default["route"]
    for route in (*named, default):
        assert route["request_headers_to_remove"] == [names.CLUSTER_HEADER, names.NO_RETRY_HEADER]


def test_routes_retry_an_unanswered_request_once(tmp_path: Path) -> None:
    policies = [route["route"].get("retry_policy") for route in routes(config("--pool", pool_file(tmp_path)))[:-1]]
    (policy,) = [policy for policy in policies if policy is not None]
    assert policy["retry_on"] == "connect-failure,refused-stream,reset,retriable-status-codes"
    assert (policy["retriable_status_codes"], policy["num_retries"]) == ([503], 1)


def test_bootstrap_detects_hung_router_and_keeps_its_access_log(tmp_path: Path) -> None:
    found = clusters(config("--pool", pool_file(tmp_path)))
    (check,) = found["dualmap-routers"]["health_checks"]
    assert "grpc_health_check" in check
    assert http2_options(found["dualmap-routers"])["connection_keepalive"]["timeout"] == "2s"
    assert http2_options(found["dualmap-access-log-0"]) == {}


def http2_options(cluster: dict[str, Any]) -> dict[str, Any]:
    (options,) = cluster["typed_extension_protocol_options"].values()
    found: dict[str, Any] = options["explicit_http_config"]["http2_protocol_options"]
    return found


def test_filters_call_the_router_only_for_matched_routes(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path))
    first = manager(document)["http_filters"][0]
    *to_pools, not_found = routes(document)
    assert (first["name"], first["disabled"]) == ("envoy.filters.http.ext_proc", True)
    for route in to_pools:
        assert list(route["typed_per_filter_config"]) == ["envoy.filters.http.ext_proc"]
    assert "typed_per_filter_config" not in not_found


def test_routes_have_no_timeout_for_long_responses(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path))
    assert {route["route"]["timeout"] for route in routes(document)[:-1]} == {"0s"}


def test_bootstrap_endpoints_come_from_eds_unless_static(tmp_path: Path) -> None:
    cluster = clusters(config("--pool", pool_file(tmp_path)))["llm/qwen"]
    assert cluster["type"] == "EDS"
    assert "load_assignment" not in cluster
    source = cluster["eds_cluster_config"]["eds_config"]["api_config_source"]
    assert source["grpc_services"][0]["envoy_grpc"]["cluster_name"] == "dualmap-routers"
    # The option uses the cluster's own name.
    assert "service_name" not in cluster["eds_cluster_config"]


def test_static_endpoints_mark_draining_members(tmp_path: Path) -> None:
    cluster = clusters(config("--pool", pool_file(tmp_path), "--static-endpoints"))["llm/qwen"]
    assert "eds_cluster_config" not in cluster
    assert hosts(cluster) == ["10.0.0.1 8000", "10.0.0.2 8000", "fd00::3 8000"]
    listed = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [host.get("health_status") for host in listed] == [None, "DRAINING", None]


def test_pool_cluster_uses_picked_hosts_and_reports_the_endpoint(tmp_path: Path) -> None:
    cluster = clusters(config("--pool", pool_file(tmp_path)))["llm/qwen"]
    (policy,) = cluster["load_balancing_policy"]["policies"]
    typed = policy["typed_extension_config"]["typed_config"]
    metadata = {"key": "envoy.lb", "path": [{"key": names.DESTINATION_KEY}]}
    assert typed["override_host_sources"] == [{"header": names.DESTINATION_HEADER}, {"metadata": metadata}]
    assert typed["selected_host_key"] == {"key": "envoy.lb", "path": [{"key": names.SERVED_KEY}]}


@pytest.mark.parametrize(
    ("mode", "body", "trailers", "no_wait"),
    [
        ("streamed", "STREAMED", "SKIP", True),
        ("full-duplex", "FULL_DUPLEX_STREAMED", "SEND", False),
        ("buffered", "BUFFERED", "SKIP", False),
    ],
)
def test_filters_mode_option_sets_the_processing_mode(
    tmp_path: Path, mode: str, body: str, trailers: str, no_wait: bool
) -> None:
    ext_proc = http_filter(config("--pool", pool_file(tmp_path), "--mode", mode), "ext_proc")
    sent = ext_proc["processing_mode"]
    assert (sent["request_body_mode"], sent["request_trailer_mode"]) == (body, trailers)
    assert (sent["response_header_mode"], sent["response_body_mode"]) == ("SEND", "STREAMED")
    assert ext_proc.get("send_body_without_waiting_for_header_response", False) is no_wait
    assert ext_proc.get("allow_content_length_header", False) is no_wait
    assert ext_proc["failure_mode_allow"] is True


def test_filters_pass_request_and_response_metadata(tmp_path: Path) -> None:
    options = http_filter(config("--pool", pool_file(tmp_path)), "ext_proc")["metadata_options"]
    assert options["receiving_namespaces"]["untyped"] == ["envoy.lb", "dualmap"]
    assert options["forwarding_namespaces"]["untyped"] == ["envoy.lb", "envoy.lb.subset_hint"]


def test_filters_timeout_exceeds_the_longest_max_wait(tmp_path: Path) -> None:
    patient = pool_file(tmp_path, "patient", routing={"queue": {"maxWait": "10m"}})
    ext_proc = http_filter(config("--pool", pool_file(tmp_path), "--pool", patient), "ext_proc")
    assert ext_proc["message_timeout"] == "615s"


def test_filters_timeout_exceeds_the_longest_pause_of_a_body(tmp_path: Path) -> None:
    hasty = pool_file(tmp_path, "hasty", routing={"queue": {"maxWait": "1s"}})
    for options in (["--pool", hasty], ["--discover", "--longest-wait", "1s"]):
        timeout = http_filter(config(*options), "ext_proc")["message_timeout"]
        assert float(timeout.removesuffix("s")) >= Limits().stalled_s + 5.0


def test_listener_removes_reserved_headers_first(tmp_path: Path) -> None:
    (early,) = manager(config("--pool", pool_file(tmp_path)))["early_header_mutation_extensions"]
    removed = [m["remove_on_match"]["key_matcher"]["prefix"] for m in early["typed_config"]["mutations"]]
    others = (
        *(names.PREFILLER_HEADER, names.PREFILLERS_HEADER, "x-prefiller-url", "x-data-parallel-rank"),
        *("x-data-parallel-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
        *("x-worker-instance-id", "x-prefill-instance-id", "x-dp-rank", "x-prefill-dp-rank", "x-dynamo-routing-mode"),
    )
    own = (names.DESTINATION_HEADER, names.SERVED_KEY, names.CLUSTER_HEADER, names.DECISION_HEADER)
    for header in (*own, *others):
        assert any(header.startswith(prefix) for prefix in removed), header


def test_requests_without_a_pick_go_to_the_pool_that_clients_address(tmp_path: Path) -> None:
    decode = pool_file(tmp_path, "qwen", prefillPool="prefill", model={"name": "m"})
    prefill = pool_file(tmp_path, "prefill", model={"name": "m"})
    routes = manager(config("--pool", decode, "--pool", prefill))["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["route"]["cluster"] for route in routes if "cluster" in route.get("route", {})] == ["llm/qwen"]


def test_listener_disables_http1_trailers(tmp_path: Path) -> None:
    assert "enable_trailers" not in manager(config("--pool", pool_file(tmp_path)))["http_protocol_options"]


def test_access_log_tags_equal_the_tags_the_router_reads(tmp_path: Path) -> None:
    (log,) = manager(config("--pool", pool_file(tmp_path)))["access_log"]
    tags = {tag["tag"] for tag in log["typed_config"]["common_config"]["custom_tags"]}
    assert tags == {value for name, value in vars(names).items() if name.startswith("TAG_")}


def test_usage_filter_writes_the_metadata_the_access_log_reads(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path))
    script = http_filter(document, "lua")["default_source_code"]["inline_string"]
    (log,) = manager(document)["access_log"]
    tags = {tag["tag"]: tag["value"] for tag in log["typed_config"]["common_config"]["custom_tags"]}
    assert f'local NAMESPACE = "{names.USAGE_NAMESPACE}"' in script
    for variable, tag in (
        ("PROMPT", names.TAG_PROMPT_TOKENS),
        ("COMPLETION", names.TAG_COMPLETION_TOKENS),
        ("CACHED", names.TAG_CACHED_TOKENS),
    ):
        assert f'local {variable} = "{tag}"' in script
        assert tags[tag] == f"%DYNAMIC_METADATA({names.USAGE_NAMESPACE}:{tag})%"


def test_usage_script_is_written_as_a_multi_line_string(tmp_path: Path) -> None:
    result = run("--pool", pool_file(tmp_path))
    (script,) = [line for line in result.stdout.splitlines() if "inline_string" in line and line.endswith(" |")]
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines.index("function envoy_on_response(handle)") > lines.index(script.strip())


def test_filters_neither_buffer_nor_parse_responses(tmp_path: Path) -> None:
    """The filters must not crash on a response, and must not buffer a whole response (docs/adr/0006)."""
    filters = manager(config("--pool", pool_file(tmp_path)))["http_filters"]
    assert [f["name"].removeprefix("envoy.filters.http.") for f in filters] == ["ext_proc", "lua", "router"]
    script = filters[1]["typed_config"]["default_source_code"]["inline_string"]
    assert "handle:bodyChunks()" in script
    assert "handle:body()" not in script


def test_status_listener_serves_only_readiness_and_statistics(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--status", "0.0.0.0:9902")
    _, status = document["static_resources"]["listeners"]
    assert status["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 9902}
    (host,) = status["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    assert [route["match"] for route in host["routes"]] == [{"path": "/ready"}, {"path": "/stats/prometheus"}]
    assert hosts(clusters(document)["envoy-admin"]) == ["127.0.0.1 9901"]
    assert "envoy-admin" not in clusters(config("--pool", pool_file(tmp_path)))


def test_bootstrap_without_sinks_has_no_access_log(tmp_path: Path) -> None:
    somewhere = Address(host="127.0.0.1", port=0)
    router = Address(host="127.0.0.1", port=9002)
    pools = load_pool_files([pool_file(tmp_path)])
    settings = EnvoySettings(pools=pools, routers=(router,), access_logs=(), listen=somewhere, admin=somewhere)
    document = yaml.safe_load(to_yaml(bootstrap(settings)))
    assert "access_log" not in manager(document)
    assert set(clusters(document)) == {"dualmap-routers", "llm/qwen"}


def test_routes_match_only_inference_paths(tmp_path: Path) -> None:
    *to_pools, not_found = routes(config("--pool", pool_file(tmp_path)))
    for route in to_pools:
        matched = re.compile(route["match"]["safe_regex"]["regex"]).fullmatch
        for path in PATHS:
            assert all(matched(each) for each in (path, f"/v1{path}", f"/v1{path}/render")), path
        assert matched("/v1/models")
        assert matched("/v1/models/org/name")
        for path in ("/", "/metrics", "/v1", "/v1/load_lora_adapter", "/v1/chat/completions/x", "/v1/modelsx"):
            assert not matched(path), path
    assert not_found["match"] == {"prefix": "/"}
    assert not_found["direct_response"]["status"] == 404


def test_allow_path_adds_paths_or_allows_all(tmp_path: Path) -> None:
    for options in (["--pool", pool_file(tmp_path)], ["--discover"]):
        added = routes(config(*options, "--allow-path", "/a.b", "--allow-path", "/detokenize"))
        for route in added[:-1]:
            matched = re.compile(route["match"]["safe_regex"]["regex"]).fullmatch
            assert all(map(matched, ("/a.b", "/detokenize", "/v1/chat/completions")))
            assert not matched("/acb")
        everything = routes(config(*options, "--allow-path", "*"))
        assert all(route["match"]["prefix"] == "/" for route in everything)


def test_routes_refuse_methods_first_unless_all_paths_are_allowed(tmp_path: Path) -> None:
    for options in (["--pool", pool_file(tmp_path)], ["--discover"]):
        document = config(*options, "--allow-path", "/detokenize")
        refusing = all_routes(document)[:2]
        assert [route["direct_response"]["status"] for route in refusing] == [405, 405]
        assert [*refusing, *routes(document)] == all_routes(document)
        for route in refusing:
            assert not re.fullmatch(route["match"]["safe_regex"]["regex"], "/detokenize")
        assert all("prefix" in route["match"] for route in all_routes(config(*options, "--allow-path", "*")))


def test_listener_normalises_paths_and_refuses_escaped_slashes(tmp_path: Path) -> None:
    found = manager(config("--pool", pool_file(tmp_path)))
    assert (found["normalize_path"], found["merge_slashes"]) == (True, True)
    assert found["path_with_escaped_slashes_action"] == "REJECT_REQUEST"


@pytest.mark.parametrize(
    ("memory", "mebibytes"), [(None, 1024), ("2Gi", 2048), ("512Mi", 512), ("1.5Gi", 1536), ("1.073741824e+09", 1024)]
)
def test_overload_limits_follow_the_memory(memory: str | None, mebibytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if memory is not None:
        monkeypatch.setenv("DUALMAP_ENVOY_MEMORY", memory)
    document = config("--discover")
    heap, connections = (each["typed_config"] for each in document["overload_manager"]["resource_monitors"])
    largest = int(heap["max_heap_size_bytes"])
    assert 0.7 < largest / (mebibytes << 20) < 0.9
    assert int(connections["max_active_downstream_connections"]) == mebibytes * 32
    assert int(document["memory_allocator_manager"]["soft_memory_limit_bytes"]) < largest
    assert document["admin"]["ignore_global_conn_limit"] is True


def test_listener_bounds_times_streams_and_buffers(tmp_path: Path) -> None:
    large = pool_file(tmp_path, "large", routing={"maxBodyBytes": 64 << 20})
    for pools, body_bytes in (["--pool", pool_file(tmp_path)], 16 << 20), (["--pool", large], 64 << 20):
        document = config(*pools)
        found = manager(document)
        assert (found["request_timeout"], found["request_headers_timeout"]) == ("60s", "10s")
        assert (found["stream_flush_timeout"], found["stream_idle_timeout"]) == ("120s", "3600s")
        assert found["common_http_protocol_options"] == {"idle_timeout": "900s"}
        assert found["http2_protocol_options"]["max_concurrent_streams"] == 100
        (listener,) = document["static_resources"]["listeners"]
        assert listener["per_connection_buffer_limit_bytes"] < 1 << 20
        assert {int(route["request_body_buffer_limit"]) for route in routes(document)[:-1]} == {body_bytes}


def test_status_listener_answers_under_overload(tmp_path: Path) -> None:
    document = config("--pool", pool_file(tmp_path), "--status", "0.0.0.0:9902")
    _, status = document["static_resources"]["listeners"]
    assert (status["ignore_global_conn_limit"], status["bypass_overload_manager"]) == (True, True)
