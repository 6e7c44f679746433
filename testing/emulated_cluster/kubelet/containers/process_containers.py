"""One container of a pod: runs one process at a time, probes it, and restarts it by the restart policy.

``pods.py`` starts and stops the container, ``probes.py`` checks it, and ``runtimes.py`` starts its process.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from emulated_cluster.kubelet.containers.actions import ActionTarget, perform
from emulated_cluster.kubelet.containers.containers import Object, PodLocation, log_name
from emulated_cluster.kubelet.containers.probes import Probe, verdicts
from emulated_cluster.kubelet.containers.runtimes import Runtime, Started
from emulated_cluster.kubelet.containers.status import ContainerView, Running, State, Terminated, Waiting
from emulated_cluster.kubelet.isolation.processes import Process
from emulated_cluster.kubelet.pod_spec.environment import ContainerConfigError

# After preStop, a process has at least this time between SIGTERM and SIGKILL, as with a real kubelet.
MINIMUM_GRACE_S: Final = 2.0
# A real kubelet's restart back-off is ten times as long, which is too slow for tests.
BACK_OFF_S: Final = 1.0
BACK_OFF_LIMIT_S: Final = 30.0
# Time between two attempts to start: a missing object, such as a Secret, may be created later.
_CONFIG_RETRY_S: Final = 0.5


class ProcessContainer:
    """A container whose command runs as a local process."""

    def __init__(
        self,
        pod: Object,
        spec: Object,
        location: PodLocation,
        runtime: Runtime,
        on_change: Callable[[], None],
        *,
        policy: str | None = None,
    ) -> None:
        """``policy`` decides on restarts; default: the pod's restartPolicy."""
        self._pod = pod
        self._runtime = runtime
        self._policy = policy or pod["spec"].get("restartPolicy", "Always")
        self._spec = spec
        self._location = location
        self._on_change = on_change
        self.log = location.node.logs / log_name(pod["metadata"]["name"], pod["metadata"]["uid"], spec["name"])
        self._probes = {kind: Probe.read(spec, f"{kind}Probe") for kind in ("startup", "liveness", "readiness")}
        self._process: Process | None = None
        self._started_as: Started | None = None
        initializing = bool(pod["spec"].get("initContainers"))
        self._state: State = Waiting(reason="PodInitializing" if initializing else "ContainerCreating")
        self._over = False
        self._last: Terminated | None = None
        self._restarts = 0
        self._started = asyncio.Event()
        self._ready = False
        self._stopping = asyncio.Event()
        self._deadline_s = float("inf")
        self._grace: asyncio.Timeout | None = None

    @property
    def view(self) -> ContainerView:
        """The current state."""
        running = isinstance(self._state, Running)
        return ContainerView(
            name=self._spec["name"],
            image=self._spec.get("image", ""),
            container_id="" if self._process is None else f"process://{self._process.pid}",
            state=self._state,
            last=self._last,
            restarts=self._restarts,
            started=running and self._started.is_set(),
            ready=running and self._started.is_set() and self._ready,
            over=self._over,
        )

    @property
    def pid(self) -> int | None:
        """The ID of the main process while it runs."""
        return self._process.pid if self._process is not None and isinstance(self._state, Running) else None

    async def run(self) -> None:
        """Run the process, and restart it after its end, until ``stop`` or until the restart policy forbids a
        restart."""
        try:
            await self._live_again_and_again()
        finally:
            self._over = True
            self._on_change()

    def stop(self, grace_s: float) -> None:
        """Run preStop, send SIGTERM, and send SIGKILL after ``grace_s`` at the latest."""
        self._stopping.set()
        self._shorten(grace_s)

    def crash(self) -> None:
        """Kill the process and its children."""
        if self._process is None or not isinstance(self._state, Running):
            raise ProcessLookupError(f"container {self._spec['name']} is not running")
        self._process.kill()

    async def execute(self, command: Sequence[str], *, log: Path) -> int:
        """Run a command in the container, writing to ``log``; raises ProcessLookupError if the container does not
        run."""
        if self._started_as is None or not isinstance(self._state, Running):
            raise ProcessLookupError(f"container {self._spec['name']} is not running")
        return await self._started_as.execute(command, log)

    async def _live_again_and_again(self) -> None:
        while not self._stopping.is_set():
            try:
                exit_code = await self._live()
            except ContainerConfigError as error:
                self._become(Waiting(reason="CreateContainerConfigError", message=str(error)))
                await self._wait_unless_stopped(_CONFIG_RETRY_S)
                continue
            if self._stopping.is_set() or not self._starts_again(exit_code):
                return
            await self._back_off()
        if self._last is not None:
            self._become(self._last)

    async def _live(self) -> int:
        """Run the process once, from its start to its end; return its exit status."""
        started = await self._runtime.start(self.log)
        self._started_as = started
        self._process = process = started.process
        started_s = time.time()
        try:
            self._started.clear()
            self._ready = False
            self._become(Running(started_s=started_s))
            await self._until_it_ends(process, self._action_target(started))
        finally:
            process.kill()
            exit_code = await process.wait()
            self._become(Terminated(exit_code=exit_code, started_s=started_s, finished_s=time.time()))
        return exit_code

    async def _until_it_ends(self, process: Process, target: ActionTarget) -> None:
        """Wait for the end of the process. A failed probe or ``stop`` ends the process."""
        readiness = asyncio.create_task(self._follow_readiness(target))
        unhealthy = asyncio.create_task(self._until_unhealthy(target))
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({readiness, unhealthy, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if unhealthy.done():
                self._shorten(unhealthy.result())
            if readiness.done():
                readiness.result()
            unhealthy.cancel()
            if not ended.done():
                await self._end(process, target)
        finally:
            await _cancelled(readiness, unhealthy, ended, stopping)
            self._deadline_s = self._deadline_s if self._stopping.is_set() else float("inf")

    async def _end(self, process: Process, target: ActionTarget) -> None:
        """Run preStop and send SIGTERM; return when the process has ended or its grace period is over."""
        handler = self._spec.get("lifecycle", {}).get("preStop")
        if handler is not None:
            await self._within(self._deadline_s, perform(handler, target, timeout_s=None), process.wait())
        process.terminate()
        least_s = asyncio.get_running_loop().time() + MINIMUM_GRACE_S
        await self._within(max(self._deadline_s, least_s), process.wait())

    async def _within(self, deadline_s: float, *work: Coroutine[Any, Any, object]) -> None:
        """Wait until one of ``work`` ends, or until ``deadline_s``, which ``stop`` may change."""
        tasks = [asyncio.create_task(each) for each in work]
        try:
            async with asyncio.timeout_at(deadline_s) as self._grace:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            self._grace = None
            await _cancelled(*tasks)

    def _shorten(self, grace_s: float) -> None:
        deadline_s = asyncio.get_running_loop().time() + grace_s
        if deadline_s >= self._deadline_s:
            return
        self._deadline_s = deadline_s
        if self._grace is not None and not self._grace.expired():
            self._grace.reschedule(deadline_s)

    async def _until_unhealthy(self, target: ActionTarget) -> float:
        """Wait until a startup or liveness probe fails; return the grace period of the restart."""
        startup = self._probes["startup"]
        if startup is not None:
            async with contextlib.aclosing(verdicts(startup, target)) as answers:
                if not await anext(answers):
                    return self._grace_s(startup)
        self._started.set()
        self._on_change()
        liveness = self._probes["liveness"]
        if liveness is not None:
            async with contextlib.aclosing(verdicts(liveness, target)) as answers:
                async for alive in answers:
                    if not alive:
                        return self._grace_s(liveness)
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the event is never set")

    async def _follow_readiness(self, target: ActionTarget) -> None:
        """Update ``ready`` by the readiness probe until the process ends."""
        await self._started.wait()
        readiness = self._probes["readiness"]
        if readiness is None:
            self._set_ready(True)
        else:
            async with contextlib.aclosing(verdicts(readiness, target)) as answers:
                async for ready in answers:
                    self._set_ready(ready)
        await asyncio.Event().wait()

    def _set_ready(self, ready: bool) -> None:
        if ready is not self._ready:
            self._ready = ready
            self._on_change()

    def _grace_s(self, probe: Probe) -> float:
        pods: float = self._pod["spec"].get("terminationGracePeriodSeconds", 30)
        return pods if probe.grace_s is None else probe.grace_s

    def _starts_again(self, exit_code: int) -> bool:
        return self._policy == "Always" or (self._policy == "OnFailure" and exit_code != 0)

    async def _back_off(self) -> None:
        """Wait before the next start: no wait before the first start, then a growing time. ``stop`` ends the wait."""
        if self._restarts:
            delay_s = min(BACK_OFF_LIMIT_S, BACK_OFF_S * 2 ** (self._restarts - 1))
            self._become(Waiting(reason="CrashLoopBackOff", message=f"back-off {delay_s:g} s"))
            await self._wait_unless_stopped(delay_s)
        if not self._stopping.is_set():
            self._restarts += 1

    async def _wait_unless_stopped(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    def _become(self, state: State) -> None:
        if isinstance(self._state, Terminated):
            self._last = self._state
        self._state = state
        self._on_change()

    def _action_target(self, started: Started) -> ActionTarget:
        named = {each["name"]: each["containerPort"] for each in self._spec.get("ports") or () if "name" in each}

        async def execute(command: Sequence[str]) -> int:
            return await started.execute(command, self.log)

        return ActionTarget(address=self._location.address, ports=named, execute=execute)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the running tasks and wait for their end; raise the error of a failed task."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
