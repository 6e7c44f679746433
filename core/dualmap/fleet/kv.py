"""The KV memory that requests in flight use at one member."""

from collections import OrderedDict
from math import inf

from dualmap.fleet.in_flight import InFlightRequest, Stage

# A decoding request without reports counts as ended after SILENT_DECODE_S or SILENT_DECODE_FACTOR times the mean
# silence, whichever is longer. The mean silence is the mean time between a request's last report and its end.
SILENT_DECODE_S = 120.0
SILENT_DECODE_FACTOR = 10.0
# The weight of each ended request in the mean silence.
_SILENCE_WEIGHT = 0.05


class KvAccount:
    """The KV memory of requests in flight at one member, and the requests that are decoding."""

    def __init__(self) -> None:
        self.tokens = 0
        """Active KV tokens: the prompt tokens of all pending and decoding requests."""
        self.decoding: OrderedDict[str, InFlightRequest] = OrderedDict()
        """The decoding requests; the request with the oldest report is first."""
        self._mean_silence_s = 0.0

    @property
    def most_silent(self) -> InFlightRequest:
        """The decoding request with the oldest report; a decoding request must exist."""
        return next(iter(self.decoding.values()))

    def add(self, request: InFlightRequest) -> None:
        """Add a request's prompt tokens."""
        self.tokens += request.chain.tokens

    def decode(self, now: float, request: InFlightRequest) -> None:
        """Record that a request is decoding at ``now``, reported or assumed."""
        request.stage, request.silent_since_s = Stage.DECODING, now
        self.decoding[request.request_id] = request
        self.decoding.move_to_end(request.request_id)

    def give_up(self, request: InFlightRequest) -> None:
        """Count a decoding request as ended without a report."""
        self.remove(request)
        request.stage = Stage.SILENT

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request's prompt tokens; a silent request's tokens were removed earlier."""
        if request.stage is Stage.DECODING:
            del self.decoding[request.request_id]
        if request.stage is not Stage.SILENT:
            self.tokens -= request.chain.tokens

    def learn_silence(self, silence_s: float) -> None:
        """Add a silence before a request's end to the mean silence."""
        self._mean_silence_s += _SILENCE_WEIGHT * (silence_s - self._mean_silence_s)

    def overdue_s(self) -> float:
        """Return the time at which the first of ``decoding`` counts as ended; infinity if none is decoding."""
        for most_silent in self.decoding.values():
            return most_silent.silent_since_s + max(SILENT_DECODE_S, SILENT_DECODE_FACTOR * self._mean_silence_s)
        return inf
