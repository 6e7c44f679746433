"""How slow a member is by its whole answers: responses without streaming, which show no first token.

An answer's slowness is its duration as a multiple of what the pool expects for it (``AnswerCost``). Compared with the
other members' answers, it shows that the member is slower, but not whether its prefill or its decoding is. The router
predicts the time of the first token, so the prefill is assumed to cause the whole difference. The same bounds as for
prefills hold for what one client, or a few answers, can change (``dualmap.fleet.samples``).
"""

from math import exp, sqrt
from typing import Final

from dualmap.fleet.samples import (
    AGREEMENT,
    FADE_ROUNDS,
    FRESH_ROUNDS,
    Agreement,
    RecentSamples,
    near,
    upper_median,
)

# The median is taken over this many answers. More answers would show a slow member later: at 1 request/s, each of four
# members gets 15 in a minute.
WINDOW: Final = 9
MOST_OF_CLIENT: Final = 5
# The old samples that count beside the first new one, so that one answer shows whether the member is still slow.
_KEPT: Final = 2
# The prefill counts as at least this part of an answer, which limits how much a difference of durations can mean.
_LEAST_PREFILL: Final = 0.25
# A difference counts as far as it exceeds the width of the middle half of the samples times this factor, divided by the
# root of their number: about two standard errors of a median.
_UNCERTAINTY: Final = 2.0


class WholeAnswers:
    """The slowness of a member's recent whole answers, relative to the other members of its pool."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._samples = RecentSamples(window=WINDOW, most=MOST_OF_CLIENT, prior=1.0, priors=0)
        self._last_round = 0.0
        # The answers in flight.
        self._awaited = 0

    def await_one(self) -> None:
        """Record that an answer is expected from the member."""
        self._awaited += 1

    def await_one_less(self) -> None:
        """Record that an expected answer has ended, or is given up."""
        self._awaited -= 1

    def add(self, now: float, client: int, *, work_s: float, tokens: int, seconds: float) -> bool:
        """Record a client's answer of ``tokens``; return whether it may teach anything."""
        agreement, cost = self._agreement, self._agreement.answer_cost
        expected_s = cost.expected_s(work_s, tokens)
        if not cost.is_known:
            cost.observe(work_s, tokens, seconds)
            return False
        if self._age > 0.0:
            self._samples.keep_newest(_KEPT)
        self._last_round = agreement.rounds
        if not self._samples.add(now, client, seconds / expected_s):
            return False
        median = self._median()
        agreement.answers.report(self, median)
        cost.observe(work_s, tokens, expected_s * near(seconds / expected_s, median))
        return True

    def relative(self) -> float:
        """Return how many times slower the member's prefill is than the pool's; about 1 without new samples.

        While an answer is awaited, old samples count in full. A slow member therefore gets one request at a time
        that tests it, however long its answers take.
        """
        if not self._samples.ordered:
            return 1.0
        median, common, age = self._median(), self._agreement.answers.value, self._age
        excess = max(median, common) / min(median, common) - 1.0 - self._uncertainty() / common
        part = max(self._agreement.answer_cost.prefill_part, _LEAST_PREFILL)
        factor = min(1.0 + max(0.0, excess) / part, AGREEMENT)
        if age > 0.0 and not self._awaited:
            factor **= exp(-age / FADE_ROUNDS)
        return factor if median > common else 1.0 / factor

    def forget(self) -> None:
        """Take no further part in the common median: the member left the pool."""
        self._agreement.answers.forget(self)

    @property
    def _age(self) -> float:
        """The rounds since the samples became old."""
        return self._agreement.rounds - self._last_round - FRESH_ROUNDS

    def _uncertainty(self) -> float:
        ordered = self._samples.ordered
        quarter = len(ordered) // 4
        return _UNCERTAINTY * (ordered[-1 - quarter] - ordered[quarter]) / sqrt(len(ordered))

    def _median(self) -> float:
        return upper_median(self._samples.ordered, self._agreement.answers.value, window=WINDOW)
