"""Tests of the readers of engines' answers: valid answers, other engines' answers, and junk."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.engines.profile import (
    ADAPTERS_MAX,
    DIALECTS,
    EVENT_SOURCES_MAX,
    MODELS_MAX,
    NO_PROFILE,
    EngineProfile,
    EventSource,
    read_event_sources,
    read_metrics,
    read_models,
    read_server_info,
    read_version,
)
from dualmap.engines.samples import SAMPLES_MAX
from shared_data import shared_file

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
process_start_time_seconds 1.7951498656e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 100.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",kv_cache_size_tokens="2048",num_gpu_blocks="64"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:cache_config_info{page_size="64",num_pages="101"} 1.0
"""
TENSORRT = b"""trtllm_num_requests_running 4
trtllm_num_requests_waiting 0
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 11
"""
LOAD_ONLY = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


class TestMetrics:
    def test_vllm_page_gives_load_memory_sleep_and_start(self) -> None:
        assert read_metrics("vLLM", VLLM) == EngineProfile(
            engine="vLLM",
            block_tokens=32,
            kv_tokens=63 * 32,  # One block is a placeholder.
            cache_tokens=63 * 32,
            waiting=3,
            running=2,
            ranks=(0,),
            asleep=False,
            started_s=1795149865.6,
        )

    def test_recorded_vllm_page_is_read(self) -> None:
        profile = read_metrics("vLLM", shared_file("fixtures/vllm/metrics_8001.txt").read_bytes())
        assert (profile.kv_tokens, profile.block_tokens, profile.waiting, profile.running) == (2016, 32, 0, 0)
        assert (profile.asleep, profile.started_s, profile.reason) == (False, 1795149865.6, "")

    def test_sglang_page_gives_load_and_memory(self) -> None:
        profile = read_metrics("SGLang", SGLANG)
        assert (profile.running, profile.waiting, profile.block_tokens, profile.kv_tokens) == (4, 1, 64, 6400)
        assert (profile.asleep, profile.started_s) == (None, None)

    def test_tensorrt_page_gives_load_and_memory(self) -> None:
        profile = read_metrics("TensorRTLLM", TENSORRT)
        assert (profile.running, profile.waiting, profile.block_tokens, profile.kv_tokens) == (4, 0, 32, 320)

    def test_ranks_behind_one_endpoint_are_summed(self) -> None:
        page = b"".join(
            b'vllm:num_requests_running{engine="%d"} 2\nvllm:num_requests_waiting{engine="%d"} 1\n'
            b'vllm:cache_config_info{engine="%d",block_size="16",num_gpu_blocks="11"} 1\n' % (rank, rank, rank)
            for rank in range(3)
        )
        profile = read_metrics("vLLM", page)
        assert (profile.running, profile.waiting, profile.kv_tokens, profile.block_tokens) == (6, 3, 480, 16)
        assert profile.ranks == (0, 1, 2)

    @pytest.mark.parametrize(
        ("engine", "labels", "ranks"),
        [
            ("vLLM", ('engine="3"',), (3,)),
            ("vLLM", ('engine="10"', 'engine="9"'), (9, 10)),
            ("vLLM", ('engine="-1"', 'engine="many"', 'my_engine="7"'), (0,)),
            ("SGLang", ('tp_rank="0"', 'tp_rank="1"'), (0,)),
            ("SGLang", ('dp_rank="1",tp_rank="0"', 'dp_rank="1",tp_rank="1"', 'dp_rank="0",tp_rank="2"'), (0, 1)),
            ("TensorRTLLM", ("",), (0,)),
        ],
    )
    def test_ranks_are_those_of_the_label(self, engine: str, labels: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        dialect = DIALECTS[engine]
        lines = [f"{name}{{{each}}} 0\n" for each in labels for name in (dialect.running, dialect.waiting)]
        assert read_metrics(engine, "".join(lines).encode()).ranks == ranks

    def test_engine_without_prefix_caching_keeps_nothing(self) -> None:
        profile = read_metrics("vLLM", VLLM.replace(b'caching="True"', b'caching="False"'))
        assert (profile.kv_tokens, profile.cache_tokens) == (2016, 0)

    @pytest.mark.parametrize(
        ("engine", "page", "name"),
        [
            ("vLLM", VLLM, b"vllm:kv_cache_usage_perc"),
            ("SGLang", SGLANG, b"sglang:token_usage"),
            ("TensorRTLLM", TENSORRT, b"trtllm_kv_cache_utilization"),
        ],
    )
    def test_use_of_memory_is_the_mean_of_the_ranks(self, engine: str, page: bytes, name: bytes) -> None:
        assert read_metrics(engine, page).kv_usage is None
        ranks = name + b'{engine="0"} 0.5\n' + name + b'{engine="1"} 1\n'
        assert read_metrics(engine, page + ranks).kv_usage == 0.75
        for junk in (b"NaN", b"-0.1", b"1.1", b"many"):
            assert read_metrics(engine, page + ranks + name + b" " + junk + b"\n").kv_usage is None

    def test_hybrid_model_has_fewer_tokens_than_its_blocks(self) -> None:
        profile = read_metrics("vLLM", VLLM.replace(b'size_tokens="2048"', b'size_tokens="512"'))
        assert profile.kv_tokens == 512

    @pytest.mark.parametrize("state", ["weights_offloaded", "discard_all"])
    def test_engine_that_is_not_awake_is_asleep(self, state: str) -> None:
        page = VLLM.replace(b'"awake"} 1.0', b'"awake"} 0.0') + (
            f'vllm:engine_sleep_state{{sleep_state="{state}"}} 1.0\n'.encode()
        )
        assert read_metrics("vLLM", page).asleep is True

    def test_engine_of_another_type_is_named(self) -> None:
        assert read_metrics("vLLM", SGLANG).reason == "/metrics is that of SGLang, not of vLLM"
        assert read_metrics("SGLang", VLLM).running is None

    @pytest.mark.parametrize(
        "labels",
        ['block_size="None",num_gpu_blocks="64"', 'block_size="32"', 'block_size="-1",num_gpu_blocks="9"', "junk", ""],
    )
    def test_memory_that_cannot_be_read_is_unknown(self, labels: str) -> None:
        profile = read_metrics("vLLM", LOAD_ONLY + f"vllm:cache_config_info{{{labels}}} 1\n".encode())
        assert (profile.kv_tokens, profile.cache_tokens, profile.running, profile.reason) == (None, None, 0, "")

    @pytest.mark.parametrize(
        "page",
        [
            b"",
            b"<html>not found</html>\n",
            LOAD_ONLY[:-1],
            b"vllm:num_requests_running 1\n",
            b"vllm:num_requests_running -1\nvllm:num_requests_waiting 0\n",
            b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n",
            b"vllm:num_requests_running +Inf\nvllm:num_requests_waiting 0\n",
            b'vllm:num_requests_running{a="} 1\nvllm:num_requests_waiting 0\n',
        ],
    )
    def test_page_without_a_valid_load_gives_a_reason(self, page: bytes) -> None:
        profile = read_metrics("vLLM", page)
        assert profile.reason.startswith("/metrics ")
        assert profile == EngineProfile(reason=profile.reason)

    def test_tensorrt_ranks_share_the_block_and_add_their_memory(self) -> None:
        page = b"".join(
            b'trtllm_num_requests_running{rank="%d"} 1\ntrtllm_num_requests_waiting{rank="%d"} 0\n'
            b'trtllm_kv_cache_tokens_per_block{rank="%d"} 32\ntrtllm_kv_cache_max_blocks{rank="%d"} 11\n'
            % (rank, rank, rank, rank)
            for rank in range(4)
        )
        profile = read_metrics("TensorRTLLM", page)
        assert (profile.running, profile.block_tokens, profile.kv_tokens, profile.cache_tokens) == (4, 32, 1280, 1280)

    @pytest.mark.parametrize(
        "sizes",
        [b'{r="0"} 32\ntrtllm_kv_cache_tokens_per_block{r="1"} 64\n', b" NaN\n", b" 0\n", b" -1\n", b" 1e300\n"],
    )
    def test_tensorrt_block_that_is_not_one_number_is_unknown(self, sizes: bytes) -> None:
        page = TENSORRT.replace(b" 32\n", sizes)
        profile = read_metrics("TensorRTLLM", page)
        assert (profile.block_tokens, profile.kv_tokens, profile.running) == (None, None, 4)

    def test_text_inside_a_label_is_no_label(self) -> None:
        labels = rb'x="a,block_size=\"7\"",my_block_size="9",block_size="16",num_gpu_blocks="11"'
        profile = read_metrics("vLLM", LOAD_ONLY + b"vllm:cache_config_info{%b} 1\n" % labels)
        assert (profile.block_tokens, profile.kv_tokens) == (16, 160)

    def test_samples_of_a_metric_are_bounded(self) -> None:
        page = LOAD_ONLY + b'vllm:num_requests_running{engine="1"} 1\n' * (2 * SAMPLES_MAX)
        assert read_metrics("vLLM", page).running == SAMPLES_MAX - 1

    @pytest.mark.parametrize(
        "part",
        [
            pytest.param(b"vllm:num_requests_running 0\n", id="samples"),
            pytest.param(b"vllm:num_requests_running_now 0\n", id="similar names"),
            pytest.param(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="2"} 1\n', id="memories"),
            pytest.param(b'vllm:cache_config_info{a="' + rb"\"" * 1000 + b'"} 1\n', id="escapes"),
            pytest.param(b"vllm:cache_config_info{" + b'a="b",' * 1000 + b"} 1\n", id="labels"),
            pytest.param(b"\n", id="empty lines"),
        ],
    )
    def test_hostile_page_takes_little_time(self, part: bytes) -> None:
        page = LOAD_ONLY + part * (2**20 // len(part))
        assert seconds(page) < 0.05

    @pytest.mark.parametrize("unit", [b"a", b'a="b",', b'a="', b'"', rb"\"", b"block_size=", b',block_size="', b"} "])
    def test_hostile_labels_take_linear_time(self, unit: bytes) -> None:
        """Text of 64 KB took seconds if each position began a search for a label's end."""
        page = LOAD_ONLY + b"vllm:cache_config_info{" + unit * (2**20 // len(unit)) + b"} 1\n"
        assert seconds(page) < 0.05

    def test_absurd_load_is_bounded(self) -> None:
        page = b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting 1e300\n"
        profile = read_metrics("vLLM", page)
        assert profile.running == profile.waiting == 10**6

    @given(engine=st.sampled_from(sorted(DIALECTS)), page=st.binary(max_size=300))
    def test_any_page_is_read_without_an_error(self, engine: str, page: bytes) -> None:
        name = DIALECTS[engine].running.encode()
        for each in (page, name + page + b"\n", name + b" 1\n" + DIALECTS[engine].waiting.encode() + page + b"\n"):
            profile = read_metrics(engine, each)
            assert (profile.running is None) == bool(profile.reason)


def seconds(page: bytes) -> float:
    """Return the shortest CPU time of several readings of a page."""
    times_s = []
    for _ in range(3):
        begun_s = time.process_time()
        read_metrics("vLLM", page)
        times_s.append(time.process_time() - begun_s)
    return min(times_s)


def model(name: object, parent: object = None, **more: object) -> dict[str, object]:
    return {"id": name, "parent": parent, "object": "model", **more}


class TestDocuments:
    def test_version_is_read(self) -> None:
        assert read_version({"version": "0.32.0"}).version == "0.32.0"

    @pytest.mark.parametrize(
        "document", [None, [], 7, {}, {"version": 1}, {"version": ""}, {"version": "x" * 65}, {"version": "a\nb"}]
    )
    def test_invalid_version_gives_a_reason(self, document: object) -> None:
        assert read_version(document) == EngineProfile(reason="/version has no valid version")

    def test_models_give_length_and_adapters(self) -> None:
        document = {"data": [model("m", max_model_len=1024), model("sql", "m"), model("math", "m", max_model_len=None)]}
        assert read_models(document) == EngineProfile(
            max_model_len=1024, models=("m", "sql", "math"), adapters=("sql", "math")
        )

    def test_recorded_models_are_read(self) -> None:
        document = json.loads(shared_file("fixtures/vllm/v1_models.json").read_text())
        profile = read_models(document)
        assert profile == EngineProfile(max_model_len=1024, models=profile.models)
        assert len(profile.models) == len(document["data"])

    @pytest.mark.parametrize("document", [None, [], {}, {"data": {}}, {"data": "m"}])
    def test_invalid_models_give_a_reason(self, document: object) -> None:
        assert read_models(document) == EngineProfile(reason="/v1/models has no list of models")

    @pytest.mark.parametrize(
        "odd",
        [7, None, model(None, "m"), model("", "m"), model("x" * 254, "m"), model("a\nb", "m"), model("a", ""),
         model("a", 1), model("a", max_model_len=-1), model("a", max_model_len=True), model("a", max_model_len=1e9)],
    )  # fmt: skip
    def test_odd_models_are_ignored(self, odd: object) -> None:
        assert replace(read_models({"data": [odd]}), models=()) == NO_PROFILE

    def test_models_of_a_long_list_are_not_known(self) -> None:
        names = [f"m{n}" for n in range(MODELS_MAX)]
        assert read_models({"data": [model(each) for each in names]}).models == tuple(names)
        assert read_models({"data": [model(each) for each in (*names, "more")]}).models == ()

    def test_adapters_are_bounded(self) -> None:
        profile = read_models({"data": [model(f"a{n}", "m") for n in range(ADAPTERS_MAX + 1)]})
        assert (len(profile.adapters), profile.reason) == (
            ADAPTERS_MAX,
            f"/v1/models has {ADAPTERS_MAX + 1} adapters, of which {ADAPTERS_MAX} are served",
        )

    def test_models_and_event_sources_beyond_the_limit_are_not_read(self) -> None:
        many = [model("m")] * MODELS_MAX
        assert read_models({"data": [*many, model("sql", "m", max_model_len=9)]}) == NO_PROFILE
        off = {str(n): {"enable_kv_cache_events": False} for n in range(EVENT_SOURCES_MAX)}
        assert read_event_sources({**off, "999": {"enable_kv_cache_events": True}}) == NO_PROFILE

    def test_event_sources_are_read_by_rank(self) -> None:
        source = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://[::]:5657"}
        document = {"1": {**source, "endpoint": "tcp://*:5558", "topic": "kv"}, "0": source}
        assert read_event_sources(document).event_sources == (
            EventSource(rank=0, port=5557, replay_port=5657, topic=""),
            EventSource(rank=1, port=5558, replay_port=5657, topic="kv"),
        )

    @pytest.mark.parametrize(
        ("source", "port"),
        [({"endpoint": "ipc:///tmp/x"}, None), ({"endpoint": "tcp://*:0"}, None), ({"endpoint": "tcp://*:70000"}, None),
         ({"endpoint": 5557}, None), ({}, None), ({"endpoint": "tcp://10.0.0.1:9"}, 9)],
    )  # fmt: skip
    def test_event_source_without_a_port_is_kept(self, source: dict[str, object], port: int | None) -> None:
        (read,) = read_event_sources({"0": {"enable_kv_cache_events": True, **source}}).event_sources
        assert (read.port, read.replay_port) == (port, None)

    @pytest.mark.parametrize("document", [{}, {"0": {"enable_kv_cache_events": False}}])
    def test_event_source_that_is_off_is_left_out(self, document: dict[str, object]) -> None:
        profile = read_event_sources(document)
        assert profile == EngineProfile(publishes=False)
        assert profile.events_problem == "the engine reports no KV events"
        # Other pages do not say it.
        assert EngineProfile(version="1").also(profile).also(EngineProfile(engine="vLLM")).publishes is False

    @pytest.mark.parametrize(
        ("document", "publishes"),
        [({"kv_events": None}, False), ({}, None), ({"kv_events": []}, None),
         ({"kv_events": {"endpoint_port_base": 1}}, True)],
    )  # fmt: skip
    def test_sglang_without_a_publisher_says_so(self, document: dict[str, object], publishes: bool | None) -> None:
        assert read_server_info(document).publishes is publishes

    @pytest.mark.parametrize("document", [None, [], {"x": {}}, {"0": 1}, {"1" * 9: {}}, {"\N{SUPERSCRIPT TWO}": {}}])
    def test_invalid_event_sources_give_a_reason(self, document: object) -> None:
        profile = read_event_sources(document)
        assert profile.reason.startswith("/kv_event_sources")
        assert not profile.event_sources

    def test_sglang_server_info_is_read(self) -> None:
        events = {"endpoint_port_base": 5557, "dp_size": 2, "topic": "kv", "replay_endpoint_port_base": 5657}
        document = {"version": "0.5.22", "max_total_num_tokens": 9000, "context_length": 4096, "page_size": 64}
        assert read_server_info({**document, "kv_events": events}) == EngineProfile(
            version="0.5.22",
            block_tokens=64,
            kv_tokens=9000,
            cache_tokens=9000,
            max_model_len=4096,
            event_sources=(
                EventSource(rank=0, port=5557, replay_port=5657, topic="kv"),
                EventSource(rank=1, port=5558, replay_port=5658, topic="kv"),
            ),
            publishes=True,
        )

    @pytest.mark.parametrize(
        "change",
        [{"kv_events": None}, {"kv_events": []}, {"kv_events": {"endpoint_port_base": 65_535, "dp_size": 2}},
         {"kv_events": {"endpoint_port_base": "5557"}}, {"version": None}, {"page_size": 0}],
    )  # fmt: skip
    def test_odd_server_info_gives_what_is_valid(self, change: dict[str, Any]) -> None:
        profile = read_server_info({"version": "0.5", "max_total_num_tokens": 9000, "page_size": 1, **change})
        assert profile.kv_tokens == 9000
        assert len(profile.event_sources) <= 1

    @pytest.mark.parametrize("document", [None, [], "x"])
    def test_invalid_server_info_gives_a_reason(self, document: object) -> None:
        assert read_server_info(document) == EngineProfile(reason="/server_info is no object")


class TestProfile:
    def test_later_answers_have_precedence_and_reasons_join(self) -> None:
        first = EngineProfile(version="1", waiting=3, asleep=True, reason="a")
        assert first.also(EngineProfile(version="2", asleep=False, waiting=0, reason="b")) == EngineProfile(
            version="2", waiting=0, asleep=False, reason="a; b"
        )
        assert first.also(NO_PROFILE) == first

    @pytest.mark.parametrize("asleep", [True, False])
    def test_silent_engine_keeps_all_but_its_load(self, asleep: bool) -> None:
        profile = EngineProfile(version="1", kv_tokens=9, waiting=1, running=2, asleep=asleep, at_s=1.0)
        failed = profile.failed("silent")
        assert failed == EngineProfile(version="1", kv_tokens=9, asleep=asleep, reason="silent")
        assert failed.at_s is None

    def test_profile_has_the_time_of_the_load_that_it_contains(self) -> None:
        load = EngineProfile(waiting=1, running=2, at_s=5.0)
        assert EngineProfile(version="1").also(load).also(EngineProfile(version="2")).at_s == 5.0

    def test_problem_is_the_reason_or_that_the_engine_sleeps(self) -> None:
        assert EngineProfile(asleep=True).problem == "the engine is asleep"
        assert EngineProfile(asleep=True, reason="a").problem == "a"
        assert EngineProfile(asleep=False).problem == ""
