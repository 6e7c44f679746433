"""Routes requests of all pools to members, and reports each event of a request to the router of the request's pool.

The module is synchronous, without gRPC, asyncio or a clock. ``stream`` requests picks and reports the progress of
requests. The access log reports how requests ended, and ``store`` supplies other replicas' updates.
``transport.deadlines`` calls ``on_deadline``. Each pool's ``dualmap.router.PoolRouter`` makes the decisions and tracks
the pool's requests. The picker reports every event as an observation.

``answers`` turns the outcomes of a pool's router into the answers to streams. ``ends`` ends requests.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from dualmap.engines.profile import EngineProfile
from dualmap.engines.residency import KvChange
from dualmap.engines.source import SourceStatus
from dualmap.kv_store.view import NO_MATCH
from dualmap.ownership.messages import Ask, Declined, Message
from dualmap.pools.pool import Pool
from dualmap.prompts.api import Api
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap.prompts.parity import TokenClass
from dualmap.prompts.prompt import Prompt
from dualmap.remote_prefills import Prefiller, Settled
from dualmap.replicas.update import ReplicaUpdate, SharedBinding
from dualmap.requests import Asked, Outcome, PoolSnapshot, Queued, Request, Usage
from dualmap.shared_router import RemoteDecision, Router
from dualmap_edge.logs import get_logger
from dualmap_extproc.errors import Refused, body_too_large, model_not_found, model_unnamed, no_endpoint
from dualmap_extproc.names import SELECTION_HEADER, cluster_name
from dualmap_extproc.request.answers import Answers
from dualmap_extproc.request.body import quoted_of, read_body
from dualmap_extproc.request.builder import RequestBuilder
from dualmap_extproc.request.ending import AccessLogEntry, Ending
from dualmap_extproc.request.ends import Ends
from dualmap_extproc.request.ids import KEY_BYTES, RequestIds
from dualmap_extproc.request.observations import (
    Accepted,
    Arrival,
    Decided,
    Expired,
    FirstTokenSeen,
    Logged,
    MembersDeparted,
    OwnerChanged,
    PickNotFollowed,
    PoolsChanged,
    RemotelyDecided,
    Report,
    RoutedBodiless,
    ServedElsewhere,
)
from dualmap_extproc.request.orphans import Orphans, progress_of
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.reading import BoundsOfModels
from dualmap_extproc.request.served_pools import Mesh, ServedPools
from dualmap_extproc.request.token_counts import TokenCounts
from dualmap_extproc.request.tokens import Tokens
from dualmap_extproc.request.waiting import WaitingRequest
from dualmap_extproc.settings import OWN_GATEWAY, Gateway, Limits

_log = get_logger(__name__)


class Picker:
    """The picker of this router: it finds a request's pool by the model, and the pool's router picks the member.

    ``report`` receives every observation. ``id_prefix`` makes request ids unique among replicas and restarts, because
    access log entries may belong to other replicas or earlier processes. ``id_key`` is the secret of request ids
    (``ids``). ``hash_key`` is the key of the hashes of prompts and sessions, which all replicas must share.
    ``client_key`` is the key of the hashes of clients' names. ``observed_headers`` are further headers in observations.
    If ``replicated`` is true, the picker keeps replication updates for other replicas (``take_update``). With ``send``,
    each pool has an owner among the routers (``dualmap.shared_router``), and the picker sends messages about a pool to
    the router of a name; ``id_prefix`` is then this router's name. If ``log_prompts`` is true, debug lines quote
    prompts. ``gateway`` says what the gateway in front of this picker supports. ``epoch_s`` is the time since the epoch
    at which ``now`` is 0.
    """

    def __init__(
        self,
        limits: Limits,
        report: Report,
        *,
        id_prefix: str,
        hash_key: bytes = PUBLIC_KEY,
        id_key: bytes = bytes(KEY_BYTES),
        observed_headers: frozenset[str] = frozenset(),
        replicated: bool = False,
        log_prompts: bool = False,
        client_key: bytes = b"",
        send: Callable[[str, str, Message], None] | None = None,
        gateway: Gateway = OWN_GATEWAY,
        epoch_s: float = 0.0,
    ) -> None:
        self.gateway = gateway
        self._limits = limits
        self._report = report
        self.ids = RequestIds(id_prefix, id_key)
        """The ids of this picker's requests, by which the access log accepts entries."""
        self._observed_headers = self._kept_headers = observed_headers
        self._log_prompts = log_prompts
        self._builder = RequestBuilder(limits, self.ids, hash_key=hash_key, client_key=client_key)
        self._send = send
        mesh = None
        if send is not None:
            changed = self._owner_changed
            mesh = Mesh(name=id_prefix, send=send, decided=self._decided_remotely, owner_changed=changed)
        self._served = ServedPools(replicated=replicated, hash_key=hash_key, epoch_s=epoch_s, mesh=mesh)
        self._orphans = Orphans()
        self._counts = TokenCounts()
        self._answers = Answers(report, gateway)
        self._ends = Ends(self._answers, self._served, self._counts, report, limit=limits.ended_requests)
        self._owners = self._answers.owners
        self._waiting = self._answers.waiting
        self._prefills = self._answers.prefills

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of the last ``set_pools``, in their order."""
        return self._served.pools

    @property
    def knows_pools(self) -> bool:
        """Whether ``set_pools`` was called. Before, any request may have a pool, and must not get 404."""
        return self._served.known

    def pool(self, name: str) -> Pool | None:
        """Return a pool (``namespace/name``) with what its engines say about open values; None if it is not served."""
        router = self._served.router(name)
        return None if router is None else router.pool

    def pool_of(self, model: str) -> str | None:
        """Return the pool (``namespace/name``) that serves a model, None for an unknown model."""
        router = self._served.of_model(model)
        return None if router is None else router.pool.id

    def trusts(self, pool: str, requests: TokenClass) -> bool:
        """Return whether the token ids of a class of a pool's requests are used (``token_counts``)."""
        return self._counts.trusts(pool, requests)

    def distrusted(self, pool: str) -> tuple[TokenClass, ...]:
        """Return the classes of a pool's requests whose token ids are not used (``token_counts``)."""
        return self._counts.distrusted(pool)

    @property
    def kept_headers(self) -> frozenset[str]:
        """The lower-case names of the headers that ``pick`` accepts: of sessions, clients, objectives and observers."""
        return self._kept_headers

    @property
    def max_body_bytes(self) -> int:
        """The largest request body that any pool accepts."""
        largest = self._served.max_body_bytes
        return self._limits.body_bytes if largest is None else largest

    @property
    def bounds(self) -> BoundsOfModels:
        """The bounds on request bodies, by model."""
        return self._served.bounds

    def set_pools(self, now: float, pools: Sequence[Pool]) -> None:
        """Replace the pools. Keep the requests of pools that stay, and drop the requests of removed pools.

        If two pools have the same model, the first pool serves it. (The reader of pool files rejects such pools.) The
        picker rejects the waiting requests of a removed pool.
        """
        removed, effects = self._served.replace(now, pools)
        self._counts.set_pools(pool.id for pool in pools)
        self._report_pools(now)
        served = self._served
        routing_headers = served.session_headers | served.client_headers | served.objective_headers
        self._kept_headers = routing_headers | self._observed_headers
        if self.gateway.conformance_hooks:
            self._kept_headers |= {SELECTION_HEADER}
        if removed:
            for request_id in [each for each, router in self._owners.items() if router.pool.id in removed]:
                del self._owners[request_id]
        for request_id, waiting in self._waiting.of_pools(removed):
            refused = no_endpoint(waiting.router.pool.id)
            self._answers.reject(now, refused, waiting.arrival, waiting.queued_s(now), request_id)
            self._waiting.answer(request_id, refused)
        if self._prefills.splits:
            effects += self._prefills.on_removed(now, removed)
        # The requests of removed pools have answers, also if no router has released a request.
        self._answers.deliver(now, self._answers.settled(now, *effects))
        self._report_departed()

    def on_profile(self, now: float, pool: str, member: str, profile: EngineProfile) -> None:
        """Apply what the engine of a pool's member says; ignore an unknown pool or member."""
        router = self._served.router(pool)
        if router is None:
            return
        changed, outcomes = router.on_profile(now, member, profile)
        if changed:
            self._served.name_pools()
            self._report_pools(now)
        self._answers.release(now, (router, outcomes))

    def on_kv_events(
        self, pool: str, member: str, rank: int, changes: Sequence[KvChange], status: SourceStatus
    ) -> None:
        """Apply what a rank of the engine of a pool's member reports about its cache; ignore an unknown pool."""
        router = self._served.router(pool)
        if router is not None:
            router.on_kv_events(member, rank, changes, status)

    def stop_queueing(self, now: float) -> None:
        """Release all waiting requests, stop queueing and stop asking others, because this router is about to end.

        The picker rejects requests of a pool without members. Another router may serve these requests at a later
        attempt.
        """
        for router in self._served.shared():
            self._answers.release(now, (router, router.stop_asking(now).outcomes))
        self._served.queue_no_more()
        if self.knows_pools:
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
        peer: str = "",
    ) -> Picked | Refused | AnswerLater:
        """Pick the member for a request that arrived at ``arrived_s``, and assign an id to the request.

        ``headers`` contains the request's headers that are in ``kept_headers``. If the request waits, a later call of
        any method of the picker calls ``resume`` once with the answer. If ``aborted`` ends the request before, the
        picker does not call ``resume``. ``peer`` is the identity of the Envoy that sent the request (``wire.peer``).
        """
        prompt, size_bytes = read_body(body, api), len(body)
        return self.pick_read(
            now, prompt, subset, arrived_s, size_bytes=size_bytes, headers=headers, resume=resume, peer=peer
        )

    def pick_read(
        self,
        now: float,
        prompt: Prompt | Refused,
        subset: frozenset[str] | None,
        arrived_s: float,
        *,
        size_bytes: int,
        headers: Mapping[str, str],
        resume: Callable[[Picked | Refused], None],
        peer: str = "",
        tokens: Tokens | None = None,
    ) -> Picked | Refused | AnswerLater:
        """Do the same as ``pick`` for a body of ``size_bytes`` whose prompt is known, and perhaps its ``tokens``."""
        arrival = Arrival(at_s=arrived_s, headers=headers)
        if isinstance(prompt, Refused):
            return self._answers.reject(now, prompt, arrival)
        router = self._served.of_model(prompt.model)
        if router is None:
            return self._answers.reject(now, model_not_found(prompt.model), arrival)
        pool = router.pool
        if size_bytes > pool.routing.max_body_bytes:
            too_large = replace(body_too_large(pool.routing.max_body_bytes), pool=pool.id)
            return self._answers.reject(now, too_large, arrival)
        request = self._builder.build(
            pool,
            prompt,
            subset,
            arrived_s,
            headers=headers,
            peer=peer,
            ids=self._counts.trusted_ids(pool.id, tokens),
            stored=NO_MATCH if tokens is None else tokens.stored,
        )
        self._report(Accepted(now=now, pool=pool.id, request=request, arrival=arrival))
        quoted = self._quoted(prompt, headers) if self._log_prompts and _log.debugging else {}
        self._owners[request.id] = router
        if tokens is not None:
            self._counts.add(request.id, pool.id, tokens)
        settled: Sequence[Settled] = ()
        if pool.prefill_pool:
            decision, settled = self._decide_both(
                now, router, request, prompt, headers=headers, peer=peer, tokens=tokens
            )
        else:
            decision, outcomes = router.on_request(now, request)
            if outcomes:
                settled = self._answers.settled(now, (router, outcomes))
        if isinstance(decision, Queued | Asked):
            since_s = now if isinstance(decision, Queued) else None
            waiting = WaitingRequest(router=router, since_s=since_s, arrival=arrival, quoted=quoted, resume=resume)
            return self._answers.wait(now, request.id, waiting, settled)
        answer = self._answers.answer(now, pool, decision, arrival, quoted)
        if settled:
            self._answers.deliver(now, settled)
        return answer

    def _decide_both(
        self,
        now: float,
        router: Router,
        request: Request,
        prompt: Prompt,
        *,
        headers: Mapping[str, str],
        peer: str,
        tokens: Tokens | None,
    ) -> tuple[Outcome | Asked, Sequence[Settled]]:
        """Ask the router of a pool with a prefill pool about a new request, and the prefill pool's router."""
        prefill, prefiller = self._served.prefill_router(router.pool.id), None
        if prefill is not None:
            ids = self._counts.trusted_ids(router.pool.id, tokens)
            # The gateway allows destinations, and a prefill member is none.
            twin = self._builder.build(
                prefill.pool, prompt, None, request.arrived_s, headers=headers, peer=peer, ids=ids, twin=request
            )
            prefiller = Prefiller(prefill, twin)
        return self._prefills.on_request(now, request, router, prefiller)

    def pick_bodiless(self, now: float, subset: frozenset[str] | None, *, model: str = "") -> Picked | Refused:
        """Pick any member for a request without a prompt, from the pool of ``model``, or from the only pool.

        With several pools, the picker rejects a request without a model, because the pools may belong to different
        tenants.
        """
        router = self._served.of_model(model) if model else self._served.only
        if router is None:
            unnamed = model_unnamed() if self.pools else no_endpoint("")
            return self._answers.reject(now, model_not_found(model) if model else unnamed, None)
        pool, endpoints = router.pool, router.any_endpoints(subset)
        if not endpoints:
            # Without the pool's id, because a request without a prompt does not activate a pool that is scaled to zero.
            return self._answers.reject(now, no_endpoint(""), None)
        self._report(RoutedBodiless(now=now, pool=pool.id))
        return Picked(
            destination=self._answers.destination(endpoints),
            cluster=cluster_name(pool.namespace, pool.name),
            max_body_bytes=pool.routing.max_body_bytes,
        )

    def refuse(self, now: float, refused: Refused, headers: Mapping[str, str], request_id: str = "") -> Refused:
        """Report a rejection that ``stream`` decided, and return it. ``headers`` are as in ``pick``.

        ``request_id`` is the id of a request that was accepted before.
        """
        return self._answers.reject(now, refused, Arrival(at_s=now, headers=headers), request_id=request_id)

    def decided(self, now: float, seconds: float) -> None:
        """Report how long it took to read a large body and to choose a member."""
        self._report(Decided(now=now, seconds=seconds))

    def first_token(self, now: float, request_id: str) -> None:
        """Record that the first chunk of the response's event stream arrived."""
        router = self._owners.get(request_id)
        if router is None:
            return
        first_token, outcomes = router.on_first_token(now, request_id)
        effects = [(router, outcomes)]
        if self._prefills.splits:
            prefilled, more = self._prefills.on_first_token(now, request_id)
            effects += more
            if prefilled is not None and first_token is not None:
                prefill_pool = more[0][0].pool.id
                self._report(FirstTokenSeen(now=now, pool=prefill_pool, first_token=prefilled, request_id=request_id))
                first_token = first_token._replace(predicted_ttft_s=prefilled.predicted_ttft_s)
        if first_token is not None:
            pool = router.pool.id
            self._report(FirstTokenSeen(now=now, pool=pool, first_token=first_token, request_id=request_id))
        self._answers.release(now, *effects)

    def heard(self, now: float, request_id: str) -> None:
        """Record that a request's response continues, so that the request does not expire."""
        router = self._owners.get(request_id)
        if router is not None:
            router.on_heard(now, request_id)

    def served(self, now: float, request_id: str, endpoint: str) -> None:
        """Record the endpoint that served a request, as Envoy reports it."""
        router = self._owners.get(request_id)
        if router is None:
            return
        elsewhere, outcomes = router.on_served(now, request_id, endpoint)
        if elsewhere:
            self._report(ServedElsewhere(now=now, pool=router.pool.id))
        self._answers.release(now, (router, outcomes))

    def not_followed(self, now: float, request_id: str) -> None:
        """Record that the gateway sent a request to none of the endpoints that the pick named."""
        router = self._owners.get(request_id)
        if router is not None:
            self._report(PickNotFollowed(now=now, pool=router.pool.id))

    def finished(self, now: float, request_id: str, usage: Usage | None) -> None:
        """End a request after its complete response. The usage may be known now, later, or never."""
        self._ends.compare(now, request_id, usage)
        if not self._ends.end(
            now, request_id, lambda router: router.on_finished(now, request_id, usage), Ending.FINISHED, usage=usage
        ):
            self._ends.measure(now, request_id, usage)

    def rejected(self, now: float, request_id: str) -> None:
        """End a request that the engine rejected.

        The request counts as aborted in its pool's router, because the engine did not prefill its prompt.
        """
        self._ends.end(now, request_id, lambda router: router.on_aborted(now, request_id), Ending.REJECTED)

    def aborted(self, now: float, request_id: str) -> None:
        """End a request that was cancelled or broke off; remove it from the queue if it is queued."""
        waiting = self._waiting.pop(request_id)
        self._ends.end(now, request_id, lambda router: router.on_aborted(now, request_id), Ending.ABORTED, waiting)

    def failed(self, now: float, request_id: str) -> None:
        """End a request that its member failed to serve."""
        self._ends.end(now, request_id, lambda router: router.on_failed(now, request_id), Ending.FAILED)

    def access_log(self, now: float, entry: AccessLogEntry) -> None:
        """End a request by its entry in Envoy's access log; ignore unknown requests and ended requests."""
        if entry.request_id in self._waiting:
            # Envoy has not received the id of a waiting request, so this entry does not come from Envoy.
            return
        if entry.sender is not None and not self.ids.is_from(entry.request_id, entry.sender):
            # Another router forwarded the entry of another client than the one that sent the request.
            return
        self._report(Logged(now=now, entry=entry))
        if entry.served_endpoint is not None:
            self.served(now, entry.request_id, entry.served_endpoint)
        match entry.ending:
            case Ending.FINISHED:
                self.finished(now, entry.request_id, entry.usage)
            case Ending.REJECTED:
                self.rejected(now, entry.request_id)
            case Ending.ABORTED | Ending.FAILED:
                self._ends.compare(now, entry.request_id, entry.usage)
                end = self.failed if entry.ending is Ending.FAILED else self.aborted
                router = self._owners.get(entry.request_id)
                end(now, entry.request_id)
                if router is not None and entry.usage is not None:
                    router.on_usage(now, entry.request_id, entry.usage)
                # If a client disconnects directly after the whole answer, Envoy reports a disconnect, but the answer's
                # usage is valid.
                self._ends.measure(now, entry.request_id, entry.usage)

    def on_orphan(self, now: float, entry: AccessLogEntry) -> None:
        """End a request that a router had picked that has ended since.

        Only that router could verify the sender of the entry. The request's id is not guessable. The entry may arrive
        before this router has received the last messages of the router that ends, so the picker remembers it.
        """
        self._orphans.add(now, entry)
        self._end_orphan(now, entry)

    def _end_orphan(self, now: float, entry: AccessLogEntry) -> None:
        """End a request of another router in the accounts of its pool, if that router has ended."""
        reports = progress_of(entry)
        for router in self._served.shared():
            for report in reports:
                self._answers.release(now, (router, router.on_orphan(now, report).outcomes))

    def take_update(self, now: float) -> tuple[tuple[str, ReplicaUpdate], ...]:
        """Return each pool's id and this replica's replication update for the other replicas."""
        return tuple((router.pool.id, router.take_update(now)) for router in self._served)

    def on_update(self, now: float, pool: str, peer: str, update: ReplicaUpdate, age_s: float) -> None:
        """Apply the update of replica ``peer`` about a pool, which is ``age_s`` seconds old; ignore unknown pools."""
        router = self._served.router(pool)
        if router is not None:
            self._answers.release(now, (router, router.on_update(now, peer, update, age_s).outcomes))

    def on_bindings(self, now: float, pool: str, bindings: Sequence[SharedBinding]) -> None:
        """Apply the session bindings of a pool from the store."""
        router = self._served.router(pool)
        if router is not None:
            router.on_bindings(now, bindings)

    def on_routers(self, now: float, routers: Collection[str]) -> None:
        """Take the names of the routers that may own pools, this router among them if it may."""
        self._answers.release(now, *self._served.set_owners(now, routers))

    def on_message(self, now: float, pool: str, peer: str, message: Message) -> None:
        """Apply the message of another router about a pool; decline questions about a pool that is not served."""
        router = self._served.shared_router(pool)
        if router is not None:
            self._answers.release(now, (router, router.on_message(now, peer, message).outcomes))
        elif isinstance(message, Ask) and self._send is not None:
            self._send(pool, peer, Declined(request_id=message.request.id, number=message.number))

    def on_router_lost(self, now: float, peer: str) -> None:
        """Forget a router that has ended, or to which the connection is lost."""
        self._answers.release(now, *((each, each.on_router_lost(now, peer).outcomes) for each in self._served.shared()))
        for entry in self._orphans.take(now, peer):
            self._end_orphan(now, entry)

    def next_deadline(self) -> float | None:
        """Return the time at which ``on_deadline`` is due next, or None."""
        return self._served.next_deadline()

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits for its outcome. Meanwhile, any event may cause an earlier deadline."""
        return bool(self._waiting)

    def on_first_waiting(self, wake: Callable[[], None]) -> None:
        """Set the function to call when a request begins to wait while no other request waits."""
        self._waiting.on_first = wake

    def on_deadline(self, now: float) -> None:
        """Run all due actions: release or reject queued requests, and expire requests without recent events."""
        for router in self._served:
            expired, outcomes = router.on_deadline(now)
            effects = [(router, outcomes)]
            for completion in expired:
                if self._prefills.splits:
                    if self._owners.get(completion.request_id) is not router:
                        # The request's prefill expired in its prefill pool. The request continues.
                        continue
                    effects += self._prefills.forget(now, completion.request_id)
                self._owners.pop(completion.request_id, None)
                self._report(Expired(now=now, pool=router.pool.id, completion=completion))
            self._answers.release(now, *effects)
        self._report_departed()

    def statuses(self, pools: Collection[str] | None = None) -> tuple[PoolSnapshot, ...]:
        """Return the current status of each pool, or only of the served pools in ``pools``."""
        return self._served.statuses(pools)

    def demands(self, pools: Collection[str] | None = None) -> tuple[PoolSnapshot, ...]:
        """Do the same as ``statuses`` for this router's own requests only, whichever router accounts for them."""
        return self._served.demands(pools)

    def _quoted(self, prompt: Prompt, headers: Mapping[str, str]) -> Mapping[str, object]:
        """Return what a debug line quotes of a request: never the name of its client."""
        shown = {name: value for name, value in headers.items() if name not in self._served.client_headers}
        return quoted_of(prompt, shown, self._limits)

    def _report_pools(self, now: float) -> None:
        self._report(PoolsChanged(now=now, pools=tuple(router.pool for router in self._served)))

    def _decided_remotely(self, pool: str, decision: RemoteDecision) -> None:
        self._report(RemotelyDecided(pool=pool, result=decision.result, seconds=decision.seconds))

    def _report_departed(self) -> None:
        for pool, members in self._served.take_departed():
            self._report(MembersDeparted(pool=pool, members=tuple(sorted(members))))

    def _owner_changed(self, pool: str, before: str, owner: str) -> None:
        self._report(OwnerChanged(pool=pool, before=before, owner=owner))
