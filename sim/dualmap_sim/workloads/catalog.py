"""The workloads by name, and ``Workload``, a value that commands and worker processes share.

The generators and ``mooncake`` make the traces, and ``sessions`` adds sessions to the recorded traces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from dualmap_sim.workloads import agentic, poisson_chats, tool_agent, zipf_bursts
from dualmap_sim.workloads.agentic import agentic_workload
from dualmap_sim.workloads.mooncake import read_mooncake
from dualmap_sim.workloads.poisson_chats import poisson_chats_workload
from dualmap_sim.workloads.sessions import label_sessions
from dualmap_sim.workloads.statistics import Asked, Fact, compare
from dualmap_sim.workloads.synthetic import default_workload
from dualmap_sim.workloads.tool_agent import tool_agent_workload
from dualmap_sim.workloads.trace import Trace
from dualmap_sim.workloads.zipf_bursts import zipf_bursts_workload


class Generator(Protocol):
    """A function that generates a workload."""

    def __call__(self, requests: int, *, seed: int = 0) -> Trace:
        """Return a trace with that number of requests. Equal arguments give equal traces on any machine."""


WORKLOADS: Final[Mapping[str, Generator]] = MappingProxyType(
    {
        "default": default_workload,
        "tool_agent": tool_agent_workload,
        "agentic": agentic_workload,
        "zipf_bursts": zipf_bursts_workload,
        "poisson_chats": poisson_chats_workload,
    }
)
"""The generated workloads by name."""

ASKED: Final[Mapping[str, tuple[Asked, ...]]] = MappingProxyType(
    {
        "tool_agent": tool_agent.ASKED,
        "agentic": agentic.ASKED,
        "zipf_bursts": zipf_bursts.ASKED,
        "poisson_chats": poisson_chats.ASKED,
    }
)
"""The target figures of each generated workload, if it has any."""


class UnknownWorkload(Exception):
    """No workload has that name; the message lists the valid names."""

    def __init__(self, name: str) -> None:
        super().__init__(f"workload: {name!r} is not accepted; give one of {', '.join(WORKLOADS)}, or a trace")
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests to replay: ``requests`` requests, starting with number ``start``.

    The requests are read from a recorded ``trace`` in Mooncake's format, or from a router's ``recording``, of which
    ``recorded_pool`` is the pool to replay (``dualmap_sim.recordings.replays``). The recording has ``scale`` times as
    many sessions as it was recorded with. Without both, the workload ``name`` is
    generated with ``seed``.
    """

    name: str = "default"
    trace: Path | None = None
    recording: Path | None = None
    recorded_pool: str = ""
    scale: float = 1.0
    requests: int = 4000
    start: int = 0
    seed: int = 0

    def load(self) -> Trace:
        """Return the trace, neither capped nor scaled to a rate. A recorded trace gets session labels.

        A recorded trace may have fewer requests than requested. The workload must not be a router's recording. Raises
        UnknownWorkload, or TraceError for a trace that cannot be read.
        """
        assert self.recording is None, "dualmap_sim.recordings reads recordings"
        if self.trace is not None:
            return label_sessions(read_mooncake(self.trace, start=self.start, limit=self.requests))
        generator = WORKLOADS.get(self.name)
        if generator is None:
            raise UnknownWorkload(self.name)
        whole = generator(self.start + self.requests, seed=self.seed)
        return replace(whole, requests=whole.requests[self.start :])

    def facts(self, trace: Trace) -> tuple[Fact, ...]:
        """Return the statistics of the loaded trace and its target figures."""
        return compare(trace, ASKED.get(self.name, ()) if self.trace is None and self.recording is None else ())
