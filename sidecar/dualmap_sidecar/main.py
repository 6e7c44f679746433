"""The command ``dualmap pd-proxy``: parses the settings, then runs the proxy by ``wiring.run``."""

import os
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from dualmap_edge import logs
from dualmap_edge.options import PORT, Duration
from dualmap_sidecar.settings import KvConnector, Settings
from dualmap_sidecar.targets import read_allowed

_PORT_MAX: Final = 65_535


class _Listen(click.ParamType[tuple[str, int]]):
    """The parameter type of an address to listen on."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not host or not (port.isascii() and port.isdecimal()) or int(port) > _PORT_MAX:
            self.fail(f"{value!r} is not accepted; give HOST:PORT, such as 0.0.0.0:8000 or [::]:8000", param, ctx)
        return host, int(port)


class _Engine(click.ParamType[str]):
    """The parameter type of the engine's base URL."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            url = urlsplit(str(value))
            whole = url.scheme == "http" and bool(url.hostname) and bool(url.port) and url.username is None
        except ValueError:
            whole = False
        if not whole or url.path not in ("", "/") or url.query or url.fragment:
            self.fail(f"{value!r} is not accepted; give http://HOST:PORT, such as http://127.0.0.1:8200", param, ctx)
        return f"http://{url.netloc}"


class _Allowed(click.ParamType[str]):
    """The parameter type of a network, or of a single address with its port."""

    name = "network"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            read_allowed([str(value)])
        except ValueError:
            self.fail(
                f"{value!r} is not accepted; give a network such as 10.0.0.0/8, or IP:PORT such as 10.0.0.7:8000",
                param,
                ctx,
            )
        return str(value)


@click.command(context_settings={"show_default": True})
@click.option(
    "--listen", type=_Listen(), default="0.0.0.0:8000", metavar="HOST:PORT", help="Address for requests. 0: any port."
)
@click.option(
    "--engine", type=_Engine(), default="http://127.0.0.1:8200", metavar="URL", help="The decode engine, in plain HTTP."
)
@click.option(
    "--metrics-port", type=PORT, default=9093, help="Port for /metrics and /healthz, on the host of --listen."
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Pool file of the prefill pool: its members may prefill. Repeat the option for several files.",
)
@click.option(
    "--allow",
    multiple=True,
    type=_Allowed(),
    metavar="CIDR|IP:PORT",
    help="Addresses that may prefill: a network, or one address. Repeat the option for several.",
)
@click.option(
    "--kube",
    is_flag=True,
    help="Members of the InferencePools in the namespace may prefill. The environment variable KUBECONFIG selects the "
    "cluster. The default is the pod's cluster.",
)
@click.option("--namespace", help="With --kube: the namespace of the pools. [default: env POD_NAMESPACE]")
@click.option(
    "--kv-connector",
    type=click.Choice([each.value for each in KvConnector]),
    default=KvConnector.NIXL.value,
    help="How the engines move KV: with nixl, the prefiller's answer says where the KV is; with shared-storage, the "
    "engine finds the KV in a common store by itself.",
)
@click.option(
    "--prefill-timeout", type=Duration(), default="60s", help="Longest time for a prefiller's answer, then the next."
)
@click.option(
    "--continue",
    "continues",
    is_flag=True,
    help="If the engine ends within a stream, let a member of the header x-dualmap-continue generate the rest.",
)
@click.option(
    "--continue-max-tokens",
    type=click.IntRange(1, 1_000_000),
    default=4096,
    help="With --continue: longest stream, in generated tokens, that is continued.",
)
@click.option("--log-level", default="info", type=click.Choice(logs.LOG_LEVELS))
@click.option("--log-format", default="text", type=click.Choice(logs.LOG_FORMATS))
def pd_proxy(
    listen: tuple[str, int],
    engine: str,
    metrics_port: int,
    pools: tuple[Path, ...],
    allow: tuple[str, ...],
    kube: bool,
    namespace: str | None,
    kv_connector: str,
    prefill_timeout: float,
    continues: bool,
    continue_max_tokens: int,
    log_level: str,
    log_format: logs.LogFormat,
) -> None:
    """Run the sidecar of a decode engine, which has prompts prefilled by other engines.

    \b
    Example:
      dualmap pd-proxy --listen 0.0.0.0:8000 --engine http://127.0.0.1:8200 --pool prefill.yaml
      dualmap pd-proxy --kube --namespace llm
      dualmap pd-proxy --allow 10.20.0.0/16

    The request headers x-prefiller-host-port and x-dualmap-prefillers name the prefillers of a request, in order. The
    proxy asks them for the prompt's KV, and then sends the request to the engine, which pulls the KV. If no prefiller
    answers, the engine computes the prompt itself. All other requests pass unchanged.

    The proxy asks only addresses of --pool, --allow or --kube, and never follows redirects. After SIGTERM, it completes
    the requests in flight, and exits with status 0. A second signal ends them.
    """
    if kube and pools:
        raise click.UsageError("--pool and --kube exclude each other; give one of them")
    if not (kube or pools or allow):
        raise click.UsageError("no address may prefill; give --pool FILE, --allow CIDR or --kube")
    settings = Settings(
        host=listen[0],
        port=listen[1],
        engine=engine,
        metrics_port=metrics_port,
        pools=pools,
        namespace=_namespace(namespace, kube=kube),
        allow=allow,
        kv_connector=KvConnector(kv_connector),
        prefill_timeout_s=prefill_timeout,
        continue_tokens=continue_max_tokens if continues else None,
        log_level=log_level,
        log_format=log_format,
    )
    logs.configure(level=log_level, log_format=log_format)
    from dualmap_sidecar.wiring import run  # A slow import that --help does not need.

    sys.exit(run(settings))


def _namespace(namespace: str | None, *, kube: bool) -> str | None:
    """Return the namespace of the pools, None without ``--kube``. Raises UsageError."""
    if not kube:
        if namespace is not None:
            raise click.UsageError("--namespace requires --kube; add --kube or omit --namespace")
        return None
    found = namespace or os.environ.get("POD_NAMESPACE")  # noqa: TID251
    if not found:
        raise click.UsageError("--kube requires a namespace; give --namespace, or set POD_NAMESPACE")
    return found
