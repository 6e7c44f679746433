"""Errors of the Kubernetes client, raised by ``client`` and ``library``."""

from typing import Final

_GONE: Final = 410
# The maximum length of a text in a message: the error page of a proxy may be long.
_MESSAGE_CHARACTERS: Final = 500


class KubeError(Exception):
    """A request failed. ``status`` is the HTTP status, 0 for no answer; ``reason`` is from the API, such as Conflict.

    ``retry_after_s`` is the Retry-After header of the answer (429 and 503), None without this header.
    """

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        self.status = status
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(f"{status} {message}" if status else message)

    @property
    def expired(self) -> bool:
        """True if the resourceVersion is no longer available, so that a new list is needed."""
        return self.status == _GONE


class KubeConfigError(KubeError):
    """No configuration can be used: neither a kubeconfig nor a pod's service account."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


def clipped(text: str | bytes) -> str:
    """Return a text for an error message, on one line and shortened."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MESSAGE_CHARACTERS else f"{shown[:_MESSAGE_CHARACTERS]}..."
