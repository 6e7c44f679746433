"""Tests of the operator's warnings about pod templates, and of templates without a warning."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from dualmap.pools.pool import KvEvents
from dualmap_operator.decide.spec import SelectorWorkload, read_spec
from dualmap_operator.decide.workload.checks import template_warnings
from pod_templates import GOOD_CONTAINER, engine_with, odd_templates, pool_of, template_of

ENGINE = "spec.workload.template.spec.containers[0]"


def warned(engine: Mapping[str, Any], **pod: Any) -> tuple[str, ...]:
    return template_warnings(pool_of(template_of(engine, **pod)))


def only(warnings: tuple[str, ...]) -> str:
    (warning,) = warnings
    return warning


def test_valid_template_has_no_warnings() -> None:
    assert warned(GOOD_CONTAINER) == ()


def test_template_of_adopted_pods_is_not_checked() -> None:
    adopted = SelectorWorkload(selector={"matchLabels": {"app": "qwen"}})

    assert template_warnings(replace(pool_of({}), workload=adopted)) == ()


def test_template_warning_contains_field_path_and_remedy() -> None:
    bad = {"name": "e", "image": "i", "args": ["--port=9"], "ports": [{"containerPort": 9}]}

    warnings = warned(bad, terminationGracePeriodSeconds=1)

    assert len(warnings) == 6
    for warning in warnings:
        assert warning.startswith("spec.workload.template.spec.")
        assert "; give " in warning or "; declare " in warning
        assert warning.isascii()


class TestGracePeriod:
    def test_too_short_grace_period_warning_contains_actual_period(self) -> None:
        assert only(warned(GOOD_CONTAINER, terminationGracePeriodSeconds=30)) == (
            "spec.workload.template.spec.terminationGracePeriodSeconds: 30 is shorter than a drain "
            "(spec.drain.timeout is 600s), so the operator uses 640; give 640 or more, or a shorter spec.drain.timeout"
        )

    @pytest.mark.parametrize("own", [None, 640, 3600, "30", True])
    def test_grace_period_absent_longer_or_invalid_has_no_warning(self, own: object) -> None:
        assert warned(GOOD_CONTAINER, terminationGracePeriodSeconds=own) == ()

    def test_grace_period_with_custom_pre_stop_is_not_checked(self) -> None:
        own = engine_with(lifecycle={"preStop": {"sleep": {"seconds": 1}}})

        assert warned(own) == ()


class TestShutdownTimeout:
    @pytest.mark.parametrize(
        "commands",
        [
            {"args": ["--model=m", "--enable-prompt-tokens-details"]},
            {"command": ["vllm", "serve", "m"], "args": ["--enable-prompt-tokens-details"]},
            {"command": ["/opt/venv/bin/vllm", "serve", "m", "--enable-prompt-tokens-details"], "args": None},
            {
                "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
                "args": ["--enable-prompt-tokens-details"],
            },
            {"command": ["sh", "-c", "exec vllm serve m --enable-prompt-tokens-details"], "args": None},
            {
                "command": ["sh", "-c"],
                "args": ["vllm serve m \\\n --enable-prompt-tokens-details # --shutdown-timeout 9"],
            },
        ],
    )
    def test_missing_vllm_shutdown_timeout_gives_a_warning(self, commands: dict[str, Any]) -> None:
        assert only(warned(engine_with(**commands))) == (
            f"{ENGINE}.args: --shutdown-timeout is missing (default: 0 s); at shutdown, vLLM aborts streams "
            "that are still open after this timeout; give --shutdown-timeout 20 or more"
        )

    @pytest.mark.parametrize(
        "args",
        [
            ["--shutdown-timeout=5"],
            ["--shutdown-timeout", "5"],
            ["--shutdown_timeout", "5"],
            ["--shutdown-timeout=60", "--shutdown-timeout=5"],
        ],
    )
    def test_too_short_shutdown_timeout_gives_a_warning(self, args: list[str]) -> None:
        warning = only(warned(engine_with(args=["--enable-prompt-tokens-details", *args])))

        assert warning.startswith(f"{ENGINE}.args: --shutdown-timeout 5 is too short; at shutdown, vLLM")

    @pytest.mark.parametrize(
        "script",
        [
            "vllm serve m --shutdown-timeout 0",
            "vllm serve m --shutdown-timeout='0' && x",
            "vllm serve m \\\n  --shutdown-timeout \\\n  0",
        ],
    )
    def test_shutdown_timeout_is_read_from_a_shell_script(self, script: str) -> None:
        warnings = warned(engine_with(command=["/bin/bash", "-ec", script], args=None))

        assert f"{ENGINE}.args: --shutdown-timeout 0 is too short; at shutdown, vLLM" in warnings[0]

    def test_zero_shutdown_timeout_gives_a_warning_for_any_engine(self) -> None:
        assert "--shutdown-timeout 0 is too short;" in only(
            warned(engine_with(command=["/start"], args=["--shutdown-timeout=0"]))
        )

    @pytest.mark.parametrize(
        "commands",
        [
            {"args": ["--shutdown-timeout=20", "--enable-prompt-tokens-details"]},
            {"args": ["--shutdown_timeout", "90", "--enable_prompt_tokens_details"]},
            {"args": ["--shutdown-timeout=$(LONG)", "--enable-prompt-tokens-details"]},
            {"command": ["sh", "-c", "vllm serve m --shutdown-timeout $LONG --enable-prompt-tokens-details"]},
            {"args": ["--config", "/etc/vllm.yaml"]},
            {"command": ["/start.sh"], "args": ["--fast"]},
            {"command": ["dualmap", "engine-sim"], "args": ["--host", "$(POD_IP)"]},
        ],
    )
    def test_sufficient_or_unreadable_shutdown_timeout_has_no_warning(self, commands: dict[str, Any]) -> None:
        assert warned(engine_with(**commands)) == ()

    @pytest.mark.parametrize("engine", ["SGLang", "TensorRTLLM", "Generic"])
    def test_missing_shutdown_timeout_of_other_engine_has_no_warning(self, engine: str) -> None:
        assert template_warnings(pool_of(template_of(engine_with(args=["--port=9"])), engine=engine)) == ()


class TestPromptTokensDetails:
    @pytest.mark.parametrize("args", [[], ["--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"]])
    def test_missing_prompt_tokens_details_flag_gives_a_warning(self, args: list[str]) -> None:
        warning = only(warned(engine_with(args=["--shutdown-timeout=20", *args])))

        assert warning.startswith(f"{ENGINE}.args: --enable-prompt-tokens-details is missing")


CONFIG = '{"enable_kv_cache_events": true, "endpoint": "%s", "replay_endpoint": "tcp://*:5558"}'


class TestKvEvents:
    def warned(self, *args: str, kv_events: bool = True, engine: str = "vLLM") -> tuple[str, ...]:
        usual = ("--shutdown-timeout=20", "--enable-prompt-tokens-details")
        pool = pool_of(template_of(engine_with(args=[*usual, *args])), engine=engine)
        events = replace(pool.engine, kv_events=KvEvents(enabled=kv_events))
        return template_warnings(replace(pool, engine=events))

    def test_missing_config_gives_a_warning_if_the_pool_has_kv_events(self) -> None:
        warning = only(self.warned())

        assert warning.startswith(f"{ENGINE}.args: --kv-events-config is missing, so vLLM publishes no KV events, but ")
        assert '; give --kv-events-config={"enable_kv_cache_events":true,' in warning
        assert self.warned(kv_events=False) == ()
        assert self.warned(engine="SGLang") == ()

    @pytest.mark.parametrize("config", ["{}", '{"enable_kv_cache_events": false}', '{"enable_kv_cache_events": "yes"}'])
    def test_config_that_does_not_enable_events_gives_a_warning(self, config: str) -> None:
        assert "does not enable KV events" in only(self.warned(f"--kv-events-config={config}"))

    @pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://collector:5557", "\u00e9" * 500])
    def test_endpoint_that_is_not_listened_on_gives_a_warning(self, endpoint: str) -> None:
        warning = only(self.warned("--kv-events-config", CONFIG % endpoint))

        assert "to which vLLM connects instead of listening" in warning
        assert warning.isascii()
        assert len(warning) < 700

    @pytest.mark.parametrize(
        "args",
        [
            ["--kv-events-config", CONFIG % "tcp://*:5557"],
            ["--kv_events_config=" + CONFIG % "tcp://[::]:5557"],
            ['--kv-events-config={"enable_kv_cache_events": true}'],
            ["--kv-events-config=$(CONFIG)"],
            ["--kv-events-config"],
            ["--kv-events-config=" + "[" * 100_000],
            ["--kv-events-config=[1]"],
            ['--kv-events-config={"enable_kv_cache_events": true, "endpoint": 5}'],
            ["--kv-events-config.enable_kv_cache_events", "true"],
            ["--config", "/etc/vllm.yaml"],
        ],
    )
    def test_valid_or_unreadable_config_has_no_warning(self, args: list[str]) -> None:
        assert self.warned(*args) == ()

    def test_example_of_kv_events_has_no_warnings(self) -> None:
        file = Path(__file__).parents[2] / "manifests" / "examples" / "kv-events.yaml"
        (pool, *_) = yaml.safe_load_all(file.read_text())
        assert template_warnings(read_spec(pool)) == ()


class TestReadiness:
    def test_missing_readiness_probe_gives_a_warning(self) -> None:
        warning = only(warned(engine_with(readinessProbe=None)))

        assert warning.startswith(f"{ENGINE}.readinessProbe: the probe is missing")
        assert "GET /health on port 8000" in warning

    def test_startup_probe_prevents_the_readiness_probe_warning(self) -> None:
        assert warned(engine_with(readinessProbe=None, startupProbe={"tcpSocket": {"port": 8000}})) == ()

    def test_readiness_probe_is_required_only_in_engine_container(self) -> None:
        sidecar = {"name": "proxy", "image": "envoy", "ports": [{"containerPort": 9901}]}

        assert template_warnings(pool_of(template_of(sidecar, GOOD_CONTAINER))) == ()


class TestPorts:
    def test_declared_ports_without_the_engine_port_give_a_warning(self) -> None:
        ports = [{"containerPort": 8080}, {"containerPort": 9090}]

        assert only(warned(engine_with(ports=ports))).startswith(
            f"{ENGINE}.ports: 8080, 9090 do not include spec.engine.port 8000;"
        )

    def test_container_without_declared_ports_has_no_warning(self) -> None:
        assert warned(engine_with(ports=None)) == ()
        assert warned(engine_with(ports=[])) == ()

    def test_vllm_listening_on_another_port_gives_a_warning(self) -> None:
        engine = engine_with(args=[*GOOD_CONTAINER["args"], "--port", "8001"])

        assert only(warned(engine)).startswith(f"{ENGINE}.args: --port 8001 differs from spec.engine.port 8000")
        assert warned(engine_with(args=[*GOOD_CONTAINER["args"], "--port", "8000"])) == ()


@given(odd_templates())
def test_template_of_any_shape_is_checked_without_error(template: dict[str, Any]) -> None:
    assert all(isinstance(warning, str) for warning in template_warnings(pool_of(template)))


@pytest.mark.parametrize(
    "args", ["--shutdown-timeout=0", [None, 5, ["--port=9"], {}], ["--shutdown-timeout"], ["--shutdown-timeout", "--x"]]
)
def test_arguments_of_a_wrong_type_are_ignored(args: object) -> None:
    assert "--port" not in " ".join(warned(engine_with(args=args, command=["/start"])))


@pytest.mark.parametrize("containers", ["engine", [None], ["engine"], [], {"engine": {}}])
def test_template_without_container_has_no_warnings(containers: object) -> None:
    assert template_warnings(pool_of({"spec": {"containers": containers}})) == ()


def test_shell_script_with_an_unclosed_quote_is_parsed() -> None:
    script = "cat <<END\nit's\nEND\nvllm serve m --shutdown-timeout 3 --enable-prompt-tokens-details"

    assert "--shutdown-timeout 3 is too short;" in only(warned(engine_with(command=["sh", "-c", script], args=None)))
