"""The names of a cluster's DNS server, and the DNS messages.

``services.py`` follows Services and EndpointSlices and serves the names to pods. The names follow Kubernetes' DNS-based
service discovery, without SRV and PTR records. The messages follow RFC 1035, with one question per message and answers
of types A and CNAME.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Object = Mapping[str, Any]

DOMAIN: Final = "cluster.local"
# The label of an EndpointSlice with the name of its Service.
SERVICE_LABEL: Final = "kubernetes.io/service-name"
_UDP_BYTES: Final = 512
# A short TTL like CoreDNS's for Services, so that clients soon see changes.
_TTL_S: Final = 5
_A, _CNAME, _INTERNET = 1, 5, 1
_NO_ERROR, _NO_SUCH_NAME = 0, 3
_RESPONSE, _AUTHORITATIVE, _TRUNCATED, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x400, 0x200, 0x100, 0x80
_HEADER: Final = struct.Struct("!6H")
_QUESTION: Final = struct.Struct("!2H")
_RECORD: Final = struct.Struct("!2HIH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a lookup: addresses, or another name (``alias``) and its addresses."""

    addresses: tuple[str, ...] = ()
    alias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of a DNS message.

    ``end`` is the question's end in the message, because the answer begins with the same bytes.
    """

    number: int
    name: str
    kind: int
    recursion_desired: bool
    end: int


def ready_addresses(slices: Iterable[Object], *, hostname: str | None = None) -> tuple[str, ...]:
    """Return the addresses of a Service's ready endpoints; ``hostname`` selects the endpoints with this host name.

    If a Service has ``publishNotReadyAddresses``, its slices have all endpoints as ready.
    """
    return tuple(
        address
        for each in slices
        for endpoint in each.get("endpoints") or ()
        if endpoint.get("conditions", {}).get("ready") is not False
        and (hostname is None or endpoint.get("hostname") == hostname)
        for address in endpoint["addresses"]
    )


def resolve(name: str, services: Mapping[str, Object], slices: Mapping[str, Sequence[Object]]) -> Found | None:
    """Resolve a full name; return None for an unknown name.

    The keys of ``services`` and ``slices`` are the Services' ``namespace/name``.
    """
    labels = name.lower().removesuffix(".").split(".")
    if labels[-3:] != ["svc", *DOMAIN.split(".")] or len(labels) not in {5, 6}:
        return None
    *hostname, service_name, namespace = labels[:-3]
    key = f"{namespace}/{service_name}"
    service = services.get(key)
    if service is None:
        return None
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        if hostname:
            return None
        target = resolve(spec["externalName"], services, slices)
        return Found(alias=spec["externalName"], addresses=target.addresses if target else ())
    if spec.get("clusterIP") == "None":
        addresses = ready_addresses(slices.get(key, ()), hostname=hostname[0] if hostname else None)
        return Found(addresses=addresses) if addresses or not hostname else None
    return None if hostname else Found(addresses=(spec["clusterIP"],))


def read_question(message: bytes) -> Question | None:
    """Return the question of a message, or None if the message is not a single question."""
    try:
        number, flags, questions, *_ = _HEADER.unpack_from(message)
        if flags & _RESPONSE or questions != 1:
            return None
        labels, at = [], _HEADER.size
        while length := message[at]:
            labels.append(message[at + 1 : at + 1 + length].decode("ascii"))
            at += 1 + length
        kind, _ = _QUESTION.unpack_from(message, at + 1)
    except (struct.error, IndexError, UnicodeDecodeError):
        return None
    return Question(
        number=number,
        name=".".join(labels),
        kind=kind,
        recursion_desired=bool(flags & _RECURSION_DESIRED),
        end=at + 1 + _QUESTION.size,
    )


def write_answer(message: bytes, question: Question, found: Found | None, *, udp: bool) -> bytes:
    """Return the answer to a question. Over UDP, an answer above the size limit is empty and has the flag TC."""
    records = []
    if found is not None:
        owner = question.name
        if found.alias and question.kind in {_A, _CNAME}:
            records.append(_record(owner, _CNAME, _encoded(found.alias)))
            owner = found.alias
        if question.kind == _A:
            records += [_record(owner, _A, ipaddress.IPv4Address(each).packed) for each in found.addresses]
    flags = _RESPONSE | _AUTHORITATIVE | _RECURSION_AVAILABLE
    flags |= _RECURSION_DESIRED if question.recursion_desired else 0
    flags |= _NO_ERROR if found is not None else _NO_SUCH_NAME
    asked = message[_HEADER.size : question.end]
    whole = _HEADER.pack(question.number, flags, 1, len(records), 0, 0) + asked + b"".join(records)
    if udp and len(whole) > _UDP_BYTES:
        return _HEADER.pack(question.number, flags | _TRUNCATED, 1, 0, 0, 0) + asked
    return whole


def _record(name: str, kind: int, content: bytes) -> bytes:
    return _encoded(name) + _RECORD.pack(kind, _INTERNET, _TTL_S, len(content)) + content


def _encoded(name: str) -> bytes:
    labels = [label.encode("ascii") for label in name.removesuffix(".").split(".")]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
