"""A request's body: its received chunks, the check whether it is complete, its prompt and its session."""

import re
from collections.abc import Mapping
from typing import Final

import orjson

from dualmap.errors import BadRequest
from dualmap.keys.sessions import session_key
from dualmap.prompts.api import Api, guess_api
from dualmap.prompts.prompt import Prompt, read_prompt
from dualmap_extproc.errors import Refused, invalid_body
from dualmap_extproc.request.object_scan import JSON_SPACE, ObjectScan, ObjectState
from dualmap_extproc.settings import Limits

# The beginning of orjson's error message for a JSON text that ends too early.
_TRUNCATED = "unexpected end of data"
# A larger part of a body is not parsed to learn whether it may continue: the parser would hold the event loop.
_PARSED_BYTES: Final = 64 * 1024
# Chunks below this size are joined, so that a body in tiny chunks takes no more memory than its bytes.
_JOINED_BYTES: Final = 4 * 1024
_CODE: Final = r"\\u00"
# The key "model", with or without escapes, and a text as its value.
_MODEL: Final = re.compile(
    rf'"(?:m|{_CODE}6[dD])(?:o|{_CODE}6[fF])(?:d|{_CODE}64)(?:e|{_CODE}65)(?:l|{_CODE}6[cC])"'
    r'[ \t\r\n]*+:[ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")'.encode(),
    re.DOTALL,
)


class ReceivedBody:
    """The chunks of a request's body that have arrived.

    In the methods, ``content_length`` is the length from the request's headers, or 0 without a length.
    """

    __slots__ = ("_chunks", "_parsed_bytes", "_scan", "size_bytes")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._parsed_bytes = 0
        self._scan = ObjectScan()
        self.size_bytes = 0

    def add(self, chunk: bytes) -> None:
        """Append the next chunk."""
        self.size_bytes += len(chunk)
        if not chunk:
            # Envoy may end a body with an empty message. Without the empty chunk, a body of one chunk is not copied.
            return
        if self._chunks and len(self._chunks[-1]) < _JOINED_BYTES:
            self._chunks[-1] += chunk
        else:
            self._chunks.append(chunk)

    def take(self) -> tuple[bytes, ...]:
        """Return the chunks of the body and keep only its size."""
        chunks, self._chunks = self._chunks, []
        return tuple(chunks)

    def scan(self, last_chunk: bytes, content_length: int) -> bool:
        """Scan the chunk that was added last; return whether the body looks complete.

        A body looks complete if it has its announced length, or without a length, if its braces are balanced.
        """
        if content_length:
            return self.size_bytes >= content_length
        self._scan.scan(last_chunk)
        return self._scan.state is ObjectState.CLOSED

    def may_continue(self, content_length: int) -> bool:
        """Return whether more bytes are announced, or without a length, whether more bytes could complete the JSON.

        A small body is parsed, but not again before its size has doubled. Many pauses therefore take little time.
        """
        if content_length:
            return self.size_bytes < content_length
        if self._scan.state in (ObjectState.CLOSED, ObjectState.NO_OBJECT):
            return False
        if self.size_bytes > _PARSED_BYTES or self.size_bytes < 2 * self._parsed_bytes:
            return True
        self._parsed_bytes = self.size_bytes
        return may_go_on(b"".join(self._chunks))


def read_body(body: bytes, api: Api) -> Prompt | Refused:
    """Return the prompt of a complete body for the API ``api``, or a 400 that describes the fault."""
    parsed = parse_body(body)
    return parsed if isinstance(parsed, Refused) else prompt_of(parsed, api)


def parse_body(body: bytes) -> object | Refused:
    """Return the JSON value of a complete body, or a 400 that describes the fault."""
    if not body:
        return invalid_body("the request has no body")
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return invalid_body(f"the body is not JSON: {error}")
    return parsed


def prompt_of(parsed: object, api: Api) -> Prompt | Refused:
    """Return the prompt of a parsed body that was sent to ``api``, or a 400 that names the fault."""
    try:
        return read_prompt(parsed, api)
    except BadRequest as error:
        return invalid_body(str(error), param=error.param)


def model_names(body: bytes) -> list[str]:
    """Return the texts of all keys ``model`` in a body, at any depth, without parsing it; the last ones come last."""
    names = []
    for match in _MODEL.finditer(body):
        try:
            names.append(str(orjson.loads(match[1])))
        except orjson.JSONDecodeError:
            continue
    return names


def guess_api_of(body: bytes) -> Api:
    """Return the probable API of a complete body without a path."""
    try:
        return guess_api(orjson.loads(body))
    except orjson.JSONDecodeError:
        return Api.UNKNOWN


def may_go_on(body: bytes) -> bool:
    """Return whether a body is the beginning of a JSON object that more bytes could complete."""
    text = body.lstrip(JSON_SPACE)
    if not text.startswith(b"{"):
        return not text
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # Position 0 is the brace. An error at position 0 means bytes that are not UTF-8, for example half a character.
        return error.pos == 0 or error.msg.startswith(_TRUNCATED)
    return False


def session_of(name: str, root: int, limits: Limits) -> int | None:
    """Return the key of a request's session; None for a session name that is empty or too long."""
    return session_key(name, root) if 0 < len(name) <= limits.session_characters else None


def quoted_of(prompt: Prompt, headers: Mapping[str, str], limits: Limits) -> Mapping[str, object]:
    """Return the prompt and headers of a request, shortened for a debug line."""
    text = prompt.text.decode("utf-8", "replace")[: limits.quoted_characters]
    return {"prompt": text, "headers": {name: ascii(value) for name, value in headers.items()}}
