"""Reads entries of Envoy's access log from its protobuf messages.

The module does not trust messages: absent or invalid fields become None.
"""

import math
from collections.abc import Mapping
from typing import Final

from dualmap.requests import Usage
from dualmap_extproc.names import (
    DUALMAP_NAMESPACE,
    REQUEST_ID_KEY,
    TAG_CACHED_TOKENS,
    TAG_COMPLETION_TOKENS,
    TAG_PROMPT_TOKENS,
    TAG_REQUEST_ID,
    TAG_TOTAL_US,
)
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.wire import access_log_pb2 as wire

# The longest accepted request id. The ids of routers are shorter.
ID_CHARACTERS: Final = 512
# The longest text of an IP address (RFC 4291 section 2.2).
_ADDRESS_CHARACTERS: Final = 45
# The largest accepted count of tokens. Every model's context is shorter, and a float represents every count exactly.
TOKENS_MAX: Final = 10**9
# The longest accepted duration of a request: a year.
_MICROSECONDS_MAX: Final = 366 * 86_400 * 10**6


def read_id(entry: wire.HTTPAccessLogEntry) -> str:
    """Return an entry's request id, or an empty string if no router picked a member for the request."""
    common = entry.common_properties
    request_id = _tag(common.custom_tags, TAG_REQUEST_ID) or _metadata_id(common)
    return request_id if len(request_id) <= ID_CHARACTERS else ""


def read_entry(entry: wire.HTTPAccessLogEntry, request_id: str) -> AccessLogEntry:
    """Return an entry as a value object; ``request_id`` is the entry's id. Never raises."""
    common = entry.common_properties
    total_us = _number(_tag(common.custom_tags, TAG_TOTAL_US), most=_MICROSECONDS_MAX)
    flags: tuple[str, ...] = ()
    if common.HasField("response_flags"):
        flags = tuple(field.name for field, _ in common.response_flags.ListFields())
    return AccessLogEntry(
        request_id=request_id,
        status=entry.response.response_code.value if entry.response.HasField("response_code") else None,
        flags=flags,
        served_endpoint=_served_endpoint(common),
        usage=_usage(common.custom_tags),
        total_s=None if total_us is None else total_us / 1e6,
        attempts=common.upstream_request_attempt_count or None,
    )


def _tag(tags: Mapping[str, str], name: str) -> str:
    """Return a custom tag's value, or an empty string for an absent tag and for ``-``, Envoy's sign for "no value"."""
    value = tags.get(name, "")
    return "" if value == "-" else value


def _metadata_id(common: wire.AccessLogCommon) -> str:
    """Return the request id from the dynamic metadata, for gateways without the router's tags in the access log."""
    # The test with `in` comes first, because a read of an absent key inserts the key into a protobuf map of messages.
    namespaces = common.metadata.filter_metadata
    if DUALMAP_NAMESPACE not in namespaces:
        return ""
    fields = namespaces[DUALMAP_NAMESPACE].fields
    return fields[REQUEST_ID_KEY].string_value if REQUEST_ID_KEY in fields else ""


def _served_endpoint(common: wire.AccessLogCommon) -> str | None:
    if not common.HasField("upstream_remote_address"):
        return None
    address = common.upstream_remote_address.socket_address
    if not 0 < len(address.address) <= _ADDRESS_CHARACTERS or not 0 < address.port_value < 2**16:
        return None
    host = f"[{address.address}]" if ":" in address.address else address.address
    return f"{host}:{address.port_value}"


def _usage(tags: Mapping[str, str]) -> Usage | None:
    prompt, completion, cached = (
        _number(_tag(tags, name)) for name in (TAG_PROMPT_TOKENS, TAG_COMPLETION_TOKENS, TAG_CACHED_TOKENS)
    )
    if prompt is None and completion is None and cached is None:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def _number(text: str, *, most: int = TOKENS_MAX) -> int | None:
    """Return a whole number up to ``most`` in Envoy's notation (``12``, ``1e+06``), or None for any other text."""
    if not text or len(text) > 32:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and 0 <= value <= most else None
