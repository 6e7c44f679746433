"""``dualmap engine-sim``: the command that runs one simulated engine until a signal stops it.

This module parses the settings, and ``http_server.py`` serves the requests. SIGTERM (or Ctrl-C) drains the server, like
vLLM with a shutdown timeout. A second signal aborts the remaining requests.
"""

import asyncio
import signal
import sys
from dataclasses import replace
from typing import Final

import click

from dualmap_sim.option_checks import FiniteFloatRange, not_blank
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import ServerSettings

BLOCK_TOKENS: Final = 16
"""vLLM's block size. The presets use the traces' block size of 512."""
DRAIN_TIMEOUT_S: Final = 120.0
"""Seconds that a stopped server waits for running requests before it aborts them."""


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on. 0 selects a free port.",
)
@click.option(
    "--model", callback=not_blank, default="simulated", show_default=True, help="Model name that requests must use."
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="7b",
    show_default=True,
    help="Preset with the engine's speeds and memory. The preset pd is prefill-only and stops after one token.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(min=0),
    help="Capacity of the prefix cache in tokens. 0 disables the cache.  [default: the preset's]",
)
@click.option(
    "--speed",
    type=FiniteFloatRange(0.0001, 10_000),
    default=1.0,
    show_default=True,
    help="Seconds of simulated time per second. With --speed 10, the engine runs ten times as fast.",
)
@click.option("--adapter", "adapters", multiple=True, help="Name of a LoRA adapter that the engine serves. Repeatable.")
@click.option("--api-key", help="Require 'Authorization: Bearer KEY' under /v1/.")
def engine_sim(
    host: str,
    port: int,
    model: str,
    preset: str,
    cache_tokens: int | None,
    speed: float,
    adapters: tuple[str, ...],
    api_key: str | None,
) -> None:
    """Run a simulated OpenAI-compatible engine.

    The engine answers chat completions, completions and embeddings with generated words. The engine's speed follows a
    model with first-come, first-served prefill, a prefix cache and batched decode. Four bytes of a prompt count as one
    token. The command prints the engine's address on stderr.

    The engine cuts prompts at 20480 tokens with the presets 7b and pd, at 10240 with 14b, and at 131072 with agent.
    /v1/models and /tokenize report this limit as max_model_len.

    As with vLLM's development mode, POST /sleep puts the engine to sleep, and POST /wake_up wakes it.

    \b
    Example:
      dualmap engine-sim --port 8001 --model qwen --preset 7b --speed 10
      curl localhost:8001/v1/completions -d '{"model": "qwen", "prompt": "hello", "max_tokens": 8}'
    """
    config = replace(PRESETS[preset], block_tokens=BLOCK_TOKENS)
    if cache_tokens is not None:
        config = replace(config, cache_tokens=cache_tokens)
    settings = ServerSettings(
        host=host, port=port, model=model, config=config, speed=speed, api_key=api_key, adapters=adapters
    )
    sys.exit(asyncio.run(_serve(settings)))


async def _serve(settings: ServerSettings) -> int:
    """Serve until a signal; return the exit code: 0 if every accepted request was answered."""
    from dualmap_sim.http_server import (
        EngineHttpServer,
    )  # Imported here because aiohttp takes a second to load, and --help does not need it.

    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = EngineHttpServer(settings)
    try:
        address = await server.start()
    except OSError as error:
        click.echo(f"dualmap engine-sim: cannot listen on {settings.host}:{settings.port}: {error}", err=True)
        await server.close()
        return 1
    click.echo(f"dualmap engine-sim ready http={address} model={settings.model}", err=True)
    await signals.get()
    drained = asyncio.ensure_future(server.drain())
    hurried = asyncio.ensure_future(signals.get())
    await asyncio.wait((drained, hurried), timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    answered_all = drained.done()
    for task in (drained, hurried):
        task.cancel()
    await server.close()
    return 0 if answered_all else 1
