"""The headers and metadata of a request and its response that routing needs.

The picker receives only the values of session headers and trace headers.
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

# The headers that routing reads, in addition to session headers and trace headers.
_READ = frozenset({":method", ":path", "content-length", "content-encoding", "content-type"})
_METHODS_WITH_PROMPT = (b"POST", b"PUT", b"PATCH")


class RequestHead:
    """The headers of one request, and the endpoints that the gateway allows for the request (None: all).

    ``api`` is the API of the path. ``content_length`` is 0 without an announced length. ``unacceptable`` is the answer
    to a request that cannot be routed. ``unreadable`` is the answer to a request with a body that the router cannot
    read. ``strip`` lists the client's headers that only the router may set. ``kept`` holds the session and trace
    headers, by lower-case name.
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
        """Read the request's headers. If they exceed the limits, set ``unacceptable`` instead."""
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
                # A session name may contain any bytes. Equal bytes always give the same session.
                self.kept[key] = answers.header_value(header).decode("utf-8", "surrogateescape")

    def _take(self, key: str, value: bytes) -> None:
        if key == ":method":
            self.method = value
        elif key == ":path":
            # Engines decode the path before they match it, so the router must also recognise a path with encoded
            # letters.
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
        """Read the endpoints that a gateway allows. Gateways send these endpoints in different messages."""
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
        """Return whether the request has a prompt: by its method, or without a method, by whether it has a body.

        ``body_bytes`` is the number of the body's bytes that have arrived.
        """
        return self.method in _METHODS_WITH_PROMPT or (not self.method and body_bytes > 0)


def read_response(headers: base.HeaderMap, ending: Ending) -> tuple[Ending, bool]:
    """Return a request's ending by its response's headers, and whether the engine sends the response in one piece.

    Without a status, the returned ending is ``ending``.
    """
    whole = False
    for header in headers.headers:
        key = header.key.lower()
        if key == ":status":
            status = answers.header_value(header)
            ending = ending_of(int(status[:4]) if status.isdigit() else None)
            # A response without a 2xx status, such as a redirect, contains no tokens.
            whole |= not status.startswith(b"2")
        elif key == "content-type" and answers.header_value(header).startswith(b"application/json"):
            # An engine sends a JSON response after it has all tokens, so the first chunk is not the first token.
            whole = True
    return ending, whole
