"""The ext_proc answers the router sends, built field by field, and the few reads that take more than an attribute.

Functions of messages only; which answer is due when is the stream's business (``dualmap_extproc.request.stream``).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from ipaddress import AddressValueError, IPv6Address
from typing import Final

from google.protobuf.struct_pb2 import Struct

from dualmap_extproc import names
from dualmap_extproc.wire import base_pb2 as base
from dualmap_extproc.wire import ext_proc_pb2 as wire

# Answers that change nothing. They are shared by all streams and never written to.
PLAIN_REQUEST_BODY: Final = wire.ProcessingResponse(request_body=wire.BodyResponse())
PLAIN_RESPONSE_HEADERS: Final = wire.ProcessingResponse(response_headers=wire.HeadersResponse())
PLAIN_RESPONSE_BODY: Final = wire.ProcessingResponse(response_body=wire.BodyResponse())
PLAIN_RESPONSE_TRAILERS: Final = wire.ProcessingResponse(response_trailers=wire.TrailersResponse())

# The answers that may change headers of the request.
_WITH_HEADERS: Final = ("request_headers", "request_body")
# Destinations whose picks are kept made, about 1 KB each.
_PICKS: Final = 1024
_OVERWRITE: Final = base.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def header_value(header: base.HeaderValue) -> bytes:
    """Return a header's value from whichever of the two fields the sender filled."""
    return header.raw_value or header.value.encode()


def set_header(mutation: wire.HeaderMutation, key: str, value: str) -> None:
    """Set a header, replacing every value it had."""
    # Each step into a message costs as much as setting a field of it.
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
) -> None:
    """Write a pick into an answer to request headers, body or trailers; without ``retries``, Envoy shall not retry.

    The destination goes out as a header and as dynamic metadata, since gateways differ in which they read; the request
    id comes back in the access log. Trailers' answers cannot set headers: they carry the metadata alone, which chooses
    within Envoy's default cluster; with several pools the stream must not let it come to that.
    """
    kind = answer.WhichOneof("response")
    answer.MergeFrom(_pick(kind, destination, cluster, retries))
    if request_id:
        ours = answer.dynamic_metadata.fields[names.DUALMAP_NAMESPACE].struct_value.fields
        ours[names.REQUEST_ID_KEY].string_value = request_id
    if strip and kind in _WITH_HEADERS:
        mutation = getattr(answer, kind).response.header_mutation
        # What is set replaces what the client sent; naming it for removal as well would rely on Envoy's order.
        replaced = {option.header.key for option in mutation.set_headers}
        mutation.remove_headers.extend(key for key in strip if key not in replaced)


@lru_cache(maxsize=_PICKS)
def _pick(kind: str, destination: str, cluster: str, retries: bool) -> wire.ProcessingResponse:
    """Return what all picks of a destination have in common, made once: never written to.

    It costs a third of making it, and a pool has few destinations: two for each pair that keys map to.
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
    """Return the answer that makes Envoy send ``body`` (JSON) to the client itself."""
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
    """Stream a request body back (FULL_DUPLEX_STREAMED) in pieces of at most ``size`` bytes.

    ``last`` says that the final piece ends the stream; an empty body then still takes one piece, otherwise none.
    """
    for piece in _pieces(body, size, last=last):
        answer = wire.ProcessingResponse()
        answer.request_body.response.body_mutation.streamed_response.CopyFrom(piece)
        yield answer


def response_pieces(body: bytes, size: int, *, last: bool) -> Iterator[wire.ProcessingResponse]:
    """Stream a chunk of a response body back, as ``request_pieces`` does a request's."""
    for piece in _pieces(body, size, last=last):
        answer = wire.ProcessingResponse()
        answer.response_body.response.body_mutation.streamed_response.CopyFrom(piece)
        yield answer


def subset_metadata(metadata: base.Metadata) -> Struct | None:
    """Return what a gateway says about allowed endpoints, None where it says nothing."""
    return metadata.filter_metadata.get(names.SUBSET_NAMESPACE)


def subset_hint(subset: Struct) -> frozenset[str] | None:
    """Return the endpoints a gateway allows (``ip:port`` or ``ip``), or None where it names no such thing.

    A list and a comma-separated string are both in use (PROTOCOLS section 1). Any other value allows nothing. IPv6
    addresses come out as pools spell them (``fd00::1``, ``[fd00::1]:8000``), however the gateway spells them; entries
    that are none are left out.
    """
    hint = subset.fields.get(names.SUBSET_KEY)
    if hint is None:
        return None
    texts = [each.string_value for each in hint.list_value.values] or [hint.string_value]
    parts = (_endpoint(each.strip()) for text in texts for each in text.split(","))
    return frozenset(part for part in parts if part)


def served_endpoint(metadata: base.Metadata) -> str:
    """Return the endpoint Envoy's host selection reports to have served, or an empty string."""
    lb = metadata.filter_metadata.get(names.LB_NAMESPACE)
    served = None if lb is None else lb.fields.get(names.SERVED_KEY)
    return "" if served is None else served.string_value


def _endpoint(text: str) -> str:
    """Return an endpoint in the spelling that pools use; empty for an IPv6 address that is none."""
    if text.count(":") < 2 and "[" not in text:
        # IPv4 has but one spelling, and what is no address equals no member's.
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
