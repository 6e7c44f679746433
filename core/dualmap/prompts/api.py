"""The APIs of inference engines, told apart by the request's path (docs/prompts.md)."""

from enum import Enum, auto
from typing import Final


class Api(Enum):
    """An API of an inference engine. It decides which fields of a request body become prompt tokens."""

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
"""The API by the end of its path; of two ends that fit, the longer one counts."""
_LONGEST_FIRST: Final = sorted(PATHS, key=len, reverse=True)
# vLLM renders a prompt without computing it at the API's own path and this.
_RENDER: Final = "/render"


def api_of(path: str) -> Api:
    """Return the API that a decoded path names; a prefix before it, such as a gateway's, is accepted."""
    route = path.partition("?")[0].rstrip("/").removesuffix(_RENDER)
    return next((PATHS[end] for end in _LONGEST_FIRST if route.endswith(end)), Api.UNKNOWN)
