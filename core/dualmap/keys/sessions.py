"""Sessions: requests with the same session id from the client, and the member that has each session's KV.

A session's key replaces the leading blocks of its requests, so that all requests of a session have the same pair. A
session's binding contains its host: the member that computed the last turn (request). Each turn updates the binding,
because the member that computes the turn then has the KV cache of the session. With ``session.migration``, a turn goes
to the session's host unless EAR's rule moves the session (``dualmap.policies.migration``). Without
``session.migration``, the policy chooses a member, with the host as an additional candidate.

Replicas exchange bindings. A session's ``version`` counts its moves, and the binding with the higher version is valid.
The table has a maximum size and evicts the least recently used binding first. A binding expires ``ttl_s`` after its
last turn.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from xxhash import xxh3_64_intdigest

from dualmap.replicas.update import SharedBinding

MAX_SESSIONS = 65_536
# The time in which a binding from the store may correct a guessed binding; the store usually answers within 0.1 s.
GUESS_S = 5.0


@dataclass(slots=True)
class Binding:
    """A session's binding to ``host``, the member with its KV.

    ``hint_tokens`` is set for a binding from the store: the host is assumed to cache this many tokens, which the prefix
    index does not contain. ``guessed_s`` is the time at which the session was bound without an answer from the store.
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
    """The bindings in this router.

    If ``replicated`` is true, the table stores changes and unknown sessions for ``take_changes`` and ``take_wanted``.
    """

    def __init__(self, ttl_s: float, *, replicated: bool) -> None:
        self.ttl_s = ttl_s
        self._replicated = replicated
        self._bindings: OrderedDict[int, Binding] = OrderedDict()
        self._changed: dict[int, None] = {}
        self._wanted: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._bindings)

    def get(self, now: float, session: int) -> Binding | None:
        """Return a session's binding, or None; an unknown session is added to the sessions of ``take_wanted``."""
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
        """Apply another replica's binding unless this router's binding is newer; ``hinted``: it is from the store.

        While the router waits for the store, it may send a turn of the session to a member other than the binding's.
        That turn counts as a move of the session: the session's version is then the store's version plus one.
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
        """Return the bindings that this router has changed since the last call."""
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
        """Remove expired bindings and bindings above the maximum size, least recently used first."""
        while self._bindings:
            session, oldest = next(iter(self._bindings.items()))
            if len(self._bindings) <= MAX_SESSIONS and now - oldest.used_s <= self.ttl_s:
                return
            del self._bindings[session]
            self._changed.pop(session, None)
