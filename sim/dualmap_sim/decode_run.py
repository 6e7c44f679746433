"""A series of decode steps over an unchanged batch. The end of each step is known in advance.

``engine.py`` has one run while its batch decodes, and may shorten the run. Only this module computes the end of a step.
So the server and the simulation agree exactly: the server shows each token, and the simulation skips to the last.
"""

from dualmap_sim.presets import DecodeCost


class DecodeRun:
    """A run of ``steps`` decode steps from ``start_s``. Its ``requests`` hold ``kv_tokens`` at the start."""

    __slots__ = ("_cost", "_kv_tokens", "_requests", "end_s", "start_s", "steps")

    def __init__(self, cost: DecodeCost, *, start_s: float, steps: int, requests: int, kv_tokens: int) -> None:
        self._cost = cost
        self._requests = requests
        self._kv_tokens = kv_tokens
        self.start_s = start_s
        self.steps = steps
        self.end_s = self.end_of_s(steps)
        """The end of the last step."""

    def end_of_s(self, steps: int) -> float:
        """Return the end of the run's first ``steps`` steps."""
        return self.start_s + self._cost.steps_s(steps, requests=self._requests, kv_tokens=self._kv_tokens)

    def boundary_s(self, now: float) -> float:
        """Return the end of the current step, or ``now`` between two steps."""
        return self.end_of_s(self._begun_at(now))

    def cut(self, now: float) -> None:
        """End the run with the current step."""
        self.steps = min(self.steps, self._begun_at(now))
        self.end_s = self.end_of_s(self.steps)

    def _begun_at(self, now: float) -> int:
        done = self.done_at(now)
        return done if self.end_of_s(done) >= now else done + 1

    def done_at(self, now: float) -> int:
        """Return the number of steps that have ended at ``now``."""
        guess = self._cost.steps_within(
            max(0.0, now - self.start_s), requests=self._requests, kv_tokens=self._kv_tokens
        )
        # The closed form may be wrong by rounding; all other code uses `end_of_s`.
        while guess > 0 and self.end_of_s(guess) > now:
            guess -= 1
        while guess < self.steps and self.end_of_s(guess + 1) <= now:
            guess += 1
        return min(guess, self.steps)
