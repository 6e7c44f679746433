"""Makes the tables and the chart of the autoscaling measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.autoscaling.measures import cell, size_cell
from bench.autoscaling.settings import (
    ENOUGH,
    SCALERS,
    SHAPES,
    SIZES,
    SLO,
    SLO_ROUTERS,
    SLO_S,
    START_S,
    TARGETS,
    WARMUP_S,
    Extent,
    Shape,
    queue,
)
from bench.paper.cells import Figures as Kept
from bench.paper.charts import INK, SLO_COLOUR, finish, grid, save
from bench.paper.results import Results
from bench.paper.settings import TITLES
from bench.paper.tables import Spread, table
from matplotlib.axes import Axes


def page(results: Results, extent: Extent) -> str:
    """Return a Markdown page with the tables of the measurements."""
    title = TITLES[extent.workload]
    parts = [
        f"{title}, engine model `7b`, SLO {SLO_S:g} s. Instances take {START_S:g} s to start. Each figure is the "
        f"mean over up to {len(extent.seeds)} runs that begin elsewhere in the trace, in brackets least and most. "
        f"The first {WARMUP_S / 60:g} minutes are not judged.\n"
    ]
    for shape in _measured(results, extent):
        parts.append(f"## {shape.capitalize()}: {SHAPES[shape].says}\n\n{_shape_table(results, extent, shape)}")
    sizes = _size_table(results, extent)
    if sizes:
        parts.append(f"## Fixed fleets, half an hour at a rate\n\n{sizes}")
    return "\n".join(parts)


def _measured(results: Results, extent: Extent) -> list[str]:
    """Return the shapes with at least one run."""
    return [each for each in extent.shapes if results.figures(cell(extent, each, SLO, 0)) is not None]


def _shape_table(results: Results, extent: Extent, shape: str) -> str:
    rises = SHAPES[shape].rises_s is not None
    heads = [
        "scaled on",
        "within SLO %",
        "worst minute %",
        "refused",
        "TTFT p99 s",
        "instance hours",
        "mean",
        "most",
        "changes",
        "turns",
        "hit rate %",
    ]
    if rises:
        enough = ENOUGH[SHAPES[shape].highest]
        heads += [f"{enough} asked after s", f"{enough} serve after s"]
    rows = []
    for scaler in (*SCALERS, SLO_ROUTERS):
        of = [found for seed in extent.seeds if (found := results.figures(cell(extent, shape, scaler, seed)))]
        if not of:
            continue
        row = [
            scaler,
            _spread(of, "slo_attainment", 1, 100),
            _spread(of, "worst_minute", 0, 100),
            _spread(of, "refused", 0),
            _spread(of, "ttft_p99_s", 1),
            _spread(of, "instance_hours", 1),
            _spread(of, "replicas_mean", 1),
            _spread(of, "replicas_max", 0),
            _spread(of, "changes", 0),
            _spread(of, "turns", 0),
            _spread(of, "hit_rate", 1, 100),
        ]
        if rises:
            row += [_spread(of, "asked_after_s", 0), _spread(of, "serving_after_s", 0)]
        rows.append(row)
    return table(heads, rows)


def _size_table(results: Results, extent: Extent) -> str:
    rows = []
    for rate, sizes in SIZES.items():
        for size in sizes:
            of = [f for seed in extent.seeds if (f := results.figures(size_cell(extent, rate, size, seed)))]
            if of:
                rows.append(
                    [
                        f"{rate:g}",
                        f"{size}",
                        _spread(of, "slo_attainment", 1, 100),
                        _spread(of, "worst_minute", 0, 100),
                        _spread(of, "ttft_p99_s", 1),
                        _spread(of, "hit_rate", 1, 100),
                    ]
                )
    if not rows:
        return ""
    return table(("rate", "instances", "within SLO %", "worst minute %", "TTFT p99 s", "hit rate %"), rows)


def _spread(of: Sequence[Kept], name: str, digits: int, scale: float = 1.0) -> str:
    return Spread.of(each[name] for each in of).show(digits, scale)


_COLOURS: Final = (("SLO", "#0f766e"), (queue(TARGETS[0]), "#c2571a"), (queue(TARGETS[1]), "#b8860b"))


def draw(results: Results, extent: Extent, path: Path) -> None:
    """Draw the sizes of the fleets with the load, and the share of requests served within the SLO."""
    shapes = _measured(results, extent)
    if not shapes:
        return
    figure, axes = grid(2, len(shapes))
    for column, shape in enumerate(shapes):
        sizes, shares = axes[0][column], axes[1][column]
        for scaler, colour in _COLOURS:
            found = results.figures(cell(extent, shape, scaler, 0))
            if found is not None:
                series = found["series"]
                sizes.step(
                    _minutes(series["at_s"]), series["asked"], where="post", color=colour, linewidth=1.3, label=scaler
                )
                sizes.fill_between(
                    _minutes(series["at_s"]), series["serving"], step="post", color=colour, alpha=0.12, linewidth=0
                )
                at_s, share = zip(*series["attainment"], strict=True)
                shares.plot(_minutes(at_s), [100 * each for each in share], color=colour, linewidth=1.1)
        _draw_need(sizes, SHAPES[shape])
        shares.axhline(90, color=SLO_COLOUR, linewidth=1, linestyle=":", zorder=0.5)
        shares.set_ylim(-3, 103)
        finish(sizes, f"{shape}: replicas asked for, serving (shaded)", across="minutes")
        finish(shares, "within SLO, % of each minute's requests", across="minutes")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles=handles,
        labels=labels,
        loc="outside lower center",
        ncols=min(4, 2 * len(shapes)),
        frameon=False,
        fontsize=8,
    )
    save(figure, path)


def _draw_need(axes: Axes, shape: Shape) -> None:
    """Draw the load as the number of instances that it needs, with the cost per request at the highest rate."""
    at_min: list[float] = []
    need: list[float] = []
    now_s = 0.0
    for phase in shape.phases:
        at_min += [now_s / 60, (now_s + phase.seconds) / 60]
        need += [phase.rate / shape.highest * ENOUGH[shape.highest]] * 2
        now_s += phase.seconds
    axes.plot(at_min, need, color=INK, linewidth=1, linestyle=":", label="what the load takes")


def _minutes(seconds: Sequence[float]) -> list[float]:
    return [each / 60 for each in seconds]
