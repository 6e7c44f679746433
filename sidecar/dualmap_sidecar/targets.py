"""The engines that a request names in its headers, and which of them the proxy may ask.

A header is as trustworthy as its sender. The proxy therefore sends requests only to addresses that its operator has
allowed: the members of pools, or networks. A name must be an IP address and a port, because a host name or a URL could
lead elsewhere.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

PREFILLER_HEADER: Final = "x-prefiller-host-port"
"""One prefiller, as llm-d's picker names it."""
PREFILLERS_HEADER: Final = "x-dualmap-prefillers"
"""A list of prefillers in order of preference."""
CONTINUE_HEADER: Final = "x-dualmap-continue"
"""A list of members that continue a stream whose engine ends, in order of preference."""
TARGETS_MAX: Final = 8
"""The most targets of one request; further ones are left out."""

_TARGET: Final = re.compile(r"\[?([0-9A-Fa-f.:]{2,45})\]?:([1-9][0-9]{0,4})", re.ASCII)
_PORT_MAX: Final = 65_535


@dataclass(frozen=True, slots=True)
class Target:
    """An engine's address."""

    ip: IPv4Address | IPv6Address
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"


def read_target(text: str) -> Target | None:
    """Return the address in ``ip:port`` or ``[ip]:port``, None for any other text."""
    match = _TARGET.fullmatch(text)
    if match is None:
        return None
    try:
        target = Target(ip_address(match[1]), int(match[2]))
    except ValueError:
        return None
    bracketed = text.startswith("[") and "]" in text
    if target.port > _PORT_MAX or bracketed != (target.ip.version == 6) or ("]" in text) != bracketed:
        return None
    return target


class Allowed:
    """The addresses that the proxy may ask: networks, single addresses, and the members of pools."""

    def __init__(self, networks: Iterable[IPv4Network | IPv6Network] = (), targets: Iterable[Target] = ()) -> None:
        self._networks = tuple(networks)
        self._targets = frozenset(targets)
        self._members: frozenset[Target] = frozenset()

    def set_members(self, members: Iterable[Target]) -> None:
        """Replace the members of pools."""
        self._members = frozenset(members)

    def __contains__(self, target: Target) -> bool:
        if target in self._members or target in self._targets:
            return True
        return any(target.ip in network for network in self._networks)


def read_allowed(texts: Iterable[str]) -> Allowed:
    """Return the addresses of ``--allow``: networks such as 10.0.0.0/8, and single ``ip:port``. Raises ValueError."""
    networks, targets = [], []
    for text in texts:
        target = read_target(text)
        if target is not None:
            targets.append(target)
        else:
            try:
                networks.append(ip_network(text))
            except ValueError as error:
                raise ValueError(f"{text!r}: {error}") from error
    return Allowed(networks, targets)


@dataclass(frozen=True, slots=True)
class Named:
    """The targets that a request names and the proxy may ask, in order, and the number of those left out."""

    targets: tuple[Target, ...]
    left_out: int


def read_targets(values: Iterable[str], allowed: Allowed) -> Named:
    """Return the targets of header values, each of which is a list, in order and without repetition."""
    texts = [text for value in values for each in value.split(",") if (text := each.strip(" \t"))]
    targets: dict[Target, None] = {}
    left_out = 0
    for text in texts:
        target = read_target(text)
        if target is None or target not in allowed or len(targets) == TARGETS_MAX:
            left_out += 1
        else:
            targets[target] = None
    return Named(tuple(targets), left_out)


def read_prefillers(single: list[str], lists: list[str], allowed: Allowed) -> Named:
    """Return the prefillers of a request: the values of ``PREFILLER_HEADER``, then those of ``PREFILLERS_HEADER``.

    ``PREFILLER_HEADER`` names exactly one prefiller. If it is repeated or a list, it is ambiguous and left out.
    """
    if len(single) == 1 and "," not in single[0]:
        return read_targets([*single, *lists], allowed)
    named = read_targets(lists, allowed)
    return Named(named.targets, named.left_out + len(single))
