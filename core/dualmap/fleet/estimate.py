"""Each member's prefill speed, learnt from observed requests, for the predicted TTFT (paper eq. 7).

The model for a prefill of ``n`` new tokens after ``h`` cached tokens is ``(n + a/2 * ((n+h)^2 - h^2)) / r`` seconds.
``r`` is the speed of linear work in tokens per second, and ``a`` is the attention cost, which grows with the context.
``1/r`` and ``a/2r`` are fitted to observed first-token times by least squares with exponential forgetting. The fit is
regularised towards a prior and bounded, so that a burst of outliers cannot make a member look idle or unusable.
``dualmap.fleet.samples`` limits what each prefill can change. A prefill with a wrong token count can be retracted.
"""

from copy import copy
from typing import NamedTuple

from dualmap.fleet.samples import Agreement, RecentPrefills

# The prior of the attention cost ``a``; models of 7B to 14B parameters have 2e-5 to 3.3e-5.
_PRIOR_ATTENTION = 3.0e-5
_MOST_ATTENTION = 1.0e-4
# The learnt speed is at most this factor above or below the pool's prior.
SPEED_BOUND = 20.0
# The factor for the weight of all earlier samples at each new sample: about 50 samples have an effect.
_FORGET = 0.98
# The prior has the weight of this many samples of _PRIOR_TOKENS tokens.
_PRIOR_SAMPLES = 4.0
_PRIOR_TOKENS = 2000.0
_RIDGE_N = _PRIOR_SAMPLES * _PRIOR_TOKENS**2
_RIDGE_Q = _PRIOR_SAMPLES * _PRIOR_TOKENS**4
# A sample is clipped to this factor of the prediction, because stalls and preemptions do not show the prefill speed.
SAMPLE_CLIP = 3.0
# The number of undisturbed prefills, among about the last 50, that gives the solo speed its full weight. At this
# number, the prefills have the same weight as the prior.
_SOLO_SAMPLES = 4.0
# In the least-squares fit, a longer prefill weighs no more than one of this many tokens.
_HEAVIEST_TOKENS = 20_000.0
# Shorter prefills do not show a member's speed, because scheduling and network take most of their time.
SHORTEST_SAMPLE_TOKENS = 64


class Speed(NamedTuple):
    """A prefill speed: seconds per token of linear work, and seconds per squared token of attention work."""

    linear_s: float
    quadratic_s: float

    def compute_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return T_c (paper eq. 7): the seconds to prefill ``new_tokens`` after ``cached_tokens``."""
        return self.linear_s * new_tokens + self.quadratic_s * _attention(new_tokens, cached_tokens)

    @property
    def tokens_per_second(self) -> float:
        """The speed of linear work without attention, as in the pool's ``prefillTokensPerSecond``."""
        return 1.0 / self.linear_s


class _Term(NamedTuple):
    """A prefill's contribution to the normal equations, and its number among the model's prefills."""

    n: float
    q: float
    target_s: float
    number: int


class PrefillModel:
    """The prefill speed of one member, learnt from the times of its first tokens."""

    def __init__(self, prior_tokens_per_second: float) -> None:
        linear_s = 1.0 / prior_tokens_per_second
        self._prior = Speed(linear_s, linear_s * _PRIOR_ATTENTION / 2)
        self._bounds_s = (linear_s / SPEED_BOUND, linear_s * SPEED_BOUND)
        # Sums of the normal equations for the features n (new tokens) and q (attention work), with seconds as the
        # target.
        self._nn = self._nq = self._qq = self._nt = self._qt = 0.0
        self._number = 0
        self.speed = self._prior

    def observe(self, *, new_tokens: int, cached_tokens: int, service_s: float) -> _Term | None:
        """Learn from one prefill that took ``service_s`` seconds at the member.

        Return the value that ``retract`` needs; None if nothing was learnt.
        """
        if new_tokens < SHORTEST_SAMPLE_TOKENS or service_s <= 0.0:
            return None
        attention = _attention(new_tokens, cached_tokens)
        expected_s = self.speed.linear_s * new_tokens + self.speed.quadratic_s * attention
        target_s = min(max(service_s, expected_s / SAMPLE_CLIP), expected_s * SAMPLE_CLIP)
        scale = min(1.0, _HEAVIEST_TOKENS / new_tokens)
        self._number += 1
        term = _Term(scale * new_tokens, scale * attention, scale * target_s, self._number)
        self._add(term, kept=_FORGET, weight=1.0)
        return term

    def retract(self, term: _Term) -> None:
        """Take back what was learnt from a prefill."""
        self._add(term, kept=1.0, weight=-(_FORGET ** (self._number - term.number)))

    def _add(self, term: _Term, *, kept: float, weight: float) -> None:
        n, q, target_s, _ = term
        self._nn = self._nn * kept + weight * n * n
        self._nq = self._nq * kept + weight * n * q
        self._qq = self._qq * kept + weight * q * q
        self._nt = self._nt * kept + weight * n * target_s
        self._qt = self._qt * kept + weight * q * target_s
        self.speed = self._solve()

    def _solve(self) -> Speed:
        """Solve the regularised normal equations over ``0 <= a <= _MOST_ATTENTION``, then bound the speed.

        If the unconstrained solution is outside the range of ``a``, the best solution is at one of the two limits of
        ``a``. At a limit, only one parameter remains to fit. Separate limits for the two parameters are not sufficient:
        noise could make an instance look many times faster than its samples.
        """
        nn, nq, qq = self._nn + _RIDGE_N, self._nq, self._qq + _RIDGE_Q
        nt = self._nt + _RIDGE_N * self._prior.linear_s
        qt = self._qt + _RIDGE_Q * self._prior.quadratic_s

        determinant = nn * qq - nq * nq
        linear_s = (nt * qq - qt * nq) / determinant
        quadratic_s = (qt * nn - nt * nq) / determinant
        most = _MOST_ATTENTION / 2
        if linear_s > 0.0 and 0.0 <= quadratic_s <= most * linear_s:
            ratio = quadratic_s / linear_s
        else:

            def error(linear_s: float, ratio: float) -> float:
                quadratic_s = linear_s * ratio
                return (
                    nn * linear_s**2 + 2 * nq * linear_s * quadratic_s + qq * quadratic_s**2
                    - 2 * (nt * linear_s + qt * quadratic_s)
                )  # fmt: skip

            borders = ((nt + c * qt) / (nn + 2 * c * nq + c * c * qq) for c in (0.0, most))
            linear_s, ratio = min(zip(borders, (0.0, most), strict=True), key=lambda fit: error(*fit))
        low, high = self._bounds_s
        linear_s = min(max(linear_s, low), high)
        return Speed(linear_s, linear_s * ratio)


class Lesson(NamedTuple):
    """What a member's speed learnt from one prefill, so that it can be taken back."""

    learnt_by: "LearntSpeed"
    client: int
    slowness: float
    term: _Term
    solo_term: _Term | None


class LearntSpeed:
    """One member's prefill speed: as requests experience it, and as it would be without other replicas' prefills.

    ``agreement`` is shared by the members of a pool.
    """

    def __init__(self, prior_tokens_per_second: float, agreement: Agreement) -> None:
        self._prior = PrefillModel(prior_tokens_per_second).speed
        self._agreement = agreement
        self._recent = RecentPrefills(agreement)
        self._model = PrefillModel(prior_tokens_per_second)
        # Learnt only from prefills that no other replica's prefills delayed, according to the replicas' reports. It is
        # the same object until the first other prefill, so that a single replica learns only once.
        self._solo_model = self._model
        # The number of such prefills among the samples that still have an effect.
        self._solo_samples = 0.0
        self.current = self._model.speed
        """The speed for this router's requests; the backlog that other replicas report is counted separately."""

    @property
    def solo_tokens_per_second(self) -> float:
        """The speed without other replicas' prefills, which all replicas share.

        Reports of other replicas' prefills arrive late, so ``current`` includes some of the time of these prefills. The
        error of ``current`` grows with the number of replicas. In overload, other replicas use the member almost
        always. The solo speed then stays close to ``current``, which is still learnt.
        """
        known, linear_s = min(self._solo_samples / _SOLO_SAMPLES, 1.0), self.current.linear_s
        return 1.0 / (linear_s + known * (self._solo_model.speed.linear_s - linear_s))

    def observe(
        self, now: float, *, client: int, new_tokens: int, cached_tokens: int, service_s: float, solo: bool
    ) -> Lesson | None:
        """Learn from a client's prefill that took ``service_s``.

        ``solo`` is true if no other replica's prefill delayed it. Return the value that ``retract`` needs; None if
        nothing was learnt.
        """
        if new_tokens < SHORTEST_SAMPLE_TOKENS or service_s <= 0.0:
            return None
        prior_s = self._prior.compute_s(new_tokens, cached_tokens)
        slowness = service_s / prior_s
        accepted = self._recent.accept(now, client, slowness)
        if accepted is None:
            return None
        service_s = prior_s * accepted
        if not solo and self._solo_model is self._model:
            self._solo_model = copy(self._model)
        term = self._model.observe(new_tokens=new_tokens, cached_tokens=cached_tokens, service_s=service_s)
        solo_term = term if solo else None
        self._solo_samples *= _FORGET
        if solo:
            self._solo_samples += 1.0
            if self._solo_model is not self._model:
                solo_term = self._solo_model.observe(
                    new_tokens=new_tokens, cached_tokens=cached_tokens, service_s=service_s
                )
        self.current = self._model.speed
        return None if term is None else Lesson(self, client, slowness, term, solo_term)

    def forget(self) -> None:
        """Take no further part in the agreement: the member left the pool."""
        self._agreement.forget(self._recent)

    def retract(self, lesson: Lesson) -> None:
        """Take back what was learnt from a prefill."""
        self._recent.withdraw(lesson.client, lesson.slowness)
        self._model.retract(lesson.term)
        if lesson.solo_term is not None and self._solo_model is not self._model:
            self._solo_model.retract(lesson.solo_term)
        self.current = self._model.speed


def _attention(new_tokens: int, cached_tokens: int) -> float:
    return float(new_tokens * (new_tokens + 2 * cached_tokens))
