"""The receipt of a routing decision: the inputs, the rule that decided, and the chosen member.

A receipt has three formats: the ``x-dualmap-decision`` response header (an RFC 9651 Structured Fields dictionary), JSON
(``dualmap explain --json``, debug logs) and sentences (``dualmap explain``). The classes are named tuples, because each
decision creates several of these objects. A named tuple is immutable and takes a third of the time of a frozen
dataclass.
"""

from typing import Final, NamedTuple

from dualmap.policies.situation import Candidate, Rule
from dualmap.pools.pool import ReceiptFields

# Where a prompt is computed: at the chosen member, or at a member of the prefill pool.
_LOCAL: Final = "local"
_REMOTE: Final = "remote"


class Key(NamedTuple):
    """The hash key of a request: the chained hash of its first ``blocks`` blocks, which contain ``tokens`` tokens."""

    hash: int
    blocks: int
    tokens: int


class CandidateReceipt(NamedTuple):
    """One candidate with the policy's inputs. ``ttft_s`` is the predicted T_q + T_c in seconds (paper eq. 7).

    Behind the ``matched_tokens``, the member would fetch ``fetch_tokens`` from the pool's KV store.
    """

    id: str
    state: str
    matched_tokens: int
    pending_tokens: int
    in_flight: int
    ttft_s: float
    fetch_tokens: int = 0

    @classmethod
    def of(cls, candidate: Candidate, waited_s: float) -> "CandidateReceipt":
        """Return a candidate of a request that has waited for ``waited_s``."""
        # Every request creates two or three, and values by position take half the time.
        return cls(
            candidate.id,
            candidate.state,
            candidate.matched_tokens,
            candidate.pending_tokens,
            candidate.in_flight,
            waited_s + candidate.ttft_s,
            candidate.fetch_tokens,
        )


class PrefillReceipt(NamedTuple):
    """Where the prompt of a request is computed, of a pool with a prefill pool, whose name is ``pool``.

    ``receipt`` is the prefill pool's receipt. It is None if the chosen member computes the prompt itself, for the
    reason ``local``: a stable name for programs, with ``meaning`` for people.
    """

    pool: str
    receipt: "Receipt | None" = None
    local: str = ""
    meaning: str = ""

    @property
    def where(self) -> str:
        """``remote``, or why the chosen member computes the prompt."""
        return self.local if self.receipt is None else _REMOTE

    def as_json(self) -> dict[str, object]:
        """Return the values as JSON values."""
        if self.receipt is None:
            return {"where": _LOCAL, "pool": self.pool, "reason": self.local, "meaning": self.meaning}
        return {"where": _REMOTE, "pool": self.pool, "receipt": self.receipt.as_json()}


class SessionHost(NamedTuple):
    """The member that computed the last request of a session. Other members fetch KV from ``source`` (``ip:port``).

    ``source`` is empty if no member can fetch from it.
    """

    id: str
    source: str = ""


class Receipt(NamedTuple):
    """The reason for a choice of member. ``pair`` is in ring order (ring 1, ring 2). ``reason`` completes "because".

    ``matched_tokens`` is what the chosen member is assumed to cache when the request is sent to it. The ``candidates``
    are as they were at the choice. ``source`` says where ``matched_tokens`` is from: the engine's KV ``events``, or the
    router's own ``records``. ``adapter`` says whether the chosen member has the request's LoRA adapter: ``loaded``,
    ``absent`` or ``unknown``. It is empty for the base model. ``prefill`` is None for a pool without a prefill pool.
    If a member of the prefill pool computes the prompt, ``predicted_ttft_s`` is of that member. ``fetch_tokens`` are
    the tokens that the chosen member is expected to fetch from the pool's KV store or from the session's host; None if
    members fetch no KV. ``host`` is None for a request without a session, or of a new session.
    """

    pool: str
    policy: str
    rule: str
    reason: str
    key: Key
    pair: tuple[str, ...]
    chosen: str
    address: str
    prompt_tokens: int
    matched_tokens: int
    predicted_ttft_s: float
    candidates: tuple[CandidateReceipt, ...]
    source: str = "records"
    adapter: str = ""
    prefill: PrefillReceipt | None = None
    fetch_tokens: int | None = None
    host: SessionHost | None = None

    @property
    def moved_from(self) -> str:
        """The member that the request's session leaves; empty if the session stays, is new, or is none."""
        return "" if self.host is None or self.host.id == self.chosen else self.host.id

    @property
    def kv_source(self) -> str:
        """The endpoint from which the chosen member can fetch the KV of a session that moves; empty for none."""
        return self.host.source if self.host is not None and self.moved_from else ""

    def header(self, fields: ReceiptFields = ReceiptFields.FULL) -> str:
        """Return the receipt as an RFC 9651 dictionary, the value of ``x-dualmap-decision``.

        With ``ReceiptFields.CHOSEN``, the chosen member is the only value that depends on other clients' requests.
        Hotness determines the key's length and therefore the pair, and the rule shows which members cache the prompt.
        Engines may load adapters for requests.
        """
        chosen = _sf_string(self.chosen)
        if fields is ReceiptFields.CHOSEN:
            return f"policy={self.policy}, chosen={chosen}, prompt={self.prompt_tokens}"
        pair = " ".join(map(_sf_string, self.pair))
        adapter = f", adapter={_sf_string(self.adapter)}" if self.adapter else ""
        fetch = "" if self.fetch_tokens is None else f", fetch={self.fetch_tokens}"
        moved_from = self.moved_from
        moved = f", moved_from={_sf_string(moved_from)}" if moved_from else ""
        return (
            f"policy={self.policy}, rule={_sf_string(self.rule)}, pair=({pair}), chosen={chosen}, "
            f"matched={self.matched_tokens}, prompt={self.prompt_tokens}, key={self.key.blocks}, "
            f"source={_sf_string(self.source)}{adapter}{fetch}{moved}{self._prefill_fields()}"
        )

    def _prefill_fields(self) -> str:
        prefill = self.prefill
        if prefill is None:
            return ""
        if prefill.receipt is None:
            return f", prefill={_LOCAL}, prefill_reason={_sf_string(prefill.local)}"
        return f", prefill={_sf_string(prefill.receipt.chosen)}"

    def moved(self, to: Candidate, rule: Rule, *, predicted_ttft_s: float, adapter: str = "") -> "Receipt":
        """Return the receipt of the same request after a move to another member's queue."""
        return self._replace(
            rule=rule.name,
            reason=rule.meaning,
            chosen=to.id,
            address=to.endpoint,
            matched_tokens=to.matched_tokens,
            fetch_tokens=None if self.fetch_tokens is None else to.fetch_tokens,
            source=source_of(to),
            predicted_ttft_s=predicted_ttft_s,
            adapter=adapter,
        )

    def as_json(self) -> dict[str, object]:
        """Return the receipt as JSON values.

        The hash is a string of 16 hex digits, because many JSON parsers lose precision above 2^53.
        """
        fields = self._asdict()
        if not self.adapter:
            del fields["adapter"]
        del fields["prefill"], fields["host"]
        if self.moved_from:
            fields["moved_from"] = self.moved_from
        if self.prefill is not None:
            fields["prefill"] = self.prefill.as_json()
        candidates = [each._asdict() for each in self.candidates]
        if self.fetch_tokens is None:
            for each in (fields, *candidates):
                del each["fetch_tokens"]
        else:
            for each, candidate in zip(candidates, self.candidates, strict=True):
                each["compute_tokens"] = self.prompt_tokens - candidate.matched_tokens - candidate.fetch_tokens
        return {
            **fields,
            "key": {**self.key._asdict(), "hash": f"{self.key.hash:016x}"},
            "pair": list(self.pair),
            "candidates": candidates,
        }


def source_of(candidate: Candidate) -> str:
    """Return where a candidate's cached tokens are known from."""
    return "events" if candidate.reported else "records"


def _sf_string(text: str) -> str:
    """Quote a Structured Fields string (RFC 9651 section 4.1.6); the pool reader allows printable ASCII ids only."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
