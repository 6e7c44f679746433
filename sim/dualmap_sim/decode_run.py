"""A series of decode steps over an unchanged batch, where the end of each step is known in advance.

``engine.py`` keeps one while its batch decodes, and may shorten it. Only this module computes when a step ends. So the
server, which shows each token, and the simulation, which skips to the last, agree exactly.
"""

from dualmap_sim.presets import DecodeCost


class DecodeRun:
    """``steps`` decode steps from ``start_s`` of ``requests`` that hold ``kv_tokens`` when it starts."""

    __slots__ = ("_cost", "_kv_tokens", "_requests", "end_s", "start_s", "steps")

    def __init__(self, cost: DecodeCost, *, start_s: float, steps: int, requests: int, kv_tokens: int) -> None:
        self._cost = cost
        self._requests = requests
        self._kv_tokens = kv_tokens
        self.start_s = start_s
        self.steps = steps
        self.end_s = self.end_of_s(steps)
        """The end of its last step."""

    def end_of_s(self, steps: int) -> float:
        """Return the end of the run's first ``steps`` steps."""
        return self.start_s + self._cost.steps_s(steps, requests=self._requests, kv_tokens=self._kv_tokens)

    def boundary_s(self, now: float) -> float:
        """Return the end of the current step; ``now`` itself between two steps."""
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
        # The closed form is exact up to rounding; all other code uses `end_of_s`.
        while guess > 0 and self.end_of_s(guess) > now:
            guess -= 1
        while guess < self.steps and self.end_of_s(guess + 1) <= now:
            guess += 1
        return min(guess, self.steps)
