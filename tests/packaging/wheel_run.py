"""Builds the wheel, installs it into a new environment, and runs the unit tests against the installed packages."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "dualmap",
    "dualmap_edge",
    "dualmap_operator",
    "dualmap_extproc",
    "dualmap_sim",
    "dualmap_sidecar",
    "dualmap_cli",
}


def run(*command: str | Path, cwd: Path) -> None:
    """Print and run a command; if the command fails, exit with its status."""
    print("+", *command, flush=True)
    status = subprocess.run([str(part) for part in command], cwd=cwd, check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """Build the wheel, check its packages, install it and run the tests."""
    uv = Path(sys.executable).parent / "uv"
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        hashed = ("--require-hashes", "--build-constraint", ROOT / "constraints.txt")
        run(uv, "build", "--wheel", "--quiet", *hashed, "--out-dir", here, ROOT, cwd=here)
        (wheel,) = here.glob("*.whl")
        top_level = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
        unexpected = {name for name in top_level if not name.endswith(".dist-info")} ^ PACKAGES
        if unexpected:
            sys.exit(f"the wheel's top-level packages are not as expected: {sorted(unexpected)}")
        run(uv, "venv", "--quiet", "--python", sys.executable, here / "venv", cwd=here)
        python = here / "venv" / "bin" / "python"
        install = (uv, "pip", "install", "--quiet", "--python", python)
        hashed = ("--require-hashes", "--constraint", ROOT / "constraints.txt")
        run(*install, *hashed, "--requirement", ROOT / "pyproject.toml", "--extra", "dev", cwd=here)
        run(*install, "--no-deps", wheel, cwd=here)
        # The tests run in another folder, so that Python imports the installed packages and not the repository's.
        tests = [ROOT / "tests" / name for name in ("core", "edge", "controlplane", "extproc", "sim", "sidecar")]
        tests.append(ROOT / "testing" / "tests" / "unit")
        run(
            python,
            "-m",
            "pytest",
            "--quiet",
            "--numprocesses",
            "2",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
            *tests,
            cwd=here,
        )
        run(here / "venv" / "bin" / "dualmap", "policies", cwd=here)


main()
