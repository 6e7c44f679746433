"""The settings of one engine server, which ``engine_server.py`` parses and ``http_server.py`` uses.

The module is separate, so that the command line can parse its flags without loading an HTTP server.
"""

from dataclasses import dataclass

from dualmap_sim.presets import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of an engine server. ``port`` 0 selects a free port; ``speed`` is model seconds per real second."""

    host: str
    port: int
    model: str
    config: EngineConfig
    speed: float
    api_key: str | None
    adapters: tuple[str, ...] = ()
