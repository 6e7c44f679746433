"""Tests of TLS in Envoy's generated bootstrap: connections, files, and validation by the real Envoy."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from certificates import Authority, write_pair
from extproc.envoy_configs import clusters, config, pool_file, run, validate


def tls_files(directory: Path) -> dict[str, str]:
    """Create the files of Envoy's TLS options."""
    authority = Authority()
    folder = write_pair(directory / "certificates", authority.pair())
    (folder / "ca.crt").write_bytes(authority.pem)
    files = {"--tls-cert": "tls.crt", "--tls-key": "tls.key", "--tls-ca": "ca.crt"}
    return {option: str(folder / name) for option, name in files.items()}


def flat(options: dict[str, str]) -> list[str]:
    return [part for option in options.items() for part in option]


def tls_context(cluster: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = cluster["transport_socket"]["typed_config"]["common_tls_context"]
    return found


@pytest.mark.parametrize("tls", ["off", "on"])
def test_tls_applies_only_to_router_and_access_log_clusters(tmp_path: Path, tls: str) -> None:
    found = clusters(config("--pool", pool_file(tmp_path), "--tls", tls))
    encrypted = {name for name, cluster in found.items() if "transport_socket" in cluster}
    assert encrypted == ({"dualmap-routers", "dualmap-access-log-0"} if tls == "on" else set())
    for name in encrypted:
        context = tls_context(found[name])
        assert context["alpn_protocols"] == ["h2"]
        assert context["validation_context"] == {"trust_chain_verification": "ACCEPT_UNTRUSTED"}
        assert "tls_certificates" not in context


SECRETS = {"dualmap-client-certificate": ["--tls-cert", "--tls-key"], "dualmap-router-ca": ["--tls-ca"]}


@pytest.mark.parametrize("sds", [False, True], ids=["read once", "--tls-sds"])
@pytest.mark.parametrize("secrets", [["dualmap-client-certificate"], ["dualmap-router-ca"], list(SECRETS)])
def test_real_envoy_accepts_tls_files(tmp_path: Path, secrets: list[str], sds: bool) -> None:
    files = tls_files(tmp_path)
    options = [part for secret in secrets for option in SECRETS[secret] for part in (option, files[option])]
    if sds:
        options += ["--tls-sds", str(tmp_path)]
    result = run("--pool", pool_file(tmp_path), "--tls", "on", *options)
    assert result.exit_code == 0, result.output
    validate(tmp_path, result.stdout)


def test_tls_files_are_named_in_the_bootstrap(tmp_path: Path) -> None:
    """Envoy reads these files itself, so the bootstrap contains only their names, and no key."""
    options = {"--tls-cert": "/e/tls.crt", "--tls-key": "/e/tls.key", "--tls-ca": "/e/ca.crt"}
    found = clusters(config("--pool", pool_file(tmp_path), "--tls", "on", *flat(options)))
    for name in ("dualmap-routers", "dualmap-access-log-0"):
        assert tls_context(found[name]) == {
            "tls_certificates": [
                {"certificate_chain": {"filename": "/e/tls.crt"}, "private_key": {"filename": "/e/tls.key"}}
            ],
            "validation_context": {"trusted_ca": {"filename": "/e/ca.crt"}},
            "alpn_protocols": ["h2"],
        }


def test_tls_sds_option_writes_files_named_in_the_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"--tls-cert": "/e/tls.crt", "--tls-key": "/e/tls.key", "--tls-ca": "/ca/ca.crt", "--tls-sds": "."}
    found = clusters(config("--pool", pool_file(tmp_path), "--tls", "on", *flat(options)))
    named = {name: str(tmp_path / f"{name}.yaml") for name in SECRETS}
    for name in ("dualmap-routers", "dualmap-access-log-0"):
        context = tls_context(found[name])
        sources = [*context["tls_certificate_sds_secret_configs"], context["validation_context_sds_secret_config"]]
        assert {s["name"]: s["sds_config"]["path_config_source"]["path"] for s in sources} == named
        assert not {"tls_certificates", "validation_context"} & context.keys()
    secrets = {}
    for path in named.values():
        (secret,) = yaml.safe_load(Path(path).read_text())["resources"]
        secrets[secret["name"]] = secret
    certificate = secrets["dualmap-client-certificate"]["tls_certificate"]
    assert certificate == {
        "certificate_chain": {"filename": "/e/tls.crt"},
        "private_key": {"filename": "/e/tls.key"},
        "watched_directory": {"path": "/e"},
    }
    trust = secrets["dualmap-router-ca"]["validation_context"]
    assert trust == {"trusted_ca": {"filename": "/ca/ca.crt"}, "watched_directory": {"path": "/ca"}}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tls-cert", "tls.crt"], "--tls-cert: 'tls.crt' is not accepted; give --tls-key too"),
        (["--tls-key", "tls.key"], "--tls-key: 'tls.key' is not accepted; give --tls-cert too"),
        (["--tls-sds", "."], "--tls-sds: '"),
        (["--tls", "off", "--tls-ca", "ca.crt"], "--tls: 'off' is not accepted; give --tls on with"),
        (["--tls-ca", "ca.crt", "--tls-sds", "/nonexistent"], "'--tls-sds': Directory '/nonexistent' does not exist"),
    ],
)
def test_incomplete_tls_options_are_a_usage_error(tmp_path: Path, options: list[str], reason: str) -> None:
    result = run("--pool", pool_file(tmp_path), "--tls", "on", *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert reason in result.stderr
