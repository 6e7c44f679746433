"""``dualmap engine-sim``: the command that runs one simulated engine until a signal stops it.

This module parses the settings, and ``http_server.py`` serves the requests. SIGTERM (or Ctrl-C) drains the server, like
vLLM with a shutdown timeout. A second signal aborts the remaining requests.
"""

import asyncio
import signal
import sys
from dataclasses import replace
from math import inf
from typing import Final

import click

from dualmap_sim.errors import CannotPublish
from dualmap_sim.option_checks import FiniteFloatRange, not_blank
from dualmap_sim.presets import PRESETS, EngineConfig
from dualmap_sim.server_settings import KvEventSettings, KvTransferSettings, ServerSettings

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
@click.option("--kv-events", is_flag=True, help="Publish KV events over ZeroMQ, as vLLM does.")
@click.option(
    "--kv-events-port",
    type=click.IntRange(0, 65535),
    default=5557,
    show_default=True,
    help="Port of the KV events. 0 selects a free port.",
)
@click.option(
    "--kv-events-replay-port",
    type=click.IntRange(0, 65535),
    default=5558,
    show_default=True,
    help="Port on which the engine sends missed KV events again. 0 selects a free port.",
)
@click.option(
    "--kv-events-encoding",
    type=click.Choice(["map", "array"]),
    default="map",
    show_default=True,
    help="Encoding of the KV events. vLLM uses arrays up to 0.23, and maps since 0.24.",
)
@click.option(
    "--kv-transfer",
    is_flag=True,
    help="Keep the KV of prompts for other engines, and pull KV from them, as vLLM does with a NIXL connector. "
    "Pull what the engine in x-kv-cache-source-host-port caches.",
)
@click.option(
    "--kv-transfer-tokens-per-second",
    type=FiniteFloatRange(1, 1e9),
    default=200_000.0,
    show_default=True,
    help="Speed at which other engines pull KV from this engine, in simulated time.",
)
@click.option(
    "--kv-transfer-hold",
    type=FiniteFloatRange(0.1, 3600),
    default=480.0,
    show_default=True,
    help="Seconds for which the engine keeps KV that no engine pulls, and waits for KV that it pulls.",
)
@click.option(
    "--kv-load-failure-policy",
    type=click.Choice(["fail", "recompute"]),
    default="fail",
    show_default=True,
    help="What the engine does if it cannot pull KV: fail the request, or compute the prompt.",
)
@click.option(
    "--data-parallel-rank",
    type=click.IntRange(0, 1023),
    default=0,
    show_default=True,
    help="Rank of the engine in its KV events, which is added to their ports.",
)
def engine_sim(
    host: str,
    port: int,
    model: str,
    preset: str,
    cache_tokens: int | None,
    speed: float,
    adapters: tuple[str, ...],
    api_key: str | None,
    kv_events: bool,
    kv_events_port: int,
    kv_events_replay_port: int,
    kv_events_encoding: str,
    kv_transfer: bool,
    kv_transfer_tokens_per_second: float,
    kv_transfer_hold: float,
    kv_load_failure_policy: str,
    data_parallel_rank: int,
) -> None:
    """Run a simulated OpenAI-compatible engine.

    The engine answers chat completions, completions and embeddings with generated words. The engine's speed follows a
    model with first-come, first-served prefill, a prefix cache and batched decode. Four bytes of a prompt count as one
    token. The command prints the engine's address on stderr.

    The engine cuts prompts at 20480 tokens with the presets 7b and pd, at 10240 with 14b, and at 131072 with agent.
    /v1/models and /tokenize report this limit as max_model_len.

    As with vLLM's development mode, POST /sleep puts the engine to sleep, POST /wake_up wakes it, and POST
    /reset_prefix_cache empties its prefix cache.

    With --kv-transfer, the engine is a prefiller for requests whose kv_transfer_params ask for a remote decode, and
    decodes prompts of other engines without computing them.

    With --kv-events, requests in flight and cached prefixes share one memory of --cache-tokens, and blocks of answers
    are cached as well. GET /kv_event_sources shows the ports.

    \b
    Example:
      dualmap engine-sim --port 8001 --model qwen --preset 7b --speed 10
      curl localhost:8001/v1/completions -d '{"model": "qwen", "prompt": "hello", "max_tokens": 8}'
    """
    config = _engine_config(preset, cache_tokens, kv_transfer=kv_transfer)
    if kv_events and config.cache_tokens < 2 * config.block_tokens:
        raise click.UsageError(
            f"--kv-events needs a prefix cache; give --cache-tokens at least {2 * config.block_tokens}"
        )
    for kv_port in (kv_events_port, kv_events_replay_port):
        if kv_port + data_parallel_rank > 65535:
            raise click.UsageError(f"port {kv_port} plus rank {data_parallel_rank} is above 65535")
    settings = ServerSettings(
        host=host,
        port=port,
        model=model,
        config=config,
        speed=speed,
        api_key=api_key,
        adapters=adapters,
        kv_events=KvEventSettings(
            port=kv_events_port,
            replay_port=kv_events_replay_port,
            rank=data_parallel_rank,
            as_arrays=kv_events_encoding == "array",
        )
        if kv_events
        else None,
        kv_transfer=KvTransferSettings(
            tokens_per_s=kv_transfer_tokens_per_second,
            hold_s=kv_transfer_hold,
            recompute=kv_load_failure_policy == "recompute",
        )
        if kv_transfer
        else None,
    )
    sys.exit(asyncio.run(_serve(settings)))


def _engine_config(preset: str, cache_tokens: int | None, *, kv_transfer: bool) -> EngineConfig:
    """Return the configuration of a preset with vLLM's block size, and with another cache if one is given."""
    config = replace(PRESETS[preset], block_tokens=BLOCK_TOKENS)
    if cache_tokens is not None:
        config = replace(config, cache_tokens=cache_tokens)
    if kv_transfer:
        # The transfer takes its time before the engine gets the request.
        config = replace(config, pull_tokens_per_s=inf)
    return config


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
    except CannotPublish as error:
        click.echo(f"dualmap engine-sim: {error}", err=True)
        await server.close()
        return 1
    endpoints = server.kv_endpoints
    events = f" kv_events={endpoints[0]} kv_replay={endpoints[1]}" if endpoints is not None else ""
    click.echo(f"dualmap engine-sim ready http={address} model={settings.model}{events}", err=True)
    await signals.get()
    drained = asyncio.ensure_future(server.drain())
    hurried = asyncio.ensure_future(signals.get())
    await asyncio.wait((drained, hurried), timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    answered_all = drained.done()
    for task in (drained, hurried):
        task.cancel()
    await server.close()
    return 0 if answered_all else 1
