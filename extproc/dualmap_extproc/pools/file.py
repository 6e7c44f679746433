"""Reads pool files at the start and watches them: InferencePool objects in YAML, for a router without Kubernetes.

A file may hold one object, several documents, or the ``List`` that ``kubectl get dmpool -o yaml`` prints. This module
opens files and parses them within limits. ``dualmap.objects.pool_reader`` reads the objects. The watcher polls the
content of files. Polling detects renames, writes in place, swapped ConfigMap links and changes on network file systems.
"""

import asyncio
import hashlib
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.constructor import ConstructorError

from dualmap.errors import PoolError
from dualmap.objects.pool_reader import check_distinct, read_pools
from dualmap.pools.pool import Pool
from dualmap_edge.logs import get_logger
from dualmap_extproc.pools.changes import log_changes, log_prefill_problems, prefill_problems

# The largest size of a pool file. A member takes about 100 bytes, so the limit allows tens of thousands of members, or
# hundreds of pools with pod templates.
MAX_BYTES: Final = 4 * 1024 * 1024
# The deepest nesting in a file. A pod template has about 15 levels. libyaml recurses in C and crashes the process at
# about 10 000 levels.
MAX_DEPTH: Final = 64
# The largest number of values in a file. Each alias counts as all values that it expands to, because a few nested
# aliases can expand to billions of values.
MAX_NODES: Final = 500_000

# The interval between two polls, and the shorter interval after a poll that found a change. The watcher applies a
# change when two successive polls read the same bytes. The watcher therefore does not apply a half-written file.
POLL_S: Final = 0.5
SETTLE_S: Final = 0.2

# libyaml's loader is about eight times faster, but PyYAML may be built without libyaml.
_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG_PREFIX: Final = "tag:yaml.org,2002:"
_TEXT_SHOWN: Final = 40
_log = get_logger(__name__)


class _Loader(_YamlLoader):  # type: ignore[misc]  # The stubs cannot know which loader it is.
    """PyYAML's safe loader, which also refuses a key that a mapping has twice, and names the line of every error."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Return a document. Raises yaml.MarkedYAMLError."""
        # PyYAML moves the pairs of `<<` into the mappings while it constructs them, so the check comes first.
        nodes, seen = [node], set[int]()
        while nodes:
            each = nodes.pop()
            if id(each) in seen or isinstance(each, yaml.ScalarNode):
                continue
            seen.add(id(each))
            if isinstance(each, yaml.MappingNode):
                _refuse_repeated_keys(each)
                nodes += [value for _, value in each.value]
            else:
                nodes += each.value
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value. Raises yaml.MarkedYAMLError."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # PyYAML converts scalars without checks. Examples are 2026-13-45, a 5000-digit number, `!!bool maybe`
            # (KeyError) and `!!int ""` (IndexError).
            kind = node.tag.removeprefix(_TAG_PREFIX)
            raise ConstructorError(None, None, f"{_quoted(node)} is no valid {kind}", node.start_mark) from error


def _refuse_repeated_keys(mapping: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = (key.tag, key.value)
        if name in lines:
            problem = f"the mapping has the key {_quoted(key)} already in line {lines[name]}"
            raise ConstructorError(None, None, problem, key.start_mark)
        lines[name] = key.start_mark.line + 1


def _quoted(node: yaml.Node) -> str:
    text = str(node.value)
    return repr(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}...")


class PoolFileError(PoolError):
    """A pool file is invalid. ``file`` is the path from the command line; the other fields are those of PoolError."""

    def __init__(self, file: Path, field: str, value: object, accepted: str) -> None:
        self.file = file
        super().__init__(field, value, accepted)

    def __str__(self) -> str:
        return f"{self.file}: {super().__str__()}"


class UnreadablePoolFileError(PoolFileError):
    """A pool file is missing, too large, or not YAML. ``value`` describes the fault, which is in no field."""

    def __str__(self) -> str:
        where = "" if self.field in ("file", "document") else f"{self.field}: "
        # PyYAML's messages have several lines and may quote the file.
        wrong = " ".join(str(self.value).split())
        return f"{self.file}: {where}{wrong if len(wrong) <= 200 else wrong[:197] + '...'}; give {self.accepted}"


def load_pool_files(paths: Iterable[Path]) -> tuple[Pool, ...]:
    """Return the pools of all files, in the order given. Raises PoolFileError."""
    return _joined([(path, _parse(path, _read(path))) for path in paths])


def load_documents(path: Path) -> tuple[object, ...]:
    """Return the documents of a YAML file that are not empty, within the limits of pool files. Raises PoolFileError."""
    return parse_documents(path, _read(path))


def parse_documents(path: Path, data: bytes) -> tuple[object, ...]:
    """Return the YAML documents in ``data`` that are not empty; errors name ``path``. Raises PoolFileError."""
    return tuple(document for document in _load_yaml(path, data) if document is not None)


@dataclass(slots=True)
class _WatchedFile:
    """One file: the digest last read, the digest last applied, and the last valid pools.

    ``refused`` is true if the last content was invalid.
    """

    path: Path
    seen: bytes = b""
    acted_on: bytes = b""
    pools: tuple[Pool, ...] = ()
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The result of one poll: new pools to serve, errors to report, and whether a file changed since the last poll."""

    pools: tuple[Pool, ...] | None
    refusals: tuple[PoolFileError, ...]
    unsettled: bool


class PoolFileWatcher:
    """The watcher of pool files: call ``load`` once, and then ``run``, which ends only when cancelled.

    If a file becomes invalid or missing, the watcher keeps the file's last valid pools, and still applies changes of
    other files. While two files define the same pool name or model, the watcher applies no changes.
    """

    def __init__(self, paths: Iterable[Path], *, poll_s: float = POLL_S, settle_s: float = SETTLE_S) -> None:
        self._files = tuple(_WatchedFile(path) for path in paths)
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._served: tuple[Pool, ...] = ()
        # The pools of the last report, and the current conflict between files.
        self._logged: tuple[Pool, ...] = ()
        self._clash: str | None = None

    @property
    def refused(self) -> bool:
        """Whether any file is invalid or missing, so that the router serves its last valid pools."""
        return self._clash is not None or any(file.refused for file in self._files)

    def load(self) -> tuple[Pool, ...]:
        """Return the pools of all files. Raises PoolFileError for the first invalid file."""
        for file in self._files:
            data = _read(file.path)
            file.pools = _parse(file.path, data)
            file.seen = file.acted_on = _digest(data)
        self._served = self._logged = _joined([(file.path, file.pools) for file in self._files])
        log_prefill_problems((), self._served)
        return self._served

    async def run(
        self,
        on_pools: Callable[[tuple[Pool, ...]], None],
        on_refused: Callable[[PoolFileError], None] = lambda _: None,
        on_looked: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Watch until cancelled: call ``on_pools`` with all pools after a change, and ``on_refused`` once per error.

        The method calls ``on_looked`` after each poll; the argument is true if any file is invalid or missing.
        """
        unsettled = False
        while True:
            await asyncio.sleep(self._settle_s if unsettled else self._poll_s)
            # The poll runs in a thread, because a disk may be slow, and a long file takes a second to parse.
            try:
                look = await asyncio.to_thread(self._look)
                on_looked(self.refused)
                self._tell(look, on_pools, on_refused)
                unsettled = look.unsettled
            except Exception as error:  # noqa: BLE001  # an unexpected error must not end the watch of all files
                _log.error("Applying the pool files failed, keeping the last valid pools", reason=repr(error))

    def _tell(
        self,
        look: _Look,
        on_pools: Callable[[tuple[Pool, ...]], None],
        on_refused: Callable[[PoolFileError], None],
    ) -> None:
        """Log and report the result of a poll."""
        for error in look.refusals:
            _log.error(
                "Rejected pool file, keeping the last valid version",
                file=str(error.file),
                field=error.field,
                value=str(error.value) if isinstance(error, UnreadablePoolFileError) else error.shown,
                accepted=error.accepted,
            )
            on_refused(error)
        if look.pools is not None:
            log_changes(self._logged, look.pools)
            log_prefill_problems(self._logged, look.pools)
            self._logged = look.pools
            on_pools(look.pools)

    def _look(self) -> _Look:
        """Read every file once, apply the changes that two successive polls found, and return the result."""
        refusals: list[PoolFileError] = []
        unsettled = changed = False
        for file in self._files:
            data: bytes | None = None
            error: PoolFileError | None = None
            try:
                if _is_pipe(file.path):
                    continue  # `--pool <(kubectl ...)` can be read only once.
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
                _log.info("Pool file is valid again", file=str(file.path))
            file.refused = error is not None
        pools = self._rejoin(refusals) if changed else None
        return _Look(pools=pools, refusals=tuple(refusals), unsettled=unsettled)

    def _rejoin(self, refusals: list[PoolFileError]) -> tuple[Pool, ...] | None:
        """Return the pools of all files if they differ from the served pools. Add a conflict to ``refusals``."""
        try:
            pools = _joined([(file.path, file.pools) for file in self._files])
        except PoolFileError as clash:
            # The watcher reports a conflict once, even if a file without the conflict changes later.
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
    """Return whether a path is a pipe or a device. Return False after an error, which the next read reports."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _read(path: Path) -> bytes:
    """Return a file's bytes. Raises PoolFileError if the file is unreadable or too long."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadablePoolFileError(path, "file", error.strerror, "a readable file") from error
    if len(data) > MAX_BYTES:
        raise UnreadablePoolFileError(
            path, "file", f"more than {MAX_BYTES} bytes", f"a file of at most {MAX_BYTES} bytes"
        )
    return data


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _parse(path: Path, data: bytes) -> tuple[Pool, ...]:
    """Return the pools of one file's content. Raises PoolFileError."""
    documents = parse_documents(path, data)
    pools: list[Pool] = []
    for number, document in enumerate(documents, start=1):
        try:
            pools.extend(read_pools(document, refuse_unknown=True))
        except PoolError as error:
            field = error.field if len(documents) == 1 else f"document {number}: {error.field}"
            raise PoolFileError(path, field, error.value, error.accepted) from error
    if not pools:
        raise UnreadablePoolFileError(
            path, "document", "it contains no pool", "at least one InferencePool of serving.dualmap.dev/v1alpha1"
        )
    return tuple(pools)


def _joined(files: Iterable[tuple[Path, tuple[Pool, ...]]]) -> tuple[Pool, ...]:
    """Return the pools of all files.

    Raises PoolFileError for a pool name or model that an earlier file already has.
    """
    files = tuple(files)
    joined: tuple[Pool, ...] = ()
    for path, pools in files:
        joined += pools
        try:
            check_distinct(joined)
        except PoolError as error:
            # Two pools may have one model if one prefills for the other.
            problems = prefill_problems([pool for _, pools in files for pool in pools])
            mend = "".join(f"; or correct spec.prefillPool of {pool}: {reason}" for pool, reason in problems.items())
            raise PoolFileError(path, error.field, error.value, error.accepted + mend) from error
    return joined


def _load_yaml(path: Path, data: bytes) -> list[object]:
    """Return the documents of a YAML stream. Raises PoolFileError for invalid YAML, or too many values or levels."""
    try:
        _refuse_bombs(path, data)
        return list(yaml.load_all(data, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        field = "document" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise UnreadablePoolFileError(path, field, error.problem or error.context, "valid YAML") from error
    except yaml.YAMLError as error:
        # ReaderError (the bytes are not text) has no mark.
        raise UnreadablePoolFileError(path, "document", f"{type(error).__name__}: {error}", "a YAML file") from error


def _refuse_bombs(path: Path, data: bytes) -> None:
    """Raise PoolFileError for YAML that is too deep, too long or circular.

    The check parses events, which needs a constant size of the C stack.

    ``open_nodes`` holds the anchor of each open collection and the number of nodes before the collection. At the end of
    a collection, the difference of the node counts is the collection's size. An alias counts as its collection's size.
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
