"""A streamed answer that another engine can continue: what was generated, and the request for the rest.

The engine that continues gets the prompt with the text so far, and generates the rest. It tokenizes the text anew and
samples with another state. So the answer is a valid one, but not the one that the first engine would have completed.
Requests whose answer depends on more than the text are not continued (``Continuation.of``).
"""

import json
import re
from itertools import pairwise
from typing import Any, Final, Self

from dualmap_sidecar.errors import UnreadableBody
from dualmap_sidecar.json_object import JsonObject

DONE: Final = b"data: [DONE]\n\n"
INTERRUPTED: Final = (
    b'data: {"error":{"message":"the engine ended within the answer, and no other engine continued it",'
    b'"type":"server_error","code":"stream_interrupted"}}\n\n'
)
EVENT_BYTES_MAX: Final = 1024 * 1024
"""The longest event of a stream that can be continued. A chunk of an answer has some hundred bytes."""
_DATA: Final = b"data:"
_EMPTY_LINE: Final = re.compile(rb"\n\r?\n")
_COMPLETION_TOKENS: Final = 16
"""Tokens of a completion without ``max_tokens``, in OpenAI's API and in vLLM."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
# With one of these members, an answer depends on more than its text, or is not only text.
_NOT_CONTINUED: Final = (
    "best_of", "echo", "continue_final_message", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "logprobs", "prompt_embeds", "prompt_logprobs", "structured_outputs", "suffix", "top_logprobs", "use_beam_search",
)  # fmt: skip
_TEXT_DELTA: Final = ("role", "content")


class Continuation:
    """The state of one stream. ``tokens_max`` bounds the generated tokens up to which it can be continued."""

    def __init__(self, document: JsonObject, *, chat: bool, tokens_max: int) -> None:
        self._document = document
        self._chat = chat
        self._tokens_max = tokens_max
        options = document.value("stream_options")
        self._wants_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._head: dict[str, bytes] = {}
        self._text: list[str] = []
        self._only_text = True
        # Tokens of the engines before, and of the present one.
        self._before = 0
        self._tokens = 0
        self._prompt_tokens: int | None = None
        self._continued = False
        self._complete = False
        self.ended = False
        """Whether the stream has its regular end."""
        self.failed = False
        """Whether the present engine reported an error within the stream."""

    @classmethod
    def of(cls, document: JsonObject, *, chat: bool, tokens_max: int) -> Self | None:
        """Return the state of a request's stream, None if the stream cannot be continued."""
        if document.value("stream") is not True or document.value("n") not in (None, 1):
            return None
        if any(_is_set(document.value(name)) for name in _NOT_CONTINUED if name in document.names):
            return None
        form, choice, options = (document.value(name) for name in ("response_format", "tool_choice", "stream_options"))
        if form not in (None, {"type": "text"}) or choice not in (None, "auto", "none"):
            return None
        if isinstance(options, dict) and options.get("continuous_usage_stats"):
            return None
        prompt = document.value("messages" if chat else "prompt")
        if not isinstance(prompt, list if chat else str) or not prompt:
            return None
        return cls(document, chat=chat, tokens_max=tokens_max)

    @property
    def first_document(self) -> JsonObject:
        """The request for the first engine, whose stream then says how many tokens were generated."""
        options = self._document.value("stream_options")
        wanted = {
            **(options if isinstance(options, dict) else {}),
            "include_usage": True,
            "continuous_usage_stats": True,
        }
        return JsonObject.parse(self._document.edited(replace={"stream_options": json.dumps(wanted).encode()}))

    @property
    def size(self) -> int:
        """The bytes of the request, which is kept until the stream ends."""
        return len(self._document.body)

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self._before + self._tokens

    @property
    def possible(self) -> bool:
        """Whether the stream can be continued now."""
        return self._only_text and self.tokens <= self._tokens_max

    @property
    def complete(self) -> bool:
        """Whether no token is missing, so that only the end of the stream is."""
        left = self._left()
        return self._complete or (left is not None and left <= 0)

    def take(self, event: bytes) -> bytes:
        """Return what the client gets for an event of the present engine."""
        payload = event.removeprefix(_DATA).strip()
        if payload == b"[DONE]":
            # vLLM ends a stream with an error regularly.
            self.ended = not self.failed
            return event if self.ended else b""
        if not event.startswith(_DATA):
            return event
        try:
            chunk = JsonObject.parse(payload)
        except UnreadableBody:
            self._only_text = False
            return event
        if "error" in chunk.names:
            self.failed = True
            return b""
        choices, usage = chunk.value("choices"), chunk.value("usage")
        self._count(usage)
        if not self._continued and not self._head:
            self._head = {name: raw for name in ("id", "created", "model") if (raw := chunk.raw(name)) is not None}
        if choices == []:
            return self._usage_event(chunk, usage) if self._wants_usage else b""
        if not isinstance(choices, list) or not isinstance(choices[0], dict) or not self._note(choices[0], usage):
            return b""
        return _event(chunk.edited(remove=("usage",), replace=self._head if self._continued else None))

    def next_body(self) -> bytes:
        """Return the request for the next engine, which generates the rest."""
        self._before, self._tokens, self._continued, self.failed = self.tokens, 0, True, False
        text = "".join(self._text)
        replace: dict[str, bytes] = {}
        if text and self._chat:
            messages = self._document.raw("messages")
            assert messages is not None
            message = json.dumps({"role": "assistant", "content": text}).encode()
            replace["messages"] = messages.rstrip().removesuffix(b"]") + b"," + message + b"]"
            replace |= {"continue_final_message": b"true", "add_generation_prompt": b"false"}
        elif text:
            prompt = self._document.value("prompt")
            assert isinstance(prompt, str)
            replace["prompt"] = json.dumps(prompt + text).encode()
        left = self._left()
        if left is not None:
            given = [name for name in _LIMITS if self._document.value(name) is not None] or ["max_tokens"]
            replace |= {name: str(left).encode() for name in given}
        least = self._document.value("min_tokens")
        if isinstance(least, int) and least:
            replace["min_tokens"] = str(max(0, least - self._before)).encode()
        return self.first_document.edited(replace=replace)

    def end(self) -> bytes:
        """Return the end of a stream that has all its tokens."""
        events = b""
        if not self._complete:
            choice: dict[str, Any] = {"index": 0, "delta": {}} if self._chat else {"index": 0, "text": ""}
            events += self._own_event([{**choice, "logprobs": None, "finish_reason": "length"}], None)
        if self._wants_usage and self._prompt_tokens is not None:
            events += self._own_event([], self._whole_usage())
        return events + DONE

    def _left(self) -> int | None:
        """Return the tokens that may still be generated, None without a limit."""
        limits = [value for name in _LIMITS if isinstance(value := self._document.value(name), int)]
        if not limits and self._chat:
            return None
        return min(limits, default=_COMPLETION_TOKENS) - self.tokens

    def _count(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        prompt, generated = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(generated, int):
            self._tokens = generated
        if isinstance(prompt, int) and self._prompt_tokens is None:
            # The prompt of an engine that continues contains what was generated before.
            self._prompt_tokens = prompt - self._before

    def _note(self, choice: dict[str, Any], usage: object) -> bool:
        """Note a piece of the answer; return whether the client gets it."""
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        if isinstance(delta, dict) and any(value for name, value in delta.items() if name not in _TEXT_DELTA):
            self._only_text = False
        if choice.get("finish_reason") is not None:
            self._complete = True
        if isinstance(text, str) and text:
            self._text.append(text)
            if not isinstance(usage, dict):
                self._tokens += 1
            return True
        opens = isinstance(delta, dict) and "role" in delta and not self._complete
        return not (opens and self._continued)

    def _whole_usage(self) -> dict[str, int]:
        prompt = self._prompt_tokens or 0
        return {"prompt_tokens": prompt, "total_tokens": prompt + self.tokens, "completion_tokens": self.tokens}

    def _usage_event(self, chunk: JsonObject, usage: object) -> bytes:
        if not self._continued or not isinstance(usage, dict):
            return _event(chunk.body)
        return _event(chunk.edited(replace={**self._head, "usage": json.dumps(self._whole_usage()).encode()}))

    def _own_event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        head = {name: json.loads(raw) for name, raw in self._head.items()}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        counted = {} if usage is None else {"usage": usage}
        return _event(json.dumps({**head, "object": kind, "choices": choices, **counted}).encode())


class EventTooLong(Exception):
    """An event of a stream has more than EVENT_BYTES_MAX bytes."""


class Events:
    """Splits a stream into its events, each with the empty line at its end."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, piece: bytes) -> list[bytes]:
        """Return the events that are complete with this piece. Raises EventTooLong for an incomplete event."""
        data = self._rest + piece
        ends = [empty_line.end() for empty_line in _EMPTY_LINE.finditer(data)]
        self._rest = data[ends[-1] if ends else 0 :]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise EventTooLong
        return [data[start:end] for start, end in pairwise((0, *ends))]


def _is_set(value: object) -> bool:
    """Return whether a member has an effect. The number 0 asks for the log probability of the token itself."""
    return value is not None and value is not False


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
