"""Structured logs on stderr, as text or JSON. Only this module imports structlog.

Every module calls ``get_logger`` and logs a constant message with key=value details. Details may be ids, counts,
addresses and reasons. Prompt text and header values are never logged, except in the debug line of ``picker`` with
``--log-prompts``.

All messages use ``logging``, so that messages of libraries have the same format. structlog renders the messages. The
handlers ignore a closed stderr, so that the end of a log reader causes no failed request. The import of structlog takes
a third of a second, so only ``configure`` imports it.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from structlog.typing import Processor

LogFormat = Literal["text", "json"]
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_OURS: Final = ("dualmap_edge", "dualmap_extproc", "dualmap_operator", "dualmap_sidecar")
LOG_FORMATS: Final[tuple[LogFormat, ...]] = ("text", "json")
_MINUTE_S: Final = 60.0
_NAMES_SHOWN: Final = 20


class Logger:
    """Writes one line per call: a constant message with details of any type."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    @property
    def debugging(self) -> bool:
        """True if debug lines are written; check this property before computing expensive details."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, sentence: str, **details: object) -> None:
        """Log details of one request for debugging."""
        self._logger.debug(sentence, extra={"details": details})

    def info(self, sentence: str, **details: object) -> None:
        """Log a regular event, such as a start, a reload, or a new replica."""
        self._logger.info(sentence, extra={"details": details})

    def warning(self, sentence: str, **details: object) -> None:
        """Log a problem that the program handles."""
        self._logger.warning(sentence, extra={"details": details})

    def error(self, sentence: str, **details: object) -> None:
        """Log a failure that needs attention."""
        self._logger.error(sentence, extra={"details": details})


class OncePerMinute:
    """A warning that is logged at most once a minute, with the number of its events since the last line."""

    def __init__(self, logger: Logger, sentence: str, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._sentence = sentence
        self._clock = clock
        self._events = 0
        self._logged_s: float | None = None

    def warn(self, events: int, **details: object) -> None:
        """Count events; log the warning if a minute has passed. ``details`` describe the last of the events."""
        now = self._clock()
        self._events += events
        if self._logged_s is None or now - self._logged_s >= _MINUTE_S:
            self._logger.warning(self._sentence, count=self._events, **details)
            self._logged_s, self._events = now, 0


def place_of(error: BaseException) -> str:
    """Return the file and the line that raised an error.

    Log lines contain this and the error's type instead of the error's text, which may quote a request.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.filename}:{place.lineno}"


def get_logger(name: str) -> Logger:
    """Return the logger of a module; ``configure`` may be called before or after this function."""
    return Logger(name)


def clipped(names: Iterable[str]) -> list[str]:
    """Return a list for a log line: the first names, and the number of the others, which may be tens of thousands."""
    listed = list(names)
    more = len(listed) - _NAMES_SHOWN
    return [*listed[:_NAMES_SHOWN], f"and {more} more"] if more > 0 else listed


def configure(*, level: str, log_format: LogFormat) -> None:
    """Write logs at ``level`` (one of LOG_LEVELS) and above to stderr; for libraries, warnings and above.

    ``log_format`` is one of LOG_FORMATS. Raises ValueError for another level or format.
    """
    if level not in LOG_LEVELS:
        raise ValueError(f"log level: {level!r} is not accepted; give one of {', '.join(LOG_LEVELS)}")
    if log_format not in LOG_FORMATS:
        raise ValueError(f"log format: {log_format!r} is not accepted; give one of {', '.join(LOG_FORMATS)}")
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    root.addHandler(_handler(json=log_format == "json"))
    root.setLevel(logging.WARNING)
    for package in _OURS:
        logging.getLogger(package).setLevel(level.upper())


def _handler(*, json: bool) -> logging.Handler:
    import structlog

    render: list[Processor]
    if json:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain tracebacks, because structlog's default (rich) prints local variables, which may contain prompts.
        plain = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            _add_details,
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    return handler


def _add_details(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add a record's details to the event, as a structlog processor."""
    details = getattr(event["_record"], "details", {})
    return {**details, **event}
