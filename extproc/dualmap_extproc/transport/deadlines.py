"""The task that calls the picker at its deadlines."""

import asyncio
import contextlib
from math import inf
from typing import Final

from dualmap_extproc.request.picker import Picker

_POLL_S: Final = 1.0
# The poll interval while requests wait, and for _POLL_S after the last of them. Every event may then change deadlines,
# and a check of all members' deadlines may take 0.1 ms.
_WAITING_POLL_S: Final = 0.02
# The shortest sleep. One call of the picker handles deadlines that are less than this time apart.
_PAUSE_S: Final = 0.005


async def keep_deadlines(picker: Picker) -> None:
    """Call the picker at each of its deadlines, until cancelled.

    The task sleeps until the next deadline, at most one second, and at most 20 ms while requests wait.
    """
    clock = asyncio.get_running_loop().time
    first_waiting = asyncio.Event()
    picker.on_first_waiting(first_waiting.set)
    often_until_s = -inf
    while True:
        deadline_s = picker.next_deadline()
        if deadline_s is not None and deadline_s <= clock():
            picker.on_deadline(clock())
            deadline_s = picker.next_deadline()
        if picker.has_waiting or first_waiting.is_set():
            often_until_s = clock() + _POLL_S
        first_waiting.clear()
        often = clock() < often_until_s
        sleep_s = _WAITING_POLL_S if often else _POLL_S
        if deadline_s is not None:
            # The sleep is never zero, so that a deadline that stays in the past does not block the event loop.
            sleep_s = min(max(deadline_s - clock(), _PAUSE_S), sleep_s)
        if often:
            # A router that asks another about each request would otherwise wake the task for each of them.
            await asyncio.sleep(sleep_s)
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(sleep_s):
                await first_waiting.wait()
