"""The options that several commands share, and the settings that these options make."""

import os
import secrets
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar, get_args
from urllib.parse import urlsplit

import click

from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_edge import logs
from dualmap_edge.options import PORT, Duration, Size
from dualmap_extproc.app.hash_key import hash_key_option
from dualmap_extproc.app.record_options import recording_settings
from dualmap_extproc.envoy.config.settings import Address, EnvoySettingsError
from dualmap_extproc.recording.hashing import roots_key
from dualmap_extproc.settings import REPLICA_ID_CHARACTERS, KubeSettings, Limits, Settings, Transport
from dualmap_extproc.store.options import redis_options, redis_settings

_PORTS: Final = ("grpc_port", "health_port", "metrics_port", "als_port")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _ReplicaId(click.ParamType[str]):
    """The parameter type of a router's name: printable ASCII without spaces, at most as long as a host name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not (text.isascii() and text.isprintable() and " " not in text and 0 < len(text) <= REPLICA_ID_CHARACTERS):
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            self.fail(f"{shown!r} is not accepted; give 1 to {REPLICA_ID_CHARACTERS} ASCII characters without spaces")
        return text


class _Peer(click.ParamType[tuple[str, int]]):
    """The parameter type of another router's address."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        try:
            address = Address.to_connect(str(value), field="--peer")
        except EnvoySettingsError:
            self.fail(f"{value!r} is not accepted; give HOST:PORT, such as 10.0.0.2:9002 or routers.llm.svc:9002")
        return address.host, address.port


class _OtlpEndpoint(click.ParamType[str]):
    """The parameter type of the URL of an OpenTelemetry collector that accepts OTLP over gRPC."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        accepted = "give http://HOST:PORT, or https://HOST:PORT for TLS, such as http://collector:4317"
        try:
            url = urlsplit(str(value))
            whole = url.scheme in ("http", "https") and bool(url.hostname) and bool(url.port)
        except ValueError:
            whole = False
        if not whole or url.path not in ("", "/") or url.query or url.fragment or url.username is not None:
            self.fail(f"{value!r} is not accepted; {accepted}", param, ctx)
        if not _installed("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"):
            self.fail("the OpenTelemetry exporter is not installed; run pip install 'dualmap[otlp]'", param, ctx)
        return f"{url.scheme}://{url.netloc}"


def _installed(*modules: str) -> bool:
    """Return whether all of these modules can be imported, without importing them."""
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:
        return False


def listen_options(*, health_port: str = "--health-port") -> Callable[[_Function], _Function]:
    """Return a decorator that adds the options for address and ports; ``health_port`` is the name of one of them."""
    return _all_of(
        click.option("--host", default="0.0.0.0", help="IP address on which all ports listen."),
        click.option(
            "--grpc-port",
            default=9002,
            type=PORT,
            help="gRPC port for ext_proc, xDS, access log and health. 0: any free port.",
        ),
        click.option(
            health_port,
            "health_port",
            default=9003,
            type=PORT,
            help="gRPC port without TLS: health, KEDA's scaler. 0: any free port.",
        ),
        click.option(
            "--metrics-port",
            default=9090,
            type=PORT,
            help="HTTP port for /metrics, /pools and the dashboard. 0: any free port.",
        ),
        click.option("--dashboard/--no-dashboard", default=True, help="Serve the dashboard at / of the metrics port."),
        click.option(
            "--als-port", default=9004, type=PORT, help="gRPC port for Envoy's access log only. 0: any free port."
        ),
    )


def transport_option(function: _Function) -> _Function:
    """Add the option for the server of the gRPC port."""
    return click.option(
        "--transport",
        default="h2",
        type=click.Choice(get_args(Transport)),
        help="Server of --grpc-port: the router's own HTTP/2 server (h2), or gRPC's Python library (grpc).",
    )(function)


def replica_options(*, hash_key_default: str) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the options of several routers; ``hash_key_default`` describes their default key."""
    return _all_of(
        redis_options,
        click.option(
            "--peer",
            "peers",
            multiple=True,
            type=_Peer(),
            metavar="HOST:PORT",
            help="gRPC port of the other routers, which decide about each pool together. A DNS name stands for all its "
            "addresses, and may include this router. Repeat the option for several addresses. [default: with --redis, "
            "routers find each other there]",
        ),
        hash_key_option(default=hash_key_default),
        click.option(
            "--replica-id",
            default=socket.gethostname,
            show_default="host name",
            type=_ReplicaId(),
            help="Name of this router. No other router may have the same name.",
        ),
    )


def process_options(function: _Function) -> _Function:
    """Add the options for tracing, drain, memory and logs."""
    return _all_of(
        click.option(
            "--otlp-endpoint",
            type=_OtlpEndpoint(),
            metavar="URL",
            help="Send a trace span for each decision to this OpenTelemetry collector (OTLP over gRPC).",
        ),
        click.option(
            "--drain-timeout",
            default="25s",
            type=Duration(),
            help="Maximum time to complete open requests after SIGTERM.",
        ),
        click.option(
            "--max-buffered",
            default="512MiB",
            type=Size(),
            help="Maximum size of all request bodies that the router stores. Above it, the largest one gets 503. Give "
            "at most a quarter of the memory limit.",
        ),
        click.option("--log-level", default="info", type=click.Choice(logs.LOG_LEVELS)),
        click.option("--log-format", default="text", type=click.Choice(["text", "json"])),
        click.option(
            "--log-prompts", is_flag=True, help="Log the headers and prompts of requests. Requires --log-level debug."
        ),
    )(function)


def _all_of(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the options in their order."""

    def add(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def settings_of(
    *,
    pools: tuple[Path, ...] = (),
    kube: KubeSettings | None = None,
    alone: bool,
    max_buffered: int,
    drain_timeout: float,
    redis: str | None,
    redis_password: str | None,
    redis_password_file: Path | None,
    redis_ca: Path | None,
    hash_key: bytes | None,
    record: Path | None,
    record_sample: float,
    record_max: int,
    **options: Any,
) -> Settings:
    """Return the settings from the options of this module, and from ``options`` named as fields of the settings.

    ``alone`` says whether this router is the only one of its pools if it has no address of another. Raises UsageError.
    """
    _check_distinct({name: options[name] for name in _PORTS})
    if options["log_prompts"] and options["log_level"] != "debug":
        raise click.UsageError("--log-prompts requires --log-level debug; add --log-level debug or omit --log-prompts")
    shared = redis_settings(redis, redis_password, redis_password_file, redis_ca)
    recording, secret = recording_settings(record, sample=record_sample, max_bytes=record_max)
    if hash_key is None:
        # Routers of one deployment need the same key. So do the recordings of a router before and after a restart.
        own = secrets.token_bytes(32) if secret is None else roots_key(secret)
        hash_key = own if alone and not shared and not options["peers"] else PUBLIC_KEY
    return Settings(
        pools=pools,
        kube=kube,
        drain_timeout_s=drain_timeout,
        redis=shared,
        hash_key=hash_key,
        recording=recording,
        limits=Limits(buffered_bytes=max_buffered),
        **options,
    )


def _check_distinct(ports: dict[str, int]) -> None:
    """Raise UsageError if two ports are equal, unless they are 0 (any free port)."""
    names = {each.name: each.opts[0] for each in click.get_current_context().command.params}
    seen: dict[int, str] = {}
    for name, port in ports.items():
        option = names[name]
        other = seen.setdefault(port, option)
        if port and other != option:
            raise click.UsageError(f"{other} and {option} are both {port}; give two different ports")


def configure_process(settings: Settings) -> None:
    """Configure the logs, and gRPC before it is imported."""
    # By default, gRPC writes a line to standard error for every connection that TLS rejects, outside the router's logs.
    # A client may retry without end. gRPC has no other setting for this output.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251
    logs.configure(level=settings.log_level, log_format=settings.log_format)
