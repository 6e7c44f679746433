"""Encodes replication updates and demand reports as bytes: the entries of a pool's streams.

The format is little-endian: a version byte, then the fields in the order of ``encode_update``. A count precedes each
list, and a length precedes each text (UTF-8). A router writes ten entries a second, so the format is compact. Hashes
and counts are packed arrays, so a prompt of 8000 tokens takes 500 bytes.

The decoder checks every value, because any client of the store may have written the bytes.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

from dualmap.replicas.update import HotnessCounts, Placement, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap.scaling.reports import Report, Share

NODES_MAX: Final = 4096
"""The most prefixes with counts in one entry, so that one entry cannot fill a router's bounded tree of prefixes."""
_VERSION: Final = 1
_VERSION_AND_REQUESTS: Final = struct.Struct("<BI")
_COUNT: Final = struct.Struct("<I")
_TEXT: Final = struct.Struct("<H")
_LOAD: Final = struct.Struct("<QddIQ")
_BINDING: Final = struct.Struct("<QQId")
_REPORT_VERSION: Final = 1
_REPORT: Final = struct.Struct("<B" + 2 * "dQIIII")
LONGEST_S: Final = 1e9
"""The longest time in an entry, about thirty years. The encoder replaces longer times by this value."""
_REPLICAS_MAX: Final = 1e6
# The largest number of pending prefill tokens. No pool has more tokens than this limit, and a sum over routers fits
# KEDA's 64 bits.
_PENDING_MAX: Final = 2**48
_U32_MAX: Final = 2**32 - 1
_TEXT_BYTES_MAX: Final = 1024


class UnreadableUpdate(Exception):
    """The bytes are not a replication update or report of this version."""


def encode_update(update: ReplicaUpdate) -> bytes:
    """Return an update as bytes, without its wanted sessions, which other replicas do not need."""
    nodes, loads = update.hotness.nodes, update.loads or {}
    parts = [
        _VERSION_AND_REQUESTS.pack(_VERSION, min(update.hotness.requests, _U32_MAX)),
        _hashes(tuple(nodes)),
        struct.pack(f"<{len(nodes)}I", *(min(requests, _U32_MAX) for requests in nodes.values())),
        _hashes(update.hotness.split),
        _COUNT.pack(len(loads)),
    ]
    for member, load in loads.items():
        packed = _LOAD.pack(
            load.pending_prefill_tokens,
            _bounded(load.backlog_s),
            _bounded(load.held_s),
            load.in_flight,
            load.active_kv_tokens,
        )
        parts += [_text(member), packed]
    parts.append(_COUNT.pack(len(update.placements)))
    for placement in update.placements:
        parts += [_text(placement.endpoint), _hashes(placement.hashes)]
    parts.append(_COUNT.pack(len(update.bindings)))
    for binding in update.bindings:
        # If another client of the store wrote the largest version, the router's increment exceeds the format's limit.
        version = min(binding.version, _U32_MAX)
        packed = _BINDING.pack(binding.session, binding.tokens, version, _bounded(binding.moved_ago_s))
        parts += [_text(binding.host), packed]
    return b"".join(parts)


def decode_update(data: bytes) -> ReplicaUpdate:
    """Return the update that ``encode_update`` encoded. Raises UnreadableUpdate."""
    reader = _Reader(data)
    try:
        version, requests = reader.unpack(_VERSION_AND_REQUESTS)
        if version != _VERSION:
            raise UnreadableUpdate(f"unknown version {version}")
        nodes = reader.hashes()
        counts = reader.array(len(nodes), "I", 4)
        if len(nodes) > NODES_MAX or 0 in counts:
            raise UnreadableUpdate(f"invalid request counts: {len(nodes)} prefixes, {counts.count(0)} with 0 requests")
        split = reader.hashes()
        update = ReplicaUpdate(
            hotness=HotnessCounts(requests=requests, nodes=dict(zip(nodes, counts, strict=True)), split=split),
            loads=dict(reader.load() for _ in range(reader.count())),
            placements=tuple(reader.placement() for _ in range(reader.count())),
            bindings=tuple(reader.binding() for _ in range(reader.count())),
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise UnreadableUpdate(str(error)) from None
    reader.must_be_at_its_end()
    return update


def encode_report(report: Report) -> bytes:
    """Return a report of a pool's demand as 65 bytes."""
    values = (value for share in (report.own, report.pool) for value in _share_values(share))
    return _REPORT.pack(_REPORT_VERSION, *values)


def decode_report(data: bytes) -> Report:
    """Return the report that ``encode_report`` encoded; later versions may append fields. Raises UnreadableUpdate."""
    if len(data) < _REPORT.size or data[0] != _REPORT_VERSION:
        raise UnreadableUpdate(f"invalid report of {len(data)} bytes")
    _, *values = _REPORT.unpack_from(data)
    return Report(own=_share(*values[:6]), pool=_share(*values[6:]))


def _share_values(share: Share) -> tuple[float | int, ...]:
    # A router's own counts always fit. A sum contains values of other clients of the store, which may be arbitrary.
    return (
        min(share.desired_replicas, _REPLICAS_MAX),
        min(share.pending_prefill_tokens, _PENDING_MAX),
        min(share.in_flight, _U32_MAX),
        min(share.held, _U32_MAX),
        min(share.first_tokens, _U32_MAX),
        min(share.slo_met, _U32_MAX),
    )


def _share(replicas: float, pending: int, in_flight: int, held: int, first_tokens: int, slo_met: int) -> Share:
    if not 0.0 <= replicas <= _REPLICAS_MAX or slo_met > first_tokens or pending > _PENDING_MAX:
        said = f"{replicas} instances, {pending} tokens, {slo_met} of {first_tokens} first tokens in time"
        raise UnreadableUpdate(f"a share of {said}")
    return Share(
        desired_replicas=replicas,
        pending_prefill_tokens=pending,
        in_flight=in_flight,
        held=held,
        first_tokens=first_tokens,
        slo_met=slo_met,
    )


def _bounded(seconds: float) -> float:
    """Return seconds within the bounds that readers accept; infinity becomes LONGEST_S."""
    return min(max(seconds, 0.0), LONGEST_S)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _TEXT.pack(len(encoded)) + encoded


def _hashes(hashes: Sequence[int]) -> bytes:
    return _COUNT.pack(len(hashes)) + struct.pack(f"<{len(hashes)}Q", *hashes)


class _Reader:
    """A reader of successive values from bytes; raises struct.error if the bytes end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self._data, self._at)
        self._at += form.size
        return values

    def count(self) -> int:
        count: int = self.unpack(_COUNT)[0]
        return count

    def array(self, count: int, code: str, item_bytes: int) -> tuple[int, ...]:
        # The check comes first, because an invalid count could allocate gigabytes.
        if count * item_bytes > len(self._data) - self._at:
            raise UnreadableUpdate(f"{count} values do not fit in {len(self._data) - self._at} bytes")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += count * item_bytes
        return values

    def hashes(self) -> tuple[int, ...]:
        return self.array(self.count(), "Q", 8)

    def text(self) -> str:
        (length,) = self.unpack(_TEXT)
        if length > min(_TEXT_BYTES_MAX, len(self._data) - self._at):
            raise UnreadableUpdate(f"invalid text of {length} bytes")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def load(self) -> tuple[str, SharedLoad]:
        member = self.text()
        pending, backlog_s, held_s, in_flight, active_kv = self.unpack(_LOAD)
        load = SharedLoad(
            pending_prefill_tokens=pending,
            backlog_s=_seconds(backlog_s),
            held_s=_seconds(held_s),
            in_flight=in_flight,
            active_kv_tokens=active_kv,
        )
        return member, load

    def placement(self) -> Placement:
        return Placement(endpoint=self.text(), hashes=self.hashes())

    def binding(self) -> SharedBinding:
        host = self.text()
        session, tokens, version, moved_ago_s = self.unpack(_BINDING)
        return SharedBinding(
            session=session, host=host, tokens=tokens, version=version, moved_ago_s=_seconds(moved_ago_s)
        )

    def must_be_at_its_end(self) -> None:
        if self._at != len(self._data):
            raise UnreadableUpdate(f"{len(self._data) - self._at} unexpected bytes at the end")


def _seconds(value: float) -> float:
    # The comparison rejects NaN too: every comparison with NaN is false.
    if not 0.0 <= value <= LONGEST_S:
        raise UnreadableUpdate(f"{value} seconds")
    return value
