"""The settings of one engine server: between ``engine_server.py``, which parses them, and ``http_server.py``.

It is separate from both, so that the command line can read its flags without loading an HTTP server.
"""

from dataclasses import dataclass

from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of an engine server. ``port`` 0 takes any free one; ``speed`` is model s per wall s."""

    host: str
    port: int
    model: str
    config: EngineConfig
    speed: float
    api_key: str | None
