"""Programs that tests use and that are no Python packages: where they are, after ``e2e/debian.sh``."""

import os
import shutil
from pathlib import Path


def find_promtool() -> Path | None:
    """Return Prometheus' promtool: the one on the PATH, or the one that ``e2e/debian.sh`` has unpacked."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = shutil.which("promtool") or shutil.which("promtool", path=cache / "dualmap" / "debian" / "usr" / "bin")
    return Path(found) if found else None
