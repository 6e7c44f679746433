"""The command ``dualmap router``: parses the settings, then runs the router by ``wiring.run``."""

import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import click

from dualmap_extproc.app.options import (
    configure_process,
    listen_options,
    process_options,
    replica_options,
    settings_of,
    transport_option,
)
from dualmap_extproc.app.record_options import record_options
from dualmap_extproc.settings import KubeSettings

_DEFAULT_NAMESPACE: Final = "dualmap-system"
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class _Namespace(click.ParamType[str]):
    """The parameter type of a Kubernetes namespace's name."""

    name = "namespace"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not _DNS_LABEL.fullmatch(text):
            self.fail(f"{text!r} is not accepted; give a DNS label of at most 63 characters", param, ctx)
        return text


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
@listen_options()
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
@replica_options(hash_key_default="random; a public key with --redis, --peer or --kube")
@record_options
@process_options
def router(
    pools: tuple[Path, ...],
    kube: bool,
    namespace: str | None,
    all_namespaces: bool,
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
    watched = _kube_settings(pools, kube=kube, namespace=namespace, all_namespaces=all_namespaces)
    settings = settings_of(pools=pools, kube=watched, alone=watched is None, **options)
    configure_process(settings)
    from dualmap_extproc.app.wiring import run  # A slow import that --help does not need.

    sys.exit(run(settings))
