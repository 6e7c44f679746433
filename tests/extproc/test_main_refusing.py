"""Tests ``dualmap router`` with invalid settings: the exit status, and the accepted values in the error message."""

import asyncio
import socket
import sys

import pytest
from click.testing import CliRunner

from dualmap_extproc.app.main import router
from extproc.envoy_messages import logging_as_it_was
from extproc.router_processes import WAIT_S, launch, write_pool

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize(
    ("content", "options", "status", "said"),
    [
        ("", (), 2, "pool.yaml"),
        ("kind: Pod", (), 2, "apiVersion"),
        (None, ("--tls", "/nonexistent"), 2, "--tls: '/nonexistent' is not accepted; give off, self-signed"),
        (None, ("--tls", "on"), 2, "--tls: 'on' is not accepted; give off, self-signed"),
        ("replicas: !!bool maybe", (), 2, "pool.yaml"),
        (None, ("--drain-timeout", "soon"), 2, "Invalid value for '--drain-timeout': 'soon' is not accepted; give "),
        (
            None,
            ("--max-buffered", "1 KB"),
            2,
            "'1 KB' is not accepted; give at least 1MB, such as 512MiB",
        ),
        (None, ("--replica-id", ""), 2, "Invalid value for '--replica-id': '' is not accepted; give 1 to 253 ASCII"),
        (None, ("--replica-id", "r" * 254), 2, "1 to 253 ASCII characters without spaces"),
        (None, ("--replica-id", "a b"), 2, "'a b' is not accepted; give 1 to 253 ASCII characters without spaces"),
        (
            None,
            ("--peer", "router-1"),
            2,
            "Invalid value for '--peer': 'router-1' is not accepted; give HOST:PORT, such",
        ),
        (None, ("--replica-id", "ro\x00ter"), 2, "1 to 253 ASCII characters without spaces"),
        (None, ("--als-port", "4711", "--grpc-port", "4711"), 2, "--grpc-port and --als-port are both 4711"),
        (
            None,
            ("--redis", "redis://cache:port"),
            2,
            "--redis: the URL is not accepted: the text is not a URL, or the port",
        ),
        (None, ("--redis", "rediss://c", "--redis-ca", "/nonexistent"), 2, "--redis-ca: /nonexistent: No such file"),
        (None, ("--redis", "redis://c", "--redis-password-file", "/nonexistent"), 2, "/nonexistent: No such file"),
        (None, ("--redis-password-file", "/nonexistent"), 2, "--redis-password-file requires --redis"),
        (
            None,
            ("--redis", "redis://c", "--redis-password", "x"),
            2,
            "give --redis-password-file FILE or the environment variable DUALMAP_",
        ),
        (None, ("--tls-client-ca", "/nonexistent"), 2, "--tls-client-ca: requires TLS"),
        (None, ("--log-prompts",), 2, "--log-prompts requires --log-level debug"),
        (None, ("--grpc-port", "70000"), 2, "70000"),
        (None, ("--host", "not.an.address.invalid"), 1, "give another --host"),
        (None, ("--host", "a..b"), 1, "give another --host"),
        (None, ("--host", "192.0.2.1"), 1, "cannot listen on 192.0.2.1:0"),
    ],
)
def test_router_with_invalid_settings_exits_with_status_and_reason(tmp_path, content, options, status, said):
    file = write_pool(tmp_path / "pool.yaml")
    if content is not None:
        file.write_text(content)
    ports = ("--host", "127.0.0.1", "--grpc-port", "0", "--health-port", "0", "--metrics-port", "0", "--als-port", "0")

    with logging_as_it_was():
        result = CliRunner().invoke(router, ["--pool", str(file), *ports, *options])

    assert result.exit_code == status
    assert said in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("option", ["--grpc-port", "--health-port", "--metrics-port", "--als-port"])
async def test_router_with_port_in_use_exits_and_names_the_option(tmp_path, monkeypatch, option):
    # The environment is like a user's, in which gRPC may also write to stderr.
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    ports = {f"--{name}-port": "0" for name in ("grpc", "health", "metrics", "als")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports[option] = str(taken.getsockname()[1])
        arguments = [text for pair in ports.items() for text in pair]
        file = write_pool(tmp_path / "pool.yaml")
        command = [
            sys.executable,
            "-m",
            "dualmap_cli",
            "router",
            "--host",
            "127.0.0.1",
            "--pool",
            str(file),
            *arguments,
        ]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), WAIT_S)

    where = f"127.0.0.1:{ports[option]}"
    assert said.decode() == (
        f"dualmap router: cannot listen on {where}: Address already in use; give another {option}\n"
    )
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no pools; give one or more --pool FILE, or --kube"),
        (("--kube", "--pool", "pool.yaml"), "--pool and --kube exclude each other"),
        (("--kube", "--namespace", "a", "--all-namespaces"), "--namespace and --all-namespaces exclude each other"),
        (("--pool", "pool.yaml", "--namespace", "a"), "--namespace requires --kube"),
        (("--pool", "pool.yaml", "--all-namespaces"), "--all-namespaces requires --kube"),
        (("--kube", "--namespace", "A/b"), "'A/b' is not accepted; give a DNS label of at most 63 characters"),
    ],
)
def test_router_conflicting_pool_options_are_usage_errors(options, said):
    result = CliRunner().invoke(router, options)

    assert result.exit_code == 2
    assert said in result.stderr


async def test_router_with_invalid_kubeconfig_exits_with_a_reason(tmp_path):
    process = await launch("--kube", KUBECONFIG=str(tmp_path / "none"))
    _, said = await asyncio.wait_for(process.communicate(), WAIT_S)

    assert process.returncode == 2
    assert f"dualmap router: kubeconfig {tmp_path / 'none'} does not exist".encode() in said
