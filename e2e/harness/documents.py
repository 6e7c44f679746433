"""Pool documents and request bodies of the tests, and parsers for a response's receipt and error body."""

import json
import re
from collections.abc import Mapping
from typing import Any

from harness.clients import Reply
from harness.stack import PoolMember, pool_document
from harness.upstream import Upstream


def document(pool: str, members: list[PoolMember], *, version: int = 1, **spec: Any) -> dict[str, Any]:
    """Return a pool's document with model and alias by the pool's name; ``spec`` adds fields."""
    spec |= {"model": {"name": f"{pool}-model", "aliases": [pool]}}
    return pool_document(members, name=pool, model=f"{pool}-model", spec=spec, version=version)


def queue(**settings: Any) -> dict[str, Any]:
    """Return queue settings for a spec, with which requests queue behind any load of a member."""
    return {"routing": {"queue": {"dispatchWindow": "1ms", **settings}}}


def member_of(upstream: Upstream, *, state: str = "Active") -> PoolMember:
    """Return an upstream as a member of a pool."""
    return PoolMember(id=upstream.name, address=upstream.host, port=upstream.port, state=state)


def chat(pool: str, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    """Return a chat completions body of one message for a pool's model, with more ``fields``."""
    return {"model": f"{pool}-model", "messages": [{"role": "user", "content": prompt}], **fields}


def padded(pool: str, size: int) -> bytes:
    """Return a chat body of exactly ``size`` bytes."""
    empty = json.dumps(chat(pool, "")).encode()
    body = json.dumps(chat(pool, "x" * (size - len(empty)))).encode()
    assert len(body) == size, f"a chat body has at least {len(empty)} bytes"
    return body


def prompt_of(blocks: int, *, seed: str) -> str:
    """Return a prompt of at least ``blocks`` blocks of 128 tokens, with a different prefix for each ``seed``."""
    return f"{seed} " + "All work and no play makes Jack a dull boy. " * (blocks * 512 // 44 + 1)


def receipt(reply: Reply) -> Mapping[str, str]:
    """Return the receipt's items from a response's decision header, with strings without quotes."""
    header = reply.headers["x-dualmap-decision"]
    pairs = re.findall(r'(\w+)=("[^"]*"|\([^)]*\)|[^,\s]+)', header)
    return {key: value.strip('"') for key, value in pairs}


def error_of(reply: Reply) -> dict[str, Any]:
    """Return the OpenAI error object of a rejected request; fails for any other body."""
    assert reply.headers["content-type"].startswith("application/json"), reply
    error: dict[str, Any] = json.loads(reply.body)["error"]
    assert {"message", "type", "code"} <= error.keys()
    assert error["message"]
    return error
