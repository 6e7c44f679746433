"""The counters that show a failure which Envoy's clients do not see.

With ``failure_mode_allow``, Envoy answers 200 although it received no pick. Envoy and the router count such failures.
"""

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

# Envoy's counter of GOAWAYs is not read, because a draining router sends one. The router counts its GOAWAYs by reason.
_ENVOY: Final = r"ext_proc\.(failure_mode_allowed|streams_failed|spurious_msgs_received|message_timeouts)$"
_GOAWAYS: Final = re.compile(r'^dualmap_http2_goaways_total\{reason="(?!drain")(\w+)"\} (\S+)$', re.MULTILINE)
_TIMEOUT_S: Final = 5.0

# How to read the counters of each running process, and the sums of those that have ended.
_running: dict[object, Callable[[], Mapping[str, float]]] = {}
_ended: Counter[str] = Counter()


def watch_envoy(process: object, admin: str) -> None:
    """Count the failures of an Envoy from now on; ``admin`` is the URL of its admin interface."""
    _running[process] = lambda: _of_envoy(admin)


def watch_router(process: object, status: str) -> None:
    """Count the GOAWAYs of a router from now on; ``status`` is the URL of its metrics port."""
    _running[process] = lambda: _of_router(status)


def end(process: object) -> None:
    """Read the counters of a process for the last time, before it ends."""
    read = _running.pop(process, None)
    if read is not None:
        _ended.update(_read(read))


def counts() -> Counter[str]:
    """Return the failures of all processes so far."""
    total = Counter(_ended)
    for read in tuple(_running.values()):
        total.update(_read(read))
    return +total


def _read(read: Callable[[], Mapping[str, float]]) -> dict[str, int]:
    """Return the counters of a process; nothing if it does not answer, as after a crash."""
    try:
        return {name: int(value) for name, value in read().items()}
    except (OSError, ValueError):
        return {}


def _of_envoy(admin: str) -> Mapping[str, float]:
    stats = json.loads(_get(f"{admin}/stats?format=json&filter={urllib.request.quote(_ENVOY)}"))["stats"]
    return {stat["name"].rpartition(".")[2]: stat["value"] for stat in stats if stat.get("value")}


def _of_router(status: str) -> Mapping[str, float]:
    return {f"goaway {reason}": float(count) for reason, count in _GOAWAYS.findall(_get(f"{status}/metrics"))}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
