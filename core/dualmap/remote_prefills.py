"""The prefills of one pool's requests at the members of another pool: prefill and decode apart.

A request of a pool with a prefill pool needs up to two decisions: its decode member, from its own pool's router, and
its prefill member, from the prefill pool's router. ``RemotePrefills`` asks both in turn and returns one decision:

1. The decode pool's router chooses the decode member, or queues the request while no member has room for its KV.
2. If few tokens of the prompt are uncached at the decode member, the prefill is local: the decode member computes it.
3. Otherwise, the prefill pool's router chooses the prefill member, or queues the request while that is saturated.
4. If the prefill pool rejects the request, the decode pool's router decides again for a local prefill.

Without a usable prefill pool, or without a member in it, the decode pool's router decides for a local prefill at once.

Each router accounts for its own part of the request. The decode pool's router counts the KV memory from the decode
decision to the request's end, and no pending prefill. The prefill pool's router counts the pending prefill from the
prefill decision to the first token. Each router may ask the owner of its pool (``dualmap.shared_router``).
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, NamedTuple

from dualmap.receipt import PrefillReceipt
from dualmap.requests import (
    Asked,
    Completion,
    Decision,
    FirstToken,
    Outcome,
    Queued,
    Reason,
    Rejection,
    Request,
    Usage,
)
from dualmap.shared_router import Router

Outcomes = tuple[Router, tuple[Outcome, ...]]
"""A pool's router, and the outcomes of queued requests from one event of the router."""


class LocalPrefill(NamedTuple):
    """Why a decode member computes a prompt itself: a name for programs, and a meaning that completes "because"."""

    name: str
    meaning: str


SHORT: Final = LocalPrefill("short", "few tokens of the prompt are uncached at the chosen member")
UNUSABLE: Final = LocalPrefill("unusable", "the prefill pool does not exist, or cannot prefill for this pool")
NO_MEMBER: Final = LocalPrefill("no-member", "the prefill pool has no member that may be picked")
FULL: Final = LocalPrefill("full", "the prefill pool's queue is full, or the request waited in it for too long")


class Prefiller(NamedTuple):
    """The prefill pool's router, and the request as this router gets it."""

    router: Router
    request: Request


class Settled(NamedTuple):
    """An outcome for the driver, and the router of the pool that the client's request belongs to."""

    router: Router
    outcome: Outcome


class _Stage(Enum):
    DECODE = auto()
    """The decode pool's router decides."""
    PREFILL = auto()
    """The decode member is chosen, and the prefill pool's router decides."""
    LOCAL = auto()
    """The decode pool's router decides for a local prefill."""
    PREFILLING = auto()
    """The request is sent, and its first token has not arrived."""
    DECODING = auto()
    """The first token has arrived."""


@dataclass(slots=True, kw_only=True)
class Split:
    """A request that both pools decide; ``local`` is why the prefill became local."""

    request: Request
    decode: Router
    pool: str
    prefiller: Prefiller | None
    stage: _Stage = _Stage.DECODE
    decision: Decision | None = None
    prefill: Decision | None = None
    local: LocalPrefill = UNUSABLE
    was_queued: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether the request was sent to both members."""
        return self.stage in (_Stage.PREFILLING, _Stage.DECODING)


class RemotePrefills:
    """The requests of this router that a prefill pool prefills or may prefill.

    Decisions on other requests pass ``settle`` unchanged. A request with a local prefill is forgotten after its
    decision.
    """

    def __init__(self) -> None:
        self.splits: dict[str, Split] = {}
        """The requests without a decision, and those with a remote prefill, by id."""

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request of a pool with a prefill pool has no final decision."""
        split = self.splits.get(request_id)
        return split is not None and not split.is_decided

    def on_request(
        self, now: float, request: Request, decode: Router, prefiller: Prefiller | None
    ) -> tuple[Outcome | Asked, list[Settled]]:
        """Decide a new request of a pool with a prefill pool; return its answer, and other requests' outcomes.

        ``prefiller`` is None if the prefill pool is not usable.
        """
        pool = decode.pool
        local = _unusable(prefiller)
        request = request._replace(prefills_up_to=pool.prefill_min_tokens - 1 if local is None else None)
        split = Split(request=request, decode=decode, pool=pool.prefill_pool, prefiller=prefiller)
        if local is not None:
            split.stage, split.local = _Stage.LOCAL, local
        self.splits[request.id] = split
        settled: list[Settled] = []
        due: deque[Outcomes] = deque()
        answer, outcomes = decode.on_request(now, request)
        self._advance(now, split, answer, due, settled)
        due.append((decode, outcomes))
        self._settle(now, due, settled)
        own = [each.outcome for each in settled if each.outcome.request_id == request.id]
        others = [each for each in settled if each.outcome.request_id != request.id]
        return own[-1] if own else Asked(request_id=request.id), others

    def settle(self, now: float, effects: Iterable[Outcomes]) -> list[Settled]:
        """Return the outcomes of routers' events for the driver, after the decisions that follow from them."""
        settled: list[Settled] = []
        self._settle(now, deque(effects), settled)
        return settled

    def on_first_token(self, now: float, request_id: str) -> tuple[FirstToken | None, list[Outcomes]]:
        """Release a request's prefill at its prefill member; return what this member's pool observed, and effects.

        The prefill member has no part in the request after the first token.
        """
        split = self.splits.get(request_id)
        if split is None or split.stage is not _Stage.PREFILLING:
            return None, []
        router = self._prefilling(split)
        split.stage = _Stage.DECODING
        first_token, outcomes = router.on_first_token(now, request_id)
        return first_token, [(router, outcomes), (router, router.on_finished(now, request_id).outcomes)]

    def on_end(
        self, now: float, completion: Completion, usage: Usage | None, *, finished: bool, failed: bool
    ) -> tuple[Completion, list[Outcomes]]:
        """End a sent request; return its completion with the prefill member's prediction, and the effects.

        A request that failed before its first token may have failed at either member, so it counts at both. Engines
        report the cached tokens of the member that computed the prompt.
        """
        split = self.splits.pop(completion.request_id, None)
        if split is None or split.prefill is None:
            return completion, []
        request_id, router = completion.request_id, self._prefilling(split)
        effects: list[Outcomes] = []
        if split.stage is _Stage.PREFILLING:
            end = router.on_finished if finished else router.on_failed if failed else router.on_aborted
            effects.append((router, end(now, request_id).outcomes))
        if usage is not None:
            # The prefill member generated none of the output tokens.
            router.on_usage(now, request_id, replace(usage, completion_tokens=None))
        return completion._replace(
            predicted_cached_tokens=split.prefill.receipt.matched_tokens,
            measured_cached_tokens=None if usage is None else usage.cached_tokens,
            comparable=split.request.comparable,
        ), effects

    def forget(self, now: float, request_id: str) -> list[Outcomes]:
        """Forget a request whose client left, or which expired; return the effects at the prefill pool."""
        split = self.splits.pop(request_id, None)
        if split is None or split.stage not in (_Stage.PREFILL, _Stage.PREFILLING):
            return []
        router = self._prefilling(split)
        return [(router, router.on_aborted(now, request_id).outcomes)]

    def on_removed(self, now: float, pools: Collection[str]) -> list[Outcomes]:
        """Apply that this process no longer serves some pools (``namespace/name``); return the effects.

        The routers of removed pools answer no further questions, so requests that wait for them get local prefills.
        """
        effects: list[Outcomes] = []
        for request_id, split in tuple(self.splits.items()):
            if split.decode.pool.id in pools:
                effects += self.forget(now, request_id)
            elif split.prefiller is not None and split.prefiller.router.pool.id in pools:
                split.prefiller = None
                if split.is_decided:
                    del self.splits[request_id]
                elif split.stage is _Stage.PREFILL:
                    effects += self._decide_locally(now, split, UNUSABLE)
        return effects

    def _settle(self, now: float, due: deque[Outcomes], settled: list[Settled]) -> None:
        while due:
            router, outcomes = due.popleft()
            for outcome in outcomes:
                split = self.splits.get(outcome.request_id)
                if split is None or split.is_decided:
                    settled.append(Settled(router, outcome))
                else:
                    self._advance(now, split, outcome, due, settled)

    def _advance(
        self, now: float, split: Split, outcome: Outcome | Asked, due: deque[Outcomes], settled: list[Settled]
    ) -> None:
        """Take a router's outcome for a request that waits for it."""
        if isinstance(outcome, Asked):
            return
        if isinstance(outcome, Queued):
            if not split.was_queued:
                split.was_queued = True
                settled.append(Settled(split.decode, outcome))
        elif split.stage is _Stage.PREFILL:
            if isinstance(outcome, Rejection):
                reason = NO_MEMBER if outcome.reason is Reason.NO_ENDPOINT else FULL
                due.extend(self._decide_locally(now, split, reason))
            else:
                settled.append(Settled(split.decode, self._sent(split, outcome)))
        elif isinstance(outcome, Rejection):
            del self.splits[outcome.request_id]
            settled.append(Settled(split.decode, outcome))
        elif split.stage is _Stage.LOCAL:
            is_short = split.local is NO_MEMBER and _new_tokens(outcome) < split.decode.pool.prefill_min_tokens
            settled.append(Settled(split.decode, self._local(split, outcome, SHORT if is_short else split.local)))
        else:
            self._on_decode_member(now, split, outcome, due, settled)

    def _on_decode_member(
        self, now: float, split: Split, decision: Decision, due: deque[Outcomes], settled: list[Settled]
    ) -> None:
        """Ask the prefill pool, unless the decode member computes the prompt itself."""
        prefiller, local = split.prefiller, _unusable(split.prefiller)
        if not split.request.is_prefilled_elsewhere(_new_tokens(decision)):
            settled.append(Settled(split.decode, self._local(split, decision, SHORT)))
        elif prefiller is None or local is not None:
            # The prefill pool has changed since the request came.
            due.extend(self._decide_locally(now, split, local or UNUSABLE))
        else:
            split.stage, split.decision = _Stage.PREFILL, decision
            answer, outcomes = prefiller.router.on_request(now, prefiller.request)
            due.append((prefiller.router, outcomes))
            self._advance(now, split, answer, due, settled)

    def _decide_locally(self, now: float, split: Split, reason: LocalPrefill) -> list[Outcomes]:
        """Ask the decode pool again, because its member must compute the prompt; return the effects."""
        split.stage, split.local, split.decision = _Stage.LOCAL, reason, None
        split.request = split.request._replace(prefills_up_to=None)
        released = split.decode.on_aborted(now, split.request.id).outcomes
        answer, outcomes = split.decode.on_request(now, split.request)
        own = () if isinstance(answer, Asked) else (answer,)
        return [(split.decode, (*released, *own, *outcomes))]

    def _local(self, split: Split, decision: Decision, reason: LocalPrefill) -> Decision:
        del self.splits[decision.request_id]
        prefill = PrefillReceipt(pool=split.pool, local=reason.name, meaning=reason.meaning)
        return decision._replace(receipt=decision.receipt._replace(prefill=prefill))

    def _sent(self, split: Split, prefill: Decision) -> Decision:
        """Return the decision on a request with both members."""
        assert split.decision is not None, "the decode member is chosen first"
        split.stage, split.prefill = _Stage.PREFILLING, prefill
        receipt = split.decision.receipt._replace(
            predicted_ttft_s=prefill.receipt.predicted_ttft_s,
            prefill=PrefillReceipt(pool=split.pool, receipt=prefill.receipt),
        )
        return split.decision._replace(receipt=receipt, prefillers=prefill.endpoints)

    @staticmethod
    def _prefilling(split: Split) -> Router:
        assert split.prefiller is not None, "a prefill pool's router was asked"
        return split.prefiller.router


def _unusable(prefiller: Prefiller | None) -> LocalPrefill | None:
    """Return why no prefill pool can be asked; None if one can.

    A pool that is scaled to zero may queue requests until it has a member, so it is not asked.
    """
    if prefiller is None:
        return UNUSABLE
    return None if any(each.takes_new_keys for each in prefiller.router.pool.members) else NO_MEMBER


def _new_tokens(decision: Decision) -> int:
    """Return the tokens of a prompt that are neither cached nor fetched at the decode member."""
    receipt = decision.receipt
    return receipt.prompt_tokens - receipt.matched_tokens - (receipt.fetch_tokens or 0)
