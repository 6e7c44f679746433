"""What the data path reports while it works: ``metrics`` implements it, ``picker`` and ``server`` call it.

Loads are not reported here: they are read from the routers' statuses when asked for (``Picker.statuses``).
"""

from typing import Protocol

from dualmap.requests import Completion, Decision, FirstToken
from dualmap_extproc.errors import Refused


class Observer(Protocol):
    """Told of each event once, on the event loop; must not block. ``pool`` is ``namespace/name``."""

    def routed(self, pool: str, decision: Decision) -> None:
        """A request with a prompt was sent to an instance."""

    def routed_bodiless(self, pool: str) -> None:
        """A GET or another request without a prompt was sent to any instance."""

    def refused(self, refused: Refused) -> None:
        """A request got an error instead of an instance; ``refused.pool`` may be empty."""

    def waited(self, pool: str, seconds: float) -> None:
        """A request that was held is held no longer: sent to an instance, refused, or given up by its client."""

    def decided(self, seconds: float) -> None:
        """Reading a body, choosing and building the answer took ``seconds`` of this process."""

    def first_token(self, pool: str, first_token: FirstToken) -> None:
        """The first chunk of an event stream came back."""

    def finished(self, pool: str, completion: Completion) -> None:
        """A request ended with its response complete."""

    def rejected(self, pool: str, completion: Completion) -> None:
        """The engine did not take a request, by a 4xx status that is about the request (``ending``)."""

    def aborted(self, pool: str, completion: Completion) -> None:
        """A request was cancelled, broke off, or was put off by an instance that is full (``ending``)."""

    def failed(self, pool: str, completion: Completion) -> None:
        """The instance failed: it answered 5xx, refused the connection, or broke off (``ending``)."""

    def expired(self, pool: str, completion: Completion) -> None:
        """A request was forgotten because no news of it came within the ledger's time to live."""

    def measured(self, pool: str, completion: Completion) -> None:
        """The engine said how many prompt tokens it had cached: at the end of a request or a little later."""

    def served_elsewhere(self, pool: str) -> None:
        """Envoy reported that another instance than the chosen one served a request."""
