"""Routes requests of all pools: from a request body to a destination, and from its end back to its pool's router.

Synchronous, without gRPC, asyncio or a clock. ``stream`` asks for picks and reports how requests go, the access log
reports how they ended, ``store`` brings other replicas' updates, and ``transport.server`` drives the deadlines. Each
pool's ``dualmap.router.PoolRouter`` decides and keeps the accounts. Every event is reported as an observation.

A pool's router may queue a request. Any call may release queued requests (a first token, a new member, the time), so
after each call the picker takes the outcomes and resumes those requests.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from dualmap.keys.sessions import session_key
from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import chain_blocks, chain_root
from dualmap.prompts.prompt import Prompt
from dualmap.replicas.news import News, SharedBinding
from dualmap.requests import Completion, Decision, Held, PoolStatus, Refusal, Request, Usage
from dualmap.router import PoolRouter
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused, model_not_found, no_endpoint, refused_by_router
from dualmap_extproc.names import cluster_name
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.ending import AccessLogEntry, Ending
from dualmap_extproc.request.observations import (
    Abandoned,
    Arrival,
    Ended,
    Expired,
    FirstTokenSeen,
    Measured,
    Queued,
    Rejected,
    Report,
    Routed,
    RoutedBodiless,
    ServedElsewhere,
)
from dualmap_extproc.settings import Limits

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Where a request goes. ``destination`` is ``ip:port[,ip:port]``, ``cluster`` the pool's cluster in Envoy.

    ``request_id`` is empty for a request without a prompt, of which the router keeps no account. ``receipt`` is the
    value of the decision header, None where the response gets none. ``decision`` is None without a prompt.
    """

    destination: str
    cluster: str
    request_id: str = ""
    receipt: str | None = None
    decision: Decision | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A queued request. Its outcome comes by ``resume``, unless it is aborted first."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request that asked for a pick: its arrival, what the log may quote, and where a late answer goes."""

    arrival: Arrival
    quoted: Mapping[str, object]
    resume: Callable[[Picked | Refused], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """A queued request, its router, and the time from which it is queued."""

    asked: _Asked
    router: PoolRouter
    since_s: float


class Picker:
    """The pools of this router, found by the models they serve.

    ``report`` takes every observation. ``id_prefix`` makes request ids unique among replicas and restarts, since access
    logs outlive both. ``trace_headers`` are further headers that observations carry. ``shares`` says that replication
    updates for other replicas are taken (``take_news``), ``log_prompts`` that debug lines may quote prompts.
    """

    def __init__(
        self,
        limits: Limits,
        report: Report,
        *,
        id_prefix: str,
        trace_headers: frozenset[str] = frozenset(),
        shares: bool = False,
        log_prompts: bool = False,
    ) -> None:
        self._limits = limits
        self._report = report
        self._id_prefix = id_prefix
        self._trace_headers = trace_headers
        self._shares = shares
        self._log_prompts = log_prompts
        self._sequence = count()
        self._routers: dict[str, PoolRouter] = {}
        self._models: dict[str, PoolRouter] = {}
        # The router of every request that is queued or in flight, by request id.
        self._owners: dict[str, PoolRouter] = {}
        self._kept_headers = trace_headers
        self._max_wait_s = 0.0
        self._queues = True
        self._queued: dict[str, _Queued] = {}
        self._on_first_held: Callable[[], None] = lambda: None
        # Ended requests whose usage the access log may still report, oldest first.
        self._ended: OrderedDict[str, tuple[str, Completion]] = OrderedDict()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools as last given, in their order."""
        return tuple(router.pool for router in self._routers.values())

    @property
    def max_wait_s(self) -> float:
        """The longest time that any pool lets a request queue."""
        return self._max_wait_s

    @property
    def kept_headers(self) -> frozenset[str]:
        """The lower-case names of the headers that ``pick`` takes: the pools' session headers and the trace's."""
        return self._kept_headers

    def set_pools(self, now: float, pools: Sequence[Pool]) -> None:
        """Replace the pools. Accounts of pools that stay are kept; those of removed pools are dropped.

        A model that two pools name belongs to the first; the pool files' reader refuses such files. Requests queued in
        a removed pool are rejected.
        """
        routers: dict[str, PoolRouter] = {}
        models: dict[str, PoolRouter] = {}
        for given in pools:
            pool = given if self._queues else given.never_holding()
            router = self._routers.get(pool.id)
            if router is None:
                router = PoolRouter(pool, shares=self._shares)
            elif router.pool != pool:
                router.on_pool(now, pool)
            routers[pool.id] = router
            for name in (pool.model.name, *pool.model.aliases):
                models.setdefault(name, router)
        removed = self._routers.keys() - routers.keys()
        self._routers, self._models = routers, models
        self._max_wait_s = max((pool.routing.queue.max_wait_s for pool in pools), default=0.0)
        self._kept_headers = self._trace_headers.union(pool.routing.session.header.lower() for pool in pools)
        if removed:
            self._owners = {each: router for each, router in self._owners.items() if router.pool.id not in removed}
            for request_id, queued in tuple(self._queued.items()):
                pool_id = queued.router.pool.id
                if pool_id in removed:
                    refused, waited_s = no_endpoint(pool_id), now - queued.since_s
                    self._resume(request_id, self._reject(now, refused, queued.asked.arrival, waited_s))
        for router in routers.values():
            self._settle(now, router)

    def hold_no_more(self, now: float) -> None:
        """Release what is queued and queue nothing any longer, since this router is about to end.

        Requests of a pool without members are rejected: another router, or a later try, may serve them.
        """
        self._queues = False
        self.set_pools(now, self.pools)

    def pick(
        self,
        now: float,
        body: bytes,
        subset: frozenset[str] | None,
        arrived_s: float,
        *,
        headers: Mapping[str, str],
        resume: Callable[[Picked | Refused], None],
    ) -> Picked | Refused | Waiting:
        """Choose the member for a request that arrived at ``arrived_s``; open its account under a new id.

        ``headers`` holds those of ``kept_headers`` that the request has. A queued request is answered by ``resume``,
        once, from within a later call of any of the picker's methods; never when it is ``aborted`` first.
        """
        arrival = Arrival(at_s=arrived_s, headers=headers)
        prompt = read_body(body)
        if isinstance(prompt, Refused):
            return self._reject(now, prompt, arrival)
        router = self._models.get(prompt.model)
        if router is None:
            return self._reject(now, model_not_found(prompt.model), arrival)
        pool = router.pool
        root = chain_root(model=pool.model.name, lora=prompt.lora, cache_salt=prompt.cache_salt)
        request = Request(
            id=f"{self._id_prefix}-{next(self._sequence)}",
            chain=chain_blocks(prompt.text, root=root, block_tokens=pool.routing.prefix.block_tokens),
            arrived_s=arrived_s,
            subset=subset,
            streamed=prompt.streamed,
            session=self._session(headers.get(pool.routing.session.header.lower()) or prompt.session, root),
        )
        quoted = self._quoted(prompt, headers) if self._log_prompts and _log.debugging else {}
        asked = _Asked(arrival=arrival, quoted=quoted, resume=resume)
        self._owners[request.id] = router
        decision = router.on_request(now, request)
        if isinstance(decision, Held):
            return self._hold(now, request.id, _Queued(asked=asked, router=router, since_s=now))
        answer = self._answer(now, pool, decision, asked)
        self._settle(now, router)
        return answer

    def pick_bodiless(self, now: float, subset: frozenset[str] | None) -> Picked | Refused:
        """Choose any member for a request without a prompt: of the first pool that has one."""
        for router in self._routers.values():
            endpoints = router.any_endpoints(subset)
            if endpoints:
                pool = router.pool
                self._report(RoutedBodiless(now=now, pool=pool.id))
                return Picked(destination=",".join(endpoints), cluster=cluster_name(pool.namespace, pool.name))
        return self._reject(now, no_endpoint(""), None)

    def refuse(self, now: float, refused: Refused, headers: Mapping[str, str]) -> Refused:
        """Report a rejection that ``stream`` decided before any pick; return it. ``headers`` are ``pick``'s."""
        return self._reject(now, refused, Arrival(at_s=now, headers=headers))

    def first_token(self, now: float, request_id: str) -> None:
        """Record that the first chunk of a request's event stream came back."""
        router = self._owners.get(request_id)
        first_token = None if router is None else router.on_first_token(now, request_id)
        if router is not None and first_token is not None:
            self._report(FirstTokenSeen(now=now, pool=router.pool.id, first_token=first_token))
            self._settle(now, router)

    def heard(self, now: float, request_id: str) -> None:
        """Record that a request's response continues, so that the request does not expire."""
        router = self._owners.get(request_id)
        if router is not None:
            router.on_heard(now, request_id)

    def served(self, now: float, request_id: str, endpoint: str) -> None:
        """Record the endpoint that served a request, as Envoy reports it."""
        router = self._owners.get(request_id)
        if router is not None and router.on_served(now, request_id, endpoint):
            self._report(ServedElsewhere(now=now, pool=router.pool.id))
            self._settle(now, router)

    def finished(self, now: float, request_id: str, usage: Usage | None) -> None:
        """Close a request whose response is complete. Usage may come now, later, or never."""
        router = self._owners.get(request_id)
        completion = None if router is None else router.on_finished(now, request_id, usage)
        if router is None or completion is None:
            self._measure(now, request_id, usage)
            return
        del self._owners[request_id]
        pool = router.pool.id
        self._report(Ended(now=now, pool=pool, ending=Ending.FINISHED, completion=completion))
        if completion.measured_cached_tokens is None:
            self._remember(pool, completion)
        else:
            self._report(Measured(now=now, pool=pool, completion=completion))
        self._settle(now, router)

    def rejected(self, now: float, request_id: str) -> None:
        """Close a request that the engine rejected: it prefilled no more of it than of an aborted one."""
        self._leave(now, request_id, PoolRouter.on_aborted, Ending.REJECTED)

    def aborted(self, now: float, request_id: str) -> None:
        """Close a request that was cancelled or broke off; a queued one leaves its queue."""
        queued = self._queued.pop(request_id, None)
        if self._leave(now, request_id, PoolRouter.on_aborted, Ending.ABORTED) or queued is None:
            return
        router, arrival = queued.router, queued.asked.arrival
        self._owners.pop(request_id, None)
        self._report(Abandoned(now=now, pool=router.pool.id, arrival=arrival, queued_s=now - queued.since_s))
        self._settle(now, router)

    def failed(self, now: float, request_id: str) -> None:
        """Close a request that its member failed to serve."""
        self._leave(now, request_id, PoolRouter.on_failed, Ending.FAILED)

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        """Close a request by its entry in Envoy's access log; ids that are unknown or already closed are ignored."""
        if entry.request_id in self._queued:
            # Envoy does not know the id of a queued request yet, so this entry is not Envoy's.
            return
        if entry.served_endpoint is not None:
            self.served(now, entry.request_id, entry.served_endpoint)
        if entry.ending is Ending.FINISHED:
            self.finished(now, entry.request_id, entry.usage)
        elif entry.ending is Ending.REJECTED:
            self.rejected(now, entry.request_id)
        else:
            end = self.failed if entry.ending is Ending.FAILED else self.aborted
            end(now, entry.request_id)
            # Envoy sees a client that closes right after the whole answer as gone; the answer's usage is valid.
            self._measure(now, entry.request_id, entry.usage)

    def take_news(self, now: float) -> tuple[tuple[str, News], ...]:
        """Return each pool's id and the replication update that this replica has for the others."""
        return tuple((name, router.take_news(now)) for name, router in self._routers.items())

    def on_news(self, now: float, pool: str, peer: str, news: News, age_s: float) -> None:
        """Apply replica ``peer``'s update about a pool, ``age_s`` old; pools that are not served here are ignored."""
        router = self._routers.get(pool)
        if router is not None:
            router.on_news(now, peer, news, age_s)
            self._settle(now, router)

    def on_bindings(self, now: float, pool: str, bindings: Sequence[SharedBinding]) -> None:
        """Apply what the store has of a pool's sessions."""
        router = self._routers.get(pool)
        if router is not None:
            router.on_bindings(now, bindings)
            self._settle(now, router)

    def next_deadline(self) -> float | None:
        """Return the time at which ``on_deadline`` is due next, or None."""
        deadlines = [router.next_deadline() for router in self._routers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def holding(self) -> bool:
        """Whether any request is queued, so that any event may bring an earlier deadline."""
        return bool(self._queued)

    def on_first_held(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever a request is queued while no other is."""
        self._on_first_held = wake

    def on_deadline(self, now: float) -> None:
        """Do what is due: release or reject queued requests, and expire requests of which nothing was heard."""
        for router in tuple(self._routers.values()):
            for completion in router.on_deadline(now):
                del self._owners[completion.request_id]
                self._report(Expired(now=now, pool=router.pool.id, completion=completion))
            self._settle(now, router)

    def statuses(self, pools: Collection[str] | None = None) -> tuple[PoolStatus, ...]:
        """Return the status of each pool at this moment, or of those of ``pools`` that are served here."""
        return tuple(router.status() for name, router in self._routers.items() if pools is None or name in pools)

    def _session(self, name: str, root: int) -> int | None:
        """Return the session that a request names; None for a name that is empty or too long."""
        return session_key(name, root) if 0 < len(name) <= self._limits.session_characters else None

    def _quoted(self, prompt: Prompt, headers: Mapping[str, str]) -> Mapping[str, object]:
        """Return what a debug line quotes of a request."""
        text = prompt.text.decode("utf-8", "replace")[: self._limits.quoted_characters]
        return {"prompt": text, "headers": {name: ascii(value) for name, value in headers.items()}}

    def _answer(
        self, now: float, pool: Pool, outcome: Decision | Refusal, asked: _Asked, queued_s: float | None = None
    ) -> Picked | Refused:
        """Report the outcome of a pool's router; return it as the stream's answer."""
        if isinstance(outcome, Refusal):
            del self._owners[outcome.request_id]
            return self._reject(now, refused_by_router(pool.id, outcome), asked.arrival, queued_s)
        self._report(Routed(now=now, pool=pool.id, decision=outcome, arrival=asked.arrival, queued_s=queued_s))
        if _log.debugging:
            _log.debug("Routed", request_id=outcome.request_id, **outcome.receipt.as_json(), **asked.quoted)
        return Picked(
            destination=outcome.destination,
            cluster=cluster_name(pool.namespace, pool.name),
            request_id=outcome.request_id,
            receipt=outcome.receipt.header() if pool.routing.receipt_header else None,
            decision=outcome,
        )

    def _reject(self, now: float, refused: Refused, arrival: Arrival | None, queued_s: float | None = None) -> Refused:
        """Report a rejection; return it."""
        self._report(Rejected(now=now, pool=refused.pool, refused=refused, arrival=arrival, queued_s=queued_s))
        return refused

    def _hold(self, now: float, request_id: str, queued: _Queued) -> Picked | Refused | Waiting:
        """Keep a queued request until its router decides, which the router may have done meanwhile."""
        at_once: list[Picked | Refused] = []
        self._queued[request_id] = replace(queued, asked=replace(queued.asked, resume=at_once.append))
        self._settle(now, queued.router)
        if at_once:
            return at_once[0]
        self._queued[request_id] = queued
        if len(self._queued) == 1:
            self._on_first_held()
        self._report(Queued(now=now, pool=queued.router.pool.id))
        if _log.debugging:
            _log.debug("Queued", request_id=request_id, pool=queued.router.pool.id)
        return Waiting(request_id=request_id)

    def _settle(self, now: float, router: PoolRouter) -> None:
        """Resume the queued requests that a router has decided on."""
        if not self._queued:
            return
        answers: list[tuple[str, Picked | Refused]] = []
        for outcome in router.take_outcomes():
            queued = self._queued[outcome.request_id]
            answer = self._answer(now, router.pool, outcome, queued.asked, now - queued.since_s)
            answers.append((outcome.request_id, answer))
        # All accounts are opened before the first stream resumes: a resumed stream may call the picker.
        for request_id, answer in answers:
            self._resume(request_id, answer)

    def _resume(self, request_id: str, answer: Picked | Refused) -> None:
        queued = self._queued.pop(request_id, None)
        if queued is not None:
            queued.asked.resume(answer)

    def _leave(
        self,
        now: float,
        request_id: str,
        end: Callable[[PoolRouter, float, str], Completion | None],
        ending: Ending,
    ) -> bool:
        """Close a request that did not finish, and report it; return whether it was in flight."""
        router = self._owners.get(request_id)
        completion = None if router is None else end(router, now, request_id)
        if router is None or completion is None:
            return False
        del self._owners[request_id]
        self._report(Ended(now=now, pool=router.pool.id, ending=ending, completion=completion))
        self._settle(now, router)
        return True

    def _remember(self, pool: str, completion: Completion) -> None:
        self._ended[completion.request_id] = (pool, completion)
        if len(self._ended) > self._limits.ended_requests:
            self._ended.popitem(last=False)

    def _measure(self, now: float, request_id: str, usage: Usage | None) -> None:
        """Report the engine's measurement for a request that had ended before its usage was known."""
        pool, completion = self._ended.pop(request_id, ("", None))
        if completion is not None and usage is not None and usage.cached_tokens is not None:
            measured = replace(completion, measured_cached_tokens=usage.cached_tokens)
            self._report(Measured(now=now, pool=pool, completion=measured))
