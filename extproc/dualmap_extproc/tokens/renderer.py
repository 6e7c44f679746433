"""Asks a server with vLLM's render endpoints for the token ids of a request, which it computes as the engine would.

The request's body goes there unchanged, because another order of keys could change the ids. The client follows no
redirect, uses no proxy and no cookies, and sends none of the request's headers.
"""

import asyncio
import json
import os
from array import array
from collections.abc import Sequence
from typing import Final

import aiohttp

from dualmap.prompts.api import Api
from dualmap_edge.http_answers import AnswerTooLarge, open_session, read_answer
from dualmap_extproc.tokens.messages import UnsupportedRequest

ANSWER_MAX_BYTES: Final = 4 * 1024 * 1024
"""The largest answer. The ids of the longest prompts take about a megabyte."""
CONNECTIONS_MAX: Final = 16
"""The most requests to one renderer at the same time."""
_PATHS: Final = {
    Api.CHAT: "/v1/chat/completions/render",
    Api.COMPLETIONS: "/v1/completions/render",
    Api.RESPONSES: "/v1/responses/render",
    Api.MESSAGES: "/v1/messages/render",
}
# Answers to all requests of an API or model alike: the server has no such endpoint or model, or forbids it.
_FAULTS: Final = (401, 403, 404, 405)
# An id takes less than 16 bytes, and a token has at least one byte of the request.
_ANSWER_OF_A_BYTE: Final = 16
# A word of these is in every request with media, whose answer may contain tensors.
_MEDIA: Final = (b"image", b"audio", b"video")
_SHORT_ANSWER_BYTES: Final = 64 * 1024


class RendererFault(UnsupportedRequest):
    """A failure that is the renderer's own, and not one of the request."""


class Renderer:
    """A client of renderers over kept-alive connections. Construct it in an event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def ids(self, url: str, chunks: Sequence[bytes], api: Api) -> "array[int]":
        """Return the ids of a request. Raises UnsupportedRequest if the server does not give the ids of one text.

        The error is a RendererFault if other requests of the API will probably fail as well.

        The caller sets the deadline.
        """
        path = _PATHS.get(api)
        if path is None:
            raise UnsupportedRequest(f"requests of this API ({api.name.lower()}) have no renderer")
        answer = await self._post(url.rstrip("/") + path, b"".join(chunks))
        # Most answers take less than a millisecond to decode; a long prompt's answer takes several.
        return await asyncio.to_thread(ids_in, answer) if len(answer) > _SHORT_ANSWER_BYTES else ids_in(answer)

    async def tokenized(self, url: str, body: bytes) -> "array[int]":
        """Return the ids that an engine's ``/tokenize`` gives. Raises UnsupportedRequest if it gives none."""
        return ids_in(await self._post(url.rstrip("/") + "/tokenize", body), "tokens")

    async def close(self) -> None:
        """Close open connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, body: bytes) -> bytes:
        if self._session is None:
            self._session = open_session(connections_max=CONNECTIONS_MAX)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    # Other answers from 400 to 499 are the fault of one request.
                    is_fault = response.status in _FAULTS or not 400 <= response.status < 500
                    kind = RendererFault if is_fault else UnsupportedRequest
                    raise kind(f"{url} answered with {response.status}")
                return await read_answer(response, max_bytes=ANSWER_MAX_BYTES)
        except AnswerTooLarge:
            kind = UnsupportedRequest if _has_large_answer(body) else RendererFault
            raise kind(f"the answer of {url} has more than {ANSWER_MAX_BYTES} bytes") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # asyncio.TimeoutError is an OSError as well, but belongs to the caller's deadline.
            if isinstance(error, TimeoutError):
                raise
            raise RendererFault(f"{url}: {_said(error)}") from error


def ids_in(answer: bytes, field: str = "token_ids") -> "array[int]":
    """Return the ids in an answer. Raises UnsupportedRequest for anything but the ids of one prompt of text.

    The error is a RendererFault for what no renderer answers.
    """
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        raise RendererFault("the answer is not JSON") from None
    prompts = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) and isinstance(each.get(field), list) for each in prompts):
        raise RendererFault(f"the answer has no {field}")
    if len(prompts) != 1:
        raise UnsupportedRequest(f"the answer has {field} of {len(prompts)} prompts")
    prompt = prompts[0]
    if prompt.get("features") or prompt.get("content_parts"):
        raise UnsupportedRequest("the request contains media")
    if not prompt[field]:
        raise UnsupportedRequest(f"the answer's {field} are empty")
    try:
        return array("I", prompt[field])
    except (TypeError, OverflowError):
        raise RendererFault(f"the answer's {field} are not ids of tokens") from None


def _has_large_answer(body: bytes) -> bool:
    """Return whether the right answer to a request may be too large."""
    return len(body) * _ANSWER_OF_A_BYTE >= ANSWER_MAX_BYTES or any(each in body for each in _MEDIA)


def _said(error: Exception) -> str:
    match error:
        case aiohttp.InvalidURL():
            return "the URL is not valid"
        case aiohttp.ClientSSLError():
            return f"no TLS connection ({type(error).__name__})"
        case OSError():
            # Resolvers have negative numbers. Other texts are asyncio's, and name the address once more.
            named = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            return f"no connection ({named or type(error).__name__})"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "no valid HTTP answer (it ends early)"
        case _:
            return f"no valid HTTP answer ({type(error).__name__})"
