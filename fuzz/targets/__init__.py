"""The fuzz targets: one module each, with ``check`` and optionally ``mutate``."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Final

# Target name to help text. A module is imported only when it runs, because atheris instruments modules at import.
TARGETS: Final = {
    "body": "request bodies: JSON to prompt to block hashes",
    "pools": "pool files: YAML to pools that route",
    "access_log": "Envoy's access log: protobuf to entries",
    "stream": "ext_proc streams: messages to answers, without leaks",
    "profile": "engines' answers: metrics pages and JSON to profiles that route",
    "news": "replication updates: the store's bytes to values",
    "renderer": "renderers' answers: JSON to token ids and their chain",
    "templates": "chat requests: messages and tools to the texts of chat templates",
    "kv_events": "engines' KV events: frames to the blocks that a member holds",
    "http2": "HTTP/2 connections: frames to calls, in reads of any size",
    "hpack": "HTTP/2 header blocks: HPACK to headers of calls",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target.

    ``check`` raises an error for an input that breaks an invariant. ``mutate`` mutates the structure of an input, or
    returns None; then the input's bytes are mutated. ``mutate`` is None for targets without structure.
    """

    check: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes | None] | None


def load(name: str) -> Target:
    """Import a target of TARGETS."""
    module = import_module(f"{__name__}.{name}")
    return Target(check=module.check, mutate=getattr(module, "mutate", None))
