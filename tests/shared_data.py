"""Recorded data outside the repository: traces, and answers of real engines (CONTRIBUTING.md)."""

import os
from pathlib import Path

import pytest

VARIABLE = "DUALMAP_SHARED"
BESIDE_THE_CHECKOUT = Path(__file__).parents[2] / "shared"


def shared_file(path: str) -> Path:
    """Return a file of the shared folder; skip the test if the file does not exist."""
    found = Path(os.environ.get(VARIABLE) or BESIDE_THE_CHECKOUT) / path
    if not found.exists():
        pytest.skip(f"{found} does not exist; {VARIABLE} names the folder of shared data")
    return found
