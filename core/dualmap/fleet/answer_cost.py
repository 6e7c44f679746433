"""How long a pool's members take for whole answers: responses without streaming, which arrive after their last token.

The model for an answer of ``n`` output tokens is ``a * w + b * n`` seconds. ``w`` is the expected time of all prefills
that the member had to compute during the answer. The sum of the squared relative errors is minimised, with exponential
forgetting. The duration of a single answer does not tell its prefill from its decoding, but answers of different
lengths do.
"""

from typing import Final

# The prior of ``b``, the time of one output token. The prior of ``a`` is 1.
_PRIOR_TOKEN_S: Final = 0.02
# The factor for the weight of all earlier answers at each new answer: about 100 answers of the pool have an effect.
_FORGET: Final = 0.99
# The prior has the weight of this many answers.
_PRIOR_ANSWERS: Final = 0.1
# Both parameters are at least this part of their priors, so that the expected time is not 0.
_LEAST: Final = 0.01
# Shorter answers count as ones of this part of the expected time, because the relative error would weigh them most.
_SHORTEST: Final = 1 / 3
# The mean part of prefills follows about this many answers.
_RECENT: Final = 100
# The model is too uncertain to judge members by before it knows this many answers.
_ENOUGH: Final = 8


class AnswerCost:
    """The expected duration of a pool's whole answers, learnt from the durations at all members."""

    def __init__(self) -> None:
        # Sums of the normal equations for the features w and n * _PRIOR_TOKEN_S, each divided by the duration, with 1
        # as the target.
        self._ww = self._wn = self._nn = self._w1 = self._n1 = 0.0
        self._answers = 0
        self._prefill, self._token_s = 1.0, _PRIOR_TOKEN_S
        self.prefill_part = 1.0
        """The mean part of prefills in the expected duration."""

    @property
    def is_known(self) -> bool:
        """Whether enough answers are known to judge members by their durations."""
        return self._answers >= _ENOUGH

    def expected_s(self, work_s: float, tokens: int) -> float:
        """Return the expected duration of an answer of ``tokens`` during which prefills of ``work_s`` were due."""
        return self._prefill * work_s + self._token_s * tokens

    def observe(self, work_s: float, tokens: int, seconds: float) -> None:
        """Learn from an answer that took ``seconds``; ``work_s`` or ``tokens`` must not be 0."""
        self._answers += 1
        seconds = max(seconds, _SHORTEST * self.expected_s(work_s, tokens))
        w, n = work_s / seconds, tokens * _PRIOR_TOKEN_S / seconds
        self._ww, self._wn, self._nn = (
            _FORGET * self._ww + w * w,
            _FORGET * self._wn + w * n,
            _FORGET * self._nn + n * n,
        )
        self._w1, self._n1 = _FORGET * self._w1 + w, _FORGET * self._n1 + n
        self._solve()
        prefill_part = self._prefill * work_s / self.expected_s(work_s, tokens)
        self.prefill_part += (prefill_part - self.prefill_part) / min(self._answers, _RECENT)

    def _solve(self) -> None:
        """Solve the normal equations. At a limit of ``a`` or ``b``, only the other parameter remains to fit."""
        ww, nn, wn = self._ww + _PRIOR_ANSWERS, self._nn + _PRIOR_ANSWERS, self._wn
        w1, n1 = self._w1 + _PRIOR_ANSWERS, self._n1 + _PRIOR_ANSWERS
        determinant = ww * nn - wn * wn
        prefill, decode = (w1 * nn - n1 * wn) / determinant, (n1 * ww - w1 * wn) / determinant
        if prefill < _LEAST:
            prefill, decode = _LEAST, (n1 - _LEAST * wn) / nn
        elif decode < _LEAST:
            prefill, decode = (w1 - _LEAST * wn) / ww, _LEAST
        self._prefill, self._token_s = max(prefill, _LEAST), max(decode, _LEAST) * _PRIOR_TOKEN_S
