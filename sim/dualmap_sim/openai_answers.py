"""OpenAI responses in vLLM's format: complete answers, SSE chunks and errors, as bytes to send.

Fields and their order follow vLLM 0.32, as recorded from a real server. Every generated token is a space and three
letters. So an answer that returns in the next turn's prompt counts as many tokens as were generated. The text needs no
escaping. So a stream's chunk is a concatenation of bytes, without a JSON document for each chunk.

``openai_api.py`` reads the requests.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import orjson

from dualmap_sim.errors import ApiError

DONE: Final = b"data: [DONE]\n\n"
EMBEDDING_FLOATS: Final = 8
"""Length of an embedding. Its numbers have no meaning."""

_WORDS: Final = (
    b" the fox ran far and saw one red hen sit low off our big oak hut"
    b" but not any fun for you can see how old men put out all day now"
)
_TOKEN_BYTES: Final = 4
_VOCABULARY: Final = len(_WORDS) // _TOKEN_BYTES


def output_text(start: int, tokens: int) -> bytes:
    """Return ``tokens`` tokens of output text from position ``start``, as ASCII that needs no escaping in JSON."""
    first = start % _VOCABULARY
    cycles = (first + tokens) // _VOCABULARY + 1
    return (_WORDS * cycles)[_TOKEN_BYTES * first : _TOKEN_BYTES * (first + tokens)]


def error_body(error: ApiError) -> bytes:
    """Return an error as JSON in OpenAI's format, with vLLM's fields."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.status,
            }
        }
    )


def models(model: str, adapters: Sequence[str] = (), *, created_s: int, max_model_len: int) -> bytes:
    """Return the body of ``/v1/models``: the model, and its adapters, for which vLLM says no length.

    ``max_model_len`` is the longest computed prompt.
    """
    card = {
        "id": model,
        "object": "model",
        "created": created_s,
        "owned_by": "dualmap",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }
    cards = [{**card, "id": each, "root": each, "parent": model, "max_model_len": None} for each in adapters]
    return orjson.dumps({"object": "list", "data": [card, *cards]})


def tokens(ids: Sequence[int], *, max_model_len: int) -> bytes:
    """Return the body of ``/tokenize``. ``max_model_len`` is the value of ``/v1/models``, for prompts of any length."""
    return orjson.dumps({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": None})


def rendered(ids: Sequence[int], *, request_id: str, model: str, cache_salt: str, as_list: bool) -> bytes:
    """Return the body of a render endpoint: the request as token ids. Completions have a list of prompts."""
    request = {
        "request_id": request_id,
        "token_ids": ids,
        "features": None,
        "model": model,
        "cache_salt": cache_salt or None,
    }
    return orjson.dumps([request] if as_list else request)


def embeddings(inputs: Sequence[bytes], *, model: str, prompt_tokens: int) -> bytes:
    """Return the body of ``/v1/embeddings``: a short vector per input, derived from the input alone."""
    data = [{"object": "embedding", "index": index, "embedding": _vector(text)} for index, text in enumerate(inputs)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _vector(text: bytes) -> list[float]:
    return [byte / 127.5 - 1 for byte in hashlib.sha256(text).digest()[:EMBEDDING_FLOATS]]


class Answer:
    """The answer to one generation, in the format of its endpoint.

    ``created_s`` is Unix time. The text begins at position ``start`` of the vocabulary. The position depends on the
    prompt, so that a prompt always gets the same answer.
    """

    def __init__(
        self,
        *,
        chat: bool,
        answer_id: str,
        created_s: int,
        model: str,
        start: int,
        prompt_tokens: int,
        output_tokens: int,
        finish_reason: str,
    ) -> None:
        self.answer_id = answer_id
        self._chat = chat
        self._start = start
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._finish_reason = finish_reason
        self._head = {"id": answer_id, "created": created_s, "model": model}
        self._chunk_object = "chat.completion.chunk" if chat else "text_completion"
        opening = _open(self._chunk_head())
        if chat:
            self._before_text = opening + b',"choices":[{"index":0,"delta":{"content":"'
            self._after_text = b'"},"logprobs":null,"finish_reason":'
        else:
            self._before_text = opening + b',"choices":[{"index":0,"text":"'
            self._after_text = b'","logprobs":null,"finish_reason":'

    def opening_chunk(self) -> bytes:
        """Return the chunk before the first token: the role for chat, an empty chunk for completions."""
        if not self._chat:
            return b""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return _event(self._chunk_head() | {"choices": [choice], "prompt_token_ids": None, "prompt_text": None})

    def text_chunk(self, sent_tokens: int, tokens: int, *, with_usage: bool = False) -> bytes:
        """Return the chunk with the tokens from ``sent_tokens`` to ``tokens``; the last chunk has the finish reason.

        With ``with_usage``, the chunk says how many tokens were generated so far.
        """
        text = output_text(self._start + sent_tokens, tokens - sent_tokens)
        if tokens < self._output_tokens:
            ending = b'null,"token_ids":null}]'
        else:
            ending = b'"' + self._finish_reason.encode() + b'","stop_reason":null,"token_ids":null}]'
        usage = b""
        if with_usage:
            counts = {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens + tokens}
            usage = b',"usage":' + orjson.dumps({**counts, "completion_tokens": tokens})
        return b"".join((self._before_text, text, self._after_text, ending, usage, b"}\n\n"))

    def usage_chunk(self, *, cached_tokens: int) -> bytes:
        """Return the chunk that ``stream_options.include_usage`` requests: no choices and the complete usage."""
        return _event(self._chunk_head() | {"choices": [], "usage": self._usage(cached_tokens)})

    def whole(self, *, cached_tokens: int, kv_transfer_params: Mapping[str, object] | None = None) -> bytes:
        """Return the answer of a request that does not stream; the parameters say where the prompt's KV is."""
        text = output_text(self._start, self._output_tokens).decode()
        message: dict[str, object] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        choice = {
            "index": 0,
            **message,
            "logprobs": None,
            "finish_reason": self._finish_reason,
            "stop_reason": None,
        }
        return orjson.dumps(
            {
                "id": self._head["id"],
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._head["created"],
                "model": self._head["model"],
                "choices": [choice],
                "usage": self._usage(cached_tokens),
                **({} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}),
            }
        )

    def _chunk_head(self) -> dict[str, object]:
        return {
            "id": self._head["id"],
            "object": self._chunk_object,
            "created": self._head["created"],
            "model": self._head["model"],
        }

    def _usage(self, cached_tokens: int) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + self._output_tokens,
            "completion_tokens": self._output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens, "created_cache_tokens": 0},
        }


def _open(head: dict[str, object]) -> bytes:
    """Return the beginning of an SSE event with an object that continues after ``head``."""
    return b"data: " + orjson.dumps(head)[:-1]


def _event(data: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
