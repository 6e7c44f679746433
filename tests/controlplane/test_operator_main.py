"""Tests of the command line of ``dualmap operator``: settings from flags and environment, and rejected values."""

from typing import Any

import pytest
from click.testing import CliRunner, Result

from dualmap_edge import logs
from dualmap_operator import wiring
from dualmap_operator.main import operator
from dualmap_operator.settings import GeneratedSecret, SecretKind, Settings


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings that the operator would use."""
    runs: list[Settings] = []

    def run(settings: Settings) -> int:
        runs.append(settings)
        return 0

    monkeypatch.setattr(wiring, "run", run)
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    return runs


def invoke(*arguments: str, **environment: str | None) -> Result:
    variables: dict[str, Any] = {"POD_NAMESPACE": None, **environment}
    return CliRunner().invoke(operator, arguments, env=variables)


def test_operator_options_have_documented_defaults(told: list[Settings]) -> None:
    assert invoke().exit_code == 0

    (settings,) = told
    assert settings == Settings(namespace=None, pod_namespace="dualmap-system", identity=settings.identity)
    assert (settings.metrics_port, settings.health_port, settings.router_service) == (9091, 9092, "dualmap-router")


def test_operator_options_are_read_from_flags_and_environment(told: list[Settings]) -> None:
    result = invoke(
        "--namespace", "llm", "--leader-election", "--router", "10.0.0.1:9090", "--router", "[fd00::1]:9091",
        "--generate", "authority=a", "--generate", "client=keda/b.c",
        POD_NAMESPACE="serving",
    )  # fmt: skip

    assert result.exit_code == 0
    (settings,) = told
    assert settings.namespace == "llm"
    assert settings.pod_namespace == "serving"
    assert settings.leader_election
    assert settings.routers == (("10.0.0.1", 9090), ("fd00::1", 9091))
    assert settings.generated == (
        GeneratedSecret(kind=SecretKind.AUTHORITY, name="a"),
        GeneratedSecret(kind=SecretKind.CLIENT, name="b.c", namespace="keda"),
    )


def test_candidate_identity_differs_after_a_pod_restart(told: list[Settings]) -> None:
    invoke()
    invoke()

    assert told[0].identity != told[1].identity


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--namespace", "llm", "--all-namespaces"], "exclude each other"),
        (["--namespace", "LLM"], "'LLM' is not accepted; give a DNS label"),
        (["--router", "10.0.0.1"], "'10.0.0.1' is not accepted; give HOST:PORT"),
        (["--router", "fd00::1:9090"], "give HOST:PORT, with an IPv6 host in brackets"),
        (["--router", "router:0"], "give HOST:PORT"),
        (["--health-port", "9000", "--metrics-port", "9000"], "give two different ports"),
        (["--health-port", "70000"], "70000 is not in the range"),
        (["--generate", "key=a"], "KIND is one of authority, server, client, redis, hash"),
        (["--generate", "redis=A"], "give KIND=[NAMESPACE/]NAME"),
        (["--generate", "redis=/a"], "give KIND=[NAMESPACE/]NAME"),
        (["--generate", "redis=a/b/c"], "give KIND=[NAMESPACE/]NAME"),
        (["--generate", "server=a"], "server and client need exactly one authority=NAME"),
    ],
)
def test_invalid_operator_option_error_lists_accepted_values(
    told: list[Settings], arguments: list[str], words: str
) -> None:
    result = invoke(*arguments)

    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert told == []


def test_invalid_pod_namespace_is_named_in_the_error(told: list[Settings]) -> None:
    result = invoke(POD_NAMESPACE="not/a/name")

    assert result.exit_code == 2
    assert "POD_NAMESPACE: 'not/a/name' is not accepted" in result.output


def test_operator_help_has_an_example() -> None:
    result = invoke("--help")

    assert result.exit_code == 0
    assert "dualmap operator --all-namespaces --leader-election" in result.output
