"""The APIs of inference engines, determined from a request's path or guessed from its body (docs/prompts.md)."""

from enum import Enum, auto
from typing import Final


class Api(Enum):
    """An API of an inference engine, which decides which fields of a request body become prompt tokens."""

    CHAT = auto()
    COMPLETIONS = auto()
    RESPONSES = auto()
    MESSAGES = auto()
    EMBEDDINGS = auto()
    RERANK = auto()
    SCORE = auto()
    TOKENIZE = auto()
    UNKNOWN = auto()


PATHS: Final = {
    "/chat/completions": Api.CHAT,
    "/completions": Api.COMPLETIONS,
    "/responses": Api.RESPONSES,
    "/messages": Api.MESSAGES,
    "/messages/count_tokens": Api.MESSAGES,
    "/embeddings": Api.EMBEDDINGS,
    "/pooling": Api.EMBEDDINGS,
    "/classify": Api.EMBEDDINGS,
    "/rerank": Api.RERANK,
    "/score": Api.SCORE,
    "/tokenize": Api.TOKENIZE,
}
"""The API by the end of the path; if two entries match, the longer entry applies."""
_LONGEST_FIRST: Final = sorted(PATHS, key=len, reverse=True)
RENDER: Final = "/render"
"""The suffix of an API's path at which vLLM renders a prompt without computing it."""
_SCORE_FIELDS: Final = frozenset({"queries", "text_1", "data_1", "items", "text_2", "data_2"})


def api_of(path: str) -> Api:
    """Return the API of a decoded path; a prefix of the path, such as a gateway's prefix, is ignored."""
    route = path.partition("?")[0].rstrip("/").removesuffix(RENDER)
    return next((PATHS[end] for end in _LONGEST_FIRST if route.endswith(end)), Api.UNKNOWN)


def guess_api(body: object) -> Api:
    """Return the probable API of a parsed body without a path, from fields that only this API has."""
    if not isinstance(body, dict):
        return Api.UNKNOWN
    if "messages" in body:
        return Api.MESSAGES if "system" in body or _has_anthropic_tool(body.get("tools")) else Api.CHAT
    if "prompt" in body:
        return Api.COMPLETIONS
    if "input" in body:
        return Api.EMBEDDINGS if _is_batch(body["input"]) else Api.RESPONSES
    if "query" in body and "documents" in body:
        return Api.RERANK
    return Api.SCORE if body.keys() & _SCORE_FIELDS else Api.UNKNOWN


def _has_anthropic_tool(tools: object) -> bool:
    return isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)


def _is_batch(value: object) -> bool:
    """Return whether an ``input`` is a list of token ids or texts; the items of a Responses API input are objects."""
    return isinstance(value, list) and not any(isinstance(item, dict) for item in value)
