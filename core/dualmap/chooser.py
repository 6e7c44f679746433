"""Chooses a request's member: computes the key, the pair and the candidates, and applies the policy.

``dispatcher`` sends the request to the chosen member, or queues the request while the member is saturated.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from dualmap.fleet.candidates import Candidates
from dualmap.fleet.in_flight import InFlightRequest
from dualmap.fleet.view import NO_HINT, Hint, View
from dualmap.keys.hotness import HotnessRule, HotnessTree
from dualmap.keys.rings import DualRing
from dualmap.keys.sessions import Binding, SessionTable
from dualmap.policies.migration import session_choice
from dualmap.policies.registry import POLICIES
from dualmap.policies.situation import LEAVING_WARM, Candidate, Choice, Policy, Situation
from dualmap.pools.pool import Pool
from dualmap.queue.request_queue import QueuedRequest
from dualmap.receipt import CandidateReceipt, Key, Receipt, SessionHost, source_of
from dualmap.requests import Request


class Predicted(Protocol):
    """A choice of member with its predicted TTFT."""

    @property
    def predicted_ttft_s(self) -> float:
        """The predicted time from the request's arrival to the first token."""


PredictedT = TypeVar("PredictedT", bound=Predicted)


def best_of(
    ring: DualRing, preferred: DualRing, choose: Callable[[DualRing], PredictedT], *, slo_ttft_s: float
) -> PredictedT:
    """Return the choice from the preferred members, if its predicted TTFT is within the SLO.

    Otherwise, return the faster one of this choice and the choice from all members.
    """
    chosen = choose(preferred)
    if chosen.predicted_ttft_s <= slo_ttft_s:
        return chosen
    return min((chosen, choose(ring)), key=lambda each: each.predicted_ttft_s)


class Chooser:
    """Chooses members for one pool; stores the hot prefixes and the member that has each session's KV."""

    def __init__(self, pool: Pool, candidates: Candidates, *, replicated: bool) -> None:
        self._candidates = candidates
        self._replicated = replicated
        self.sessions = SessionTable(pool.routing.session.ttl_s, replicated=replicated)
        self._sequence = 0
        self._pool = pool
        self._pool_id = pool.id
        self._fetches_kv = pool.fetches_kv
        self._policy = POLICIES[pool.routing.policy]
        self.tree = self.new_tree(pool, replicated=replicated)

    def adopt(self, pool: Pool) -> None:
        """Apply a new version of the pool."""
        if pool.routing.prefix != self._pool.routing.prefix:
            self.tree = self.new_tree(pool, replicated=self._replicated)
        self._pool = pool
        self._fetches_kv = pool.fetches_kv
        self._policy = POLICIES[pool.routing.policy]
        self.sessions.ttl_s = pool.routing.session.ttl_s

    def key(self, now: float, request: Request) -> Key:
        """Return the key of a request and count the request for hotness; call this method once per request."""
        rule = self._policy.hotness
        return self.key_by(now, request, None if rule is None else (rule, self.tree))

    def key_by(self, now: float, request: Request, hot: tuple[HotnessRule, HotnessTree] | None) -> Key:
        """Return the key of a request by a rule and a tree, which counts the request; None for the initial length."""
        # The thresholds use the size of the full ring, even if a request may use only some members. Otherwise, equal
        # prompts could have different keys.
        hashes, members = request.chain.hashes, self._candidates.size
        prefix, session = self._pool.routing.prefix, request.session
        if not hashes:
            # A prompt without text shares no prefix; its key is the hash of the request id, which spreads such requests
            # evenly.
            own = xxh3_64_intdigest(request.id.encode()) if session is None else session
            return Key(hash=own, blocks=0, tokens=0)
        if session is not None:
            # The session key replaces the initial blocks. The later blocks are combined with the session key, so that a
            # key can grow if one session becomes hot.
            rooted = (each ^ session for each in hashes[prefix.initial_blocks : prefix.max_blocks])
            hashes = (*(session for _ in hashes[: prefix.initial_blocks]), *rooted)
        if hot is None:
            blocks = min(len(hashes), prefix.initial_blocks)
        else:
            rule, tree = hot
            blocks = tree.key_blocks(now, hashes, split_share=rule.split / members, merge_share=rule.merge / members)
        return Key(hash=hashes[blocks - 1], blocks=blocks, tokens=request.chain.tokens_of(blocks))

    def with_pull(self, now: float, request: Request) -> Request:
        """Return a request that other members can fetch from its session's host, if the pool's engines can do so."""
        if request.session is None or not self._pool.routing.session.migration.pull:
            return request
        binding = self.sessions.get(now, request.session)
        if binding is None or not self._candidates.source(binding.host):
            return request
        view = self._candidates.view(now, request.chain, tokens=request.tokens)
        held = view.candidate(binding.host, _hint(binding)).matched_tokens
        if held <= request.stored.tokens:
            return request
        return request._replace(stored=request.stored._replace(tokens=held))

    @property
    def policy(self) -> Policy:
        """The pool's policy."""
        return self._policy

    @property
    def sequence(self) -> int:
        """The number of the next choice."""
        return self._sequence

    def situation(
        self, now: float, request: Request, key: Key, ring: DualRing, *, sequence: int | None = None
    ) -> Situation:
        """Return a request's situation: its candidates and their present load; at the next choice by default."""
        chain = request.chain
        view = self._view(now, request)
        members = ring.pair(key.hash)
        binding = None if request.session is None else self.sessions.get(now, request.session)
        host = None
        if binding is None:
            pair = tuple([view.candidate(each) for each in members])
        else:
            home, hint = binding.host, _hint(binding)
            pair = tuple([view.candidate(each, hint if each == home else NO_HINT) for each in members])
            if home in ring.ids:
                host = next((each for each in pair if each.id == home), None) or view.candidate(home, hint)
        return Situation(
            request_id=request.id,
            prompt_tokens=chain.tokens,
            waited_s=max(0.0, now - request.arrived_s),
            sequence=self._sequence if sequence is None else sequence,
            slo_ttft_s=self._pool.slo.ttft_s,
            spill=self._pool.routing.spill,
            pair=pair,
            everyone=self._candidates.everyone(view, ring),
            ring_walk=partial(ring.walk, key.hash),
            room_tokens=self._pool.engine.cache_tokens,
            host=host,
            last_member="" if binding is None else binding.host,
            may_move=binding is None or self._may_move(now, binding),
        )

    def choose(self, request: Request, key: Key, situation: Situation) -> QueuedRequest:
        """Let the session rule or the policy choose a member; return the request with the chosen member."""
        choice = self.choice(self._policy, situation)
        self._sequence += 1
        chosen, receipt = choice.candidate, self._receipt(request, key, situation, choice)
        return QueuedRequest(
            request=request,
            key=key,
            pair=receipt.pair,
            member=chosen.id,
            matched_tokens=chosen.matched_tokens,
            fetch_tokens=chosen.fetch_tokens,
            compute_s=chosen.compute_s,
            predicted_ttft_s=receipt.predicted_ttft_s,
            receipt=receipt,
        )

    def choice(self, policy: Policy, situation: Situation) -> Choice:
        """Return the choice of the session rule, or else of a policy."""
        return self._session_choice(situation) or policy.choose(situation)

    def last_turn(
        self, now: float, placed: QueuedRequest, leaving: Iterable[tuple[str, float]], *, answer_s: float
    ) -> QueuedRequest | None:
        """Return a placed request at the member of ``last_host``; None if there is none."""
        request = placed.request
        held_tokens = placed.matched_tokens + placed.fetch_tokens
        host = self.last_host(
            now, request, leaving, held_tokens=held_tokens, before_s=placed.predicted_ttft_s, answer_s=answer_s
        )
        if host is None:
            return None
        waited_s = max(0.0, now - request.arrived_s)
        receipt = placed.receipt.moved(
            host,
            LEAVING_WARM,
            predicted_ttft_s=waited_s + host.ttft_s,
            adapter=self._candidates.adapter_state(request.adapter, host.id),
        )
        return placed.at(host, receipt._replace(candidates=(*receipt.candidates, CandidateReceipt.of(host, waited_s))))

    def last_host(
        self,
        now: float,
        request: Request,
        leaving: Iterable[tuple[str, float]],
        *,
        held_tokens: int,
        before_s: float,
        answer_s: float,
    ) -> Candidate | None:
        """Return a member that leaves soon but will finish a request before; None if there is none.

        ``leaving`` contains members with the seconds until they leave. Such a member gets the request only if it holds
        a block more of the prompt than ``held_tokens``, which the chosen member holds and fetches, and has the first
        token earlier than ``before_s``. ``answer_s`` is the expected time from the first token to the end.
        """
        view = self._view(now, request)
        binding = None if request.session is None else self.sessions.get(now, request.session)
        hints = {} if binding is None else {binding.host: _hint(binding)}
        waited_s = max(0.0, now - request.arrived_s)
        # Fetched tokens never include a prompt's last token, so a difference of a few tokens is no advantage.
        least_tokens = held_tokens + request.chain.block_tokens
        candidates = [
            candidate
            for member, left_s in leaving
            if (candidate := view.candidate(member, hints.get(member, NO_HINT))).matched_tokens >= least_tokens
            and waited_s + candidate.ttft_s < before_s
            and candidate.ttft_s + answer_s <= left_s
        ]
        return min(candidates, key=lambda each: (each.ttft_s, each.id), default=None)

    @property
    def rebalances(self) -> bool:
        """True if queued requests move within their pair when both members are overloaded."""
        return self._policy.rebalances and self._pool.routing.rebalance.enabled

    @property
    def defers(self) -> bool:
        """True if requests that can still meet the SLO are dispatched before requests that will miss the SLO."""
        return self._policy.defers or self._pool.routing.queue.order == "Deadline"

    def bind(self, now: float, request: InFlightRequest) -> None:
        """Record that the request's member has the KV of the request's session."""
        if request.session is not None:
            self.sessions.bind(now, request.session, host=request.member, tokens=request.chain.tokens)

    def alternative(self, now: float, queued: QueuedRequest) -> Candidate | None:
        """Return the other member of a queued request's pair, or None if that member may not be picked."""
        request = queued.request
        ring, _ = self._candidates.rings(request)
        view = self._view(now, request)
        others = [each for each in queued.pair if each != queued.member and each in ring.ids]
        candidates = [view.candidate(each) for each in others]
        return min(candidates, key=lambda each: each.ttft_s, default=None)

    def _view(self, now: float, request: Request) -> View:
        """Return a view of the members for a request's prompt."""
        return self._candidates.view(
            now,
            request.chain,
            client=request.client,
            priority=request.priority,
            tokens=request.tokens,
            stored=request.stored,
        )

    def _may_move(self, now: float, binding: Binding) -> bool:
        """Return whether the cooldown since the session's last move has passed."""
        return binding.version == 0 or now - binding.moved_s >= self._pool.routing.session.migration.cooldown_s

    def _session_choice(self, situation: Situation) -> Choice | None:
        """Return the choice of the session rule; None if the policy decides."""
        rule = self._pool.routing.session.migration
        if situation.host is None or not rule.enabled:
            return None
        return session_choice(situation, situation.host, hot_ratio=rule.hot_ratio)

    def _receipt(self, request: Request, key: Key, situation: Situation, choice: Choice) -> Receipt:
        chosen, considered, waited_s = choice.candidate, situation.pair, situation.waited_s
        pair = tuple([each.id for each in considered])
        if chosen.id not in pair:
            considered = (*considered, chosen)
        return Receipt(
            pool=self._pool_id,
            policy=self._policy.name,
            rule=choice.rule.name,
            reason=choice.rule.meaning,
            key=key,
            pair=pair,
            chosen=chosen.id,
            address=chosen.endpoint,
            prompt_tokens=situation.prompt_tokens,
            matched_tokens=chosen.matched_tokens,
            fetch_tokens=chosen.fetch_tokens if self._fetches_kv else None,
            host=self._session_host(situation.last_member) if situation.last_member else None,
            source=source_of(chosen),
            adapter=self._candidates.adapter_state(request.adapter, chosen.id),
            predicted_ttft_s=waited_s + chosen.ttft_s,
            candidates=tuple([CandidateReceipt.of(each, waited_s) for each in considered]),
        )

    def _session_host(self, member: str) -> SessionHost:
        return SessionHost(member, self._candidates.source(member) if self._fetches_kv else "")

    @staticmethod
    def new_tree(pool: Pool, *, replicated: bool) -> HotnessTree:
        """Return an empty tree for the prefixes of a pool's prompts."""
        prefix = pool.routing.prefix
        return HotnessTree(
            initial_blocks=prefix.initial_blocks,
            max_blocks=prefix.max_blocks,
            window_s=prefix.window_s,
            replicated=replicated,
        )


def _hint(binding: Binding) -> Hint:
    """Return what the store says that a session's host caches."""
    return Hint(binding.hint_tokens, binding.moved_s)
