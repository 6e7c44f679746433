"""The fuzz targets: one module each, with ``check`` and optionally ``mutate``."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Final

# Name to help text. A module is imported only when it runs, because atheris instruments modules at import.
TARGETS: Final = {
    "body": "request bodies: JSON to prompt to block hashes",
    "pools": "pool files: YAML to pools that route",
    "access_log": "Envoy's access log: protobuf to entries",
    "stream": "ext_proc streams: messages to answers, without leaks",
    "news": "replication updates: the store's bytes to values",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target, loaded.

    ``check`` raises for an input that breaks an invariant. ``mutate`` varies an input by its structure, or returns None
    to have its bytes varied; it is None for targets without structure.
    """

    check: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes | None] | None


def load(name: str) -> Target:
    """Import a target of TARGETS."""
    module = import_module(f"{__name__}.{name}")
    return Target(check=module.check, mutate=getattr(module, "mutate", None))
