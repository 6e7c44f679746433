"""Routers that know every prefill time exactly, for benchmarks of what learning the times costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from dualmap.fleet.estimate import LearntSpeed, Speed
from dualmap.fleet.view import Everyone
from dualmap_sim.presets import PrefillCost


class _TrueSpeed(Speed):
    """The engine's own prefill time, with its fixed cost and the time to load cached tokens."""

    cost: PrefillCost

    def compute_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.cost.seconds(new_tokens=new_tokens, cached_tokens=cached_tokens)


@contextmanager
def known_times(cost: PrefillCost) -> Iterator[None]:
    """Let all routers in this process predict with the engines' own prefill times, until the end of the context."""
    speed = _TrueSpeed(1 / cost.tokens_per_s, cost.attention / (2 * cost.tokens_per_s))
    speed.cost = cost
    with (
        patch.object(LearntSpeed, "current", property(lambda _: speed, lambda *_: None), create=True),
        # The columns use the formula of the learnt speed.
        patch.object(Everyone, "costs_s", lambda self, weights: [weights.cost_s(each) for each in self]),
    ):
        yield
