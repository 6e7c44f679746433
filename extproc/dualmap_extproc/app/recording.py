"""Starts the recording if the settings contain one."""

import time
from asyncio import get_running_loop
from contextlib import suppress

from dualmap_extproc.recording.folder import RecordingFolder
from dualmap_extproc.recording.metrics import RecordingMetrics
from dualmap_extproc.recording.recorder import Recorder
from dualmap_extproc.recording.writer import Description, Writer
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.settings import Settings
from dualmap_extproc.telemetry.metrics import Metrics


def start_recording(settings: Settings, observations: FanOut, metrics: Metrics, *, version: str) -> Recorder | None:
    """Return a recorder that has subscribed, or None if the settings contain no recording.

    Raises RecordingError for a folder that this router may not use.
    """
    if settings.recording is None:
        return None
    folder = RecordingFolder(settings.recording.folder)
    with suppress(OSError):
        # The writer tries again, and logs why it cannot.
        folder.open()
    writer = Writer(
        folder,
        Description(router=settings.replica_id, program=version, sample=settings.recording.sample),
        RecordingMetrics(metrics.registry),
        max_bytes=settings.recording.max_bytes,
        hash_key=settings.hash_key,
    )
    writer.start()
    loop_time = get_running_loop().time
    recorder = Recorder(writer, sample=settings.recording.sample, offset_s=lambda: time.time() - loop_time())
    recorder.subscribe(observations)
    return recorder
