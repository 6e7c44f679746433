"""The errors of the sidecar.

SidecarError
├── Refused           the proxy answers the request itself, with an OpenAI error body
├── UnreadableBody    a body is not a JSON object, or has too many elements
└── PrefillFailed     a prefiller did not prefill; the next one is tried
"""

from dualmap_sidecar.outcomes import Reason


class SidecarError(Exception):
    """Base class of the sidecar's errors."""


class Refused(SidecarError):
    """A request that the proxy answers itself. ``code`` is the error's code in OpenAI's format."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class UnreadableBody(SidecarError):
    """A body that is not a JSON object. The engine rejects it as well, unless it has only too many elements."""

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


class PrefillFailed(SidecarError):
    """A prefiller did not prefill a prompt. ``detail`` describes the failure for the log."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
