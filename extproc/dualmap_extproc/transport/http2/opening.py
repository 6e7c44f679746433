"""What the headers of a request ask for: a method of a service, or a refusal (RFC 9113 section 8, PROTOCOL-HTTP2)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap_extproc.transport.http2.calls import Factory
from dualmap_extproc.transport.http2.hpack import Header, encode

_NAME: Final = re.compile(rb"[!-9;-@\[-~]+")
_VALUE_INVALID: Final = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]\Z")
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_REQUIRED: Final = (b":method", b":scheme", b":path")
_HOP_BY_HOP: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_CONTENT_TYPE: Final = re.compile(rb"application/grpc(\+proto)?(;.*)?", re.IGNORECASE)
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

GRPC_HEADERS: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))


class MalformedError(Exception):
    """The headers or trailers break a rule of HTTP/2. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The headers of a request, read once for all requests with the same block.

    ``factory`` serves the call. Without one, ``refusal`` is the block of the whole response. ``timeout_s`` is the
    client's ``grpc-timeout``. ``content_bytes`` is ``content-length``, or -1 without this header. No other header is
    stored, because very many calls may be open.
    """

    path: str
    factory: Factory | None
    refusal: bytes
    timeout_s: float | None
    content_bytes: int


_METHOD_NOT_ALLOWED: Final = encode(((b":status", b"405"), (b"allow", b"POST")))
_UNSUPPORTED_MEDIA_TYPE: Final = encode(((b":status", b"415"),))
_UNIMPLEMENTED: Final = encode((*GRPC_HEADERS, (b"grpc-status", b"12"), (b"grpc-message", b"unknown method")))


def read(headers: Sequence[Header], methods: Mapping[bytes, Factory]) -> Opening:
    """Return what a request asks for. Raises MalformedError."""
    fields = _checked(headers)
    path = fields[b":path"]
    factory, refusal = methods.get(path), b""
    if fields[b":method"] != b"POST":
        factory, refusal = None, _METHOD_NOT_ALLOWED
    elif not _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")):
        factory, refusal = None, _UNSUPPORTED_MEDIA_TYPE
    elif factory is None:
        refusal = _UNIMPLEMENTED
    timeout = _TIMEOUT.fullmatch(fields.get(b"grpc-timeout", b""))
    return Opening(
        path=path.decode("latin-1"),
        factory=factory,
        refusal=refusal,
        timeout_s=int(timeout[1]) * _UNIT_S[timeout[2]] if timeout else None,
        content_bytes=_content_bytes(headers),
    )


def check_trailers(headers: Sequence[Header]) -> None:
    """Raise MalformedError if the client's trailers are not valid."""
    for name, value in headers:
        _check(name, value)


def _checked(headers: Sequence[Header]) -> dict[bytes, bytes]:
    """Return pseudo-headers and the last value of each other header. Raises MalformedError."""
    fields: dict[bytes, bytes] = {}
    regular = False
    for name, value in headers:
        if name in _PSEUDO:
            if regular or name in fields:
                raise MalformedError("pseudo-header repeated or behind a header")
            if _VALUE_INVALID.search(value):
                raise MalformedError("invalid value")
        else:
            regular = True
            _check(name, value)
        fields[name] = value
    if not all(fields.get(name) for name in _REQUIRED):
        raise MalformedError("pseudo-header missing")
    return fields


def _check(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name) or name != name.lower():
        raise MalformedError("invalid name")
    if _VALUE_INVALID.search(value):
        raise MalformedError("invalid value")
    if name in _HOP_BY_HOP or (name == b"te" and value != b"trailers"):
        raise MalformedError("header of a connection")


def _content_bytes(headers: Sequence[Header]) -> int:
    values = {value for name, value in headers if name == b"content-length"}
    if not values:
        return -1
    value = values.pop()
    if values or not (value.isdigit() and len(value) < 19):
        raise MalformedError("invalid content-length")
    return int(value)
