"""Sessions: requests that a client says belong together, and where the KV of each session lies.

A session's name roots the key of its requests, so that all of them have one pair however their prompts go on; the
binding says which instance computed the last turn. Bindings follow the traffic: wherever a turn goes, the session's KV
is afterwards. With ``session.migration`` a turn goes to the session's host unless EAR's rule moves the session
(``policies.session_move``); without it the policy chooses and knows the host as one more warm candidate.

Replicas share bindings: a session's ``version`` counts its moves, and of two bindings the one with the higher version
holds. The table is bounded; the least recently used binding goes first, and each expires ``ttl_s`` after its last turn.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from xxhash import xxh3_64_intdigest

from dualmap.replicas.news import SharedBinding

MAX_SESSIONS = 65_536
# The store says what it knows of a session within a tenth of a second or so; what comes much later is other news.
GUESS_S = 5.0


@dataclass(slots=True)
class Binding:
    """Where a session's KV lies: on member ``host``.

    ``hint_tokens`` of its context are believed cached there although this router has not seen them go there: the
    binding came from the store, and the prefix index knows nothing of it. ``guessed_s`` is when the session was bound
    without knowing what others know of it.
    """

    host: str
    tokens: int
    version: int
    moved_s: float
    used_s: float
    hint_tokens: int = 0
    guessed_s: float = -inf


def session_key(name: str, root: int) -> int:
    """Return a session's 64-bit name; ``root`` is the ``chain_root`` of its model, LoRA adapter and ``cache_salt``."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), root)


class SessionTable:
    """The bindings this router knows; ``replicated`` has it keep what ``take_changes`` and ``take_wanted`` return."""

    def __init__(self, ttl_s: float, *, replicated: bool) -> None:
        self.ttl_s = ttl_s
        self._replicated = replicated
        self._bindings: OrderedDict[int, Binding] = OrderedDict()
        self._changed: dict[int, None] = {}
        self._wanted: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._bindings)

    def get(self, now: float, session: int) -> Binding | None:
        """Return a session's binding; an unknown one is remembered as wanted."""
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
        """Take a binding from elsewhere unless the one known here is newer; ``hinted``: the store says so.

        A turn that went somewhere before this router knew where the session was has moved it: that counts as one
        move more than what the store knows.
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
        """Return the sessions that were asked for since the last call and not known."""
        wanted, self._wanted = self._wanted, {}
        return tuple(wanted)

    def _trim(self, now: float) -> None:
        """Drop what has expired, least recently used first, and what exceeds the bound."""
        while self._bindings:
            session, oldest = next(iter(self._bindings.items()))
            if len(self._bindings) <= MAX_SESSIONS and now - oldest.used_s <= self.ttl_s:
                return
            del self._bindings[session]
            self._changed.pop(session, None)
