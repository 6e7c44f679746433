"""The errors of the demo.

::

    DemoError
    ├── ChildError       a process that the demo started crashed, or was not ready in time
    ├── MissingExtra     a package of the `demo` extra is not installed
    └── OutputRefused    another demo uses the output folder, or the folder is not writable

The command prints ``str(error)`` unchanged.
"""

from pathlib import Path


class DemoError(Exception):
    """Base class of the demo's errors; never raised itself."""


class ChildError(DemoError):
    """A child process failed; the message ends with the tail of its log."""

    def __init__(self, name: str, what: str, *, log: Path, tail: str) -> None:
        shown = "\n".join(f"    {line}" for line in tail.splitlines()) or "    (it is empty)"
        super().__init__(f"{name} {what}; the end of its log {log}:\n{shown}")


class MissingExtra(DemoError):
    """A package that only the `demo` extra installs (such as Envoy or the chart's library) is missing."""

    def __init__(self, package: str) -> None:
        super().__init__(f"the demo needs the package {package}; run: pip install 'dualmap[demo]'")


class OutputRefused(DemoError):
    """Another demo uses the output folder, or the folder is not writable: a usage error, not a failure."""
