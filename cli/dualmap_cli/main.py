"""Entry point of ``dualmap``: lists every subcommand and imports only the subcommand that runs.

Start-up takes less than half a second, because a subcommand's module may import large libraries (gRPC, aiohttp, Envoy's
types). A module is imported when its subcommand is looked up, and never for the ``--help`` of another subcommand.
"""

import errno
import importlib
import os
import signal
import sys
from importlib.metadata import version
from typing import Any

import click

from dualmap_cli.interrupts import INTERRUPTED, SIGNAL_EXIT_BASE
from dualmap_cli.stderr import drop_what_stderr_refuses

# Subcommand -> (its module, its attribute in the module, its line in `dualmap --help`).
COMMANDS: dict[str, tuple[str, str, str]] = {
    "router": (
        "dualmap_extproc.app.main",
        "router",
        "Run the endpoint picker, which tells Envoy where to send each request.",
    ),
    "epp": (
        "dualmap_extproc.app.epp",
        "epp",
        "Run the endpoint picker of a gateway with the Inference Extension, such as Istio.",
    ),
    "operator": ("dualmap_operator.main", "operator", "Run the Kubernetes operator that reconciles InferencePools."),
    "pd-proxy": (
        "dualmap_sidecar.main",
        "pd_proxy",
        "Run the sidecar of a decode engine, which has prompts prefilled by other engines.",
    ),
    "envoy-config": (
        "dualmap_extproc.app.envoy_config",
        "envoy_config",
        "Print an Envoy bootstrap for the given pools.",
    ),
    "explain": (
        "dualmap_cli.explain.command",
        "explain",
        "Print which instance the router chooses for a request, and why.",
    ),
    "tokenize": (
        "dualmap_extproc.app.tokenize",
        "tokenize",
        "Print the token count of a request, and compare the ids with an engine's.",
    ),
    "policies": ("dualmap_extproc.app.explain", "policies", "List every routing policy with its paper or project."),
    "engine-sim": ("dualmap_sim.engine_server", "engine_sim", "Run a simulated OpenAI-compatible engine."),
    "simulate": ("dualmap_cli.simulate.simulate_command", "simulate", "Compare policies in virtual time."),
    "goodput": (
        "dualmap_cli.simulate.goodput_command",
        "goodput",
        "Find the highest rate at which each policy meets the SLO.",
    ),
    "fit": ("dualmap_cli.fit.command", "fit", "Fit the engine model to a recording of requests."),
    "plan": ("dualmap_cli.plan.command", "plan", "Find the least number of instances for recorded traffic."),
    "trace": ("dualmap_cli.trace.command", "trace", "Show, merge, export and import recordings of requests."),
    "demo": ("dualmap_cli.demo.command", "demo", "Replay a workload through a real Envoy, once per policy."),
}


class LazyGroup(click.Group):
    """A group of subcommands whose modules are imported on first use."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Parse the command line, run the subcommand and exit with its status, also if stderr is closed."""
        drop_what_stderr_refuses()
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
            # The rest of the output stays in a buffer, which Python writes at exit. A failure there would change the
            # exit status.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand, None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; report Ctrl-C if it arrives before the subcommand handles signals itself."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(f"\n{INTERRUPTED}", err=True)
            ctx.exit(SIGNAL_EXIT_BASE + signal.SIGINT)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands from COMMANDS, without importing the subcommands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("dualmap"), prog_name="dualmap")
def main() -> None:
    """Route each LLM request to an instance that caches its prefix.

    \b
    Try it here:         dualmap demo
    Run a router:        dualmap router --pool pool.yaml
    Behind a gateway:    dualmap epp --pool-name qwen --pool-namespace llm
    Run the operator:    dualmap operator --all-namespaces
    Configure Envoy:     dualmap envoy-config --pool pool.yaml > envoy.yaml
    Explain a decision:  dualmap explain --pool pool.yaml --request request.json
    Compare policies:    dualmap goodput --policy round_robin,dualmap
    Show a recording:    dualmap trace show recording
    Plan capacity:       dualmap plan --recording recording --engine engine.yaml
    """
