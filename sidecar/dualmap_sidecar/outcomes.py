"""What became of prefills and of streams, in the words of metrics, logs and the response header."""

from enum import StrEnum


class Where(StrEnum):
    """Where a prompt was prefilled: by the first prefiller, by a further one, or by the decode engine itself.

    ``NONE`` stands for a request that names no prefiller. The decode engine then computes the prompt as well.
    """

    REMOTE = "remote"
    NEXT = "next"
    LOCAL = "local"
    NONE = "none"


class Reason(StrEnum):
    """Why a prefiller did not prefill a prompt."""

    REFUSED_TARGET = "refused_target"
    PAUSED = "paused"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    CUT = "cut"
    FULL = "full"
    ERROR = "error"
    NO_PARAMETERS = "no_parameters"
    NOT_LOADED = "not_loaded"


class Continued(StrEnum):
    """What became of a stream whose engine ended before its answer."""

    CONTINUED = "continued"
    MEMBER_FAILED = "member_failed"
    NO_MEMBER = "no_member"
    NOT_POSSIBLE = "not_possible"
