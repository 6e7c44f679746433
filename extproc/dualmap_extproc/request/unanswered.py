"""The messages of a request that the router must still answer, and the answers after the pick."""

from dualmap_extproc.request.modes import DUPLEX, Answering
from dualmap_extproc.wire import answers


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

    def answer(self, answering: Answering, chunk_bytes: int) -> list[bytes]:
        """Return the answers to all these messages, encoded, in the order that Envoy expects.

        The caller adds the pick to the first answer. ``chunk_bytes`` is the size of the largest piece of a body that
        the router sends back to Envoy.
        """
        out: list[bytes] = []
        if self.headers:
            out.append(answers.PLAIN_REQUEST_HEADERS)
        if answering is not DUPLEX:
            out += [answers.PLAIN_REQUEST_BODY] * self.bodies
        elif self.bodies:
            out += answers.request_pieces(self.body, chunk_bytes, last=not self.trailers)
        if self.trailers:
            out.append(answers.PLAIN_REQUEST_TRAILERS)
        self.body = b""
        return out
