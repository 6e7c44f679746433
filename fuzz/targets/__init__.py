"""What is fuzzed: one module a target, each with ``check`` and, where bytes alone reach little, ``mutate``."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Final

# By name: what make fuzz shows of it. The modules are imported only to be run, since atheris instruments at import.
TARGETS: Final = {
    "body": "request bodies: JSON to prompt to block hashes",
    "pools": "pool files: YAML to pools that route",
    "access_log": "Envoy's access log: protobuf to entries",
    "stream": "ext_proc streams: messages to answers and closed books",
    "news": "other replicas' news: the store's bytes to values",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target, loaded.

    ``check`` raises for an input by which something that must hold does not. ``mutate`` varies an input in its own
    terms, or returns None to have its bytes varied; it is None where bytes are all there is.
    """

    check: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes | None] | None


def load(name: str) -> Target:
    """Import a target of TARGETS."""
    module = import_module(f"{__name__}.{name}")
    return Target(check=module.check, mutate=getattr(module, "mutate", None))
