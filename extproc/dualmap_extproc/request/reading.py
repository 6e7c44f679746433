"""Reading bodies without holding the event loop: small bodies at once, large bodies in another process.

Reading a body takes time in proportion to its size and to the number of its JSON elements. ``read_small`` leaves the
bodies that would hold the event loop for long to another process, which runs ``read_large``. The package
``dualmap_extproc.reading`` starts the processes. ``encode_body`` to ``decode_result`` define the format of the messages
between the router and the processes.
"""

import json
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from dualmap.prompts.api import Api
from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap.prompts.prompt import MAX_NAME, Prompt, Rendered
from dualmap_extproc.errors import Refused, body_too_large, invalid_body, model_not_found
from dualmap_extproc.request.body import model_names, parse_body, prompt_of, read_body
from dualmap_extproc.request.object_scan import without_escapes

# The stream reads a body itself up to TINY_BYTES, or up to INLINE_BYTES and INLINE_ELEMENTS. The worst body within
# these limits takes a few milliseconds: the parser takes up to 60 ns a byte for containers and 10 ns for other content,
# and each element takes up to 3 us after parsing. Above PARSED_BYTES, containers are therefore counted before parsing.
TINY_BYTES: Final = 8 * 1024
PARSED_BYTES: Final = 64 * 1024
INLINE_BYTES: Final = 512 * 1024
INLINE_ELEMENTS: Final = 2000
# The most JSON elements of a body, besides the token ids of the longest prompt of any pool.
MAX_ELEMENTS: Final = 1_000_000

# The lengths of the header and of the payload, which follow.
_PREFIX: Final = struct.Struct("<IQ")
PREFIX_BYTES: Final = _PREFIX.size


class Bounds(NamedTuple):
    """A pool's bounds on a request body: its size, and the longest prompt in tokens.

    ``tokenizer`` is the folder with the chat template of a pool whose router tokenizes prompts; it may be empty.
    """

    body_bytes: int
    tokens: int
    tokenizer: str = ""


BoundsOfModels: TypeAlias = Mapping[str, Bounds]
"""The bounds by the name of each model that the router serves; the empty name stands for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeBody:
    """A complete body that is to be read, the API it was sent to, and the bounds of all models.

    ``client`` is the client's name in the fairness header, or empty. The processes do not receive it.

    The event loop does not join the chunks: a copy of 16 MiB takes 10 ms, and more while memory is busy.
    """

    chunks: tuple[bytes, ...]
    api: Api
    bounds: BoundsOfModels
    client: str = ""

    @property
    def size_bytes(self) -> int:
        """The length of the body."""
        return sum(map(len, self.chunks))


Render: TypeAlias = Callable[[str, object, Api], Rendered | None]
"""Takes a tokenizer's folder, a parsed body and its API; returns the text that the engine tokenizes, None if unknown.

It takes a bounded time.
"""
Done: TypeAlias = Callable[[float, Prompt | Refused], None]
"""Takes the time, and the prompt of a body or the answer to it."""


class Reader(Protocol):
    """Reads large bodies without holding the event loop."""

    def read(self, large: LargeBody, done: Done) -> Callable[[], None] | None:
        """Begin to read a body; return a function that cancels it, or None if too many bodies wait.

        ``done`` is called once, later, unless the reading is cancelled before.
        """
        ...


def read_small(body: bytes, api: Api) -> Prompt | Refused | None:
    """Return the prompt of a small body or the answer to it; None if reading it takes too long for the event loop."""
    if len(body) <= TINY_BYTES:
        return read_body(body, api)
    if len(body) > INLINE_BYTES or (len(body) > PARSED_BYTES and _openings(body) > INLINE_ELEMENTS):
        return None
    parsed = parse_body(body)
    if isinstance(parsed, Refused):
        return parsed
    return None if _has_many_elements(parsed) else prompt_of(parsed, api)


def _openings(body: bytes) -> int:
    """Return the number of opening brackets and braces, including those inside of strings."""
    # If there are few, ``replace`` is many times faster than ``count``.
    return 2 * len(body) - len(body.replace(b"[", b"")) - len(body.replace(b"{", b""))


def _has_many_elements(parsed: object) -> bool:
    """Return whether a parsed body has more than INLINE_ELEMENTS elements."""
    elements = 0
    unseen = [parsed]
    while unseen:
        each = unseen.pop()
        if isinstance(each, dict):
            inner: Collection[object] = each.values()
        elif isinstance(each, list):
            inner = each
        else:
            continue
        elements += len(inner)
        if elements > INLINE_ELEMENTS:
            return True
        unseen += inner
    return False


def has_more_elements(body: bytes, most: int) -> bool:
    """Return whether a body has more than ``most`` JSON elements: values and containers, counted without parsing."""
    if _separators(body) <= most:
        return False
    # Separators inside of strings are text. Each element is at most two strings (a key and a value).
    outside = without_escapes(body)
    if outside.count(b'"') > 4 * (most + 1):
        return True
    return sum(map(_separators, outside.split(b'"')[::2])) > most


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _unknown(_folder: str, _body: object, _api: Api) -> None:
    """Render nothing."""


def read_large(large: LargeBody, render: Render = _unknown) -> Prompt | Refused:
    """Return the prompt of a large body, as much of it as its pool's engines compute; or the answer to the request.

    The cheap checks precede the parser: the number of elements, then whether the body contains the name of a model.
    """
    most = MAX_ELEMENTS + max((each.tokens for each in large.bounds.values()), default=0)
    body = b"".join(large.chunks)
    if has_more_elements(body, most):
        return invalid_body(f"the body has more than {most} JSON elements")
    names = model_names(body)
    if names and not any(name in large.bounds for name in (*names, "")):
        return model_not_found(names[-1])
    parsed = parse_body(body)
    prompt = parsed if isinstance(parsed, Refused) else prompt_of(parsed, large.api)
    if isinstance(prompt, Refused):
        return prompt
    bounds = large.bounds.get(prompt.model) or large.bounds.get("")
    if bounds is None:
        return model_not_found(prompt.model)
    if len(body) > bounds.body_bytes:
        return body_too_large(bounds.body_bytes)
    # The router ignores session names above MAX_NAME, so the process does not send such a name back.
    session = prompt.session if len(prompt.session) <= MAX_NAME else ""
    text = prompt.text[: bounds.tokens * BYTES_PER_TOKEN]
    token_ids = None if prompt.token_ids is None else text
    tokenized = bounds.tokenizer and not prompt.exact and not prompt.names_ids
    rendered = render(bounds.tokenizer, parsed, large.api) if tokenized else None
    return prompt._replace(text=text, token_ids=token_ids, session=session, rendered=rendered)


def encode_body(large: LargeBody) -> bytes:
    """Return what begins the frame of a body; the body's chunks follow it."""
    header = json.dumps([large.api.name, large.bounds]).encode()
    return _PREFIX.pack(len(header), large.size_bytes) + header


def lengths(prefix: bytes) -> tuple[int, int]:
    """Return the lengths of a frame's header and payload, from its first PREFIX_BYTES."""
    header, payload = _PREFIX.unpack(prefix)
    return header, payload


def decode_body(header: bytes, payload: bytes) -> LargeBody:
    """Return the body of a frame."""
    api, bounds = json.loads(header)
    return LargeBody(chunks=(payload,), api=Api[api], bounds={name: Bounds(*each) for name, each in bounds.items()})


def encode_result(result: Prompt | Refused) -> bytes:
    """Return the frame of a result."""
    if isinstance(result, Refused):
        header = json.dumps([result.status, result.code, result.message, result.param]).encode()
        return _PREFIX.pack(len(header), 0) + header
    named = {"model": result.model, "lora": result.lora, "cache_salt": result.cache_salt, "session": result.session}
    named["lora_name"] = result.lora_name
    facts = {"streamed": result.streamed, "exact": result.exact, "names_ids": result.names_ids}
    counts = {"sequences": result.sequences, "comparable": result.comparable}
    # The ids of a prompt of ids are its text.
    ids = {"has_tools": result.has_tools, "ids": result.token_ids is not None}
    text, special = ("", None) if result.rendered is None else result.rendered
    try:
        rendered = text.encode()
    except UnicodeEncodeError:
        # Half a character in the arguments of a tool call. No tokenizer accepts it.
        rendered, special = b"", None
    tokenized = {"special": special, "text_bytes": len(result.text)}
    header = json.dumps({**named, **facts, **counts, **ids, **tokenized}).encode()
    return _PREFIX.pack(len(header), len(result.text) + len(rendered)) + header + result.text + rendered


def decode_result(header: bytes, payload: bytes) -> Prompt | Refused:
    """Return the result of a frame."""
    fields = json.loads(header)
    if isinstance(fields, list):
        status, code, message, param = fields
        return Refused(status=status, code=code, message=message, param=param)
    text_bytes, special = fields.pop("text_bytes"), fields.pop("special")
    text = payload[:text_bytes]
    rendered = None if special is None else Rendered(payload[text_bytes:].decode(), special)
    return Prompt(text=text, token_ids=text if fields.pop("ids") else None, rendered=rendered, **fields)
