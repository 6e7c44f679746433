"""``dualmap envoy-config``: prints Envoy's bootstrap for pool files and addresses."""

import sys
from pathlib import Path
from typing import Final

import click

from dualmap_edge.options import Duration
from dualmap_extproc.envoy.config.settings import (
    MEMORY_BYTES,
    Address,
    Discover,
    EnvoySettings,
    EnvoySettingsError,
    Mode,
    Tls,
    read_memory,
)

MEMORY_VARIABLE: Final = "DUALMAP_ENVOY_MEMORY"


@click.command(context_settings={"show_default": True})
@click.option(
    "--pool",
    "pool_files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Pool file (InferencePool as YAML). Repeat the option for several files. If no router picks an "
    "endpoint, the request goes to the only pool; with several pools, Envoy answers 503.",
)
@click.option("--discover", is_flag=True, help="Envoy reads the pools from the routers. Replaces --pool.")
@click.option(
    "--longest-wait",
    type=Duration(),
    metavar="DURATION",
    show_default="30s",
    help="With --discover: the longest routing.queue.maxWait of all pools.",
)
@click.option(
    "--listen", default="0.0.0.0:8080", metavar="IP:PORT", help="Address of the listener for clients. Port 0: any."
)
@click.option(
    "--router",
    default="127.0.0.1:9002",
    metavar="HOST:PORT[,...]",
    help="Addresses of the routers' gRPC ports. A DNS name stands for all its addresses, which Envoy resolves again "
    "every second.",
)
@click.option(
    "--als",
    default=None,
    metavar="HOST:PORT[,...]",
    show_default="the routers",
    help="Addresses of access log sinks. Each listed sink receives all entries. If the only sink is a DNS name, one of "
    "its addresses receives each entry; several routers there must run with --peer.",
)
@click.option(
    "--admin", default="127.0.0.1:9901", metavar="IP:PORT", help="Address of Envoy's admin interface. Port 0: any."
)
@click.option(
    "--status",
    default=None,
    metavar="IP:PORT",
    show_default="nowhere",
    help="Address of a listener that serves only /ready and /stats/prometheus, for probes and Prometheus.",
)
@click.option(
    "--mode",
    default=Mode.STREAMED.value,
    type=click.Choice([mode.value for mode in Mode]),
    help="How Envoy sends a request's body to the router.",
)
@click.option("--tls", default="off", type=click.Choice(["off", "on"]), help="Use TLS to routers and access log sinks.")
@click.option("--tls-cert", metavar="FILE", help="Client certificate, for routers that run with --tls-client-ca. PEM.")
@click.option("--tls-key", metavar="FILE", help="Key of --tls-cert. PEM.")
@click.option(
    "--tls-ca",
    metavar="FILE",
    show_default="accept any certificate",
    help="CA that must have signed the router's certificate. Envoy does not check the certificate's name. PEM.",
)
@click.option(
    "--tls-sds",
    metavar="DIR",
    show_default="Envoy reads TLS files only at its start",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Folder to which this command writes SDS files. Envoy uses SDS files to reload replaced TLS files.",
)
@click.option(
    "--allow-path",
    "allow_paths",
    multiple=True,
    metavar="PATH",
    help="Path to serve besides the inference paths (repeatable). Other paths get 404. '*' allows all paths.",
)
@click.option("--memory", envvar=MEMORY_VARIABLE, default=None, hidden=True)
@click.option("--static-endpoints", is_flag=True, help="Write the members into the bootstrap instead of using EDS.")
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
    allow_paths: tuple[str, ...],
    memory: str | None,
    static_endpoints: bool,
) -> None:
    """Print an Envoy bootstrap for pool files, or for all pools of the routers.

    The output is YAML for Envoy 1.38 or later.

    \b
    Example:
      dualmap envoy-config --pool pool.yaml --router 127.0.0.1:9002 > envoy.yaml
      envoy -c envoy.yaml
      dualmap envoy-config --discover --router dualmap-router:9002 > envoy.yaml

    \b
    Several routers behind one DNS name (a headless Service), or listed one by one:
      dualmap envoy-config --discover --router dualmap-router.dualmap-system:9002 > envoy.yaml
      dualmap envoy-config --discover --router 10.0.1.1:9002,10.0.1.2:9002 > envoy.yaml

    \b
    Mutual TLS, with certificates that are renewed while Envoy runs:
      dualmap router --pool pool.yaml --tls /certs/router --tls-client-ca /certs/ca.crt
      dualmap envoy-config --pool pool.yaml --tls on --tls-cert /certs/envoy/tls.crt \\
        --tls-key /certs/envoy/tls.key --tls-ca /certs/ca.crt --tls-sds . > envoy.yaml

    \b
    Another path of the engines, such as vLLM's /detokenize, for an Envoy with a memory limit of 2 GiB:
      DUALMAP_ENVOY_MEMORY=2Gi dualmap envoy-config --pool pool.yaml --allow-path /detokenize > envoy.yaml

    Envoy drops requests before it exceeds its memory limit. The limit is 1Gi unless DUALMAP_ENVOY_MEMORY sets it.

    Envoy opens the files of all --tls-... options, so give their paths in Envoy's file system. Envoy reloads a file
    that is replaced by a rename or by a mounted Kubernetes Secret. Envoy does not reload a file that is written in
    place.
    """
    # These imports are here because Envoy's types and YAML take a second to import, and --help needs neither.
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
            allow_paths=allow_paths,
            memory_bytes=MEMORY_BYTES if memory is None else read_memory(memory, field=MEMORY_VARIABLE),
        )
    except (EnvoySettingsError, PoolFileError) as error:
        click.echo(f"dualmap envoy-config: {error}", err=True)
        sys.exit(2)
    if settings.tls is not None:
        for path, content in discovery_files(settings.tls).items():
            path.write_text(to_yaml(content), encoding="utf-8")
    click.echo(to_yaml(bootstrap(settings)), nl=False)


def _discover(switch: bool, longest_wait_s: float | None, *, pools: bool, static: bool) -> Discover | None:
    """Return how Envoy discovers pools, or None if pool files list the pools.

    Raises UsageError unless the command has either pool files or ``--discover``.
    """
    if switch == pools:
        wrong = "--pool and --discover exclude each other" if switch else "no pools"
        raise click.UsageError(f"{wrong}; give one or more --pool FILE, or --discover")
    if switch and static:
        raise click.UsageError("--static-endpoints and --discover exclude each other; give one of them")
    if longest_wait_s is not None and not switch:
        raise click.UsageError("--longest-wait requires --discover; add --discover or omit --longest-wait")
    if not switch:
        return None
    return Discover() if longest_wait_s is None else Discover(longest_wait_s=longest_wait_s)


def _addresses(text: str, *, field: str) -> tuple[Address, ...]:
    """Return the addresses of a comma-separated list without duplicates. Raises EnvoySettingsError."""
    addresses = [Address.to_connect(part, field=field) for part in text.split(",")]
    return tuple(dict.fromkeys(addresses))


def _tls(switch: str, tls: Tls) -> Tls | None:
    """Return ``tls`` if ``--tls`` is on. Raises EnvoySettingsError for TLS files with ``--tls off``."""
    if switch == "on":
        return tls
    if tls != Tls():
        raise EnvoySettingsError("--tls", switch, "--tls on with --tls-cert, --tls-key, --tls-ca or --tls-sds")
    return None
