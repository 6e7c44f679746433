"""The settings of one engine server, which ``engine_server.py`` parses and ``http_server.py`` uses.

The module is separate, so that the command line can parse its flags without loading an HTTP server.
"""

from dataclasses import dataclass

from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSettings:
    """How an engine publishes KV events. Port 0 selects a free port. The rank is added to other ports, as in vLLM.

    ``as_arrays`` selects the encoding of vLLM up to 0.23. The last ``buffer_steps`` messages can be replayed. A replay
    drops messages when ``send_limit`` messages wait for a slow reader.
    """

    port: int = 5557
    replay_port: int = 5558
    rank: int = 0
    as_arrays: bool = False
    buffer_steps: int = 10_000
    send_limit: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferSettings:
    """How an engine hands over KV, and pulls it, as vLLM with a NIXL connector does.

    A transfer takes the number of tokens divided by ``tokens_per_s``, in model time. The engine keeps KV that no engine
    pulls for ``hold_s`` seconds of real time, and waits as long for the KV of another engine. If KV cannot be pulled,
    the engine computes the prompt with ``recompute``; otherwise the request fails.
    """

    tokens_per_s: float = 200_000.0
    hold_s: float = 480.0
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of an engine server. ``port`` 0 selects a free port; ``speed`` is model seconds per real second.

    Without ``kv_events``, the engine publishes no KV events. Without ``kv_transfer``, it ignores the field
    ``kv_transfer_params``.
    """

    host: str
    port: int
    model: str
    config: EngineConfig
    speed: float
    api_key: str | None
    adapters: tuple[str, ...] = ()
    kv_events: KvEventSettings | None = None
    kv_transfer: KvTransferSettings | None = None
