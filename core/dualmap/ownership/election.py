"""Which of several routers owns a pool, as far as one router knows."""

from collections.abc import Collection
from typing import Final

from dualmap.ownership.owner import owner_of

DECLINED_S: Final = 2.0
"""The time for which a router that declined a request of a pool does not count as a possible owner of the pool.

Each further time without an answer between is twice as long, up to DECLINED_MAX_S. The first is short, because a new
pool reaches the routers at different times."""
DECLINED_MAX_S: Final = 30.0


class Election:
    """The owner of ``pool`` as router ``name`` knows it. Without other routers, the owner is this router."""

    def __init__(self, pool: str, name: str) -> None:
        self.owner = name
        """The router that owned the pool at the last ``update``."""
        self._pool = pool
        self._name = name
        self._routers: frozenset[str] = frozenset()
        # Until when the routers that declined a request are no possible owners, and how long the last such time was.
        self._declined_until_s: dict[str, float] = {}
        self._declined_s: dict[str, float] = {}

    def is_due(self, now: float) -> bool:
        """Return whether a router that declined a request is a possible owner again since the last ``update``."""
        return bool(self._declined_until_s) and now >= min(self._declined_until_s.values())

    def set_routers(self, routers: Collection[str]) -> None:
        """Set the routers that may own pools."""
        self._routers = frozenset(routers)
        self._declined_s = {each: s for each, s in self._declined_s.items() if each in self._routers}

    def on_answer(self, router: str) -> None:
        """Record an answer of a router: the next time after a declined request is short again."""
        self._declined_s.pop(router, None)

    def on_declined(self, now: float, router: str) -> None:
        """Record that a router declined a request; it is no possible owner for some time."""
        if router not in self._declined_until_s:
            last_s = self._declined_s.get(router, DECLINED_S / 2)
            self._declined_s[router] = min(2 * last_s, DECLINED_MAX_S)
            self._declined_until_s[router] = now + self._declined_s[router]

    def update(self, now: float) -> bool:
        """Find the owner; return whether it is another router than before."""
        self._declined_until_s = {each: until_s for each, until_s in self._declined_until_s.items() if until_s > now}
        before, self.owner = self.owner, self.possible_owner()
        return self.owner != before

    def possible_owner(self) -> str:
        """Return the owner among the routers that have not declined a request lately; this router if there is none."""
        return owner_of(self._pool, self._routers - self._declined_until_s.keys()) or self._name
