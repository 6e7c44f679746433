"""The headers and metadata that routing needs, read once from a request and from its response.

Of the header values only those that name sessions are kept.
"""

from collections.abc import Container
from urllib.parse import unquote_to_bytes

from dualmap.prompts.api import Api, api_of
from dualmap_extproc.errors import (
    Refused,
    encoding_unsupported,
    headers_too_large,
    multipart_unsupported,
    subset_too_large,
    too_many_headers,
)
from dualmap_extproc.names import RESERVED_HEADER_PREFIXES
from dualmap_extproc.request.ending import Ending, ending_of
from dualmap_extproc.settings import Limits
from dualmap_extproc.wire import answers
from dualmap_extproc.wire import base_pb2 as base
from dualmap_extproc.wire import ext_proc_pb2 as wire

# The headers that are read, besides those that name sessions.
_READ = frozenset({":method", ":path", "content-length", "content-encoding", "content-type"})
_METHODS_WITH_PROMPT = (b"POST", b"PUT", b"PATCH")


class RequestHead:
    """The headers of one request, and the endpoints that the gateway allows it (None: all).

    ``api`` is the API that the path names. ``content_length`` is 0 if no length is announced. ``unacceptable`` is the
    answer to a request that cannot be routed. ``unreadable`` is the answer if a body follows that the router cannot
    read. ``strip`` names the client's headers that only the router may set. ``kept`` holds the session headers, by
    lower-case name.
    """

    __slots__ = ("api", "content_length", "kept", "method", "strip", "subset", "unacceptable", "unreadable")

    def __init__(self) -> None:
        self.method = b""
        self.api = Api.UNKNOWN
        self.content_length = 0
        self.unacceptable: Refused | None = None
        self.unreadable: Refused | None = None
        self.strip: list[str] = []
        self.kept: dict[str, str] = {}
        self.subset: frozenset[str] | None = None

    def read(self, headers: base.HeaderMap, limits: Limits, kept_headers: Container[str]) -> None:
        """Read the request's headers; above the limits, read none and set ``unacceptable``."""
        if len(headers.headers) > limits.headers:
            self.unacceptable = too_many_headers(limits.headers)
            return
        if headers.ByteSize() > limits.header_bytes:
            self.unacceptable = headers_too_large(limits.header_bytes)
            return
        for header in headers.headers:
            key = header.key.lower()
            if key in _READ:
                self._take(key, answers.header_value(header))
            elif key[:2] == "x-" and key.startswith(RESERVED_HEADER_PREFIXES):
                self.strip.append(key)
            if key in kept_headers and key not in self.kept:
                # A name may hold any bytes; equal bytes are the same session.
                self.kept[key] = answers.header_value(header).decode("utf-8", "surrogateescape")

    def _take(self, key: str, value: bytes) -> None:
        if key == ":method":
            self.method = value
        elif key == ":path":
            # Engines decode the path before they match it: an encoded letter must not hide the API.
            self.api = api_of(unquote_to_bytes(value).decode("latin-1") if b"%" in value else value.decode("latin-1"))
        elif key == "content-length":
            self.content_length = int(value) if value.isdigit() and len(value) < 20 else 0
        elif key == "content-encoding":
            encoding = value.decode("latin-1").strip().lower()
            if encoding not in ("", "identity"):
                self.unreadable = encoding_unsupported(encoding)
        elif value.strip().lower().startswith(b"multipart/form-data"):
            self.unreadable = multipart_unsupported()

    def read_subset(self, message: wire.ProcessingRequest, limits: Limits) -> None:
        """Read the endpoints that a gateway allows; gateways differ in which message carries them."""
        if not message.HasField("metadata_context"):
            return
        metadata = answers.subset_metadata(message.metadata_context)
        if metadata is None:
            return
        if metadata.ByteSize() > limits.subset_bytes:
            self.unacceptable = subset_too_large(limits.subset_bytes)
            return
        subset = answers.subset_hint(metadata)
        if subset is not None:
            self.subset = subset

    def expects_prompt(self, body_bytes: int) -> bool:
        """Return whether requests of this method have a prompt. Without a method, those with a body do.

        ``body_bytes`` of the body have arrived.
        """
        return self.method in _METHODS_WITH_PROMPT or (not self.method and body_bytes > 0)


def read_response(headers: base.HeaderMap, ending: Ending) -> tuple[Ending, bool]:
    """Return how a request ends by its response's headers, and whether the response is generated in one piece.

    Without a status, the ending is the one given.
    """
    whole = False
    for header in headers.headers:
        key = header.key.lower()
        if key == ":status":
            status = answers.header_value(header)
            ending = ending_of(int(status[:4]) if status.isdigit() else None)
            # A body without a 2xx status, such as a redirect's, holds no tokens.
            whole |= not status.startswith(b"2")
        elif key == "content-type" and answers.header_value(header).startswith(b"application/json"):
            # An engine sends a JSON response once it has all tokens, so the first chunk is not the first token.
            whole = True
    return ending, whole
