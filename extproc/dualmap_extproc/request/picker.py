"""From a request body to a destination, and back from what became of it: all pools of this router behind one object.

Synchronous and without gRPC, asyncio or a clock: ``stream`` asks and reports, ``access_log`` reports, ``store`` brings
other replicas' news, ``server`` drives the deadlines, and each pool's ``dualmap.router.PoolRouter`` decides and keeps
the books. Everything worth counting goes to the observer.

A pool's router may hold a request. Whatever a router is told may release requests it holds (a first token, a new
member, the time), so after each such call the picker takes the outcomes and resumes who waits for them.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from dualmap.keys.sessions import session_key
from dualmap.pools.pool import Pool
from dualmap.prompts.api import Api
from dualmap.prompts.blocks import chain_blocks, chain_root
from dualmap.prompts.prompt import Prompt
from dualmap.replicas.news import News, SharedBinding
from dualmap.requests import Completion, Decision, Held, PoolStatus, Refusal, Request, Usage
from dualmap.router import PoolRouter
from dualmap_edge.logs import get_logger
from dualmap_extproc.envoy.access_log.sink import AccessLogEntry
from dualmap_extproc.errors import Refused, model_not_found, no_endpoint, refused_by_router
from dualmap_extproc.names import cluster_name
from dualmap_extproc.request.body import read_body
from dualmap_extproc.request.ending import Ending
from dualmap_extproc.request.observer import Observer
from dualmap_extproc.settings import Limits

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Where a request goes. ``destination`` is ``ip:port[,ip:port]``, ``cluster`` the pool's cluster in Envoy.

    ``request_id`` is empty for a request that has no prompt and is not in the books; ``receipt`` is the value of the
    decision header, None where the response gets none; ``decision`` is what was decided on a request with a prompt.
    """

    destination: str
    cluster: str
    request_id: str = ""
    receipt: str | None = None
    decision: Decision | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request that is held. What becomes of it is told later, unless it is aborted before."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A held request: the router that holds it, since when, and whom to tell what becomes of it.

    ``quoted`` is what the log may quote of it.
    """

    router: PoolRouter
    since_s: float
    resume: Callable[[Picked | Refused], None]
    quoted: Mapping[str, object]


class Picker:
    """The pools of this router, found by the models they serve.

    ``id_prefix`` makes request ids unique among router replicas and restarts, since access logs outlive both.
    ``shares`` says that somebody takes the news for other replicas, ``log_prompts`` that debug lines may quote prompts.
    """

    def __init__(
        self, limits: Limits, observer: Observer, *, id_prefix: str, shares: bool = False, log_prompts: bool = False
    ) -> None:
        self._limits = limits
        self._observer = observer
        self._id_prefix = id_prefix
        self._shares = shares
        self._log_prompts = log_prompts
        self._sequence = count()
        self._routers: dict[str, PoolRouter] = {}
        self._models: dict[str, PoolRouter] = {}
        self._session_headers: frozenset[str] = frozenset()
        self._max_wait_s = 0.0
        self._holds = True
        self._held: dict[str, _Held] = {}
        self._on_first_held: Callable[[], None] = lambda: None
        self._on_held: Callable[[str], None] = lambda _: None
        # Ended requests whose usage the access log may still report, oldest first.
        self._ended: OrderedDict[str, tuple[str, Completion]] = OrderedDict()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools as last given, in their order."""
        return tuple(router.pool for router in self._routers.values())

    @property
    def max_wait_s(self) -> float:
        """The longest that any pool lets a request wait for an instance."""
        return self._max_wait_s

    @property
    def session_headers(self) -> frozenset[str]:
        """The lower-case names of the headers by which the pools name sessions."""
        return self._session_headers

    def set_pools(self, now: float, pools: Sequence[Pool]) -> None:
        """Take the pools as they are now. Books of pools that stay are kept; those of pools that are gone are dropped.

        A model that two pools name stays with the first; the pool files' reader refuses such files beforehand.
        Requests that wait in a pool that is gone are refused.
        """
        routers: dict[str, PoolRouter] = {}
        models: dict[str, PoolRouter] = {}
        for given in pools:
            pool = given if self._holds else given.never_holding()
            router = self._routers.get(pool.id)
            if router is None:
                router = PoolRouter(pool, shares=self._shares)
            elif router.pool != pool:
                router.on_pool(now, pool)
            routers[pool.id] = router
            for name in pool.model.names:
                models.setdefault(name, router)
        self._routers, self._models = routers, models
        self._max_wait_s = max((pool.routing.queue.max_wait_s for pool in pools), default=0.0)
        self._session_headers = frozenset(pool.routing.session.header.lower() for pool in pools)
        for request_id, held in tuple(self._held.items()):
            pool_id = held.router.pool.id
            if pool_id not in routers:
                self._resume(now, request_id, self.refuse(no_endpoint(pool_id)))
        for router in routers.values():
            self._settle(now, router)

    def hold_no_more(self, now: float) -> None:
        """Send on what is held and hold nothing back any longer, since this router is about to end.

        Requests of a pool without members are refused: another router, or a later try, may have a place for them.
        """
        self._holds = False
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
        api: Api = Api.UNKNOWN,
    ) -> Picked | Refused | Waiting:
        """Choose the instance for a request that arrived at ``arrived_s``; enter it in the books under a new id.

        ``headers`` holds those of ``session_headers`` that the request has. A request that is held is answered by
        ``resume``, once, from within a later call of any of the picker's methods; never when it is ``aborted`` first.
        """
        prompt = read_body(body, api)
        if isinstance(prompt, Refused):
            return self.refuse(prompt)
        router = self._models.get(prompt.model)
        if router is None:
            return self.refuse(model_not_found(prompt.model))
        pool = router.pool
        lora = pool.model.adapter_of(prompt.model) or prompt.lora
        root = chain_root(model=pool.model.name, lora=lora, cache_salt=prompt.cache_salt)
        request = Request(
            id=f"{self._id_prefix}-{next(self._sequence)}",
            chain=chain_blocks(prompt.text, root=root, block_tokens=pool.routing.prefix.block_tokens),
            arrived_s=arrived_s,
            subset=subset,
            streamed=prompt.streamed,
            session=self._session(headers.get(pool.routing.session.header.lower()) or prompt.session, root),
        )
        quoted = self._quoted(prompt, headers) if self._log_prompts and _log.debugging else {}
        decision = router.on_request(now, request)
        if isinstance(decision, Held):
            return self._hold(now, request.id, _Held(router=router, since_s=now, resume=resume, quoted=quoted))
        answer = self._answer(pool, decision, quoted)
        self._settle(now, router)
        return answer

    def pick_bodiless(self, subset: frozenset[str] | None) -> Picked | Refused:
        """Choose any member for a request without a prompt: of the first pool that has one."""
        for router in self._routers.values():
            endpoints = router.any_endpoints(subset)
            if endpoints:
                pool = router.pool
                self._observer.routed_bodiless(pool.id)
                return Picked(destination=",".join(endpoints), cluster=cluster_name(pool.namespace, pool.name))
        return self.refuse(no_endpoint(""))

    def refuse(self, refused: Refused, headers: Mapping[str, str] | None = None) -> Refused:
        """Report a refusal, whoever decided it; return it. ``headers`` are ``pick``'s, where no pick came before."""
        self._observer.refused(refused)
        return refused

    def first_token(self, now: float, request_id: str) -> None:
        """Take note that the first chunk of a request's event stream came back."""
        for router in self._routers.values():
            first_token = router.on_first_token(now, request_id)
            if first_token is not None:
                self._observer.first_token(router.pool.id, first_token)
                self._settle(now, router)
                return

    def heard(self, now: float, request_id: str) -> None:
        """Take note that a request's response is still going on, so that it is not forgotten."""
        for router in self._routers.values():
            router.on_heard(now, request_id)

    def served(self, now: float, request_id: str, endpoint: str) -> None:
        """Take note of the endpoint that Envoy says served a request."""
        for router in self._routers.values():
            if router.on_served(now, request_id, endpoint):
                self._observer.served_elsewhere(router.pool.id)
                self._settle(now, router)
                return

    def finished(self, now: float, request_id: str, usage: Usage | None) -> None:
        """Close a request whose response is complete. Usage may come now, later, or never."""
        for router in self._routers.values():
            completion = router.on_finished(now, request_id, usage)
            if completion is not None:
                pool = router.pool.id
                self._observer.finished(pool, completion)
                if completion.measured_cached_tokens is None:
                    self._remember(request_id, pool, completion)
                else:
                    self._observer.measured(pool, completion)
                self._settle(now, router)
                return
        self._measure(request_id, usage)

    def rejected(self, now: float, request_id: str) -> None:
        """Close a request that the engine did not take: no more was prefilled of it than of an aborted one."""
        self._leave(now, request_id, PoolRouter.on_aborted, self._observer.rejected)

    def aborted(self, now: float, request_id: str) -> None:
        """Close a request that was cancelled or broke off; one that is held gives up its place."""
        held = self._held.pop(request_id, None)
        self._leave(now, request_id, PoolRouter.on_aborted, self._observer.aborted)
        if held is not None:
            self._observer.waited(held.router.pool.id, now - held.since_s)
            self._settle(now, held.router)

    def failed(self, now: float, request_id: str) -> None:
        """Close a request that its instance failed to serve."""
        self._leave(now, request_id, PoolRouter.on_failed, self._observer.failed)

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        """Take how a request ended, by Envoy's access log; it may be another router's, or have ended for us before."""
        if entry.request_id in self._held:
            # Envoy does not know this id yet, so it is not Envoy who speaks.
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
            # A client that closes as soon as it has the whole answer looks gone to Envoy: the answer's usage is good.
            self._measure(entry.request_id, entry.usage)

    def take_news(self, now: float) -> tuple[tuple[str, News], ...]:
        """Return each pool's id and what this replica has to tell the others about it."""
        return tuple((name, router.take_news(now)) for name, router in self._routers.items())

    def on_news(self, now: float, pool: str, peer: str, news: News, age_s: float) -> None:
        """Take what replica ``peer`` told about a pool ``age_s`` ago; a pool not served here is nobody's business."""
        router = self._routers.get(pool)
        if router is not None:
            router.on_news(now, peer, news, age_s)
            self._settle(now, router)

    def on_bindings(self, now: float, pool: str, bindings: Sequence[SharedBinding]) -> None:
        """Take what the store says of a pool's sessions."""
        router = self._routers.get(pool)
        if router is not None:
            router.on_bindings(now, bindings)
            self._settle(now, router)

    def next_deadline(self) -> float | None:
        """Return when ``on_deadline`` wants to be called next, or None."""
        deadlines = [router.next_deadline() for router in self._routers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def holding(self) -> bool:
        """Whether any request is held, so that whatever happens may bring an earlier deadline."""
        return bool(self._held)

    def on_first_held(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever a request is held while no other is."""
        self._on_first_held = wake

    def on_held(self, told: Callable[[str], None]) -> None:
        """Have ``told`` called with the pool of every request that is held."""
        self._on_held = told

    def on_deadline(self, now: float) -> None:
        """Do what is due: let held requests go or refuse them, forget requests of which nothing was heard for long."""
        for router in tuple(self._routers.values()):
            for completion in router.on_deadline(now):
                self._observer.expired(router.pool.id, completion)
            self._settle(now, router)

    def statuses(self, pools: Collection[str] | None = None) -> tuple[PoolStatus, ...]:
        """Return what this router knows at this moment of each pool, or of those of ``pools`` that it serves."""
        return tuple(router.status() for name, router in self._routers.items() if pools is None or name in pools)

    def _session(self, name: str, root: int) -> int | None:
        """Return the session of a request by its name; an endless one names none."""
        return session_key(name, root) if 0 < len(name) <= self._limits.session_characters else None

    def _quoted(self, prompt: Prompt, headers: Mapping[str, str]) -> Mapping[str, object]:
        """Return what the log quotes of a request where it may."""
        text = prompt.text.decode("utf-8", "replace")[: self._limits.quoted_characters]
        return {"prompt": text, "headers": {name: ascii(value) for name, value in headers.items()}}

    def _answer(self, pool: Pool, outcome: Decision | Refusal, quoted: Mapping[str, object]) -> Picked | Refused:
        """Report what a pool's router decided; return it as the stream wants it."""
        if isinstance(outcome, Refusal):
            return self.refuse(refused_by_router(pool.id, outcome))
        self._observer.routed(pool.id, outcome)
        if _log.debugging:
            _log.debug("routed", request_id=outcome.request_id, **outcome.receipt.as_json(), **quoted)
        return Picked(
            destination=outcome.destination,
            cluster=cluster_name(pool.namespace, pool.name),
            request_id=outcome.request_id,
            receipt=outcome.receipt.header() if pool.routing.receipt_header else None,
            decision=outcome,
        )

    def _hold(self, now: float, request_id: str, held: _Held) -> Picked | Refused | Waiting:
        """Keep a request that its router holds until the router decides, which it may have done meanwhile."""
        at_once: list[Picked | Refused] = []
        self._held[request_id] = replace(held, resume=at_once.append)
        self._settle(now, held.router)
        if at_once:
            return at_once[0]
        self._held[request_id] = held
        if len(self._held) == 1:
            self._on_first_held()
        self._on_held(held.router.pool.id)
        if _log.debugging:
            _log.debug("held", request_id=request_id, pool=held.router.pool.id)
        return Waiting(request_id=request_id)

    def _settle(self, now: float, router: PoolRouter) -> None:
        """Resume the held requests that a router has decided on by now."""
        if not self._held:
            return
        answers = [
            (outcome.request_id, self._answer(router.pool, outcome, self._held[outcome.request_id].quoted))
            for outcome in router.take_outcomes()
        ]
        # All of them are in the books before anybody hears of it: whoever is told may come back to the picker.
        for request_id, answer in answers:
            self._resume(now, request_id, answer)

    def _resume(self, now: float, request_id: str, answer: Picked | Refused) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._observer.waited(held.router.pool.id, now - held.since_s)
            held.resume(answer)

    def _leave(
        self,
        now: float,
        request_id: str,
        end: Callable[[PoolRouter, float, str], Completion | None],
        report: Callable[[str, Completion], None],
    ) -> None:
        """Close a request that nothing good came of, and report it."""
        for router in self._routers.values():
            completion = end(router, now, request_id)
            if completion is not None:
                report(router.pool.id, completion)
                self._settle(now, router)
                return

    def _remember(self, request_id: str, pool: str, completion: Completion) -> None:
        self._ended[request_id] = (pool, completion)
        if len(self._ended) > self._limits.ended_requests:
            self._ended.popitem(last=False)

    def _measure(self, request_id: str, usage: Usage | None) -> None:
        """Report what the engine measured for a request that had ended before its usage was known."""
        pool, completion = self._ended.pop(request_id, ("", None))
        if completion is not None and usage is not None and usage.cached_tokens is not None:
            self._observer.measured(pool, replace(completion, measured_cached_tokens=usage.cached_tokens))
