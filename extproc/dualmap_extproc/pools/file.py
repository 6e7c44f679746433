"""Pool files: InferencePool objects in YAML files, for a router without a cluster; read at the start and watched.

A file may hold one object, several documents, or the ``List`` that ``kubectl get dmpool -o yaml`` prints. What an
object means is ``dualmap.objects.pool_reader``'s business; this module opens, bounds and parses files, and notices
changes.
It polls the content: that sees renames, writes in place, swapped ConfigMap links and network file systems alike.
"""

import asyncio
import hashlib
import reprlib
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from dualmap.errors import PoolError
from dualmap.objects.pool_reader import check_distinct, read_pools
from dualmap.pools.pool import Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.pools.changes import log_changes

# 100 bytes a member: room for tens of thousands of members, or hundreds of pools with their pod templates.
MAX_BYTES: Final = 4 * 1024 * 1024
# A pod template is about 15 deep. libyaml's composer recurses in C and crashes the process some 10 000 deep.
MAX_DEPTH: Final = 64
# Counted with every alias expanded, since a few nested aliases can stand for billions of values.
MAX_NODES: Final = 500_000

# How often the files are looked at, and how soon again after a look that found a change. A change is applied when two
# looks in a row saw the same bytes, so that a file caught half written is not taken for one with fewer members.
POLL_S: Final = 0.5
SETTLE_S: Final = 0.2

# libyaml's loader is about eight times faster; PyYAML built without it has the other.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_log = get_logger(__name__)


class PoolFileError(PoolError):
    """A pool file cannot be used; ``file`` is its path as given, the rest as in PoolError."""

    def __init__(self, file: Path, field: str, value: object, accepted: str) -> None:
        self.file = file
        super().__init__(field, value, accepted)

    def __str__(self) -> str:
        return f"{self.file}: {super().__str__()}"


class UnreadablePoolFileError(PoolFileError):
    """A pool file is missing, too much, or no YAML: ``value`` says what is wrong, in words, with no field at fault."""

    def __str__(self) -> str:
        where = "" if self.field in ("file", "document") else f"{self.field}: "
        # PyYAML's sentences run over several lines and may quote what they refuse.
        wrong = " ".join(str(self.value).split())
        return f"{self.file}: {where}{wrong if len(wrong) <= 200 else wrong[:197] + '...'}; give {self.accepted}"


def load_pool_files(paths: Iterable[Path]) -> tuple[Pool, ...]:
    """Read every file and return all their pools, in the order given; raises PoolFileError."""
    return _joined([(path, _parse(path, _read(path))) for path in paths])


@dataclass(slots=True)
class _WatchedFile:
    """One file: the digests last seen and last acted upon, whether the latter was refused, and the last good pools."""

    path: Path
    seen: bytes = b""
    acted_on: bytes = b""
    pools: tuple[Pool, ...] = ()
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What one look at the files found: new pools to serve, refusals to tell, and whether a file is changing now."""

    pools: tuple[Pool, ...] | None
    refusals: tuple[PoolFileError, ...]
    unsettled: bool


class PoolFileWatcher:
    """Keeps the pools of some files up to date: ``load`` once, then ``run`` until cancelled; nothing else ends it.

    A file that is refused or has vanished keeps its last good pools, and the other files' changes still apply. Pools
    that claim one name or model across files keep everything as it was until the files agree again.
    """

    def __init__(self, paths: Iterable[Path], *, poll_s: float = POLL_S, settle_s: float = SETTLE_S) -> None:
        self._files = tuple(_WatchedFile(path) for path in paths)
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._served: tuple[Pool, ...] = ()
        # The pools as last reported, and what kept those of all files from being served together.
        self._told: tuple[Pool, ...] = ()
        self._clash: str | None = None

    @property
    def refused(self) -> bool:
        """Whether any file is refused or missing now, so that last good pools serve in place of what it says."""
        return self._clash is not None or any(file.refused for file in self._files)

    def load(self) -> tuple[Pool, ...]:
        """Read every file and return their pools; raises PoolFileError for the first one refused."""
        for file in self._files:
            data = _read(file.path)
            file.pools = _parse(file.path, data)
            file.seen = file.acted_on = _digest(data)
        self._served = self._told = _joined([(file.path, file.pools) for file in self._files])
        return self._served

    async def run(
        self,
        on_pools: Callable[[tuple[Pool, ...]], None],
        on_refused: Callable[[PoolFileError], None] = lambda _: None,
        on_looked: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Watch until cancelled: call ``on_pools`` with all pools after a change, ``on_refused`` once per refusal.

        ``on_looked`` is told after each look at the files whether any is refused now.
        """
        unsettled = False
        while True:
            await asyncio.sleep(self._settle_s if unsettled else self._poll_s)
            # In a thread: a disk may be slow, and a long file takes a second to parse.
            try:
                look = await asyncio.to_thread(self._look)
                on_looked(self.refused)
                self._tell(look, on_pools, on_refused)
                unsettled = look.unsettled
            except Exception as error:  # noqa: BLE001  # whatever a file brings about, the others must be watched on
                _log.error("pool files could not be taken over, the last good ones serve on", reason=repr(error))

    def _tell(
        self,
        look: _Look,
        on_pools: Callable[[tuple[Pool, ...]], None],
        on_refused: Callable[[PoolFileError], None],
    ) -> None:
        """Log what a look found and report it."""
        for error in look.refusals:
            _log.error(
                "pool file refused, the last good one serves on",
                file=str(error.file),
                field=error.field,
                value=_clipped(error.value),
                accepted=error.accepted,
            )
            on_refused(error)
        if look.pools is not None:
            log_changes(self._told, look.pools)
            self._told = look.pools
            on_pools(look.pools)

    def _look(self) -> _Look:
        """Read every file once, act on the changes that have settled, and say what came of it."""
        refusals: list[PoolFileError] = []
        unsettled = changed = False
        for file in self._files:
            data: bytes | None = None
            error: PoolFileError | None = None
            try:
                if _is_pipe(file.path):
                    continue  # As in `--pool <(kubectl ...)`, which could be read only once.
                data = _read(file.path)
                digest = _digest(data)
            except PoolFileError as unreadable:
                error = unreadable
                digest = str(unreadable).encode()
            if digest == file.acted_on:
                file.seen = digest
                continue
            if digest != file.seen:
                file.seen = digest
                unsettled = True
                continue
            file.acted_on = digest
            changed = True
            try:
                if data is not None:
                    file.pools = _parse(file.path, data)
            except PoolFileError as refusal:
                error = refusal
            if error is not None:
                refusals.append(error)
            elif file.refused:
                _log.info("pool file accepted again", file=str(file.path))
            file.refused = error is not None
        pools = self._rejoin(refusals) if changed else None
        return _Look(pools=pools, refusals=tuple(refusals), unsettled=unsettled)

    def _rejoin(self, refusals: list[PoolFileError]) -> tuple[Pool, ...] | None:
        """Return the pools of all files when they differ from those served; a clash goes to ``refusals``."""
        try:
            pools = _joined([(file.path, file.pools) for file in self._files])
        except PoolFileError as clash:
            # It stands until the files agree, and another file's change is no news of it.
            if str(clash) != self._clash:
                refusals.append(clash)
            self._clash = str(clash)
            return None
        self._clash = None
        if pools == self._served:
            return None
        self._served = pools
        return pools


def _is_pipe(path: Path) -> bool:
    """Whether a path is a pipe or a device; False when that cannot be told, since reading it will say why."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _read(path: Path) -> bytes:
    """Return a file's bytes; raises PoolFileError when it cannot be read or is too long."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadablePoolFileError(path, "file", error.strerror, "a readable pool file") from error
    if len(data) > MAX_BYTES:
        raise UnreadablePoolFileError(
            path, "file", f"more than {MAX_BYTES} bytes", f"a pool file of at most {MAX_BYTES} bytes"
        )
    return data


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _parse(path: Path, data: bytes) -> tuple[Pool, ...]:
    """Return the pools of one file's content; raises PoolFileError."""
    documents = [document for document in _load_yaml(path, data) if document is not None]
    pools: list[Pool] = []
    for number, document in enumerate(documents, start=1):
        try:
            pools.extend(read_pools(document))
        except PoolError as error:
            field = error.field if len(documents) == 1 else f"document {number}: {error.field}"
            raise PoolFileError(path, field, error.value, error.accepted) from error
    if not pools:
        raise UnreadablePoolFileError(
            path, "document", "no pool in it", "at least one InferencePool of serving.dualmap.dev/v1alpha1"
        )
    return tuple(pools)


def _joined(files: Iterable[tuple[Path, tuple[Pool, ...]]]) -> tuple[Pool, ...]:
    """Return the pools of all files; raises PoolFileError for the file that claims a name or model a second time."""
    joined: tuple[Pool, ...] = ()
    for path, pools in files:
        joined += pools
        try:
            check_distinct(joined)
        except PoolError as error:
            raise PoolFileError(path, error.field, error.value, error.accepted) from error
    return joined


def _load_yaml(path: Path, data: bytes) -> list[object]:
    """Return the documents of a YAML stream; raises PoolFileError for what is not YAML or unfolds beyond bounds."""
    try:
        _refuse_bombs(path, data)
        return list(yaml.load_all(data, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        field = "document" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise UnreadablePoolFileError(path, field, error.problem or error.context, "YAML") from error
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # ReaderError (bytes that are no text) has no mark. The others come from PyYAML's conversions of scalars, which
        # check nothing: 2026-13-45, a 5000-digit number, `!!bool maybe` (KeyError), `!!int ""` (IndexError), ...
        raise UnreadablePoolFileError(
            path, "document", f"{type(error).__name__}: {error}", "values that YAML can read"
        ) from error


def _refuse_bombs(path: Path, data: bytes) -> None:
    """Raise PoolFileError for YAML too deep, too long or circular; reads events only, in constant C stack.

    ``open_nodes`` holds, for each collection being read, its anchor and the nodes counted before it, so that an alias
    can be charged with the size of what it stands for.
    """
    nodes = 0
    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    for event in yaml.parse(data, Loader=_Loader):
        if isinstance(event, yaml.DocumentStartEvent):
            sizes.clear()
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise UnreadablePoolFileError(
                    path, "document", f"*{event.anchor} inside &{event.anchor}", "aliases that are not circular"
                )
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
            nodes += 1
            if len(open_nodes) > MAX_DEPTH:
                raise UnreadablePoolFileError(path, "document", f"more than {MAX_DEPTH} levels", "a flatter file")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if nodes > MAX_NODES:
            raise UnreadablePoolFileError(
                path, "document", f"more than {MAX_NODES} values, aliases expanded", "a shorter file"
            )


def _clipped(value: object) -> str:
    """Return a refused value for the log, bounded whatever it holds."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = 80
    return shortened.repr(value)
