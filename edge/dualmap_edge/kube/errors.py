"""What can go wrong on the way to a Kubernetes API server: ``kube.py`` raises it, and so does ``kube_library.py``."""

from typing import Final

_GONE: Final = 410
# What an error says at most: a proxy's error page may be long.
_MESSAGE_CHARACTERS: Final = 500


class KubeError(Exception):
    """A request failed. ``status`` is HTTP's, 0 when no answer came; ``reason`` is the API's word, such as Conflict.

    ``retry_after_s`` is how long the server asks to be left alone (429 and 503), None where it does not say.
    """

    def __init__(self, status: int, message: str, *, reason: str = "", retry_after_s: float | None = None) -> None:
        self.status = status
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(f"{status} {message}" if status else message)

    @property
    def expired(self) -> bool:
        """Whether the version a list or watch began at is gone, so that only a new list helps."""
        return self.status == _GONE


class KubeConfigError(KubeError):
    """There is no usable way to a server: neither a kubeconfig nor a pod's service account."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)


def clipped(text: str | bytes) -> str:
    """Return what an error says of a text: on one line, and not too much of it."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MESSAGE_CHARACTERS else f"{shown[:_MESSAGE_CHARACTERS]}..."
