"""``dualmap envoy-config``: pool files and addresses in, Envoy's bootstrap out."""

import sys
from pathlib import Path

import click

from dualmap_edge.options import Duration
from dualmap_extproc.envoy.config.settings import Address, Discover, EnvoySettings, EnvoySettingsError, Mode, Tls


@click.command(context_settings={"show_default": True})
@click.option(
    "--pool",
    "pool_files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Pool file (InferencePool as YAML); repeat for several. The first one's pool takes what no router picked.",
)
@click.option("--discover", is_flag=True, help="Ask the routers which pools there are, instead of --pool.")
@click.option(
    "--longest-wait",
    type=Duration(),
    metavar="DURATION",
    show_default="30s",
    help="With --discover: no pool may hold a request for longer (its queue.maxWait).",
)
@click.option("--listen", default="0.0.0.0:8080", metavar="IP:PORT", help="Where clients connect. Port 0: any.")
@click.option("--router", default="127.0.0.1:9002", metavar="HOST:PORT[,...]", help="The routers' gRPC ports.")
@click.option(
    "--als",
    default=None,
    metavar="HOST:PORT[,...]",
    show_default="the routers",
    help="Who is sent the access log: each of these all of it.",
)
@click.option("--admin", default="127.0.0.1:9901", metavar="IP:PORT", help="Envoy's administration. Port 0: any.")
@click.option(
    "--status",
    default=None,
    metavar="IP:PORT",
    show_default="nowhere",
    help="Where probes and Prometheus find /ready and /stats/prometheus, and nothing else of the administration.",
)
@click.option(
    "--mode",
    default=Mode.STREAMED.value,
    type=click.Choice([mode.value for mode in Mode]),
    help="How a request's body reaches the router.",
)
@click.option("--tls", default="off", type=click.Choice(["off", "on"]), help="From Envoy to routers and access log.")
@click.option("--tls-cert", metavar="FILE", help="Client certificate to show (router's --tls-client-ca). PEM.")
@click.option("--tls-key", metavar="FILE", help="Its key. PEM.")
@click.option(
    "--tls-ca",
    metavar="FILE",
    show_default="trust any, as gateways do",
    help="Trust only certificates that this signed, for whatever name. PEM.",
)
@click.option(
    "--tls-sds",
    metavar="DIR",
    show_default="Envoy reads its TLS files once, at its start",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Write discovery files here, by which Envoy reads its TLS files again when they are replaced.",
)
@click.option("--static-endpoints", is_flag=True, help="Write the members into the file instead of asking by EDS.")
def envoy_config(
    *,
    pool_files: tuple[Path, ...],
    discover: bool,
    longest_wait: float | None,
    listen: str,
    router: str,
    als: str | None,
    admin: str,
    status: str | None,
    mode: str,
    tls: str,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    tls_sds: Path | None,
    static_endpoints: bool,
) -> None:
    """Print an Envoy bootstrap for the given pools, or for all that routers have (YAML, for Envoy 1.38 or later).

    \b
    Example:
      dualmap envoy-config --pool pool.yaml --router 127.0.0.1:9002 > envoy.yaml
      envoy -c envoy.yaml
      dualmap envoy-config --discover --router dualmap-router:9002 > envoy.yaml

    \b
    Mutual TLS, with certificates that may be renewed while Envoy runs:
      dualmap router --pool pool.yaml --tls /certs/router --tls-client-ca /certs/ca.crt
      dualmap envoy-config --pool pool.yaml --tls on --tls-cert /certs/envoy/tls.crt \\
        --tls-key /certs/envoy/tls.key --tls-ca /certs/ca.crt --tls-sds . > envoy.yaml

    All files of --tls-... are named as Envoy will see them. It notices what is moved into their folders (a rename, a
    mounted Kubernetes Secret), not what is written in place.
    """
    # Here, because Envoy's types and YAML take a second that --help need not.
    from dualmap_extproc.envoy.config.bootstrap import bootstrap, to_yaml
    from dualmap_extproc.envoy.config.transport import discovery_files
    from dualmap_extproc.pools.file import PoolFileError, load_pool_files

    asked = _discover(discover, longest_wait, pools=bool(pool_files), static=static_endpoints)
    try:
        settings = EnvoySettings(
            pools=load_pool_files(pool_files),
            discover=asked,
            listen=Address.to_bind(listen, field="--listen"),
            routers=_addresses(router, field="--router"),
            access_logs=_addresses(router if als is None else als, field="--als"),
            admin=Address.to_bind(admin, field="--admin"),
            status=None if status is None else Address.to_bind(status, field="--status"),
            mode=Mode(mode),
            tls=_tls(tls, Tls(certificate=tls_cert, key=tls_key, ca=tls_ca, sds=tls_sds and tls_sds.absolute())),
            static_endpoints=static_endpoints,
        )
    except (EnvoySettingsError, PoolFileError) as error:
        click.echo(f"dualmap envoy-config: {error}", err=True)
        sys.exit(2)
    if settings.tls is not None:
        for path, content in discovery_files(settings.tls).items():
            path.write_text(to_yaml(content), encoding="utf-8")
    click.echo(to_yaml(bootstrap(settings)), nl=False)


def _discover(switch: bool, longest_wait_s: float | None, *, pools: bool, static: bool) -> Discover | None:
    """Return how pools are discovered, None where files name them; raises UsageError for a mixture."""
    if switch == pools:
        wrong = "--pool and --discover exclude each other" if switch else "no pools"
        raise click.UsageError(f"{wrong}; give --pool FILE, once or more, or --discover")
    if switch and static:
        raise click.UsageError("--static-endpoints and --discover exclude each other; give one of them")
    if longest_wait_s is not None and not switch:
        raise click.UsageError("--longest-wait means nothing without --discover; give both or neither")
    if not switch:
        return None
    return Discover() if longest_wait_s is None else Discover(longest_wait_s=longest_wait_s)


def _addresses(text: str, *, field: str) -> tuple[Address, ...]:
    """Read a comma-separated list, each address once; raises EnvoySettingsError."""
    addresses = [Address.to_connect(part, field=field) for part in text.split(",")]
    return tuple(dict.fromkeys(addresses))


def _tls(switch: str, tls: Tls) -> Tls | None:
    """Return ``tls`` where ``--tls`` is on; raises EnvoySettingsError for files that would then go unused."""
    if switch == "on":
        return tls
    if tls != Tls():
        raise EnvoySettingsError("--tls", switch, "--tls on with --tls-cert, --tls-key, --tls-ca or --tls-sds")
    return None
