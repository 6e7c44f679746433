"""The command ``dualmap operator``: parses the settings once; ``wiring`` runs the operator."""

import os
import re
import secrets
import socket
import sys
from typing import Any, Final

import click

from dualmap_edge import logs
from dualmap_edge.options import PORT
from dualmap_operator.settings import GeneratedSecret, SecretKind, Settings

_DEFAULT_NAMESPACE: Final = "dualmap-system"
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET_NAME: Final = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


class _DnsLabel(click.ParamType[str]):
    """Parses the name of a namespace or Service."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not _DNS_LABEL.fullmatch(str(value)):
            self.fail(
                f"{value!r} is not accepted; give a DNS label: at most 63 characters of a-z, 0-9 and -", param, ctx
            )
        return str(value)


class _Address(click.ParamType[tuple[str, int]]):
    """Parses ``HOST:PORT``, with an IPv6 host in brackets."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        host, _, port = str(value).rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
            self.fail(f"{value!r} is not accepted; give HOST:PORT, with an IPv6 host in brackets", param, ctx)
        return host, int(port)


class _Generated(click.ParamType[GeneratedSecret]):
    """Parses ``KIND=[NAMESPACE/]NAME``."""

    name = "KIND=[NAMESPACE/]NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> GeneratedSecret:
        if isinstance(value, GeneratedSecret):
            return value
        kind, _, path = str(value).partition("=")
        namespace, slash, name = path.rpartition("/")
        located = _DNS_LABEL.fullmatch(namespace) or not slash
        if not (kind in set(SecretKind) and located and _SECRET_NAME.fullmatch(name)):
            kinds = ", ".join(SecretKind)
            self.fail(f"{value!r} is not accepted; give KIND=[NAMESPACE/]NAME, KIND is one of {kinds}", param, ctx)
        return GeneratedSecret(kind=SecretKind(kind), name=name, namespace=namespace or None)


@click.command(context_settings={"show_default": True})
@click.option("--namespace", type=_DnsLabel(), help="Reconcile the pools of this namespace only.")
@click.option("--all-namespaces", is_flag=True, help="Reconcile the pools of all namespaces (the default).")
@click.option(
    "--leader-election",
    is_flag=True,
    help="Elect one leader among several operators, through a Lease in POD_NAMESPACE.",
)
@click.option("--host", default="0.0.0.0", help="Address to listen on.")
@click.option("--metrics-port", default=9091, type=PORT, help="Port of /metrics (HTTP). 0: any free port.")
@click.option("--health-port", default=9092, type=PORT, help="Port of /healthz (HTTP). 0: any free port.")
@click.option(
    "--router-service",
    default="dualmap-router",
    type=_DnsLabel(),
    metavar="NAME",
    help="Service of the routers, in POD_NAMESPACE. The Service needs a port with the name metrics.",
)
@click.option(
    "--router",
    "routers",
    multiple=True,
    type=_Address(),
    metavar="HOST:METRICSPORT",
    help="Address of a router, for an operator outside the cluster. Replaces --router-service. Repeatable.",
)
@click.option(
    "--generate",
    "generated",
    multiple=True,
    type=_Generated(),
    help="Generate the content of this existing Secret, and renew its certificate in time. KIND is authority (signs "
    "the others), server (of the routers), client (of Envoy), redis (a password), or hash (the key of the routers' "
    "--hash-key-file). Default namespace: POD_NAMESPACE. Repeatable.",
)
@click.option("--log-level", default="info", type=click.Choice(logs.LOG_LEVELS))
@click.option("--log-format", default="text", type=click.Choice(logs.LOG_FORMATS))
def operator(namespace: str | None, all_namespaces: bool, **options: Any) -> None:
    """Reconcile the pods, ring members and status of InferencePools.

    \b
    Examples:
      dualmap operator --all-namespaces --leader-election
      KUBECONFIG=admin.conf dualmap operator --namespace llm --router 127.0.0.1:9090

    The operator finds the API server through env KUBECONFIG, or else through the pod's service account. The environment
    variable POD_NAMESPACE (default: dualmap-system) is the namespace of the Lease, of the routers' Service and of the
    ConfigMap dualmap-models. An operator of all namespaces reserves model names for namespaces in this ConfigMap. On
    SIGTERM, the operator completes its writes, releases the Lease, and exits with status 0.
    """
    from dualmap_operator.wiring import run  # A late import, because kopf and aiohttp take a second to import.

    if namespace is not None and all_namespaces:
        raise click.UsageError("--namespace and --all-namespaces exclude each other; give one of them")
    if options["health_port"] and options["health_port"] == options["metrics_port"]:
        raise click.UsageError("--health-port and --metrics-port are the same; give two different ports")
    kinds = [each.kind for each in options["generated"]]
    if {SecretKind.SERVER, SecretKind.CLIENT} & set(kinds) and kinds.count(SecretKind.AUTHORITY) != 1:
        raise click.UsageError("--generate: server and client need exactly one authority=NAME, which signs them")
    # Only this function of the operator reads the environment.
    pod_namespace = os.environ.get("POD_NAMESPACE") or _DEFAULT_NAMESPACE  # noqa: TID251
    if not _DNS_LABEL.fullmatch(pod_namespace):
        raise click.UsageError(f"env POD_NAMESPACE: {pod_namespace!r} is not accepted; give the name of a namespace")
    settings = Settings(
        namespace=namespace,
        pod_namespace=pod_namespace,
        # The random suffix makes a restarted process a new candidate, which does not continue its former lease.
        identity=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        **options,
    )
    logs.configure(level=settings.log_level, log_format=settings.log_format)
    sys.exit(run(settings))
