"""The modes of a stream, read from the ``protocol_config`` of the stream's first message.

Envoy's ``ext_proc.v3.ProcessingMode`` describes the modes. The answers that each mode needs were tested with Envoy
1.40.

``Answering`` determines when the router answers request messages:

- ``NO_WAIT`` (``STREAMED`` with ``send_body_without_waiting_for_header_response``): Envoy sends headers and body
  without waiting for answers. The router sends no answer before the end of the body. Then the answer to the headers
  contains the pick, and each body message gets its own answer. If the router answered a body message before the
  headers, Envoy would lose the pick and could corrupt the body.

- ``DUPLEX`` (``FULL_DUPLEX_STREAMED``): the router sends no answer before the pick, and then sends the body back in
  pieces. The response also passes through the router, so the stream stays open to the end of the response.

- ``WAITING`` (``BUFFERED``, ``STREAMED`` without the flag, or no ``protocol_config``): Envoy waits for the answer to
  each message. The answer to the last message of the request contains the pick.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from dualmap_extproc.wire import ext_proc_pb2 as wire

_WHOLE_BODY_MODES: Final = (wire.BUFFERED, wire.BUFFERED_PARTIAL)


class Answering(Enum):
    """When the router answers request headers and body messages (see the module's docstring)."""

    NO_WAIT = auto()
    DUPLEX = auto()
    WAITING = auto()


# Python 3.11 takes 0.2 us to find a member in its enum. Every message needs these members, so they have module names.
NO_WAIT, DUPLEX, WAITING = Answering


class RequestBody(Enum):
    """How a request's body arrives."""

    CHUNKS = auto()
    WHOLE = auto()
    """The body arrives in one message, which may lack the mark of the body's end."""
    NONE = auto()
    """The body does not arrive, because Envoy is configured not to send it."""


class ResponseBody(Enum):
    """How a response's body arrives."""

    NONE = auto()
    """The body does not arrive, because Envoy is configured not to send it."""
    CHUNKS = auto()
    """The body arrives in chunks. The router needs only the first chunk."""
    WHOLE = auto()
    """The body arrives in one message after the response's end."""
    DUPLEX = auto()
    """The body arrives in chunks, which the router must send back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """How the messages of one stream arrive, and when the router answers them."""

    answering: Answering
    request_body: RequestBody
    response_body: ResponseBody


DEFAULT_MODES: Final = Modes(
    answering=Answering.WAITING, request_body=RequestBody.CHUNKS, response_body=ResponseBody.NONE
)


def read_modes(config: wire.ProtocolConfiguration) -> Modes:
    """Return the modes of a stream with this ``protocol_config``."""
    no_wait = config.send_body_without_waiting_for_header_response
    return _modes(config.request_body_mode, config.response_body_mode, no_wait)


# An Envoy sends the same configuration on every stream, so a cache helps. The cache is bounded because the peer chooses
# the values.
@lru_cache(maxsize=64)
def _modes(request_mode: int, response_mode: int, no_wait: bool) -> Modes:
    if request_mode == wire.FULL_DUPLEX_STREAMED:
        answering = Answering.DUPLEX
    else:
        answering = Answering.NO_WAIT if no_wait else Answering.WAITING
    request_body = RequestBody.CHUNKS
    if request_mode in _WHOLE_BODY_MODES:
        request_body = RequestBody.WHOLE
    elif request_mode == wire.NONE and answering is Answering.WAITING:
        request_body = RequestBody.NONE
    return Modes(answering=answering, request_body=request_body, response_body=_response_body(response_mode))


def _response_body(mode: int) -> ResponseBody:
    if mode == wire.NONE:
        return ResponseBody.NONE
    if mode in _WHOLE_BODY_MODES:
        return ResponseBody.WHOLE
    return ResponseBody.DUPLEX if mode == wire.FULL_DUPLEX_STREAMED else ResponseBody.CHUNKS
