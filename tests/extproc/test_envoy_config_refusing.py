"""Tests of rejected addresses, choices and settings that Envoy cannot use."""

from pathlib import Path

import pytest

from dualmap_extproc.envoy.config.settings import Address, Discover, EnvoySettings, EnvoySettingsError
from dualmap_extproc.pools.file import load_pool_files
from extproc.envoy_configs import pool_file, run


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--listen", "8080"),
        ("--listen", "example.com:80"),
        ("--listen", "127.0.0.1:65536"),
        ("--listen", "127.0.0.1:-1"),
        ("--listen", "::1:80"),
        ("--listen", ""),
        ("--admin", "127.0.0.1:http"),
        ("--router", "127.0.0.1:0"),
        ("--router", "127.0.0.1:9002,"),
        ("--router", ":9002"),
        ("--router", "http://127.0.0.1:9002"),
        ("--router", "[127.0.0.1]:9002"),
        ("--als", "a b:1"),
        ("--als", "127.0.0.1:\u0661"),
        ("--allow-path", "metrics"),
        ("--allow-path", "/metrics?x"),
        ("--allow-path", ""),
    ],
)
def test_envoy_config_invalid_value_error_has_option_and_value(tmp_path: Path, flag: str, value: str) -> None:
    result = run("--pool", pool_file(tmp_path), flag, value)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert flag in result.stderr
    assert "is not accepted; give" in result.stderr


@pytest.mark.parametrize(("flag", "value"), [("--mode", "grpc"), ("--tls", "self-signed")])
def test_envoy_config_invalid_choice_is_a_usage_error(tmp_path: Path, flag: str, value: str) -> None:
    result = run("--pool", pool_file(tmp_path), flag, value)
    assert result.exit_code == 2
    assert flag in result.stderr


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--status", "127.0.0.1:9901"), "status"),
        (("--status", "0.0.0.0:8080"), "status"),
        (("--status", "0.0.0.0:1", "--admin", "127.0.0.1:0"), "admin"),
        (("--status", "envoy:1"), "--status"),
    ],
)
def test_envoy_config_unusable_status_address_is_rejected(
    tmp_path: Path, arguments: tuple[str, ...], field: str
) -> None:
    result = run("--pool", pool_file(tmp_path), *arguments)
    assert result.exit_code == 2
    assert f"{field}: " in result.stderr


def test_envoy_config_same_address_for_listen_and_admin_is_rejected(tmp_path: Path) -> None:
    result = run("--pool", pool_file(tmp_path), "--listen", "127.0.0.1:1", "--admin", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "admin" in result.stderr


def test_envoy_config_invalid_pool_file_is_an_input_error(tmp_path: Path) -> None:
    result = run("--pool", tmp_path / "missing.yaml")
    assert result.exit_code == 2
    assert "missing.yaml" in result.stderr
    assert run().exit_code == 2


def test_envoy_settings_reject_values_envoy_cannot_use(tmp_path: Path) -> None:
    somewhere = Address(host="127.0.0.1", port=1)
    pools = load_pool_files([pool_file(tmp_path)])
    with pytest.raises(EnvoySettingsError, match="pools"):
        EnvoySettings(pools=(), routers=(somewhere,), access_logs=(), listen=somewhere, admin=somewhere)
    with pytest.raises(EnvoySettingsError, match="pools"):
        EnvoySettings(
            pools=pools, discover=Discover(), routers=(somewhere,), access_logs=(), listen=somewhere, admin=somewhere
        )
    with pytest.raises(EnvoySettingsError, match="static_endpoints"):
        EnvoySettings(
            discover=Discover(),
            static_endpoints=True,
            routers=(somewhere,),
            access_logs=(),
            listen=somewhere,
            admin=somewhere,
        )
    with pytest.raises(EnvoySettingsError, match="routers"):
        EnvoySettings(pools=pools, routers=(), access_logs=(), listen=somewhere, admin=somewhere)


@pytest.mark.parametrize("memory", ["1", "63Mi", "much", "1GiB", "-1Gi"])
def test_envoy_config_unusable_memory_is_rejected(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALMAP_ENVOY_MEMORY", memory)
    result = run("--discover")
    assert result.exit_code == 2
    assert f"DUALMAP_ENVOY_MEMORY: '{memory}' is not accepted" in result.stderr
