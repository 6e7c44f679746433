"""Logs what changes in a pool without a new version of it: its owner, and members whose time to leave passes."""

from dualmap_edge.logs import clipped, get_logger
from dualmap_extproc.request.observations import FanOut, MembersDeparted, OwnerChanged

_log = get_logger(__name__)


def log_pool_events(observations: FanOut) -> None:
    """Log a line for each change of a pool's owner, as this router knows it, and for members that have departed."""
    observations.subscribe(OwnerChanged, _owner_changed)
    observations.subscribe(MembersDeparted, _departed)


def _owner_changed(changed: OwnerChanged) -> None:
    _log.info("Pool owner changed", pool=changed.pool, before=changed.before, owner=changed.owner)


def _departed(departed: MembersDeparted) -> None:
    _log.info("Members reached their time to leave", pool=departed.pool, members=clipped(departed.members))
