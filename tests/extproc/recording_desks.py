"""A picker whose requests are recorded in a folder, for tests of the recording."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from dualmap.pools.pool import Pool
from dualmap.recordings.values import Line
from dualmap.requests import Usage
from dualmap_extproc.errors import Refused
from dualmap_extproc.recording.folder import RecordingFolder
from dualmap_extproc.recording.metrics import RecordingMetrics
from dualmap_extproc.recording.recorder import Recorder
from dualmap_extproc.recording.writer import Batch, Description, Writer
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from extproc.envoy_messages import chat, pool
from recorded_folder import lines_of

EPOCH_S = 1_764_291_200.0
HASH_KEY = b"the hash key of these tests"
MAX_BYTES = 10**6


class RecordingDesk:
    """A picker, its recorder and its writer, which writes in ``tick`` instead of in a thread."""

    def __init__(
        self, folder: Path, *pools: Pool, sample: float = 1.0, max_bytes: int = MAX_BYTES, hash_key: bytes = HASH_KEY
    ) -> None:
        self.path = folder
        self.clock_s = 0.0
        self.folder = RecordingFolder(folder)
        self.folder.open()
        self.registry = CollectorRegistry()
        description = Description(router="r1", program="0.1.0", sample=sample)
        self.writer = DirectWriter(
            self.folder,
            description,
            RecordingMetrics(self.registry),
            max_bytes=max_bytes,
            hash_key=hash_key,
            clock=lambda: self.clock_s,
        )
        self.recorder = Recorder(self.writer, sample=sample, offset_s=lambda: EPOCH_S)
        observations = FanOut()
        self.recorder.subscribe(observations)
        headers = frozenset({"x-request-id"})
        self.picker = Picker(Limits(), observations.report, id_prefix="r1", hash_key=hash_key, observed_headers=headers)
        self.picker.set_pools(0.0, pools or (pool(),))

    def ask(self, body: bytes | None = None, *, now: float = 10.0, **headers: str) -> Picked | Refused | AnswerLater:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.picker.pick(now, body or chat(), None, now, headers=named, resume=lambda _: None)

    def serve(self, body: bytes | None = None, *, now: float = 10.0, **headers: str) -> Picked:
        """Send a request whose answer ends two seconds later."""
        picked = self.ask(body, now=now, **headers)
        assert isinstance(picked, Picked)
        self.picker.access_log(now + 2.0, entry_of(picked))
        return picked

    def tick(self, now: float = 20.0) -> None:
        self.recorder.tick(now)

    def lines(self) -> list[Line]:
        return lines_of(self.path)

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"dualmap_recording_{name}")


class DirectWriter(Writer):
    """A writer that writes at once."""

    def put(self, batch: Batch) -> None:
        self.take(batch)


def entry_of(picked: Picked, **fields: object) -> AccessLogEntry:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=0)
    values = {
        "status": 200,
        "usage": usage,
        "total_s": 1.5,
        "attempts": 1,
        "served_endpoint": picked.destination.split(",")[0],
    }
    return AccessLogEntry(request_id=picked.request_id, **(values | fields))
