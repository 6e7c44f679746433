"""Tests of the command line: help, imports and exit status."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dualmap_cli.main import COMMANDS, main

HEAVY = (
    "grpc",
    "aiohttp",
    "envoy_data_plane",
    "matplotlib",
    "prometheus_client",
    "structlog",
    "rich",
    "yaml",
    "orjson",
)


def test_help_lists_every_command_without_importing_any() -> None:
    script = (
        "import sys, json; from click.testing import CliRunner; from dualmap_cli.main import main;"
        "out = CliRunner().invoke(main, ['--help']).stdout;"
        f"print(json.dumps([out, [name for name in {HEAVY!r} if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    text, imported = json.loads(done.stdout)
    assert imported == []
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_has_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert f"dualmap {name}" in result.stdout.split("Options:")[0].split("\n", 1)[1], "an example belongs in the help"


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_imports_no_heavy_library(name: str) -> None:
    script = (
        "import sys, json; from click.testing import CliRunner; from dualmap_cli.main import main;"
        f"assert CliRunner().invoke(main, [{name!r}, '--help']).exit_code == 0;"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # The demo's progress bar needs rich, which has a short import time.
    assert json.loads(done.stdout) == (["rich"] if name == "demo" else [])


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["router", "--nonsense"], ["explain"], ["engine-sim", "--port", "x"]]
)
def test_invalid_usage_exits_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stderr
