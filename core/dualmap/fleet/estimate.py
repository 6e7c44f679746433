"""Each member's prefill speed, learnt from observed requests, for the predicted TTFT (paper eq. 7).

The model for a prefill of ``n`` new tokens after ``h`` cached tokens is ``(n + a/2 * ((n+h)^2 - h^2)) / r`` seconds.
``r`` is the speed of linear work in tokens per second, and ``a`` is the attention cost, which grows with the context.
``1/r`` and ``a/2r`` are fitted to observed first-token times by least squares with exponential forgetting. The fit is
regularised towards a prior and bounded, so that a burst of outliers cannot make a member look idle or unusable.
``dualmap.fleet.samples`` limits what each prefill can change. A prefill with a wrong token count can be retracted.
"""

from collections.abc import Callable
from copy import copy
from math import exp, inf, log
from typing import NamedTuple

from dualmap.fleet.samples import FADE_ROUNDS, FRESH_ROUNDS, Agreement, RecentPrefills
from dualmap.fleet.whole_answers import WholeAnswers

# The prior of the attention cost ``a``; models of 7B to 14B parameters have 2e-5 to 3.3e-5.
_PRIOR_ATTENTION = 3.0e-5
_MOST_ATTENTION = 1.0e-4
# The learnt speed is at most this factor above or below the pool's prior.
SPEED_BOUND = 20.0
# The factor for the weight of all earlier samples at each new sample: about 50 samples have an effect.
_FORGET = 0.98
_LEAST_KEPT = 1e-12
# The prior has the weight of this many samples of _PRIOR_TOKENS tokens, or of samples like the others if these are
# shorter.
_PRIOR_SAMPLES = 4.0
_PRIOR_TOKENS = 2000.0
_FEWEST_SAMPLES = 0.1
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
        return self.linear_s * new_tokens + self.quadratic_s * (new_tokens * (new_tokens + 2 * cached_tokens))

    @property
    def tokens_per_second(self) -> float:
        """The speed of linear work without attention, as in the pool's ``prefillTokensPerSecond``."""
        return 1.0 / self.linear_s


class _Term(NamedTuple):
    """A prefill's contribution to the normal equations; its weight is now the model's ``log_kept`` less this one."""

    n: float
    q: float
    target_s: float
    log_kept: float


class PrefillModel:
    """The prefill speed of one member, learnt from the times of its first tokens."""

    def __init__(self, prior_tokens_per_second: float) -> None:
        linear_s = 1.0 / prior_tokens_per_second
        self._prior = Speed(linear_s, linear_s * _PRIOR_ATTENTION / 2)
        self._slowness = 1.0
        self._bounds_s = (linear_s / SPEED_BOUND, linear_s * SPEED_BOUND)
        # Sums of the normal equations for the features n (new tokens) and q (attention work), with seconds as the
        # target.
        self._nn = self._nq = self._qq = self._nt = self._qt = 0.0
        self._samples = 0.0
        # The logarithm of the weight that remains of the first sample.
        self._log_kept = 0.0
        # The round from which on the weights have not been reduced by age.
        self._fades = inf
        self.speed = self._prior

    def renew(self, rounds: float, slowness: float) -> None:
        """Reduce the weight of old samples. With no weight left, the speed is ``slowness`` times slower than the prior.

        ``rounds`` and ``slowness`` are the pool's (``Agreement``).
        """
        if rounds > self._fades or slowness != self._slowness:
            self._age(rounds, slowness)
            self.speed = self._solve()

    def observe(
        self, rounds: float, slowness: float, *, new_tokens: int, cached_tokens: int, service_s: float
    ) -> _Term | None:
        """Learn from one prefill that took ``service_s`` seconds; ``rounds`` and ``slowness`` are the pool's.

        Return the value that ``retract`` needs; None if nothing was learnt.
        """
        if new_tokens < SHORTEST_SAMPLE_TOKENS or service_s <= 0.0:
            return None
        self._age(rounds, slowness)
        self._keep(_FORGET)
        self._fades = rounds + FRESH_ROUNDS
        attention = _attention(new_tokens, cached_tokens)
        expected_s = self.speed.linear_s * new_tokens + self.speed.quadratic_s * attention
        target_s = min(max(service_s, expected_s / SAMPLE_CLIP), expected_s * SAMPLE_CLIP)
        scale = min(1.0, _HEAVIEST_TOKENS / new_tokens)
        term = _Term(scale * new_tokens, scale * attention, scale * target_s, self._log_kept)
        self._add(term, 1.0)
        return term

    def retract(self, term: _Term, slowness: float) -> None:
        """Take back what was learnt from a prefill; ``slowness`` is the pool's."""
        self._slowness = slowness
        self._add(term, -exp(self._log_kept - term.log_kept))

    def _age(self, rounds: float, slowness: float) -> None:
        self._slowness = slowness
        if rounds > self._fades:
            self._keep(exp((self._fades - rounds) / FADE_ROUNDS))
            self._fades = rounds

    def _keep(self, part: float) -> None:
        """Multiply the weight of all samples by ``part``."""
        # After a long time, nothing is left of the samples.
        part = max(part, _LEAST_KEPT)
        self._log_kept += log(part)
        self._samples *= part
        self._nn, self._nq, self._qq = self._nn * part, self._nq * part, self._qq * part
        self._nt, self._qt = self._nt * part, self._qt * part

    def _add(self, term: _Term, weight: float) -> None:
        n, q, target_s, _ = term
        self._samples += weight
        self._nn += weight * n * n
        self._nq += weight * n * q
        self._qq += weight * q * q
        self._nt += weight * n * target_s
        self._qt += weight * q * target_s
        self.speed = self._solve()

    def _solve(self) -> Speed:
        """Solve the regularised normal equations over ``0 <= a <= _MOST_ATTENTION``, then bound the speed.

        If the unconstrained solution is outside the range of ``a``, the best solution is at one of the two limits of
        ``a``. At a limit, only one parameter remains to fit. Separate limits for the two parameters are not sufficient:
        noise could make an instance look many times faster than its samples.
        """
        usual_nn = _PRIOR_TOKENS**2
        # Rounding errors remain of retracted samples.
        if self._samples > _FEWEST_SAMPLES and self._nn < self._samples * usual_nn:
            usual_nn = self._nn / self._samples
        ridge_n, ridge_q = _PRIOR_SAMPLES * usual_nn, _PRIOR_SAMPLES * usual_nn**2
        nn, nq, qq = self._nn + ridge_n, self._nq, self._qq + ridge_q
        nt = self._nt + ridge_n * self._prior.linear_s * self._slowness
        qt = self._qt + ridge_q * self._prior.quadratic_s * self._slowness

        determinant = nn * qq - nq * nq
        linear_s = (nt * qq - qt * nq) / determinant
        quadratic_s = (qt * nn - nt * nq) / determinant
        most = _MOST_ATTENTION / 2
        if linear_s > 0.0 and 0.0 <= quadratic_s <= most * linear_s:
            ratio = quadratic_s / linear_s
        else:
            flat_s, steep_s = nt / nn, (nt + most * qt) / (nn + 2 * most * nq + most * most * qq)
            quadratic_s = steep_s * most
            flat_error = nn * flat_s**2 - 2 * (nt * flat_s)
            steep_error = (
                nn * steep_s**2 + 2 * nq * steep_s * quadratic_s + qq * quadratic_s**2
                - 2 * (nt * steep_s + qt * quadratic_s)
            )  # fmt: skip
            linear_s, ratio = (flat_s, 0.0) if flat_error <= steep_error else (steep_s, most)
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


class AwaitedAnswer(NamedTuple):
    """A whole answer in flight, from which a member's speed will learn.

    ``before_s`` is the time of all prefills that the member had completed when the request was sent to it, at the
    speed of the specification.
    """

    taught: "LearntSpeed"
    before_s: float


class EndedAnswer(NamedTuple):
    """A whole answer that ended after ``seconds``; ``work_s`` is the time of the prefills that were due during it."""

    taught: "LearntSpeed"
    work_s: float
    seconds: float


class LearntSpeed:
    """One member's prefill speed: as requests experience it, and as it would be without other replicas' prefills.

    ``agreement`` is shared by the members of a pool. ``changed`` is called after another member changed the speed.
    """

    def __init__(self, prior_tokens_per_second: float, agreement: Agreement, changed: Callable[[], None]) -> None:
        self.prior = PrefillModel(prior_tokens_per_second).speed
        """The speed that the pool's specification expects."""
        self._agreement = agreement
        self._changed = changed
        self._recent = RecentPrefills(agreement)
        self._answers = WholeAnswers(agreement)
        self._model = PrefillModel(prior_tokens_per_second)
        # Learnt only from prefills that no other replica's prefills delayed, according to the replicas' reports. It is
        # the same object until the first other prefill, so that a single replica learns only once.
        self._solo_model = self._model
        # The number of such prefills among the samples that still have an effect.
        self._solo_samples = 0.0
        self.current = self._model.speed
        """The speed for this router's requests; the backlog that other replicas report is counted separately."""
        self._renew()
        agreement.join(self, self._renew)

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
        prior_s = self.prior.compute_s(new_tokens, cached_tokens)
        slowness = service_s / prior_s
        accepted = self._recent.accept(now, client, slowness)
        if accepted is None:
            return None
        service_s = prior_s * accepted
        if not solo and self._solo_model is self._model:
            self._solo_model = copy(self._model)
        agreement = self._agreement
        term = self._model.observe(
            agreement.rounds,
            self._slowness,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            service_s=service_s,
        )
        solo_term = term if solo else None
        self._solo_samples *= _FORGET
        if solo:
            self._solo_samples += 1.0
            if self._solo_model is not self._model:
                # Undisturbed prefills may be rare, so this speed does not fade.
                solo_term = self._solo_model.observe(
                    -inf, 1.0, new_tokens=new_tokens, cached_tokens=cached_tokens, service_s=service_s
                )
        self.current = self._model.speed
        agreement.count()
        return None if term is None else Lesson(self, client, slowness, term, solo_term)

    def await_answer(self) -> None:
        """Record that a whole answer is expected from the member, which ``observe_answer`` will get."""
        self._answers.await_one()
        self._renew()

    def await_answer_no_more(self) -> None:
        """Record that an expected whole answer has ended, or is given up."""
        self._answers.await_one_less()

    def observe_answer(self, now: float, client: int, *, work_s: float, tokens: int, seconds: float) -> None:
        """Learn from a client's whole answer of ``tokens`` that took ``seconds``.

        ``work_s`` is the time that the member's prefills during the answer take at the speed of the specification.
        """
        if self._answers.add(now, client, work_s=work_s, tokens=tokens, seconds=seconds):
            self._renew()
            self._agreement.count()

    def forget(self) -> None:
        """Take no further part in the agreement: the member left the pool."""
        self._agreement.leave(self)
        self._agreement.prefills.forget(self._recent)
        self._answers.forget()

    def retract(self, lesson: Lesson) -> None:
        """Take back what was learnt from a prefill."""
        self._recent.withdraw(lesson.client, lesson.slowness)
        self._model.retract(lesson.term, self._slowness)
        if lesson.solo_term is not None and self._solo_model is not self._model:
            self._solo_model.retract(lesson.solo_term, 1.0)
        self.current = self._model.speed

    @property
    def _slowness(self) -> float:
        """How many times slower than specified the member is assumed to be without samples of its prefills."""
        return self._agreement.prefills.value * self._answers.relative()

    def _renew(self) -> None:
        """Let the speed approach the pool's common one, as its samples become old."""
        self._model.renew(self._agreement.rounds, self._slowness)
        if self.current != self._model.speed:
            self.current = self._model.speed
            self._changed()


def _attention(new_tokens: int, cached_tokens: int) -> float:
    return float(new_tokens * (new_tokens + 2 * cached_tokens))
