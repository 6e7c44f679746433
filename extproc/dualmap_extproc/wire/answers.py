"""Builds ext_proc answers, and reads those message fields that need a conversion.

``dualmap_extproc.request.stream`` decides which answers to send.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address
from typing import Final

from google.protobuf.struct_pb2 import Struct

from dualmap_extproc import names
from dualmap_extproc.wire import base_pb2 as base
from dualmap_extproc.wire import ext_proc_pb2 as wire

# Answers without changes to a message. All streams share these objects, so they must not be modified.
PLAIN_REQUEST_BODY: Final = wire.ProcessingResponse(request_body=wire.BodyResponse())
PLAIN_RESPONSE_HEADERS: Final = wire.ProcessingResponse(response_headers=wire.HeadersResponse())
PLAIN_RESPONSE_BODY: Final = wire.ProcessingResponse(response_body=wire.BodyResponse())
PLAIN_RESPONSE_TRAILERS: Final = wire.ProcessingResponse(response_trailers=wire.TrailersResponse())

# The kinds of answers that can change request headers.
_WITH_HEADERS: Final = ("request_headers", "request_body")
# The number of cached picks, of about 1 KB each.
_PICKS: Final = 1024
_OVERWRITE: Final = base.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def header_value(header: base.HeaderValue) -> bytes:
    """Return a header's value from the field that the sender filled: ``raw_value`` or ``value``."""
    return header.raw_value or header.value.encode()


def set_header(mutation: wire.HeaderMutation, key: str, value: str) -> None:
    """Set a header; replace all its values."""
    # An access to a submessage costs as much as setting a field, so the function accesses the header only once.
    header = mutation.set_headers.add(append_action=_OVERWRITE).header
    header.key = key
    header.raw_value = value.encode()


def add_pick(
    answer: wire.ProcessingResponse,
    *,
    destination: str,
    cluster: str,
    request_id: str,
    strip: Sequence[str],
    retries: bool,
    prefillers: Sequence[str] = (),
) -> None:
    """Write a pick into an answer to request headers, body or trailers; without ``retries``, Envoy does not retry.

    The answer contains the destination as a header and as dynamic metadata, because some gateways read only one of
    them. The access log returns the request id. An answer to trailers cannot set headers. Such an answer contains only
    the metadata, which selects an endpoint in Envoy's default cluster. With several pools, the stream therefore rejects
    requests with such an answer. ``prefillers`` are the endpoints that may compute the prompt. The sidecar of the
    destination sends the prompt to the first; llm-d's sidecar accepts one only, so the further ones have a header of
    their own.
    """
    kind = answer.WhichOneof("response")
    answer.MergeFrom(_pick(kind, destination, cluster, retries))
    if request_id:
        ours = answer.dynamic_metadata.fields[names.DUALMAP_NAMESPACE].struct_value.fields
        ours[names.REQUEST_ID_KEY].string_value = request_id
    if prefillers:
        add_header(answer, names.PREFILLER_HEADER, prefillers[0])
        if len(prefillers) > 1:
            add_header(answer, names.PREFILLERS_HEADER, ",".join(prefillers[1:]))
    if strip and kind in _WITH_HEADERS:
        mutation = getattr(answer, kind).response.header_mutation
        # A header that is set replaces the client's header. If the answer also removed this header, the result would
        # depend on Envoy's order.
        replaced = {option.header.key for option in mutation.set_headers}
        mutation.remove_headers.extend(key for key in strip if key not in replaced)


def add_header(answer: wire.ProcessingResponse, key: str, value: str) -> None:
    """Set one more request header in an answer that can change request headers."""
    kind = answer.WhichOneof("response")
    if kind in _WITH_HEADERS:
        set_header(getattr(answer, kind).response.header_mutation, key, value)


@lru_cache(maxsize=_PICKS)
def _pick(kind: str, destination: str, cluster: str, retries: bool) -> wire.ProcessingResponse:
    """Return the fields that all picks of a destination share. The message is cached and must not be modified.

    The cache saves two thirds of the time. A pool has few destinations: two for each pair of members.
    """
    pick = wire.ProcessingResponse()
    lb = pick.dynamic_metadata.fields[names.LB_NAMESPACE].struct_value.fields
    lb[names.DESTINATION_KEY].string_value = destination
    if kind in _WITH_HEADERS:
        common = getattr(pick, kind).response
        common.clear_route_cache = True
        set_header(common.header_mutation, names.DESTINATION_HEADER, destination)
        set_header(common.header_mutation, names.CLUSTER_HEADER, cluster)
        if not retries:
            set_header(common.header_mutation, names.NO_RETRY_HEADER, "1")
    return pick


def refusal(*, status: int, body: bytes, code: str, retry_after_s: int | None) -> wire.ProcessingResponse:
    """Return the answer with which Envoy sends ``body`` (JSON) to the client and drops the request."""
    answer = wire.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = f"dualmap_{code}"
    set_header(immediate.headers, "content-type", "application/json")
    if retry_after_s is not None:
        set_header(immediate.headers, "retry-after", str(retry_after_s))
    return answer


def request_pieces(body: bytes, size: int, *, last: bool) -> Iterator[wire.ProcessingResponse]:
    """Return a request body (FULL_DUPLEX_STREAMED) in answers of at most ``size`` bytes each.

    With ``last``, the final piece ends the body, so an empty body makes one piece. Without ``last``, an empty body
    makes no piece.
    """
    for piece in _pieces(body, size, last=last):
        answer = wire.ProcessingResponse()
        answer.request_body.response.body_mutation.streamed_response.CopyFrom(piece)
        yield answer


def response_pieces(body: bytes, size: int, *, last: bool) -> Iterator[wire.ProcessingResponse]:
    """Return a chunk of a response body in answers, as ``request_pieces`` does for a request body."""
    for piece in _pieces(body, size, last=last):
        answer = wire.ProcessingResponse()
        answer.response_body.response.body_mutation.streamed_response.CopyFrom(piece)
        yield answer


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


def _pieces(body: bytes, size: int, *, last: bool) -> Iterator[wire.StreamedBodyResponse]:
    if len(body) <= size:
        if body or last:
            yield wire.StreamedBodyResponse(body=body, end_of_stream=last)
        return
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        yield wire.StreamedBodyResponse(body=piece, end_of_stream=last and start + size >= len(body))
