"""Finds programs for tests that are not Python packages; ``e2e/debian.sh`` installs the programs."""

import os
import shutil
from pathlib import Path


def find_promtool() -> Path | None:
    """Return Prometheus' promtool from the PATH, or from the folder of ``e2e/debian.sh``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = shutil.which("promtool") or shutil.which("promtool", path=cache / "dualmap" / "debian" / "usr" / "bin")
    return Path(found) if found else None
