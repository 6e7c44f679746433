"""The command ``dualmap epp``: replaces a picker of the Gateway API Inference Extension.

The command accepts the flags and the configuration file of other pickers, and runs the router for the members of one
InferencePool (``epp.pools``).
"""

import os
import sys
from pathlib import Path
from typing import Any, Final

import click

from dualmap.objects.gaie import GROUP_VERSIONS
from dualmap.objects.pool_reader import PoolSettings
from dualmap_extproc.app.options import (
    configure_process,
    listen_options,
    process_options,
    replica_options,
    settings_of,
    transport_option,
)
from dualmap_extproc.app.program import EPP
from dualmap_extproc.app.record_options import record_options
from dualmap_extproc.epp import other_flags
from dualmap_extproc.settings import Gateway

_UNNEEDED: Final = "unneeded_flags"
_GROUP: Final = "inference.networking.k8s.io"
# The other pickers' log verbosity from which they write debug lines.
_DEBUG_VERBOSITY: Final = 4
_ZAP_LEVELS: Final = {"debug": "debug", "info": "info", "error": "error", "panic": "error"}


class _PickerCommand(click.Command):
    """A command that reads its arguments as the other pickers do (``epp.other_flags``)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; remember the flags that are known and not needed. Raises UsageError."""
        if any(each in ("--help", "-help", "-h") for each in args):
            return super().parse_args(ctx, ["--help"])
        options = [each for each in self.params if isinstance(each, click.Option)]
        flags = {opt.lstrip("-") for each in options if each.is_flag for opt in (*each.opts, *each.secondary_opts)}
        boolean = {opt.lstrip("-") for each in options if each.type is click.BOOL for opt in each.opts}
        paired = [(each.opts[0], each.secondary_opts[0]) for each in options if each.secondary_opts]
        opposites = {one.lstrip("-"): other for pair in paired for one, other in (pair, pair[::-1])}
        valued = {opt.lstrip("-") for each in options for opt in each.opts} - flags - boolean
        try:
            read = other_flags.read_arguments(args, valued=valued, boolean=boolean | flags)
        except other_flags.UnknownFlagError as error:
            own = ", ".join(f"--{each}" for each in sorted(valued | boolean | flags))
            others = ", ".join(f"--{each}" for each in sorted(other_flags.UNNEEDED))
            raise click.UsageError(f"{error}; accepted: {own}; accepted without effect: {others}", ctx) from None
        ctx.meta[_UNNEEDED] = read.unneeded
        own_arguments: list[str] = []
        for argument in read.own:
            name, _, value = argument.removeprefix("--").partition("=")
            if name not in flags:
                own_arguments.append(argument)
            elif value == "true":
                own_arguments.append(f"--{name}")
            elif name in opposites:
                own_arguments.append(opposites[name])
        return super().parse_args(ctx, own_arguments)


@click.command(cls=_PickerCommand, context_settings={"show_default": True})
@click.option("--pool-name", help="Name of the InferencePool to serve.")
@click.option("--pool-namespace", help="Namespace of the InferencePool. [default: env NAMESPACE, or default]")
@click.option(
    "--pool-group",
    default=_GROUP,
    type=click.Choice(list(GROUP_VERSIONS)),
    help=f"API group of the InferencePool: v1 of {_GROUP}, or v1alpha2 of the older group.",
)
@click.option(
    "--endpoint-selector",
    metavar="KEY=VALUE[,...]",
    help="Serve the pods with these labels, without an InferencePool. Requires --endpoint-target-ports.",
)
@click.option("--endpoint-target-ports", metavar="PORT[,...]", help="The ports of these pods.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Kubeconfig. [default: KUBECONFIG or the pod's]")
@click.option(
    "--routing",
    "routing_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML with spec.routing, spec.slo and spec.engine, as in a DualMap InferencePool. A DualMap InferencePool of "
    "the pool's name and namespace has precedence.",
)
@click.option("--config-file", type=click.Path(path_type=Path), help="EndpointPickerConfig of another picker.")
@click.option("--config-text", help="EndpointPickerConfig as text, instead of --config-file.")
@click.option("--secure-serving", type=click.BOOL, default=True, help="Use TLS on --grpc-port and --als-port.")
@click.option(
    "--cert-path",
    type=click.Path(path_type=Path),
    help="Folder with tls.crt and tls.key. [default: a self-signed certificate]",
)
@click.option(
    "--single-destination",
    type=click.BOOL,
    default=False,
    help="Name one member in each pick, for a gateway that cannot read a list, such as an Envoy with ORIGINAL_DST.",
)
@click.option(
    "--conformance-hooks",
    type=click.BOOL,
    default=False,
    help="Obey and set the headers of the Inference Extension's conformance tests. Clients then choose the endpoint.",
)
@click.option("--zap-encoder", type=click.Choice(["json", "console"]), help="Same as --log-format json or text.")
@click.option("--zap-log-level", help="Same as --log-level: debug, info, error, panic, or a number for debug.")
@click.option("--v", "verbosity", type=int, help=f"{_DEBUG_VERBOSITY} or more: same as --log-level debug.")
@listen_options(health_port=EPP.health_port)
@transport_option
@replica_options(hash_key_default="a public key")
@record_options
@process_options
def epp(
    pool_name: str | None,
    pool_namespace: str | None,
    pool_group: str,
    endpoint_selector: str | None,
    endpoint_target_ports: str | None,
    kubeconfig: Path | None,
    routing_file: Path | None,
    config_file: Path | None,
    config_text: str | None,
    secure_serving: bool,
    cert_path: Path | None,
    single_destination: bool,
    conformance_hooks: bool,
    zap_encoder: str | None,
    zap_log_level: str | None,
    verbosity: int | None,
    **options: Any,
) -> None:
    """Run the endpoint picker of a gateway with the Gateway API Inference Extension.

    \b
    Example:
      dualmap epp --pool-name qwen --pool-namespace llm
      dualmap epp --pool-name qwen --secure-serving=false --routing routing.yaml

    This command takes the place of the picker of the Inference Extension or of llm-d: change the image, and keep the
    arguments. Flags that it knows of and does not need have no effect; a warning says what is done instead. The members
    are the ready pods of the InferencePool, at each of its target ports. Requests for any model's name are served.

    Not ready before the pool exists and its pods are listed; until then, requests get 503. Needs permission to list and
    watch pods and InferencePools in the namespace; InferenceObjectives and DualMap InferencePools are optional.
    """
    # These imports are here because aiohttp and YAML take a second to import, and --help needs neither.
    from dualmap_extproc.app import epp_inputs
    from dualmap_extproc.app.wiring import run

    ctx = click.get_current_context()
    namespace = pool_namespace or os.environ.get("NAMESPACE") or "default"  # noqa: TID251
    wanted = epp_inputs.pool_ref(namespace, pool_name, pool_group, endpoint_selector, endpoint_target_ports)
    pool_settings = PoolSettings() if routing_file is None else epp_inputs.read_routing(routing_file)
    config = epp_inputs.read_picker_config(config_file, config_text)
    _check_files(kubeconfig, cert_path if secure_serving else None)
    _set_logs(ctx, options, zap_encoder, zap_log_level, verbosity)
    settings = settings_of(
        alone=False,
        tls="off" if not secure_serving else "self-signed" if cert_path is None else str(cert_path),
        tls_client_ca=None,
        gateway=Gateway(single_destination=single_destination, conformance_hooks=conformance_hooks),
        **options,
    )
    configure_process(settings)
    epp_inputs.log_effects(ctx.meta[_UNNEEDED], config)
    sys.exit(run(settings, program=EPP, pools=epp_inputs.opener(kubeconfig, wanted, pool_settings, config.roles)))


def _check_files(kubeconfig: Path | None, cert_path: Path | None) -> None:
    """Raise UsageError if a file that an option names does not exist."""
    if kubeconfig is not None:
        _check_exists(kubeconfig, f"--kubeconfig {kubeconfig}", "an existing kubeconfig")
    if cert_path is not None:
        for name in ("tls.crt", "tls.key"):
            _check_exists(cert_path / name, f"--cert-path {cert_path}: {name}", "a folder with tls.crt and tls.key")


def _check_exists(file: Path, shown: str, accepted: str) -> None:
    try:
        file.stat()
    except OSError as error:
        raise click.UsageError(f"{shown}: {error.strerror}; give {accepted}") from None


def _set_logs(
    ctx: click.Context, options: dict[str, Any], encoder: str | None, level: str | None, verbosity: int | None
) -> None:
    """Set the options of logs from the other pickers' flags, unless they are given. Raises UsageError."""
    given = click.core.ParameterSource.COMMANDLINE
    if encoder is not None and ctx.get_parameter_source("log_format") is not given:
        options["log_format"] = "json" if encoder == "json" else "text"
    if ctx.get_parameter_source("log_level") is given:
        return
    if verbosity is not None and verbosity >= _DEBUG_VERBOSITY:
        options["log_level"] = "debug"
    if level is not None:
        if level not in _ZAP_LEVELS and not level.isdecimal():
            accepted = f"{', '.join(_ZAP_LEVELS)}, or a number"
            raise click.UsageError(f"--zap-log-level: {level!r} is not accepted; give {accepted}")
        options["log_level"] = _ZAP_LEVELS.get(level, "debug")
