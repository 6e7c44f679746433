"""How Envoy talks on a stream: read from the ``protocol_config`` of the stream's first message.

Which answer each mode needs was measured with Envoy 1.40; the modes themselves are described in Envoy's
``ext_proc.v3.ProcessingMode``.

``Answering`` says when request messages are answered:

- ``NO_WAIT`` (``STREAMED`` with ``send_body_without_waiting_for_header_response``): Envoy sends headers and body
  without waiting for answers. The router answers nothing before the end of the body; then the answer to the headers
  carries the pick, and each body message gets its own answer. If a body message were answered before the headers,
  Envoy would lose the pick and could corrupt the body.
- ``DUPLEX`` (``FULL_DUPLEX_STREAMED``): the router answers nothing before the pick either, and sends the body back in
  pieces. The response also passes through the router, so the stream stays open to the end of the response.
- ``WAITING`` (``BUFFERED``, ``STREAMED`` without the flag, or no ``protocol_config``): Envoy waits for the answer to
  each message. The answer to the last message of the request carries the pick.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from dualmap_extproc.wire import ext_proc_pb2 as wire

_WHOLE_BODY_MODES: Final = (wire.BUFFERED, wire.BUFFERED_PARTIAL)


class Answering(Enum):
    """When request headers and body messages are answered (see the module)."""

    NO_WAIT = auto()
    DUPLEX = auto()
    WAITING = auto()


# Python 3.11 takes 0.2 us to find a member in its enum, hence names of their own for those that every message needs.
NO_WAIT, DUPLEX, WAITING = Answering


class RequestBody(Enum):
    """How a request's body arrives."""

    CHUNKS = auto()
    WHOLE = auto()
    """In one message, which need not mark the end of the body."""
    NONE = auto()
    """Not at all: Envoy is configured not to send it."""


class ResponseBody(Enum):
    """How a response's body arrives."""

    NONE = auto()
    """Not at all: Envoy is configured not to send it."""
    CHUNKS = auto()
    """In chunks. The router needs only the first."""
    WHOLE = auto()
    """In one message after the response's end."""
    DUPLEX = auto()
    """In chunks that the router must send back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """How the messages of one stream arrive and are answered."""

    answering: Answering
    request_body: RequestBody
    response_body: ResponseBody


DEFAULT_MODES: Final = Modes(
    answering=Answering.WAITING, request_body=RequestBody.CHUNKS, response_body=ResponseBody.NONE
)


def read_modes(config: wire.ProtocolConfiguration) -> Modes:
    """Return the modes that a stream's ``protocol_config`` announces."""
    no_wait = config.send_body_without_waiting_for_header_response
    return _modes(config.request_body_mode, config.response_body_mode, no_wait)


# An Envoy sends the same configuration on every stream. The peer chooses the values, hence the bound.
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
