"""Builds encoded ext_proc answers, and reads those message fields that need a conversion.

``dualmap_extproc.request.stream`` decides which answers to send.

Most answers differ from earlier ones in one value only. Protobuf encodes such an answer once for each length of the
value; later ones are the same bytes around another value. Messages can be joined: a parser merges the fields of encoded
messages that follow each other, also within submessages.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address
from typing import Final

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from dualmap_extproc import names
from dualmap_extproc.wire import base_pb2 as base
from dualmap_extproc.wire import ext_proc_pb2 as wire

# Answers without changes to a message.
PLAIN_REQUEST_HEADERS: Final = wire.ProcessingResponse(request_headers=wire.HeadersResponse()).SerializeToString()
PLAIN_REQUEST_BODY: Final = wire.ProcessingResponse(request_body=wire.BodyResponse()).SerializeToString()
PLAIN_REQUEST_TRAILERS: Final = wire.ProcessingResponse(request_trailers=wire.TrailersResponse()).SerializeToString()
PLAIN_RESPONSE_HEADERS: Final = wire.ProcessingResponse(response_headers=wire.HeadersResponse()).SerializeToString()
PLAIN_RESPONSE_BODY: Final = wire.ProcessingResponse(response_body=wire.BodyResponse()).SerializeToString()
PLAIN_RESPONSE_TRAILERS: Final = wire.ProcessingResponse(response_trailers=wire.TrailersResponse()).SerializeToString()

# The kinds of answers that can change request headers.
_WITH_HEADERS: Final = ("request_headers", "request_body")
# The kind of an answer by its first byte: the number of its first field, and the type of a field with a length.
_KINDS: Final = {
    field.number << 3 | 2: field.name for field in wire.ProcessingResponse.DESCRIPTOR.oneofs_by_name["response"].fields
}
# The number of cached picks, of about 1 KB each, and of cached frames of values, of about 100 bytes each.
_PICKS: Final = 1024
_FRAMES: Final = 4096
_OVERWRITE: Final = base.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def header_value(header: base.HeaderValue) -> bytes:
    """Return a header's value from the field that the sender filled: ``raw_value`` or ``value``."""
    return header.raw_value or header.value.encode()


def _set_header(mutation: wire.HeaderMutation, key: str, value: bytes) -> None:
    """Set a header; replace all its values."""
    # An access to a submessage costs as much as setting a field, so the function accesses the header only once.
    header = mutation.set_headers.add(append_action=_OVERWRITE).header
    header.key = key
    header.raw_value = value


def with_pick(
    answer: bytes,
    *,
    destination: str,
    cluster: str,
    request_id: str,
    strip: Sequence[str],
    retries: bool,
    prefillers: Sequence[str] = (),
    continuing: Sequence[str] = (),
    kv_source: str = "",
) -> bytes:
    """Add a pick to an answer to request headers, body or trailers; without ``retries``, Envoy does not retry.

    The answer contains the destination as a header and as dynamic metadata, because some gateways read only one of
    them. The access log returns the request id. An answer to trailers cannot set headers. Such an answer contains only
    the metadata, which selects an endpoint in Envoy's default cluster. With several pools, the stream therefore rejects
    requests with such an answer. ``prefillers`` are the endpoints that may compute the prompt. The sidecar of the
    destination sends the prompt to the first; llm-d's sidecar accepts one only, so the list has a header of its own.
    ``continuing`` are the endpoints from which the sidecar gets the rest of a stream that breaks. ``kv_source`` is the
    endpoint from which the destination can fetch the KV of the request's session; empty for none.
    """
    kind = _KINDS[answer[0]]
    answer += _pick(kind, destination, cluster, retries)
    if request_id:
        value = request_id.encode()
        before, after = _id_frame(len(value))
        answer += before + value + after
    # A header that is set replaces the client's header. If the answer also removed this header, the result would depend
    # on Envoy's order.
    kept = [names.DESTINATION_HEADER, names.CLUSTER_HEADER] + ([] if retries else [names.NO_RETRY_HEADER])
    if prefillers:
        kept.append(names.PREFILLER_HEADER)
        answer = with_request_header(answer, names.PREFILLER_HEADER, prefillers[0])
    if len(prefillers) > 1:
        kept.append(names.PREFILLERS_HEADER)
        answer = with_request_header(answer, names.PREFILLERS_HEADER, ",".join(prefillers))
    if continuing:
        kept.append(names.CONTINUE_HEADER)
        answer = with_request_header(answer, names.CONTINUE_HEADER, ",".join(continuing))
    if kv_source:
        kept.append(names.KV_SOURCE_HEADER)
        answer = with_request_header(answer, names.KV_SOURCE_HEADER, kv_source)
    if strip and kind in _WITH_HEADERS:
        answer = without_headers(answer, [key for key in strip if key not in kept])
    return answer


def without_headers(answer: bytes, keys: Sequence[str]) -> bytes:
    """Remove request headers in an answer that can change them."""
    if not keys:
        return answer
    removing = wire.ProcessingResponse()
    getattr(removing, _KINDS[answer[0]]).response.header_mutation.remove_headers.extend(keys)
    return answer + removing.SerializeToString()


def with_request_header(answer: bytes, key: str, value: str) -> bytes:
    """Set one more request header in an answer, if it is one that can change request headers."""
    kind = _KINDS[answer[0]]
    return answer + _setting_header(kind, key, value.encode()) if kind in _WITH_HEADERS else answer


def response_headers(values: Mapping[str, str]) -> bytes:
    """Return the answer to response headers that sets these headers."""
    answer = PLAIN_RESPONSE_HEADERS
    for key, value in values.items():
        answer += _setting_header("response_headers", key, value.encode())
    return answer


@lru_cache(maxsize=_PICKS)
def _pick(kind: str, destination: str, cluster: str, retries: bool) -> bytes:
    """Return the fields that all picks of a destination share.

    The cache saves nearly all of the time. A pool has few destinations: two for each pair of members.
    """
    pick = wire.ProcessingResponse()
    lb = pick.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value.fields
    lb[names.DESTINATION_KEY].string_value = destination
    if kind in _WITH_HEADERS:
        common = getattr(pick, kind).response
        common.clear_route_cache = True
        _set_header(common.header_mutation, names.DESTINATION_HEADER, destination.encode())
        _set_header(common.header_mutation, names.CLUSTER_HEADER, cluster.encode())
        if not retries:
            _set_header(common.header_mutation, names.NO_RETRY_HEADER, b"1")
    return pick.SerializeToString()


def refusal(*, status: int, body: bytes, code: str, retry_after_s: int | None) -> bytes:
    """Return the answer with which Envoy sends ``body`` (JSON) to the client and drops the request."""
    answer = wire.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = f"dualmap_{code}"
    _set_header(immediate.headers, "content-type", b"application/json")
    if retry_after_s is not None:
        _set_header(immediate.headers, "retry-after", b"%d" % retry_after_s)
    return answer.SerializeToString()


def request_pieces(body: bytes, size: int, *, last: bool) -> Iterator[bytes]:
    """Return a request body (FULL_DUPLEX_STREAMED) in answers of at most ``size`` bytes each.

    With ``last``, the final piece ends the body, so an empty body makes one piece. Without ``last``, an empty body
    makes no piece.
    """
    return _pieces("request_body", body, size, last=last)


def response_pieces(body: bytes, size: int, *, last: bool) -> Iterator[bytes]:
    """Return a chunk of a response body in answers, as ``request_pieces`` does for a request body."""
    return _pieces("response_body", body, size, last=last)


def subset_metadata(metadata: base.Metadata) -> Struct | None:
    """Return the gateway's metadata about allowed endpoints, or None if there is none."""
    return metadata.filter_metadata.get(names.SUBSET_NAMESPACE)


def subset_hint(subset: Struct) -> frozenset[str] | None:
    """Return the endpoints that a gateway allows (``ip:port`` or ``ip``), or None if the gateway allows all.

    Gateways send a list or a comma-separated string. Any other value allows nothing. The function converts IPv6
    addresses to the spelling that pools use (``fd00::1``, ``[fd00::1]:8000``), and omits entries with an invalid IPv6
    address.
    """
    hint = subset.fields.get(names.SUBSET_KEY)
    if hint is None:
        return None
    texts = [each.string_value for each in hint.list_value.values] or [hint.string_value]
    return endpoints_of(*texts)


def endpoints_of(*texts: str) -> frozenset[str]:
    """Return the endpoints (``ip:port`` or ``ip``) in comma-separated texts, in the spelling that pools use."""
    parts = (_endpoint(each.strip()) for text in texts for each in text.split(","))
    return frozenset(part for part in parts if part)


def served_endpoint(metadata: base.Metadata) -> str:
    """Return the endpoint that served the request according to Envoy, or an empty string."""
    lb = metadata.filter_metadata.get(names.LB_NAMESPACE)
    served = None if lb is None else lb.fields.get(names.SERVED_KEY)
    return "" if served is None else served.string_value


def _endpoint(text: str) -> str:
    """Return an endpoint in the spelling that pools use, or an empty string for an invalid IPv6 address."""
    if text.count(":") < 2 and "[" not in text:
        # IPv4 has only one spelling. A text that is not an address matches no member.
        return text
    host, _, port = text.removeprefix("[").partition("]") if text.startswith("[") else (text, "", "")
    try:
        address = str(IPv6Address(host))
    except AddressValueError:
        return ""
    if not port:
        return address
    return f"[{address}]{port}"


def _pieces(kind: str, body: bytes, size: int, *, last: bool) -> Iterator[bytes]:
    view, end = memoryview(body), len(body)
    for start in range(0, end or last, size):
        piece = view[start : start + size]
        before, after = _piece_frame(kind, len(piece), last and start + size >= end)
        yield b"".join((before, piece, after))


@lru_cache(maxsize=_FRAMES)
def _piece_frame(kind: str, size: int, last: bool) -> tuple[bytes, bytes]:
    answer = wire.ProcessingResponse()
    streamed = getattr(answer, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = bytes(size), last
    return _around_zeros(answer, size)


def _setting_header(kind: str, key: str, value: bytes) -> bytes:
    """Return an answer of a kind that sets a header."""
    before, after = _header_frame(kind, key, len(value))
    return before + value + after


@lru_cache(maxsize=_FRAMES)
def _header_frame(kind: str, key: str, size: int) -> tuple[bytes, bytes]:
    answer = wire.ProcessingResponse()
    _set_header(getattr(answer, kind).response.header_mutation, key, bytes(size))
    return _around_zeros(answer, size)


@lru_cache(maxsize=_FRAMES)
def _id_frame(size: int) -> tuple[bytes, bytes]:
    answer = wire.ProcessingResponse()
    ours = answer.dynamic_metadata.fields[names.DUALMAP_NAMESPACE].struct_value.fields
    ours[names.REQUEST_ID_KEY].string_value = "\0" * size
    return _around_zeros(answer, size)


def _around_zeros(answer: Message, size: int) -> tuple[bytes, bytes]:
    """Return what precedes and what follows a value of ``size`` zero bytes in an encoded answer."""
    encoded = answer.SerializeToString()
    if not size:
        return encoded, b""
    # No other byte is zero: neither tags nor the lengths of what contains the value.
    before, _, after = encoded.partition(bytes(size))
    return before, after
