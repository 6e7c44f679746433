"""Envoy's access log as the router's news of how requests ended (gRPC ALS): status, flags, usage.

``envoy/`` has every Envoy send every entry to every router, in batches; an entry about one of this router's requests
becomes an AccessLogEntry (pure, the upper half of the module), and ``wiring`` hands those to the picker. What arrives
is not trusted: absent or odd fields become None, an unreadable batch is counted and dropped.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualmap.requests import Usage
from dualmap_edge.logs import get_logger
from dualmap_extproc.names import (
    ACCESS_LOG_METHOD,
    ACCESS_LOG_SERVICE,
    DUALMAP_NAMESPACE,
    REQUEST_ID_KEY,
    TAG_CACHED_TOKENS,
    TAG_COMPLETION_TOKENS,
    TAG_PROMPT_TOKENS,
    TAG_REQUEST_ID,
)
from dualmap_extproc.request.ending import Ending, ending_of
from dualmap_extproc.wire import access_log_pb2 as wire

# Flags of a response that did not reach its end as it should, by their names in envoy.data.accesslog.v3.ResponseFlags;
# the others (rate limited, no route, ...) come with an error status of their own. These are nothing the instance did:
BROKEN_FLAGS: Final = frozenset(
    {
        "downstream_connection_termination",
        "downstream_protocol_error",
        "downstream_remote_reset",
        "duration_timeout",
        "local_reset",
        "no_healthy_upstream",
        "overload_manager",
        "stream_idle_timeout",
        "upstream_max_stream_duration_reached",
        "upstream_overflow",
    }
)
# And these are: it refused the connection, broke it off, or did not answer in time.
FAILED_FLAGS: Final = frozenset(
    {
        "upstream_connection_failure",
        "upstream_connection_termination",
        "upstream_protocol_error",
        "upstream_remote_reset",
        "upstream_request_timeout",
    }
)

# Longer than any id that a router gives.
ID_CHARACTERS: Final = 512
# Above any context length, below where floats lose whole numbers.
TOKENS_MAX: Final = 10**9
# Entries handed over in one go. At 10 to 40 us each a batch of Envoy's takes milliseconds; a hostile one is cut up.
ENTRIES_AT_ONCE: Final = 100

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, wire.StreamAccessLogsResponse]"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLogEntry:
    """How one request ended, as Envoy saw it; None where it did not say.

    ``request_id`` is the one the router gave at the pick. ``served_endpoint`` (``ip:port``) is the instance Envoy spoke
    to last, ``flags`` are names of ResponseFlags, in its order.
    """

    request_id: str
    status: int | None = None
    flags: tuple[str, ...] = ()
    served_endpoint: str | None = None
    usage: Usage | None = None

    @property
    def ending(self) -> Ending:
        """What became of the request: what its status says, unless something broke off.

        Where the client and the instance both broke off, it is the client who left.
        """
        if BROKEN_FLAGS.intersection(self.flags):
            return Ending.ABORTED
        return Ending.FAILED if FAILED_FLAGS.intersection(self.flags) else ending_of(self.status)


def read_id(entry: wire.HTTPAccessLogEntry) -> str:
    """Return the request id that an entry bears; empty when it bears none: no router picked for that request."""
    common = entry.common_properties
    request_id = _tag(common.custom_tags, TAG_REQUEST_ID) or _metadata_id(common)
    return request_id if len(request_id) <= ID_CHARACTERS else ""


def read_entry(entry: wire.HTTPAccessLogEntry, request_id: str) -> AccessLogEntry:
    """Read one entry, whose id was read before; never raises."""
    common = entry.common_properties
    flags: tuple[str, ...] = ()
    if common.HasField("response_flags"):
        flags = tuple(field.name for field, _ in common.response_flags.ListFields())
    return AccessLogEntry(
        request_id=request_id,
        status=entry.response.response_code.value if entry.response.HasField("response_code") else None,
        flags=flags,
        served_endpoint=_served_endpoint(common),
        usage=_usage(common.custom_tags),
    )


class AccessLogObserver(Protocol):
    """Told what the access log brings; implemented by ``metrics``."""

    def access_log_entries(self, *, known: int, others: int) -> None:
        """A batch came: so many entries bear a request id, and so many do not."""

    def access_log_unreadable(self) -> None:
        """A batch could not be read, and its entries are lost."""


class AccessLogSink:
    """The access log service: hands the entries of each batch to ``on_entries``, on the event loop.

    Only those whose ids begin with ``id_prefix``: every router gets all routers' entries, and knowing another's by its
    id costs 1 us where reading it costs 10.
    """

    def __init__(
        self,
        on_entries: Callable[[tuple[AccessLogEntry, ...]], None],
        observer: AccessLogObserver,
        *,
        id_prefix: str = "",
    ) -> None:
        self._on_entries = on_entries
        self._observer = observer
        self._id_prefix = id_prefix

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the service as grpc.aio registers it."""
        # No deserializer: with one, a batch that is no protobuf would end the stream, and the batches after it too.
        method = grpc.stream_unary_rpc_method_handler(
            self._receive, response_serializer=wire.StreamAccessLogsResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(ACCESS_LOG_SERVICE, {ACCESS_LOG_METHOD: method})

    async def _receive(self, batches: AsyncIterator[bytes], _context: _Context) -> wire.StreamAccessLogsResponse:
        """Take one Envoy worker's batches for as long as it sends them."""
        async for data in batches:
            try:
                batch = wire.StreamAccessLogsMessage.FromString(data)
            except DecodeError as error:
                self._observer.access_log_unreadable()
                _log.warning("access log batch unreadable, its entries are lost", size=len(data), reason=str(error))
                continue
            entries = batch.http_logs.log_entry
            for start in range(0, len(entries), ENTRIES_AT_ONCE):
                some = entries[start : start + ENTRIES_AT_ONCE]
                ids = [read_id(entry) for entry in some]
                without = ids.count("")
                self._observer.access_log_entries(known=len(ids) - without, others=without)
                ours = [each for each in zip(some, ids, strict=True) if each[1] and each[1].startswith(self._id_prefix)]
                self._on_entries(tuple(read_entry(entry, request_id) for entry, request_id in ours))
                # Requests waiting for their pick go first.
                await asyncio.sleep(0)
        return wire.StreamAccessLogsResponse()


def _tag(tags: Mapping[str, str], name: str) -> str:
    """Return a custom tag's value, empty when it is absent or Envoy had none (it writes ``-`` then)."""
    value = tags.get(name, "")
    return "" if value == "-" else value


def _metadata_id(common: wire.AccessLogCommon) -> str:
    """Return the request id from the dynamic metadata, for gateways whose access log has it but not our tags."""
    # Looked up with `in` first: protobuf maps of messages insert what is asked for and absent.
    namespaces = common.metadata.filter_metadata
    if DUALMAP_NAMESPACE not in namespaces:
        return ""
    fields = namespaces[DUALMAP_NAMESPACE].fields
    return fields[REQUEST_ID_KEY].string_value if REQUEST_ID_KEY in fields else ""


def _served_endpoint(common: wire.AccessLogCommon) -> str | None:
    if not common.HasField("upstream_remote_address"):
        return None
    address = common.upstream_remote_address.socket_address
    if not address.address or not 0 < address.port_value < 2**16:
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


def _number(text: str) -> int | None:
    """Return a count of tokens written as Envoy writes numbers (``12``, ``1e+06``), None for anything else."""
    if not text or len(text) > 32:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and 0 <= value <= TOKENS_MAX else None
