"""Resources of a process from /proc, for the detection of leaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.waiting import until

# The numbers of connections and helper threads vary. A leak adds one per request, and tests send dozens of requests.
SLACK = 8
SETTLE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResources:
    """File descriptors and threads of one process."""

    descriptors: int
    threads: int

    def exceeds(self, before: "ProcessResources") -> bool:
        """Return whether these resources clearly exceed ``before``."""
        return self.descriptors > before.descriptors + SLACK or self.threads > before.threads + SLACK


def resources_of(pid: int) -> ProcessResources:
    """Return the resources of a running process."""
    process = Path(f"/proc/{pid}")
    return ProcessResources(
        descriptors=len(list((process / "fd").iterdir())), threads=len(list((process / "task").iterdir()))
    )


def resident_mib(pid: int) -> float:
    """Return the resident memory of a running process, in MiB."""
    return _status_kib(pid, "VmRSS") / 1024


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a running process has had."""
    return _status_kib(pid, "VmHWM") * 1024


def _status_kib(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


async def wait_for_release(before: Mapping[str, ProcessResources], pids: Mapping[str, int]) -> None:
    """Wait until no process holds clearly more resources than the process of the same name did before."""

    async def released() -> bool:
        return not any(resources_of(pid).exceeds(before[name]) for name, pid in pids.items())

    try:
        await until(released, "descriptors and threads are released", timeout_s=SETTLE_TIMEOUT_S)
    except AssertionError as error:
        now = {name: resources_of(pid) for name, pid in pids.items()}
        raise AssertionError(f"{error}: {dict(before)} before, {now} now") from error
