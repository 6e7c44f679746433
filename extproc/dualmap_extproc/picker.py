"""From a request body to a destination, and back from what became of it: all pools of this router behind one object.

Synchronous and without gRPC, asyncio or a clock: ``stream`` asks and reports, ``access_log`` reports, ``server`` drives
the deadlines, and each pool's ``dualmap.router.PoolRouter`` decides and keeps the books. Everything worth counting
goes to the observer.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import orjson

from dualmap.blocks import chain_blocks, chain_root
from dualmap.errors import BadRequest
from dualmap.pool import Pool
from dualmap.prompt import Prompt, read_prompt
from dualmap.requests import Completion, PoolStatus, Refusal, Request, Usage
from dualmap.router import PoolRouter
from dualmap_extproc.access_log import AccessLogEntry
from dualmap_extproc.ending import Ending
from dualmap_extproc.errors import Refused, invalid_body, model_not_found, no_endpoint
from dualmap_extproc.logs import get_logger
from dualmap_extproc.names import cluster_name
from dualmap_extproc.observer import Observer
from dualmap_extproc.settings import Limits

_JSON_SPACE = b" \t\r\n"
# How orjson begins to say that a JSON text ends too early.
_TRUNCATED = "unexpected end of data"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Where a request goes. ``destination`` is ``ip:port[,ip:port]``, ``cluster`` the pool's cluster in Envoy.

    ``request_id`` is empty for a request that has no prompt and is not in the books; ``receipt`` is the value of the
    decision header, None where the response gets none.
    """

    destination: str
    cluster: str
    request_id: str = ""
    receipt: str | None = None


class Picker:
    """The pools of this router, found by the models they serve.

    ``id_prefix`` makes request ids unique among router replicas and restarts, since access logs outlive both.
    """

    def __init__(self, limits: Limits, observer: Observer, *, id_prefix: str) -> None:
        self._limits = limits
        self._observer = observer
        self._id_prefix = id_prefix
        self._sequence = count()
        self._routers: dict[str, PoolRouter] = {}
        self._models: dict[str, PoolRouter] = {}
        self._max_wait_s = 0.0
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

    def set_pools(self, now: float, pools: Sequence[Pool]) -> None:
        """Take the pools as they are now. Books of pools that stay are kept; those of pools that are gone are dropped.

        A model that two pools name stays with the first; the pool files' reader refuses such files beforehand.
        """
        routers: dict[str, PoolRouter] = {}
        models: dict[str, PoolRouter] = {}
        for pool in pools:
            router = self._routers.get(pool.id)
            if router is None:
                router = PoolRouter(pool)
            elif router.pool != pool:
                router.on_pool(now, pool)
            routers[pool.id] = router
            for name in (pool.model.name, *pool.model.aliases):
                models.setdefault(name, router)
        self._routers, self._models = routers, models
        self._max_wait_s = max((pool.routing.queue.max_wait_s for pool in pools), default=0.0)

    def pick(self, now: float, body: bytes, subset: frozenset[str] | None, arrived_s: float) -> Picked | Refused:
        """Choose the instance for a request that arrived at ``arrived_s``; enter it in the books under a new id."""
        outcome = self._read(body)
        if isinstance(outcome, Refused):
            return self.refuse(outcome)
        prompt, router = outcome
        pool = router.pool
        root = chain_root(model=pool.model.name, lora=prompt.lora, cache_salt=prompt.cache_salt)
        chain = chain_blocks(prompt.text, root=root, block_tokens=pool.routing.prefix.block_tokens)
        request_id = f"{self._id_prefix}-{next(self._sequence)}"
        request = Request(id=request_id, chain=chain, arrived_s=arrived_s, subset=subset, streamed=prompt.streamed)
        decision = router.on_request(now, request)
        if isinstance(decision, Refusal):
            return self.refuse(no_endpoint(pool.id))
        self._observer.routed(pool.id, decision)
        if _log.debugging:
            _log.debug("routed", request_id=request_id, **decision.receipt.as_json())
        return Picked(
            destination=decision.destination,
            cluster=cluster_name(pool.namespace, pool.name),
            request_id=request_id,
            receipt=decision.receipt.header() if pool.routing.receipt_header else None,
        )

    def pick_bodiless(self, subset: frozenset[str] | None) -> Picked | Refused:
        """Choose any member for a request without a prompt: of the first pool that has one."""
        for router in self._routers.values():
            endpoints = router.any_endpoints(subset)
            if endpoints:
                pool = router.pool
                self._observer.routed_bodiless(pool.id)
                return Picked(destination=",".join(endpoints), cluster=cluster_name(pool.namespace, pool.name))
        return self.refuse(no_endpoint(""))

    def may_go_on(self, body: bytes) -> bool:
        """Say whether a body is the beginning of a JSON object that more bytes could complete, and not complete yet."""
        text = body.lstrip(_JSON_SPACE)
        if not text.startswith(b"{"):
            return not text
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:
            # Position 0 holds the brace: what is reported there is bytes that are no UTF-8, as when a character is cut.
            return error.pos == 0 or error.msg.startswith(_TRUNCATED)
        return False

    def refuse(self, refused: Refused) -> Refused:
        """Report a refusal, whoever decided it; return it."""
        self._observer.refused(refused)
        return refused

    def first_token(self, now: float, request_id: str) -> None:
        """Take note that the first chunk of a request's event stream came back."""
        for router in self._routers.values():
            first_token = router.on_first_token(now, request_id)
            if first_token is not None:
                self._observer.first_token(router.pool.id, first_token)
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
                return
        self._measure(request_id, usage)

    def rejected(self, now: float, request_id: str) -> None:
        """Close a request that the engine did not take: no more was prefilled of it than of an aborted one."""
        self._leave(now, request_id, self._observer.rejected)

    def aborted(self, now: float, request_id: str) -> None:
        """Close a request that was cancelled, reset, or answered with an error status but for the rejections."""
        self._leave(now, request_id, self._observer.aborted)

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        """Take how a request ended, by Envoy's access log; it may be another router's, or have ended for us before."""
        if entry.served_endpoint is not None:
            self.served(now, entry.request_id, entry.served_endpoint)
        if entry.ending is Ending.FINISHED:
            self.finished(now, entry.request_id, entry.usage)
        elif entry.ending is Ending.REJECTED:
            self.rejected(now, entry.request_id)
        else:
            self.aborted(now, entry.request_id)
            # A client that closes as soon as it has the whole answer looks gone to Envoy: the answer's usage is good.
            self._measure(entry.request_id, entry.usage)

    def next_deadline(self) -> float | None:
        """Return when ``on_deadline`` wants to be called next, or None."""
        deadlines = [router.next_deadline() for router in self._routers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def on_deadline(self, now: float) -> None:
        """Forget requests of which nothing was heard for the ledger's time to live."""
        for router in self._routers.values():
            for completion in router.on_deadline(now):
                self._observer.expired(router.pool.id, completion)

    def statuses(self) -> tuple[PoolStatus, ...]:
        """Return what this router knows of each pool at this moment."""
        return tuple(router.status() for router in self._routers.values())

    def _read(self, body: bytes) -> tuple[Prompt, PoolRouter] | Refused:
        if not body:
            return invalid_body("the request has no body")
        try:
            prompt = read_prompt(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            return invalid_body(f"the body is not JSON: {error}")
        except BadRequest as error:
            return invalid_body(str(error), param=error.param)
        router = self._models.get(prompt.model)
        return model_not_found(prompt.model) if router is None else (prompt, router)

    def _leave(self, now: float, request_id: str, report: Callable[[str, Completion], None]) -> None:
        """Close a request that nothing good came of, and report it."""
        for router in self._routers.values():
            completion = router.on_aborted(now, request_id)
            if completion is not None:
                report(router.pool.id, completion)
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
