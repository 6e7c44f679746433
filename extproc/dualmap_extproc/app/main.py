"""The command ``dualmap router``: parses the settings, then runs the router by ``wiring.run``."""

import os
import re
import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_edge import logs
from dualmap_edge.options import PORT, Duration, Size
from dualmap_extproc.app.hash_key import hash_key_option
from dualmap_extproc.app.options import transport_option
from dualmap_extproc.envoy.config.settings import Address, EnvoySettingsError
from dualmap_extproc.settings import REPLICA_ID_CHARACTERS, KubeSettings, Limits, Settings
from dualmap_extproc.store.options import redis_options, redis_settings

_DEFAULT_NAMESPACE: Final = "dualmap-system"
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class _ReplicaId(click.ParamType[str]):
    """The parameter type of a router's name: printable ASCII without spaces, at most as long as a host name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not (text.isascii() and text.isprintable() and " " not in text and 0 < len(text) <= REPLICA_ID_CHARACTERS):
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            self.fail(f"{shown!r} is not accepted; give 1 to {REPLICA_ID_CHARACTERS} ASCII characters without spaces")
        return text


class _Namespace(click.ParamType[str]):
    """The parameter type of a Kubernetes namespace's name."""

    name = "namespace"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not _DNS_LABEL.fullmatch(text):
            self.fail(f"{text!r} is not accepted; give a DNS label of at most 63 characters", param, ctx)
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


def _kube_settings(
    pools: tuple[Path, ...], *, kube: bool, namespace: str | None, all_namespaces: bool
) -> KubeSettings | None:
    """Return the Kubernetes settings, or None if pools come from files.

    Raises UsageError unless the command has either pool files or ``--kube``.
    """
    if bool(pools) == kube:
        wrong = "--pool and --kube exclude each other" if kube else "no pools"
        raise click.UsageError(f"{wrong}; give one or more --pool FILE, or --kube")
    if namespace is not None and all_namespaces:
        raise click.UsageError("--namespace and --all-namespaces exclude each other; give one of them")
    if not kube and (namespace is not None or all_namespaces):
        option = "--all-namespaces" if namespace is None else "--namespace"
        raise click.UsageError(f"{option} requires --kube; add --kube or omit {option}")
    if not kube:
        return None
    pod_namespace = os.environ.get("POD_NAMESPACE") or _DEFAULT_NAMESPACE  # noqa: TID251
    if not _DNS_LABEL.fullmatch(pod_namespace):
        raise click.UsageError(f"env POD_NAMESPACE: {pod_namespace!r} is not accepted; give the name of a namespace")
    return KubeSettings(namespace=namespace, pod_namespace=pod_namespace)


def _check_distinct(ports: dict[str, int]) -> None:
    """Raise UsageError if two ports are equal, unless they are 0 (any free port)."""
    seen: dict[int, str] = {}
    for name, port in ports.items():
        option = f"--{name.replace('_', '-')}"
        other = seen.setdefault(port, option)
        if port and other != option:
            raise click.UsageError(f"{other} and {option} are both {port}; give two different ports")


@click.command(context_settings={"show_default": True})
@click.option(
    "--pool",
    "pools",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Pool file (InferencePool as YAML). Repeat the option for several files.",
)
@click.option(
    "--kube",
    is_flag=True,
    help="Watch InferencePools in Kubernetes. The environment variable KUBECONFIG selects the cluster. The default is "
    "the pod's cluster.",
)
@click.option("--namespace", type=_Namespace(), help="With --kube: watch only this namespace.")
@click.option("--all-namespaces", is_flag=True, help="With --kube: watch all namespaces (the default).")
@click.option("--host", default="0.0.0.0", help="IP address on which all ports listen.")
@click.option(
    "--grpc-port", default=9002, type=PORT, help="gRPC port for ext_proc, xDS, access log and health. 0: any free port."
)
@click.option(
    "--health-port", default=9003, type=PORT, help="gRPC port without TLS: health, KEDA's scaler. 0: any free port."
)
@click.option(
    "--metrics-port",
    default=9090,
    type=PORT,
    help="HTTP port for /metrics, /pools and the dashboard. 0: any free port.",
)
@click.option("--dashboard/--no-dashboard", default=True, help="Serve the dashboard at / of the metrics port.")
@click.option("--als-port", default=9004, type=PORT, help="gRPC port for Envoy's access log only. 0: any free port.")
@click.option(
    "--tls",
    default="off",
    metavar="off|self-signed|DIR",
    help="Use TLS on --grpc-port and --als-port. DIR is a folder with tls.crt and tls.key.",
)
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --tls: accept only clients with a certificate of one of these CAs. PEM.",
)
@transport_option
@redis_options
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=_Peer(),
    metavar="HOST:PORT",
    help="gRPC port of the other routers, which decide about each pool together. A DNS name stands for all its "
    "addresses, and may include this router. Repeat the option for several addresses. [default: with --redis, routers "
    "find each other there]",
)
@hash_key_option(default="random; a public key with --redis, --peer or --kube")
@click.option(
    "--replica-id",
    default=socket.gethostname,
    show_default="host name",
    type=_ReplicaId(),
    help="Name of this router. No other router may have the same name.",
)
@click.option(
    "--otlp-endpoint",
    type=_OtlpEndpoint(),
    metavar="URL",
    help="Send a trace span for each decision to this OpenTelemetry collector (OTLP over gRPC).",
)
@click.option(
    "--drain-timeout", default="25s", type=Duration(), help="Maximum time to complete open requests after SIGTERM."
)
@click.option(
    "--max-buffered",
    default="512MiB",
    type=Size(),
    help="Most memory for all request bodies that wait to be complete, read or sent back; 503 beyond. At most a "
    "quarter of the memory limit.",
)
@click.option("--log-level", default="info", type=click.Choice(logs.LOG_LEVELS))
@click.option("--log-format", default="text", type=click.Choice(["text", "json"]))
@click.option(
    "--log-prompts", is_flag=True, help="Log the headers and prompts of requests. Requires --log-level debug."
)
def router(
    pools: tuple[Path, ...],
    kube: bool,
    namespace: str | None,
    all_namespaces: bool,
    max_buffered: int,
    drain_timeout: float,
    redis: str | None,
    redis_password: str | None,
    redis_password_file: Path | None,
    redis_ca: Path | None,
    hash_key: bytes | None,
    **options: Any,
) -> None:
    """Run the endpoint picker that chooses an instance for each of Envoy's requests.

    \b
    Example:
      dualmap router --pool pool.yaml --redis redis://redis:6379
      dualmap router --kube --namespace llm
      dualmap router --pool pool.yaml --peer 10.0.0.2:9002 --peer 10.0.0.3:9002
      dualmap envoy-config --pool pool.yaml --router 127.0.0.1:9002 --als 127.0.0.1:9004 > envoy.yaml

    With --kube for all namespaces, the router reads the ConfigMap dualmap-models, which reserves model names for
    namespaces. The environment variable POD_NAMESPACE (default: dualmap-system) is the namespace of this ConfigMap.

    A ready router that receives SIGTERM fails its readiness checks, completes open requests, and exits with status 0.
    """
    # This variable must be set before gRPC is imported. By default, gRPC writes a line to standard error for every
    # connection that TLS rejects, outside the router's logs. A client may retry without end. gRPC has no other setting
    # for this output.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251
    from dualmap_extproc.app.wiring import run  # A slow import that --help does not need.

    watched = _kube_settings(pools, kube=kube, namespace=namespace, all_namespaces=all_namespaces)
    _check_distinct({name: options[name] for name in ("grpc_port", "health_port", "metrics_port", "als_port")})
    if options["log_prompts"] and options["log_level"] != "debug":
        raise click.UsageError("--log-prompts requires --log-level debug; add --log-level debug or omit --log-prompts")
    shared = redis_settings(redis, redis_password, redis_password_file, redis_ca)
    limits = Limits(buffered_bytes=max_buffered)
    if hash_key is None:
        # Routers of one deployment need the same key. Without these options, the router is the only one.
        hash_key = PUBLIC_KEY if shared or watched or options["peers"] else secrets.token_bytes(32)
    settings = Settings(
        pools=pools,
        kube=watched,
        drain_timeout_s=drain_timeout,
        redis=shared,
        hash_key=hash_key,
        limits=limits,
        **options,
    )
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    sys.exit(run(settings))
