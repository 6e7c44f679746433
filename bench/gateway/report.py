"""Makes tables of the samples: medians over the rounds with their spread, ratios within a round, and targets."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.gateway.experiment import (
    ALONE,
    DUPLEX_RATE,
    FEW_CHUNKS,
    MANY_CHUNKS,
    PEER,
    REDIS,
    ROUTERS,
    SIZES_KB,
    TRIVIAL,
    Cell,
    Measured,
    Sample,
    one_router,
    several,
)

AIM_SMALL, AIM_LARGE, AIM_IDLE_CORES = 1.5, 1.2, 0.05
# Target for messages per further chunk: 1 would mean that the picker receives every chunk. Envoy may send a few chunks
# before it processes the end of the stream.
AIM_MESSAGES = 0.02
# For runs without llm-d-router: the trivial picker's CPU time, divided by that of llm-d-router, as recorded in
# bench/results/gateway.md. By prompt in KB; and for event streams, both in FULL_DUPLEX_STREAMED.
TRIVIAL_TO_LLMD, TRIVIAL_TO_LLMD_DUPLEX = {1: 1.58, 64: 0.23, 220: 0.12}, 1.37
# Targets for the router's CPU time, divided by that of llm-d-router.
AIM_TO_LLMD, AIM_TO_LLMD_DUPLEX = {1: 0.8, 64: 0.25, 220: 0.15}, 0.5
AIM_CHUNKS_PER_S, AIM_ADDED_MS = 30_000, 1.3
_DUPLEX_PACED, _DUPLEX_CLOSED = (
    Cell(section="duplex", prompt_kb=1, chunks=MANY_CHUNKS, rate=rate) for rate in (DUPLEX_RATE, 0)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median with the lowest and the highest value."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)

    def text(self, digits: int = 0) -> str:
        """Return the median, with the range if there are several values."""
        if not self.values:
            return "-"
        shown = f"{self.median:.{digits}f}"
        if len(self.values) == 1:
            return shown
        return f"{shown} ({min(self.values):.{digits}f} to {max(self.values):.{digits}f})"


class Tables:
    """The tables of one run."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def markdown(self) -> str:
        """Return the tables of the measured sections."""
        tables = (
            self._prompts(),
            self._chunks(),
            self._duplex(),
            self._full(),
            self._routers(),
            self._idle(),
            self._aims(),
        )
        return "\n\n".join(table for table in tables if table)

    def _prompts(self) -> str:
        rows = []
        for size in SIZES_KB:
            closed = Cell(section="prompts", prompt_kb=size, chunks=0, rate=0)
            paced = Cell(section="prompts", prompt_kb=size, chunks=0, rate=self._measured.plan.rate)
            for stack in (ALONE, TRIVIAL, *self._routers_alone, REDIS, *self._peers):
                alone = stack == ALONE
                rows.append([
                    f"{size} KB",
                    stack,
                    *self._picker(closed, stack),
                    *self._picker(paced, stack),
                    self._spread(closed, stack, lambda sample: sample.cpu_us("envoy")).text(),
                    self._spread(closed, stack, lambda sample: sample.cpu_us("load")).text(),
                    self._spread(closed, stack, _per_second).text(),
                    self._spread(paced, stack, lambda sample: sample.result.ttfb_p50_ms).text(2)
                    if alone
                    else "+" + self._added(paced, stack, lambda sample: sample.result.ttfb_p50_ms).text(2),
                    self._spread(paced, stack, lambda sample: sample.result.ttfb_p99_ms).text(2)
                    if alone
                    else "+" + self._added(paced, stack, lambda sample: sample.result.ttfb_p99_ms).text(2),
                ])  # fmt: skip
        plan = self._measured.plan
        header = [
            "prompt", "stack", f"picker's CPU a request, us ({plan.connections} clients)", *self._ratios,
            f"at {plan.rate:g}/s, us", *self._ratios, "Envoy's CPU a request, us", "clients' CPU, us", "requests/s",
            f"first byte p50, ms (at {plan.rate:g}/s)", "p99, ms",
        ]  # fmt: skip
        return self._table("prompts", "Prompts, answered with JSON", header, rows)

    def _chunks(self) -> str:
        rows = []
        for stack in (ALONE, TRIVIAL, *self._routers_alone, REDIS):
            few, many = (self._chunk_cell(chunks) for chunks in (FEW_CHUNKS, MANY_CHUNKS))
            alone = stack == ALONE
            rows.append([
                stack,
                *("" if alone else self._spread(cell, stack, _picker_us).text() for cell in (few, many)),
                *("" if alone else self._spread(cell, stack, lambda sample: sample.messages).text(1)
                  for cell in (few, many)),
                *(self._spread(cell, stack, lambda sample: sample.cpu_us("envoy")).text() for cell in (few, many)),
            ])  # fmt: skip
        header = [
            "stack", f"picker's CPU a request, us: {FEW_CHUNKS} chunks", f"{MANY_CHUNKS} chunks",
            f"messages to the picker: {FEW_CHUNKS} chunks", f"{MANY_CHUNKS} chunks",
            f"Envoy's CPU a request, us: {FEW_CHUNKS} chunks", f"{MANY_CHUNKS} chunks",
        ]  # fmt: skip
        title = f"Event streams, 1 KB prompts at {self._measured.plan.rate:g}/s"
        return self._table("chunks", title, header, rows)

    def _duplex(self) -> str:
        paced, closed = _DUPLEX_PACED, _DUPLEX_CLOSED
        rows = []
        for stack in (ALONE, TRIVIAL, *self._routers_alone, *self._peers):
            alone = stack == ALONE
            p99 = "" if alone else "+" + self._added(closed, stack, lambda sample: sample.result.ttfb_p99_ms).text(2)
            rows.append([
                stack,
                *self._picker(paced, stack),
                *self._picker(closed, stack, chunks=MANY_CHUNKS),
                self._spread(closed, stack, _chunk_us("envoy")).text(1),
                self._spread(closed, stack, _chunks_per_second).text(),
                self._spread(closed, stack, lambda sample: sample.result.ttfb_p99_ms).text(2) if alone else p99,
            ])  # fmt: skip
        clients = self._measured.plan.connections
        header = [
            "stack", f"picker's CPU a request at {DUPLEX_RATE:g}/s, us", *self._ratios,
            f"picker's CPU a chunk, us ({clients} clients, request included)", *self._ratios, "Envoy's CPU a chunk, us",
            "chunks/s", "first byte p99, ms",
        ]  # fmt: skip
        title = f"Event streams of {MANY_CHUNKS} chunks, both bodies in FULL_DUPLEX_STREAMED, 1 KB prompts"
        return self._table("duplex", title, header, rows)

    def _full(self) -> str:
        """Return the rate of chunks that fills one core of each kind of process, in the stack of the first router."""
        stack, rows = self._routers_alone[0], []
        for name, process in (("clients", "load"), ("engines", "engines"), ("Envoy", "envoy"), ("router", "picker")):
            us = self._spread(_DUPLEX_CLOSED, stack, _chunk_us(process))
            if us.values:
                rows.append([name, us.text(1), f"{1e6 / us.median:.0f}"])
        header = ["process", "CPU a chunk, us (request included)", "one core is full at chunks/s (computed)"]
        return self._table("duplex", f"Processes of {stack} in FULL_DUPLEX_STREAMED", header, rows)

    def _routers(self) -> str:
        cell = Cell(section="routers", prompt_kb=1, chunks=0, rate=0)
        rows = [
            [
                stack,
                self._spread(cell, stack, _picker_us).text(),
                self._ratio(cell, stack).text(2),
                self._spread(cell, stack, lambda sample: sample.cpu_us("redis")).text(),
                self._spread(cell, stack, lambda sample: sample.cpu_us("envoy")).text(),
                self._spread(cell, stack, _per_second).text(),
            ]
            for stack in (TRIVIAL, *map(several, ROUTERS))
        ]
        header = [
            "stack", "CPU of all pickers a request, us", "x trivial", "Redis' CPU a request, us",
            "Envoy's CPU a request, us", "requests/s",
        ]  # fmt: skip
        title = f"Several routers, 1 KB prompts, {self._measured.plan.connections} clients"
        return self._table("routers", title, header, rows)

    def _idle(self) -> str:
        rows = [
            [each.stack, str(each.endpoints), f"{each.router:.4f}", f"{each.envoy:.4f}", f"{each.seconds:g}"]
            for each in self._measured.idle
        ]
        header = ["stack", "endpoints", "router, cores", "Envoy, cores", "over s"]
        return self._table("idle", "Idle", header, rows)

    def _aims(self) -> str:
        rows = []
        for size in SIZES_KB:
            aim = AIM_SMALL if size == min(SIZES_KB) else AIM_LARGE
            cell = Cell(section="prompts", prompt_kb=size, chunks=0, rate=0)
            ratio = self._ratio(cell, REDIS)
            if ratio.values:
                aimed = f"CPU at {size} KB, Redis included: at most {aim} times the trivial picker's"
                rows.append([aimed, ratio.text(2), _met(ratio.median <= aim)])
        for stack in self._routers_alone:
            rows += self._aims_of(stack)
        few, many = (
            self._spread(self._chunk_cell(chunks), REDIS, lambda sample: sample.messages)
            for chunks in (FEW_CHUNKS, MANY_CHUNKS)
        )
        if few.values and many.values:
            more = (many.median - few.median) / (MANY_CHUNKS - FEW_CHUNKS)
            aimed = f"no cost per output chunk: at most {AIM_MESSAGES} messages for each"
            rows.append([aimed, f"{more:.3f}", _met(more <= AIM_MESSAGES)])
        for each in self._measured.idle:
            aimed = f"idle with {each.endpoints} endpoints: at most {AIM_IDLE_CORES} core"
            rows.append([aimed, f"{each.router:.4f}", _met(each.router <= AIM_IDLE_CORES)])
        return _markdown("Targets", ["target", "measured", "met"], rows) if rows else ""

    def _aims_of(self, stack: str) -> list[list[str]]:
        """Return the targets of one router with a transport."""
        rows = []
        closed = [(size, Cell(section="prompts", prompt_kb=size, chunks=0, rate=0)) for size in SIZES_KB]
        loads = [(f"{size} KB", cell, TRIVIAL_TO_LLMD[size], AIM_TO_LLMD[size]) for size, cell in closed]
        duplex = f"{MANY_CHUNKS} chunks in FULL_DUPLEX"
        loads.append((duplex, _DUPLEX_PACED, TRIVIAL_TO_LLMD_DUPLEX, AIM_TO_LLMD_DUPLEX))
        for load, cell, trivial, aim in loads:
            ratio = self._to_peer(cell, stack, trivial)
            if ratio.values:
                aimed = f"{stack}: CPU at {load}, at most {aim} of llm-d-router's ({self._source_of_peer})"
                rows.append([aimed, ratio.text(2), _met(ratio.median <= aim)])
        chunks = self._spread(_DUPLEX_CLOSED, stack, _chunks_per_second)
        if chunks.values:
            aimed = f"{stack}: at least {AIM_CHUNKS_PER_S} chunks/s in FULL_DUPLEX"
            rows.append([aimed, chunks.text(), _met(chunks.median >= AIM_CHUNKS_PER_S)])
        paced = Cell(section="prompts", prompt_kb=1, chunks=0, rate=self._measured.plan.rate)
        added = self._added(paced, stack, lambda sample: sample.result.ttfb_p50_ms)
        if added.values:
            aimed = f"{stack}: first byte at 1 KB, at most +{AIM_ADDED_MS} ms (p50)"
            rows.append([aimed, added.text(2), _met(added.median <= AIM_ADDED_MS)])
        return rows

    def _to_peer(self, cell: Cell, stack: str, trivial: float) -> Spread:
        """Return the CPU time divided by llm-d-router's, of which ``trivial`` is the trivial picker's known share."""
        if self._peers:
            return self._ratio(cell, stack, PEER)
        return Spread(values=tuple(each * trivial for each in self._ratio(cell, stack).values))

    @property
    def _source_of_peer(self) -> str:
        return "measured" if self._peers else "its recorded ratio to the trivial picker"

    @property
    def _peers(self) -> tuple[str, ...]:
        return (PEER,) if self._measured.plan.peer else ()

    @property
    def _ratios(self) -> list[str]:
        """The names of the columns with ratios."""
        return ["x trivial", *(f"x {peer}" for peer in self._peers)]

    def _picker(self, cell: Cell, stack: str, *, chunks: int = 1) -> list[str]:
        """Return the picker's CPU time of a request or of a chunk, and its ratios; empty for Envoy alone."""
        if stack == ALONE:
            return [""] * (1 + len(self._ratios))
        spent = self._spread(cell, stack, lambda sample: _picker_us(sample) / chunks)
        ratios = [self._ratio(cell, stack, other).text(2) for other in (TRIVIAL, *self._peers)]
        return [spent.text(0 if chunks == 1 else 1), *ratios]

    @property
    def _routers_alone(self) -> tuple[str, ...]:
        return tuple(one_router(each) for each in self._measured.plan.transports)

    def _chunk_cell(self, chunks: int) -> Cell:
        return Cell(section="chunks", prompt_kb=1, chunks=chunks, rate=self._measured.plan.rate)

    def _table(self, section: str, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        return _markdown(title, header, rows) if section in self._measured.plan.sections else ""

    def _spread(self, cell: Cell, stack: str, figure: Callable[[Sample], float]) -> Spread:
        return Spread(values=tuple(figure(sample) for sample in self._of(cell, stack)))

    def _ratio(self, cell: Cell, stack: str, other: str = TRIVIAL) -> Spread:
        """Return the picker's CPU time divided by that of another stack's picker in the same round."""
        pairs = zip(self._of(cell, stack), self._of(cell, other), strict=True)
        return Spread(values=tuple(_picker_us(one) / _picker_us(two) for one, two in pairs))

    def _added(self, cell: Cell, stack: str, figure: Callable[[Sample], float]) -> Spread:
        """Return the difference of a figure from the figure of Envoy alone in the same round."""
        pairs = zip(self._of(cell, stack), self._of(cell, ALONE), strict=True)
        return Spread(values=tuple(figure(one) - figure(other) for one, other in pairs))

    def _of(self, cell: Cell, stack: str) -> list[Sample]:
        return [each for each in self._measured.samples if each.cell == cell and each.stack == stack]


def _picker_us(sample: Sample) -> float:
    return sample.cpu_us("picker")


def _chunk_us(process: str) -> Callable[[Sample], float]:
    """Return the function of a sample that returns a process' CPU time for each chunk."""
    return lambda sample: sample.cpu_us(process) / MANY_CHUNKS


def _chunks_per_second(sample: Sample) -> float:
    return _per_second(sample) * MANY_CHUNKS


def _per_second(sample: Sample) -> float:
    return sample.result.requests / sample.result.seconds


def _met(is_met: bool) -> str:
    return "yes" if is_met else "no"


def _markdown(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
