"""The KV memory that requests in flight use at one member."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf

from dualmap.fleet.distinct_blocks import DistinctBlocks
from dualmap.fleet.in_flight import InFlightRequest, Stage

# A decoding request without reports counts as ended after SILENT_DECODE_S or SILENT_DECODE_FACTOR times the mean
# silence, whichever is longer. The mean silence is the mean time between a request's last report and its end.
SILENT_DECODE_S = 120.0
SILENT_DECODE_FACTOR = 10.0
# The weight of each ended request in the mean silence.
_SILENCE_WEIGHT = 0.05


class KvAccount:
    """The KV memory of requests in flight at one member, and the requests that are decoding.

    The account knows the prompts' lengths, but not what they share. An engine stores a shared prefix only once, and may
    report how much memory its requests use (``measured``).
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Active KV tokens: the prompt tokens of all pending and decoding requests."""
        self.sequences = 0
        """The number of sequences that the engine runs for all pending and decoding requests."""
        self._used: int | None = None
        # The prompt tokens of the requests that may use memory after the engine's report: they were pending, or were
        # sent later. The engine gives a prompt its memory only when the prompt's prefill starts.
        self._later: dict[str, int] = {}
        self._later_tokens = 0
        self.decoding: OrderedDict[str, InFlightRequest] = OrderedDict()
        """The decoding requests; the request with the oldest report is first."""
        self._mean_silence_s = 0.0
        self.distinct: DistinctBlocks | None = None
        """The distinct blocks of all pending and decoding requests; None before ``count_distinct``."""

    @property
    def most_silent(self) -> InFlightRequest:
        """The decoding request with the oldest report; a decoding request must exist."""
        return next(iter(self.decoding.values()))

    @property
    def used_tokens(self) -> float:
        """The most KV tokens that the engine's requests use by its last report; infinity if it reports nothing.

        The number includes the requests of others in the report. It does not fall before the next report.
        """
        return inf if self._used is None else self._used + self._later_tokens

    def measured(self, used_tokens: int | None, pending: Iterable[InFlightRequest]) -> None:
        """Take an engine's report of the KV tokens that its requests use, None if it reports no number.

        ``pending`` are the requests whose prefill has not ended.
        """
        self._used = used_tokens
        self._later = {} if used_tokens is None else {each.request_id: each.chain.tokens for each in pending}
        self._later_tokens = sum(self._later.values())

    def count_distinct(self, pending: Iterable[InFlightRequest]) -> DistinctBlocks:
        """Count the distinct blocks from now on, which most policies do not need.

        ``pending`` are the requests whose prefill has not ended.
        """
        self.distinct = DistinctBlocks((*pending, *self.decoding.values()))
        return self.distinct

    def add(self, request: InFlightRequest) -> None:
        """Add a request's prompt tokens."""
        if self.distinct is not None:
            self.distinct.add(request.chain)
        self.tokens += request.chain.tokens
        self.sequences += request.sequences
        if self._used is not None:
            self._later[request.request_id] = request.chain.tokens
            self._later_tokens += request.chain.tokens

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
            self.sequences -= request.sequences
            if self.distinct is not None:
                self.distinct.remove(request.chain)
            self._later_tokens -= self._later.pop(request.request_id, 0)

    def keep(self) -> Callable[[], None]:
        """Return a function that puts the account back to its present state."""
        # The distinct blocks are built again at their next use.
        kept = vars(self) | {"decoding": self.decoding.copy(), "_later": self._later.copy(), "distinct": None}
        return lambda: vars(self).update(kept)

    def learn_silence(self, silence_s: float) -> None:
        """Add the time between a request's last report and its end to the mean."""
        self._mean_silence_s += _SILENCE_WEIGHT * (silence_s - self._mean_silence_s)

    def overdue_s(self) -> float:
        """Return the time at which the first of ``decoding`` counts as ended; infinity if none is decoding."""
        for most_silent in self.decoding.values():
            return most_silent.silent_since_s + max(SILENT_DECODE_S, SILENT_DECODE_FACTOR * self._mean_silence_s)
        return inf
