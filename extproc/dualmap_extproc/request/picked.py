"""The results of a pick: a destination, or a waiting request that gets its answer later."""

from dataclasses import dataclass, field

from dualmap.requests import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """The destination of a request: ``destination`` is ``ip:port[,ip:port]``, ``cluster`` is the pool's Envoy cluster.

    ``max_body_bytes`` is the largest request body that the pool accepts.
    ``request_id`` is empty for a request without a prompt, because the router does not track such a request.
    ``receipt`` is the value of the decision header, or None for a response without this header. ``decision`` is None
    for a request without a prompt. ``prefillers`` are the endpoints that may compute the prompt, in order of
    preference; empty if the destination computes it. ``continuing`` are the endpoints that may continue its stream.
    ``kv_source`` is the endpoint from which the destination can fetch the KV of the request's session; empty for none.
    """

    destination: str
    cluster: str
    max_body_bytes: int
    request_id: str = ""
    receipt: str | None = None
    prefillers: tuple[str, ...] = ()
    continuing: tuple[str, ...] = ()
    kv_source: str = ""
    decision: Decision | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLater:
    """A waiting request. The picker passes the outcome to ``resume``, unless the request is aborted before."""

    request_id: str
