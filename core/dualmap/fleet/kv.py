"""The KV memory that requests in flight use at one member."""

from collections import OrderedDict
from math import inf

from dualmap.fleet.in_flight import InFlightRequest, Stage

# A decoding request without reports counts as ended after this time, or after this many times the mean silence of
# requests at their end, whichever is longer. Requests that are alive need not be reported more often.
SILENT_DECODE_S = 120.0
SILENT_DECODE_FACTOR = 10.0
# The weight of each request that ends in that mean.
_SILENCE_WEIGHT = 0.05


class KvAccount:
    """The prompts of requests in flight, and which of those requests are decoded."""

    def __init__(self) -> None:
        self.tokens = 0
        """Active KV tokens: the prompts of all requests that are pending or decoded."""
        self.decoding: OrderedDict[str, InFlightRequest] = OrderedDict()
        """The requests that are decoded, the one that is silent for longest first."""
        self._mean_silence_s = 0.0

    @property
    def most_silent(self) -> InFlightRequest:
        """The decoding request without a report for longest; there must be one."""
        return next(iter(self.decoding.values()))

    def add(self, request: InFlightRequest) -> None:
        """Count a request's prompt."""
        self.tokens += request.chain.tokens

    def decode(self, now: float, request: InFlightRequest) -> None:
        """Record that a request is decoded, as reported or assumed at ``now``."""
        request.stage, request.silent_since_s = Stage.DECODING, now
        self.decoding[request.request_id] = request
        self.decoding.move_to_end(request.request_id)

    def give_up(self, request: InFlightRequest) -> None:
        """Count a decoding request as ended without a report."""
        self.remove(request)
        request.stage = Stage.SILENT

    def remove(self, request: InFlightRequest) -> None:
        """Forget a request's prompt; a silent request's was forgotten before."""
        if request.stage is Stage.DECODING:
            del self.decoding[request.request_id]
        if request.stage is not Stage.SILENT:
            self.tokens -= request.chain.tokens

    def learn_silence(self, silence_s: float) -> None:
        """Learn from a request's end how long requests are silent that are alive."""
        self._mean_silence_s += _SILENCE_WEIGHT * (silence_s - self._mean_silence_s)

    def overdue_s(self) -> float:
        """Return when the most silent decoding request counts as ended; infinity if none is decoded."""
        for most_silent in self.decoding.values():
            return most_silent.silent_since_s + max(SILENT_DECODE_S, SILENT_DECODE_FACTOR * self._mean_silence_s)
        return inf
