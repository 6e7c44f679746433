"""Decides whether an engine's count of cached tokens for a request says what the engine caches.

Some fields make an engine compute a prompt without its cache, or compute another prompt than the router reads, or count
the tokens of several sequences together. The router learns nothing about the engine's cache from such a request.
"""

from collections.abc import Mapping
from typing import Final

# The engine reads its cache only in part or not at all, because the answer needs every token of the prompt. vLLM does
# so for ``echo`` of a chat without further fields.
_WITHOUT_CACHE: Final = (
    *("prompt_logprobs", "prompt_logprob_token_ids", "echo", "skip_reading_prefix_cache"),
    *("return_logprob", "logprob_start_len", "return_hidden_states", "return_context_logits"),
)
# The engine computes other tokens than those of the text, or finds blocks under another name.
_OTHER_PROMPT: Final = (
    *("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "mm_processor_kwargs", "media_io_kwargs"),
    *("prompt_embeds", "input_embeds", "input_ids", "prompt_token_ids", "extra_key", "multi_modal_uuids"),
    *("previous_response_id", "previous_response", "previous_input_messages"),
)
# The count is of another engine, of several sequences, or a number that the client chooses.
_OTHER_COUNT: Final = (
    *("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "vllm_xargs", "custom_params"),
    *("bootstrap_host", "bootstrap_room", "best_of", "use_beam_search"),
)
_FIELDS: Final = frozenset((*_WITHOUT_CACHE, *_OTHER_PROMPT, *_OTHER_COUNT))
# The fields among them that do nothing if they are false.
_SWITCHES: Final = frozenset(
    (
        *("echo", "skip_reading_prefix_cache", "return_logprob", "return_hidden_states", "return_context_logits"),
        "use_beam_search",
    )
)
# The types of content parts without media. The content of a URL may change at each request.
_PLAIN: Final = frozenset(
    (
        *("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"),
        *("thinking", "redacted_thinking", "tool_use", "tool_result"),
    )
)


def is_comparable(body: Mapping[str, object]) -> bool:
    """Return whether the engine's cached tokens for a request with this body say what the engine caches."""
    if _has_field(body) or body.get("n") not in (None, 1):
        return False
    parameters = body.get("sampling_params")
    if isinstance(parameters, list) or (
        isinstance(parameters, dict) and (_has_field(parameters) or parameters.get("n") not in (None, 1))
    ):
        return False
    if _is_batch(body.get("prompt")) or _is_batch(body.get("input")) or _is_batch(body.get("text")):
        return False
    return not (_has_media(body.get("messages")) or _has_media(body.get("input")))


def _has_field(body: Mapping[str, object]) -> bool:
    # Nearly all bodies have none of the fields.
    return not _FIELDS.isdisjoint(body) and any(
        body[name] is not None and not (body[name] is False and name in _SWITCHES) for name in _FIELDS if name in body
    )


def _is_batch(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and isinstance(value[0], str | list)


def _has_media(turns: object) -> bool:
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, dict):
            continue
        for name in ("content", "output"):
            parts = turn.get(name)
            if isinstance(parts, list) and any(map(_is_media, parts)):
                return True
    return False


def _is_media(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    if not _is_plain(part):
        return True
    inner = part.get("content")
    return isinstance(inner, list) and any(isinstance(each, dict) and not _is_plain(each) for each in inner)


def _is_plain(part: Mapping[str, object]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _PLAIN
