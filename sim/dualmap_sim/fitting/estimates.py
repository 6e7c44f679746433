"""The result of a fit: each parameter of the engine model with its interval and what the recording says about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

_KNOWN_WIDTH: Final = 0.25
"""An interval up to this share of its value is narrow: a prediction with the value is then off by less than it."""


class FitError(Exception):
    """A recording has too few requests for a fit; ``str()`` says what is missing and what traffic would show it."""


class Verdict(StrEnum):
    """What a recording says about a parameter."""

    KNOWN = "known"
    """The interval is narrow."""
    WEAK = "weak"
    """The recording contains the parameter, but its interval is wide."""
    ABSENT = "absent"
    """The recording does not contain the parameter. Simulations use the preset's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A parameter: its value and its 90 % interval, in the unit of ``dualmap simulate --set``.

    All three numbers are None if the parameter is absent. An end of the interval is None if the recording does not
    bound the parameter.
    ``reason`` says what the value is from, and for a weak or absent one what traffic would show it.
    """

    value: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str

    @classmethod
    def absent(cls, reason: str) -> "Estimate":
        """Return the estimate of a parameter that the recording does not contain."""
        return cls(value=None, low=None, high=None, verdict=Verdict.ABSENT, reason=reason)

    @classmethod
    def of(cls, value: float, low: float, high: float | None, *, reason: str, missing: str) -> "Estimate":
        """Return a known or a weak estimate by the width of its interval; ``missing`` is added to a weak one."""
        narrow = value > 0 and high is not None and high - low <= _KNOWN_WIDTH * value
        verdict = Verdict.KNOWN if narrow else Verdict.WEAK
        return cls(
            value=value, low=low, high=high, verdict=verdict, reason=reason if narrow else f"{reason}; {missing}"
        )

    def doubted(self, reason: str) -> "Estimate":
        """Return this estimate, weak instead of known, with a further reason."""
        if self.verdict is not Verdict.KNOWN:
            return self
        return replace(self, verdict=Verdict.WEAK, reason=f"{self.reason}; {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The measured and the predicted time to the first token of one request."""

    prompt_tokens: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The relative error as a share: 0.1 is 10 % too much."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """The engine of a pool. ``members`` has the parameters of each member that differs by more than the errors.

    ``requests`` is the number of requests that reached a member. Of ``impossible`` requests, the engine's counts of
    tokens contradict the times and are not used. ``predictions`` are those of the second half of the
    recording, with an engine that was fitted to the first half only; empty if a half has too few requests.
    """

    pool: str
    requests: int
    impossible: int
    parameters: Mapping[str, Estimate]
    members: Mapping[str, Mapping[str, Estimate]]
    predictions: Sequence[Prediction]

    def error_quantile(self, share: float) -> float | None:
        """Return the quantile of the predictions' absolute relative errors; None without predictions."""
        errors = sorted(abs(each.error) for each in self.predictions)
        return errors[min(len(errors) - 1, int(share * len(errors)))] if errors else None
