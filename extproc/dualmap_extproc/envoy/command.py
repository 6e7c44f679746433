"""``dualmap envoy-config``: pool files and addresses in, Envoy's bootstrap out."""

import sys
from pathlib import Path

import click

from dualmap_extproc.envoy.settings import Address, EnvoySettings, EnvoySettingsError, Mode


@click.command(context_settings={"show_default": True})
@click.option(
    "--pool",
    "pool_files",
    multiple=True,
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Pool file (InferencePool as YAML); repeat for several. The first one's pool takes what no router picked.",
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
    "--mode",
    default=Mode.STREAMED.value,
    type=click.Choice([mode.value for mode in Mode]),
    help="How a request's body reaches the router.",
)
@click.option("--tls", default="off", type=click.Choice(["off", "on"]), help="From Envoy to routers and access log.")
@click.option("--static-endpoints", is_flag=True, help="Write the members into the file instead of asking by EDS.")
def envoy_config(
    *,
    pool_files: tuple[Path, ...],
    listen: str,
    router: str,
    als: str | None,
    admin: str,
    mode: str,
    tls: str,
    static_endpoints: bool,
) -> None:
    """Print an Envoy bootstrap for the given pools (YAML, for Envoy 1.38 or later).

    \b
    Example:
      dualmap envoy-config --pool pool.yaml --router 127.0.0.1:9002 > envoy.yaml
      envoy -c envoy.yaml
    """
    # Here, because Envoy's types and YAML take a second that --help need not.
    from dualmap_extproc.envoy.bootstrap import bootstrap, to_yaml
    from dualmap_extproc.pools.file import PoolFileError, load_pool_files

    try:
        settings = EnvoySettings(
            pools=load_pool_files(pool_files),
            listen=Address.to_bind(listen, field="--listen"),
            routers=_addresses(router, field="--router"),
            access_logs=_addresses(router if als is None else als, field="--als"),
            admin=Address.to_bind(admin, field="--admin"),
            mode=Mode(mode),
            tls=tls == "on",
            static_endpoints=static_endpoints,
        )
    except (EnvoySettingsError, PoolFileError) as error:
        click.echo(f"dualmap envoy-config: {error}", err=True)
        sys.exit(2)
    click.echo(to_yaml(bootstrap(settings)), nl=False)


def _addresses(text: str, *, field: str) -> tuple[Address, ...]:
    """Read a comma-separated list, each address once; raises EnvoySettingsError."""
    addresses = [Address.to_connect(part, field=field) for part in text.split(",")]
    return tuple(dict.fromkeys(addresses))
