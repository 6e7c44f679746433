"""Reads arguments as other pickers do, and knows the flags of these pickers that this one does not need.

The other pickers are those of the Gateway API Inference Extension and of llm-d.

Both take flags with one or two hyphens (Go's packages ``flag`` and ``pflag``). The value of a boolean flag is
true if it is not given.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_ENGINES: Final = "the router reads the engines' load by spec.engine of the settings (docs/gateways.md)"
_ENGINE: Final = "spec.engine.type of the settings is the type of all engines of the pool (docs/gateways.md)"
_METRICS: Final = "metrics are computed at each scrape"
_METRICS_PORT: Final = "the metrics port has no TLS and needs no token; a NetworkPolicy can restrict it"
_TLS: Final = "the gRPC port accepts TLS 1.2 and 1.3 with the cipher suites of its TLS library"
_RANKS: Final = "each target port is a member; an engine distributes the requests of one port over its ranks itself"
_LOGS: Final = "--log-level and --log-format control the logs"

UNNEEDED: Final = {
    "refresh-metrics-interval": _ENGINES,
    "metrics-staleness-threshold": _ENGINES,
    "model-server-metrics-scheme": _ENGINES,
    "model-server-metrics-path": _ENGINES,
    "model-server-metrics-port": _ENGINES,
    "model-server-metrics-https-insecure-skip-verify": _ENGINES,
    "total-queued-requests-metric": _ENGINES,
    "total-running-requests-metric": _ENGINES,
    "kv-cache-usage-percentage-metric": _ENGINES,
    "lora-info-metric": _ENGINES,
    "cache-info-metric": _ENGINES,
    "enable-multi-engine": _ENGINE,
    "engine-label-key": _ENGINE,
    "refresh-prometheus-metrics-interval": _METRICS,
    "tracing": "--otlp-endpoint URL sends spans",
    "enable-pprof": "there are no profiles to fetch",
    "metrics-endpoint-auth": _METRICS_PORT,
    "metrics-cert-dir": _METRICS_PORT,
    "metrics-client-ca-file": _METRICS_PORT,
    "tls-min-version": _TLS,
    "tls-cipher-suites": _TLS,
    "grpc-max-recv-msg-size": "a message may have 40 MiB; spec.routing.maxBodyBytes limits request bodies",
    "grpc-max-send-msg-size": "the messages that the gRPC port sends have no limit",
    "enable-grpc-stream-metrics": "the metrics port has the router's own metrics",
    "emit-endpoint-scores": "GET /pools/NAMESPACE/NAME on the metrics port shows the load of each member",
    "endpoint-data-parallel-size": _RANKS,
    "allow-experimental-plugins": "the warning about plugins says which have no effect",
    "ha-enable-leader-election": "every replica serves; --peer lets replicas decide together",
    "health-checking": "the gRPC port always serves health checks",
    "disable-endpoint-subset-filter": "the endpoints that a gateway allows are always respected",
    "enable-cert-reload": "the certificate is read again whenever its files change",
    "zap-devel": _LOGS,
    "zap-stacktrace-level": _LOGS,
    "zap-time-encoding": _LOGS,
}
"""What is done instead, by the name of the flag."""
_BOOLEAN: Final = frozenset(
    {
        "model-server-metrics-https-insecure-skip-verify",
        "enable-multi-engine",
        "tracing",
        "enable-pprof",
        "metrics-endpoint-auth",
        "ha-enable-leader-election",
        "health-checking",
        "disable-endpoint-subset-filter",
        "enable-cert-reload",
        "enable-grpc-stream-metrics",
        "emit-endpoint-scores",
        "allow-experimental-plugins",
        "zap-devel",
    }
)
# Flags of functions that this picker does not have. The value false needs no warning.
_MAY_BE_FALSE: Final = frozenset(
    {
        "enable-multi-engine",
        "tracing",
        "enable-pprof",
        "metrics-endpoint-auth",
        "ha-enable-leader-election",
        "disable-endpoint-subset-filter",
        "emit-endpoint-scores",
        "allow-experimental-plugins",
    }
)
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False"})


class UnknownFlagError(Exception):
    """An argument that is not accepted; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments in the form ``--name=value``, and the names of the flags that were left out because of UNNEEDED."""

    own: tuple[str, ...]
    unneeded: tuple[str, ...]


def read_arguments(arguments: Sequence[str], *, valued: Collection[str], boolean: Collection[str]) -> Arguments:
    """Return the arguments in one form. ``valued`` and ``boolean`` are the names of this command's own flags.

    Raises UnknownFlagError for an argument that is no flag of this command or of UNNEEDED.
    """
    own: list[str] = []
    unneeded: list[str] = []
    left = list(reversed(arguments))
    while left:
        argument = left.pop()
        name, given, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or argument.startswith("---") or not name:
            raise UnknownFlagError(f"{_shown(argument)} is not a flag")
        if name in boolean or name in _BOOLEAN:
            # The chart of the Gateway API Inference Extension 1.1 passes the value as the next argument.
            if not given:
                value = left.pop() if left and left[-1] in _TRUE | _FALSE else "true"
            if value not in _TRUE | _FALSE:
                raise UnknownFlagError(f"--{name}: {_shown(value)} is not accepted; give true or false")
        elif name not in valued and name not in UNNEEDED:
            raise UnknownFlagError(f"no such flag: {_shown(argument.partition('=')[0])}")
        elif not given:
            if not left:
                raise UnknownFlagError(f"--{name} needs a value")
            value = left.pop()
        if name not in UNNEEDED:
            own.append(f"--{name}={'true' if name in boolean and value in _TRUE else value}")
        elif not (name in _MAY_BE_FALSE and value in _FALSE):
            unneeded.append(name)
    return Arguments(own=tuple(own), unneeded=tuple(dict.fromkeys(unneeded)))


def explained(names: Iterable[str], instead: dict[str, str]) -> dict[str, list[str]]:
    """Return the names by what is done instead of them, so that one line explains several."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(instead[name], []).append(name)
    return groups


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
