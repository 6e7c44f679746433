"""Streams that continue on another engine after their engine has failed, as with ``dualmap pd-proxy --continue``.

The proxy asks the second endpoint of the request's pick, with the prompt and the text so far. The engine there computes
both again, except what it caches or fetches, and generates the rest. The proxy itself does not fail.
"""

from collections.abc import Sequence
from dataclasses import replace

from dualmap_sim.engine_requests import EngineRequest, FirstToken
from dualmap_sim.records import Record


class Continuations:
    """The streams of one run that could continue."""

    def __init__(self) -> None:
        self._second: dict[str, str] = {}
        # The engine's decode step at the first token of each request.
        self._began: dict[str, int] = {}
        self._broke_s: dict[str, float] = {}

    def picked(self, request_id: str, endpoints: Sequence[str]) -> None:
        """Remember the endpoints of a pick."""
        if len(endpoints) > 1:
            self._second[request_id] = endpoints[1]

    def began(self, event: FirstToken) -> None:
        """Remember the first token of a request."""
        self._began[event.request_id] = event.decode_step

    def rest_of(self, record: Record, *, decode_steps: int) -> tuple[str, EngineRequest] | None:
        """Return an endpoint and the request for the rest of a stream that breaks after ``decode_steps`` of its engine.

        None if the stream has no first token, no second endpoint, or has continued before.
        """
        work = record.arrival.work
        endpoint, began = self._second.get(work.request_id), self._began.get(work.request_id)
        if endpoint is None or began is None or record.continued:
            return None
        generated = 1 + decode_steps - began
        tokens, left = work.prompt_tokens + generated, work.output_tokens - generated
        return endpoint, replace(work, prompt_tokens=tokens, output_tokens=left)

    def asked(self, now: float, record: Record) -> None:
        """Record that another engine got the rest of a stream."""
        record.continued = True
        self._broke_s[record.arrival.request_id] = now

    def went_on(self, record: Record, event: FirstToken) -> None:
        """Record the first token of the rest of a stream."""
        record.stall_s = event.at_s - self._broke_s.pop(event.request_id)
        record.recomputed_tokens = event.prompt_tokens - event.cached_tokens - event.pulled_tokens
