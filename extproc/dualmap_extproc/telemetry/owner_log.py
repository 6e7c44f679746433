"""Logs each change of a pool's owner among the routers."""

from dualmap_edge.logs import get_logger
from dualmap_extproc.request.observations import FanOut, OwnerChanged

_log = get_logger(__name__)


def log_owner_changes(observations: FanOut) -> None:
    """Log a line for each change of a pool's owner, as this router knows it."""
    observations.subscribe(OwnerChanged, _changed)


def _changed(changed: OwnerChanged) -> None:
    _log.info("Pool owner changed", pool=changed.pool, before=changed.before, owner=changed.owner)
