"""Fuzzes the parsing of request bodies, from bytes to block hashes, as in the picker. Clients send these bytes."""

import json
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any, Final

import orjson

from dualmap.errors import BadRequest
from dualmap.prompts.api import Api
from dualmap.prompts.blocks import BlockChain, chain_blocks, chain_root
from dualmap.prompts.prompt import Prompt, read_prompt
from fuzz import trees

# Blocks are short, so that inputs of a few hundred bytes have several blocks.
_BLOCK_TOKENS: Final = 4
_BLOCK_BYTES: Final = 4 * _BLOCK_TOKENS
_AFTER_TURNS: Final = (
    *("prompt", "query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2", "suffix"),
)
# For each field that contains the turns of a conversation: the other fields whose text becomes part of the prompt.
_BESIDE_TURNS: Final = {
    "messages": ("input", *_AFTER_TURNS),
    "input": ("messages", *_AFTER_TURNS),
}
_TURN: Final = {"role": "user", "content": "and another thing"}
_WORDS: Final = (
    *("model", "messages", "role", "content", "user", "assistant", "system", "tool", "text", "type"),
    *("image_url", "url", "prompt", "input", "input_text", "instructions", "tools", "functions", "tool_calls"),
    *("tool_call_id", "name", "arguments", "output", "summary", "reasoning_content", "refusal", "input_audio"),
    *("file_id", "cache_salt", "lora_path", "lora_request", "stream", "session_id", "prompt_cache_key"),
    *("query", "documents", "text_1", "suffix", "thinking", "tool_use", "tool_result", "tool_use_id", "source"),
    *("chat_template_kwargs", "reasoning", "effort", "previous_response_id", "kv_transfer_params", "function", "id"),
)


def check(data: bytes) -> None:
    """Check that any body is either rejected with BadRequest or has one prompt.

    The prompt's hashes depend on its prefixes and its tenant.
    """
    try:
        prompt = read_prompt(orjson.loads(data))
    except orjson.JSONDecodeError:
        return
    except BadRequest:
        return
    body = orjson.loads(data)
    assert read_prompt(body) == prompt, "the same body has another prompt the second time"
    for api in Api:
        _check_api(body, api)
    assert prompt.model
    chain = _chain(prompt)
    assert chain == _chain(prompt)
    assert len(chain.hashes) == -(-len(prompt.text) // _BLOCK_BYTES)
    assert chain.tokens_of(len(chain.hashes)) == chain.tokens
    _check_prefixes(prompt, chain)
    _check_turns(body)
    _check_tenants(body)


def mutate(data: bytes, random: Random) -> bytes | None:
    """Mutate a body as JSON; return None if it is not JSON."""
    try:
        return json.dumps(trees.mutate(json.loads(data), random, _WORDS), ensure_ascii=random.random() < 0.5).encode()
    except (ValueError, RecursionError):
        return None


def _chain(prompt: Prompt) -> BlockChain:
    root = chain_root(model=prompt.model, lora=prompt.lora, cache_salt=prompt.cache_salt)
    return chain_blocks(prompt.text, root=root, block_tokens=_BLOCK_TOKENS)


def _check_api(body: Mapping[str, Any], api: Api) -> None:
    """Check that each API either rejects the body with BadRequest or reads the same prompt again."""
    try:
        prompt = read_prompt(body, api)
    except BadRequest:
        return
    assert read_prompt(body, api) == prompt, f"the same body has another prompt the second time as {api.name}"


def _check_prefixes(prompt: Prompt, chain: BlockChain) -> None:
    """Check that a prefix of the text has a prefix of the hashes, and that a changed text has other hashes."""
    root = chain_root(model=prompt.model, lora=prompt.lora, cache_salt=prompt.cache_salt)
    half = len(prompt.text) // 2
    cut = chain_blocks(prompt.text[:half], root=root, block_tokens=_BLOCK_TOKENS)
    full = half // _BLOCK_BYTES
    assert cut.hashes[:full] == chain.hashes[:full]
    if prompt.text:
        other = bytes([prompt.text[0] ^ 1]) + prompt.text[1:]
        changed = chain_blocks(other, root=root, block_tokens=_BLOCK_TOKENS)
        assert not set(changed.hashes) & set(chain.hashes), "a hash does not depend on all that comes before it"


def _check_turns(body: Mapping[str, Any]) -> None:
    """Check that a conversation with further turns keeps the hashes of all its full blocks."""
    for name, beside in _BESIDE_TURNS.items():
        turns = body.get(name)
        if not isinstance(turns, list):
            continue
        alone = {key: value for key, value in body.items() if key not in beside}
        before = read_prompt(alone)
        after = read_prompt(alone | {name: [*turns, _TURN]})
        if all(isinstance(turn, int | list) for turn in turns):
            continue  # Token ids and texts to embed are not conversations.
        assert after.text.startswith(before.text)
        full = len(before.text) // _BLOCK_BYTES
        assert _chain(after).hashes[:full] == _chain(before).hashes[:full]
        assert len(after.text) > len(before.text)
        _check_forgery(alone, name, turns, before)


def _check_forgery(body: Mapping[str, Any], name: str, turns: list[Any], prompt: Prompt) -> None:
    """Check that two turns never have the same prompt as one turn whose text contains both turns."""
    for first, second in pairwise(turns):
        if not all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in (first, second)):
            continue
        spelt = f"{first['content']}\x1e{second.get('role')}\x1f{second['content']}"
        at = turns.index(first)
        forged = [*turns[:at], first | {"content": spelt}, *turns[at + 2 :]]
        assert read_prompt({**body, name: forged}).text != prompt.text, "a text passes for another turn"


def _check_tenants(body: Mapping[str, Any]) -> None:
    """Check that prompts of different tenants, models or adapters share no hash."""
    salt = body.get("cache_salt")
    other = f"{salt}+" if isinstance(salt, str) else "+"
    variants: list[dict[str, object]] = [{}, {"cache_salt": other}, {"model": f"{body['model']}+"}]
    if not body.get("lora_path") and not body.get("lora_request"):
        variants.append({"lora_path": "+"})
    seen: set[int] = set()
    for variant in variants:
        hashes = set(_chain(read_prompt({**body, **variant})).hashes)
        assert not hashes & seen, f"{variant} shares a hash"
        seen |= hashes
