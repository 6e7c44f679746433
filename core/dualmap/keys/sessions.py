"""Sessions: requests that a client declares to belong together, and which member has each session's KV.

A session's name roots the key of its requests, so that all of them have one pair regardless of their prompts. The
binding names the member that computed the last turn. Bindings follow the traffic: the member that a turn goes to has
the session's KV afterwards. With ``session.migration`` a turn goes to the session's host unless EAR's rule moves the
session (``dualmap.policies.migration``). Without it the policy chooses, with the host as one more candidate.

Replicas share bindings: a session's ``version`` counts its moves, and of two bindings the one with the higher version
is valid. The table is bounded: the least recently used binding is evicted first, and a binding expires ``ttl_s`` after
its last turn.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from xxhash import xxh3_64_intdigest

from dualmap.replicas.update import SharedBinding

MAX_SESSIONS = 65_536
# The store answers within about a tenth of a second. A later binding does not correct a guess.
GUESS_S = 5.0


@dataclass(slots=True)
class Binding:
    """The member with a session's KV: ``host``.

    ``hint_tokens`` of its context are believed to be cached there although the prefix index has no entry for them: the
    binding came from the store. ``guessed_s`` is when the session was bound before the store's answer arrived.
    """

    host: str
    tokens: int
    version: int
    moved_s: float
    used_s: float
    hint_tokens: int = 0
    guessed_s: float = -inf


def session_key(name: str, root: int) -> int:
    """Return a session's 64-bit key; ``root`` is the ``chain_root`` of its model, LoRA adapter and ``cache_salt``."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), root)


class SessionTable:
    """The bindings that this router knows; ``replicated`` keeps what ``take_changes`` and ``take_wanted`` return."""

    def __init__(self, ttl_s: float, *, replicated: bool) -> None:
        self.ttl_s = ttl_s
        self._replicated = replicated
        self._bindings: OrderedDict[int, Binding] = OrderedDict()
        self._changed: dict[int, None] = {}
        self._wanted: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._bindings)

    def get(self, now: float, session: int) -> Binding | None:
        """Return a session's binding, or None; an unknown session is recorded as wanted."""
        binding = self._bindings.get(session)
        if binding is None or now - binding.used_s > self.ttl_s:
            if self._replicated:
                self._wanted[session] = None
            return None
        return binding

    def bind(self, now: float, session: int, *, host: str, tokens: int) -> None:
        """Record that a turn of ``tokens`` prompt tokens went to ``host``."""
        known = self._bindings.get(session)
        if known is None:
            self._bindings[session] = Binding(
                host=host, tokens=tokens, version=0, moved_s=now, used_s=now, guessed_s=now
            )
            self._trim(now)
        else:
            if known.host != host:
                known.host, known.moved_s = host, now
                known.version += 1
            known.tokens, known.used_s, known.hint_tokens = tokens, now, 0
            self._bindings.move_to_end(session)
        if self._replicated:
            self._changed[session] = None

    def adopt(self, now: float, shared: SharedBinding, *, hinted: bool) -> None:
        """Take another replica's binding unless the one known here is newer; ``hinted``: it comes from the store.

        A turn that was sent before the store's answer arrived has moved the session: its version is one more than the
        store's.
        """
        known = self._bindings.get(shared.session)
        if known is not None and known.version > shared.version:
            return
        if known is not None and known.host != shared.host and hinted and now - known.guessed_s < GUESS_S:
            known.version, known.guessed_s = shared.version + 1, -inf
            if self._replicated:
                self._changed[shared.session] = None
            return
        self._bindings[shared.session] = Binding(
            host=shared.host,
            tokens=shared.tokens,
            version=shared.version,
            moved_s=now - shared.moved_ago_s,
            used_s=now,
            hint_tokens=shared.tokens if hinted and known is None else 0,
        )
        self._bindings.move_to_end(shared.session)
        self._changed.pop(shared.session, None)
        self._trim(now)

    def take_changes(self, now: float) -> tuple[SharedBinding, ...]:
        """Return the bindings that changed here since the last call."""
        changed, self._changed = self._changed, {}
        return tuple(
            SharedBinding(
                session=session,
                host=binding.host,
                tokens=binding.tokens,
                version=binding.version,
                moved_ago_s=now - binding.moved_s,
            )
            for session in changed
            if (binding := self._bindings.get(session)) is not None
        )

    def take_wanted(self) -> tuple[int, ...]:
        """Return the unknown sessions that were looked up since the last call."""
        wanted, self._wanted = self._wanted, {}
        return tuple(wanted)

    def _trim(self, now: float) -> None:
        """Drop the bindings that expired or exceed the bound, least recently used first."""
        while self._bindings:
            session, oldest = next(iter(self._bindings.items()))
            if len(self._bindings) <= MAX_SESSIONS and now - oldest.used_s <= self.ttl_s:
                return
            del self._bindings[session]
            self._changed.pop(session, None)
