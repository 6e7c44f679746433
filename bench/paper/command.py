"""The command ``python -m bench paper``: runs the missing measurements, then writes the pages and plots."""

import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from bench.paper.behind import behind_table
from bench.paper.cells import Cell
from bench.paper.claims import claims_table, write_parts
from bench.paper.measuring import commit_of_code, measure_cells
from bench.paper.results import Measured, Results, ResultsError
from bench.paper.section import Section
from bench.paper.sections import SECTIONS
from bench.paper.settings import TRACE, Extent
from bench.paper.tables import table

from dualmap_cli.interrupts import INTERRUPTED, SIGNAL_EXIT_BASE
from dualmap_sim.parallel import WorkerError
from dualmap_sim.workloads.mooncake import TraceError, read_mooncake

_ROOT: Final = Path(__file__).parents[2]
_RECORDED: Final = _ROOT / "bench" / "results" / "paper"
_QUICK: Final = _ROOT / "build" / "paper-quick"
_EVALUATION: Final = _ROOT / "docs" / "evaluation.md"


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(dict.fromkeys(part.strip() for part in value.split(",")))


def _refuse_unknown(names: Sequence[str], accepted: Sequence[str], hint: str) -> None:
    """Raise click.BadParameter for a name that is not in ``accepted``."""
    for name in names:
        if name not in accepted:
            raise click.BadParameter(f"{name!r} is not accepted; give some of {', '.join(accepted)}", param_hint=hint)


def _trace(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Reject an unreadable trace. The default trace is not checked, because it may be missing."""
    if value is not None:
        try:
            read_mooncake(value)
        except TraceError as error:
            raise click.BadParameter(str(error)) from error
    return value


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--section",
    "names",
    callback=_names,
    help=f"Sections to measure, separated by commas: {', '.join(SECTIONS)}.",
)
@click.option(
    "--policies",
    callback=_names,
    help="Policies to measure again, even if results exist. All other policies are skipped.",
)
@click.option(
    "--stale",
    is_flag=True,
    help="After the missing measurements, repeat those that were made by another version of the code.",
)
@click.option(
    "--draw",
    "only_draw",
    is_flag=True,
    help="Do not measure. Write the results pages and the plots from the stored results.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Measure one short window of every section, as a smoke test. The results go to build/.",
)
@click.option("--processes", default=2, type=click.IntRange(1, 64), help="Number of measurements to run in parallel.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for the results.")
@click.option(
    "--trace",
    "asked_trace",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_trace,
    help="File of the Conversation trace. If the default file is missing, the measurements that need it are skipped.  "
    f"[default: {TRACE}]",
)
def paper(
    *,
    names: tuple[str, ...] | None,
    policies: tuple[str, ...] | None,
    stale: bool,
    only_draw: bool,
    quick: bool,
    processes: int,
    out: Path | None,
    asked_trace: Path | None,
) -> None:
    """Reproduce the papers' evaluations in virtual time.

    A full benchmark takes about two hours on two idle cores. Each measurement is stored as JSON. An interrupted
    benchmark continues with the measurements that have no stored result. docs/evaluation.md contains the results.

    \b
    Example:
      python -m bench paper --section goodput,ttft
      python -m bench paper --policies dualmap        # after a change of the policy
      python -m bench paper --stale                   # after a change of the router
    """
    extent = Extent(quick=quick, trace=asked_trace or TRACE)
    directory = out or (_QUICK if quick else _RECORDED)
    _refuse_unknown(names or (), tuple(SECTIONS), "--section")
    sections = [SECTIONS[name] for name in names or tuple(SECTIONS)]
    _refuse_unknown(
        policies or (), sorted({cell.policy for section in sections for cell in section.cells(extent)}), "--policies"
    )
    results = Results(directory)
    if not extent.trace.exists():
        click.echo(f"paper: {extent.trace} does not exist; skipping measurements of the Conversation trace", err=True)
    try:
        if not only_draw:
            measured_by = commit_of_code()
            cells = _to_measure(sections, extent, results, policies, commit=measured_by if stale else None)
            measure_cells(cells, results, processes, commit=measured_by)
        for section in sections:
            _write(section, results, extent, directory)
        if directory == _RECORDED:
            write_parts(_EVALUATION, parts_of_evaluation(results, extent))
    except (ResultsError, WorkerError) as error:
        click.echo(f"paper: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(f"\n{INTERRUPTED}", err=True)
        sys.exit(SIGNAL_EXIT_BASE + signal.SIGINT)


def parts_of_evaluation(results: Results, extent: Extent) -> dict[str, str]:
    """Return the measured parts of docs/evaluation.md by name: what was measured, all claims, and all excerpts."""
    sections = SECTIONS.values()
    parts = {name: part(results, extent) for section in sections for name, part in section.excerpts.items()}
    claims = [claim for section in sections for claim in section.claims(results, extent)]
    own = {
        "measured": _measured(results, extent),
        "claims": claims_table(claims),
        "behind": behind_table(results, extent),
    }
    return {**own, **parts}


def _measured(results: Results, extent: Extent) -> str:
    """Return a table of the sections with their measured cells, and the commits of the measured code."""
    rows = []
    for section in SECTIONS.values():
        cells = section.cells(extent)
        kept = [measured for cell in cells if (measured := results.get(cell)) is not None]
        has_page = (_RECORDED / f"{section.name}.md").exists()
        link = f"[{section.name}](../bench/results/paper/{section.name}.md)" if has_page else section.name
        rows.append([link, section.title, f"{len(kept)} of {len(cells)}", _commits(kept)])
    return table(("section", "subject", "measured cells", "code as of"), rows)


def _commits(kept: Sequence[Measured]) -> str:
    """Return the commits of measured code, the most frequent first, with the number of cells if there are several."""
    cells = Counter(measured.commit for measured in kept).most_common()
    if len(cells) < 2:
        return "".join(commit for commit, _ in cells) or "none"
    return ", ".join(f"{commit} ({number})" for commit, number in cells)


def _to_measure(
    sections: Sequence[Section],
    extent: Extent,
    results: Results,
    policies: tuple[str, ...] | None,
    *,
    commit: str | None,
) -> list[Cell]:
    """Return the cells to measure, each once: those without any figures first.

    Without ``policies``, the result is all missing cells. With ``commit``, the result also has the cells that another
    version of the code measured. With ``policies`` alone, the result is all cells of these policies. With both, the
    result is the cells of these policies that are missing or that another version measured.
    """
    cells = {(cell.section, cell.name): cell for section in sections for cell in section.cells(extent)}
    if policies is not None:
        cells = {name: cell for name, cell in cells.items() if cell.policy in policies}
        if commit is None:
            return list(cells.values())
    found = {name: results.get(cell) for name, cell in cells.items()}
    missing = [cell for name, cell in cells.items() if found[name] is None]
    stale = [cells[name] for name, kept in found.items() if kept is not None and commit not in (None, kept.commit)]
    return [*missing, *stale]


def _write(section: Section, results: Results, extent: Extent, directory: Path) -> None:
    kept = [measured for cell in section.cells(extent) if (measured := results.get(cell)) is not None]
    if not kept:
        return
    directory.mkdir(parents=True, exist_ok=True)
    minutes = sum(measured.cost_s for measured in kept) / 60
    path = directory / f"{section.name}.md"
    path.write_text(
        f"# {section.title}\n\n`python -m bench paper --section {section.name}`"
        f"{' --quick' if extent.quick else ''}: {len(kept)} of {len(section.cells(extent))} cells, "
        f"{minutes:.1f} minutes of processor time; code as of {_commits(kept)}; a + says: with changes.\n\n"
        f"{section.page(results, extent, directory)}"
    )
    click.echo(str(path))
