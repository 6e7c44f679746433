"""The counters that show a failure which Envoy's clients do not see.

With ``failure_mode_allow``, Envoy answers 200 although it received no pick. Envoy and the router count such failures.
"""

import contextlib
import http.client
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

# Envoy's counter of GOAWAYs is not read, because a draining router sends one. The router counts its GOAWAYs by reason.
_ENVOY: Final = r"ext_proc\.(failure_mode_allowed|streams_failed|spurious_msgs_received|message_timeouts)$"
_GOAWAYS: Final = re.compile(r'^dualmap_http2_goaways_total\{reason="(?!drain")(\w+)"\} (\S+)$', re.MULTILINE)
_GOAWAY: Final = "goaway "
_TIMEOUT_S: Final = 10.0
# The port of a router's metrics in a pod.
_METRICS_PORT: Final = 9090


class Process(Protocol):
    """A process with counters; its exit status is None while it runs."""

    @property
    def returncode(self) -> int | None: ...


class Elsewhere:
    """A process that the harness did not start, such as one in a pod. Its watch must ``end`` before the process."""

    returncode: int | None = None


# How to read the counters of each running process, and what each process has counted.
_running: dict[Process, Callable[[], Counter[str]]] = {}
_counted: dict[Process, Counter[str]] = {}
# What processes had counted before their failures began to matter.
_forgiven: dict[Process, Counter[str]] = {}


def watch_envoy(process: Process, admin: str) -> None:
    """Count the failures of an Envoy from now on; ``admin`` is the URL of its admin interface."""
    _running[process] = lambda: _of_envoy(admin)


def watch_router(process: Process, status: str) -> None:
    """Count the GOAWAYs of a router from now on; ``status`` is the URL of its metrics port."""
    _running[process] = lambda: _of_router(status)


def forgive(process: Process) -> None:
    """Leave out what a process has counted until now. Fails if its counters cannot be read."""
    _forgiven[process] = _running[process]()
    _counted.pop(process, None)


@contextlib.contextmanager
def counting(admin: str) -> Iterator[None]:
    """Count the failures of an Envoy elsewhere while the context lasts; ``admin`` as for ``watch_envoy``."""
    process = Elsewhere()
    watch_envoy(process, admin)
    forgive(process)
    try:
        yield
    finally:
        end(process)


def count_pods(pods: Iterable[Mapping[str, Any]]) -> None:
    """Count the GOAWAYs of routers in pods until now. Call it once for each router, before its pod ends."""
    for pod in pods:
        if address := pod["status"].get("podIP"):
            process = Elsewhere()
            watch_router(process, f"http://{address}:{_METRICS_PORT}")
            end(process)


def end(process: Process) -> None:
    """Read the counters of a process for the last time, before it ends."""
    _read(process)
    _running.pop(process, None)


def counts() -> Counter[str]:
    """Return the failures of all processes so far."""
    for process in tuple(_running):
        _read(process)
    return sum(_counted.values(), Counter())


def goaways(failures: Counter[str]) -> Counter[str]:
    """Return the GOAWAYs of routers among the failures."""
    return Counter({name: count for name, count in failures.items() if name.startswith(_GOAWAY)})


def _read(process: Process) -> None:
    """Read the counters of a process. Those of a process that has ended or does not answer stay as they were.

    After the end of a process, another program may use its port, and answer with its own counters.
    """
    read = _running.get(process)
    if read is not None and process.returncode is None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            _counted[process] = read() - _forgiven.get(process, Counter())


def _of_envoy(admin: str) -> Counter[str]:
    counts = Counter[str]()
    # An Envoy without such counters answers {}.
    for stat in json.loads(_get(f"{admin}/stats?format=json&filter={urllib.request.quote(_ENVOY)}")).get("stats", []):
        counts[stat["name"].rpartition(".")[2]] += stat.get("value", 0)
    return counts


def _of_router(status: str) -> Counter[str]:
    found = _GOAWAYS.findall(_get(f"{status}/metrics"))
    return Counter({f"{_GOAWAY}{reason}": int(float(count)) for reason, count in found})


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
