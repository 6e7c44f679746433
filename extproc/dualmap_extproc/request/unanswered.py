"""The messages of a request that the router must still answer, and the answers after the pick."""

from dualmap_extproc.request.modes import DUPLEX, Answering
from dualmap_extproc.wire import answers
from dualmap_extproc.wire import ext_proc_pb2 as wire


class Unanswered:
    """The request messages that have arrived and have no answer yet.

    ``body`` is the body that the router sends back to Envoy in ``DUPLEX``.
    """

    __slots__ = ("bodies", "body", "headers", "trailers")

    def __init__(self) -> None:
        self.headers = False
        self.bodies = 0
        self.trailers = False
        self.body = b""

    def answer(self, answering: Answering, chunk_bytes: int) -> list[wire.ProcessingResponse]:
        """Return the answers to all these messages, in the order that Envoy expects.

        The caller writes the pick into the first answer. The other answers may be shared objects, so the caller must
        not change them. ``chunk_bytes`` is the size of the largest piece of a body that the router sends back to Envoy.
        """
        out: list[wire.ProcessingResponse] = []
        if self.headers:
            out.append(wire.ProcessingResponse(request_headers=wire.HeadersResponse()))
        if answering is not DUPLEX:
            bodies = [answers.PLAIN_REQUEST_BODY] * self.bodies
            if bodies and not out:
                bodies[0] = wire.ProcessingResponse(request_body=wire.BodyResponse())
            out += bodies
        elif self.bodies:
            out.extend(answers.request_pieces(self.body, chunk_bytes, last=not self.trailers))
        if self.trailers:
            out.append(wire.ProcessingResponse(request_trailers=wire.TrailersResponse()))
        self.body = b""
        return out
