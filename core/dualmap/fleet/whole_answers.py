"""How slow a member is by its whole answers: responses without streaming, which show no first token.

An answer's slowness is its duration as a multiple of what the pool expects for it (``AnswerCost``). Compared with the
other members' answers, it says how much slower the member is, but not whether its prefill or its decoding is slower.
The same bounds as for prefills hold for what one client, or a few answers, can change (``dualmap.fleet.samples``).
"""

from math import exp
from typing import Final

from dualmap.fleet.samples import (
    AGREEMENT,
    FADE_ROUNDS,
    FRESH_ROUNDS,
    MOST_OF_CLIENT,
    WINDOW,
    Agreement,
    RecentSamples,
    upper_median,
)

# The old samples that count beside the first new one, so that one answer shows whether the member is still slow.
_KEPT: Final = 2


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
        slowness, was_known = seconds / cost.expected_s(work_s, tokens), cost.is_known
        if not was_known:
            cost.observe(work_s, tokens, seconds)
            return False
        if self._age > 0.0:
            self._samples.keep_newest(_KEPT)
        self._last_round = agreement.rounds
        if not self._samples.add(now, client, slowness):
            return False
        cost.observe(work_s, tokens, seconds)
        agreement.answers.report(self, self._median())
        return True

    def relative(self) -> float:
        """Return how many times slower the member is than the pool's common answers; about 1 without new samples.

        While an answer is awaited, old samples count in full. A slow member therefore gets one request at a time
        that tests it, however long its answers take.
        """
        if not self._samples.ordered:
            return 1.0
        relative = min(max(self._median() / self._agreement.answers.value, 1 / AGREEMENT), AGREEMENT)
        age = self._age
        return relative if self._awaited or age <= 0.0 else relative ** exp(-age / FADE_ROUNDS)

    def forget(self) -> None:
        """Take no further part in the common median: the member left the pool."""
        self._agreement.answers.forget(self)

    @property
    def _age(self) -> float:
        """The rounds since the samples became old."""
        return self._agreement.rounds - self._last_round - FRESH_ROUNDS

    def _median(self) -> float:
        return upper_median(self._samples.ordered, self._agreement.answers.value)
