"""Tests of the evaluation's harness: experiments, results, repeated runs and pages.

``bench`` is only in the source tree.
"""

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dualmap.pools.pool import Engine, Routing, Slo
from dualmap_sim.cluster import Cluster, ClusterConfig
from dualmap_sim.experiment import run_experiment

ROOT = Path(__file__).parents[2]
Bench = Callable[[str], ModuleType]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.paper.{name}")


def cell(bench: Bench, name: str, policy: str = "dualmap", measure: Callable[[], Any] = dict) -> Any:
    return bench("cells").Cell(section="some", name=name, policy=policy, measure=measure)


def measured(bench: Bench, **figures: Any) -> Any:
    return bench("results").Measured(figures=figures, cost_s=1.234, commit="abc")


def test_results_file_keeps_results_and_stores_nan_as_null(bench: Bench, tmp_path: Path) -> None:
    bench("results").Results(tmp_path).put(cell(bench, "one"), measured(bench, a_s=math.nan, b=[0.123456789, 7]))
    again = bench("results").Results(tmp_path)
    assert again.figures(cell(bench, "one")) == {"a_s": None, "b": [0.123457, 7]}
    assert again.get(cell(bench, "another")) is None
    assert json.loads((tmp_path / "some.json").read_text())["one"]["commit"] == "abc"


def test_results_of_concurrent_runs_are_all_kept(bench: Bench, tmp_path: Path) -> None:
    first, second = bench("results").Results(tmp_path), bench("results").Results(tmp_path)
    assert second.get(cell(bench, "one")) is None
    first.put(cell(bench, "one"), measured(bench, x=1))
    second.put(cell(bench, "two"), measured(bench, x=2))
    assert sorted(json.loads((tmp_path / "some.json").read_text())) == ["one", "two"]


def test_malformed_results_file_raises_error_with_its_name(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text("{")
    with pytest.raises(bench("results").ResultsError, match=r"some\.json cannot be read"):
        bench("results").Results(tmp_path).get(cell(bench, "one"))


def a_section(bench: Bench, *cells: Any) -> Any:
    return bench("section").Section(
        name="some",
        title="Some",
        cells=lambda _: cells,
        page=lambda results, _e, _p: str(results.figures(cells[0])),
        claims=lambda _r, _e: [],
    )


def ones() -> dict[str, float]:
    return {"x": 1.0}


def twos() -> dict[str, float]:
    return {"x": 2.0}


def test_paper_run_measures_missing_cells_and_selected_policies(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bench("command")

    monkeypatch.setattr(command, "commit_of_code", lambda: "now")

    def run(measure: Callable[[], Any], *options: str) -> list[float]:
        cells = [cell(bench, name, policy, measure) for name, policy in (("one", "dualmap"), ("two", "limit"))]
        monkeypatch.setattr(command, "SECTIONS", {"goodput": a_section(bench, *cells)})
        arguments = ["--section", "goodput", "--out", str(tmp_path), "--processes", "1", *options]
        done = CliRunner().invoke(command.paper, arguments)
        assert done.exit_code == 0, done.output
        kept = bench("results").Results(tmp_path)
        return [kept.figures(each)["x"] for each in cells]

    assert run(ones) == [1.0, 1.0]
    assert run(twos) == [1.0, 1.0]
    assert run(twos, "--policies", "dualmap", "--draw") == [1.0, 1.0]
    assert run(twos, "--policies", "dualmap") == [2.0, 1.0]
    assert run(twos, "--stale") == [2.0, 1.0]
    monkeypatch.setattr(command, "commit_of_code", lambda: "later")
    assert run(ones, "--stale", "--policies", "dualmap") == [1.0, 1.0]
    assert run(twos, "--stale") == [1.0, 2.0]
    page = (tmp_path / "some.md").read_text()
    assert page.startswith("# Some\n")
    assert "2 of 2 cells" in page
    assert page.endswith("{'x': 1.0}")


def test_stale_run_measures_missing_cells_before_stale_ones(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bench("command")
    monkeypatch.setattr(command, "commit_of_code", lambda: "now")
    cells = [cell(bench, name, measure=ones) for name in ("stale", "missing")]
    monkeypatch.setattr(command, "SECTIONS", {"goodput": a_section(bench, *cells)})
    bench("results").Results(tmp_path).put(cells[0], measured(bench, x=0.0))
    done = CliRunner().invoke(command.paper, ["--stale", "--out", str(tmp_path), "--processes", "1"])
    assert done.exit_code == 0, done.output
    assert [line.rpartition(": ")[2] for line in done.output.splitlines() if " cells, " in line] == ["missing", "stale"]


def test_page_names_the_number_of_cells_of_each_commit(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bench("command")
    cells = [cell(bench, name, measure=ones) for name in ("one", "two", "three")]
    monkeypatch.setattr(command, "SECTIONS", {"goodput": a_section(bench, *cells)})
    for each, commit in zip(cells, ("old", "new", "new"), strict=True):
        bench("results").Results(tmp_path).put(each, replace(measured(bench, x=0.0), commit=commit))
    done = CliRunner().invoke(command.paper, ["--draw", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "code as of new (2), old (1);" in (tmp_path / "some.md").read_text()


def test_evaluation_update_replaces_only_text_between_markers(bench: Bench, tmp_path: Path) -> None:
    claims = bench("claims")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- claims: made by python -m bench paper -->\nold\n<!-- end of claims -->\nafter\n")
    for measured_ in ("1", ""):
        claims.write_parts(
            page, {"claims": claims.claims_table([claims.Claim("4.2", "much", measured_)]), "gap": "no place"}
        )
    text = page.read_text()
    assert text.startswith("before\n<!-- claims")
    assert text.endswith("<!-- end of claims -->\nafter\n")
    assert "| 4.2 | much | not measured |" in text
    assert "old" not in text
    assert "no place" not in text
    assert "| 4.2 | much | 1 |" not in text


def test_evaluation_page_has_a_place_for_every_part(bench: Bench, tmp_path: Path) -> None:
    results, extent = bench("results").Results(tmp_path), bench("settings").Extent(trace=ROOT / "pyproject.toml")
    page = (ROOT / "docs" / "evaluation.md").read_text()
    excerpts = {name: part for each in bench("sections").SECTIONS.values() for name, part in each.excerpts.items()}
    for name in ("measured", "claims", "behind", *excerpts):
        assert page.count(f"<!-- {name}: made by python -m bench paper -->\n") == 1
        assert page.count(f"<!-- end of {name} -->\n") == 1
    assert all(part(results, extent).startswith("| ") for part in excerpts.values())


def test_sections_without_results_still_state_claims(bench: Bench, tmp_path: Path) -> None:
    results, extent = bench("results").Results(tmp_path), bench("settings").Extent(trace=ROOT / "pyproject.toml")
    for section in bench("sections").SECTIONS.values():
        if section.name != "ttft":  # This experiment reads the trace.
            assert all(each.says for each in section.claims(results, extent))


def test_unknown_section_is_rejected_with_accepted_names(bench: Bench) -> None:
    done = CliRunner().invoke(bench("command").paper, ["--section", "goodputs"])
    assert done.exit_code == 2
    assert "'goodputs' is not accepted; give some of goodput, chats, ttft" in done.output


def test_unknown_policy_is_rejected_with_accepted_names(bench: Bench) -> None:
    done = CliRunner().invoke(bench("command").paper, ["--section", "goodput", "--policies", "dualmap,dual_map"])
    assert done.exit_code == 2
    assert "--policies" in done.output
    assert "'dual_map' is not accepted; give some of cache_affinity, dualmap, dualmap_paper" in done.output


@pytest.mark.parametrize(("text", "told"), [(None, "No such file"), ("{}\n{", "trace.jsonl:1: ")])
def test_unreadable_trace_path_is_rejected(bench: Bench, tmp_path: Path, text: str | None, told: str) -> None:
    trace = tmp_path / "trace.jsonl"
    if text is not None:
        trace.write_text(text)
    done = CliRunner().invoke(bench("command").paper, ["--draw", "--out", str(tmp_path), "--trace", str(trace)])
    assert done.exit_code == 2
    assert "--trace" in done.output
    assert told in done.output


def test_paper_command_interrupted_by_ctrl_c_exits_130(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    command = bench("command")
    monkeypatch.setattr(command, "measure_cells", interrupt)
    done = CliRunner().invoke(command.paper, ["--section", "goodput", "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert done.output.endswith("interrupted; nothing is left running.\n")


def test_paper_command_help_has_a_short_option(bench: Bench) -> None:
    done = CliRunner().invoke(bench("command").paper, ["-h"])
    assert done.exit_code == 0
    assert "--stale" in done.output


def test_result_cells_have_distinct_names_and_a_policy(bench: Bench) -> None:
    extent = bench("settings").Extent(trace=ROOT / "pyproject.toml")
    for section in bench("sections").SECTIONS.values():
        cells = section.cells(extent)
        names = {(each.section, each.name) for each in cells}
        assert len(names) == len(cells) > 0
        assert all(
            each.policy in each.name
            for each in cells
            if each.policy in ("dualmap", "limit") and "ideal" not in each.name
        )


def test_missing_trace_omits_the_conversation_workload(bench: Bench, tmp_path: Path) -> None:
    extent = bench("settings").Extent(trace=tmp_path / "none")
    cells = [each for section in bench("sections").SECTIONS.values() for each in section.cells(extent)]
    assert not [each.name for each in cells if "conversation" in each.name]
    assert [each.name for each in cells if "tool_agent" in each.name]


def test_paper_experiments_state_nothing_in_the_pool(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ClusterConfig] = []

    class Stopped(Cluster):
        def __init__(self, config: ClusterConfig) -> None:
            made.append(config)
            raise NotImplementedError

    monkeypatch.setattr("dualmap_sim.experiment.Cluster", Stopped)
    with pytest.raises(NotImplementedError):
        run_experiment(bench("settings").Extent(quick=True).experiment("tool_agent", "14b", 0, "lmetric"))
    (config,) = made
    assert config.discovery
    assert (config.pool.engine, config.pool.slo) == (Engine(), Slo())
    assert config.pool.routing == Routing(policy="lmetric")


def test_cache_affinity_has_blocks_that_tell_prompts_apart(bench: Bench) -> None:
    extent = bench("settings").Extent(quick=True)
    lengths = {each: extent.experiment("tool_agent", "7b", 0, each).block_tokens for each in bench("settings").RIVALS}
    assert lengths.pop("cache_affinity") == 512
    assert set(lengths.values()) == {128}


@pytest.mark.parametrize(
    "section", ["goodput", "chats", "ttft", "scale", "elasticity", "robust", "sessions", "llumnix"]
)
def test_paper_comparisons_contain_every_other_policy(bench: Bench, section: str) -> None:
    extent = bench("settings").Extent(trace=ROOT / "pyproject.toml")
    measured_: dict[str, set[str]] = {}
    for each in bench("sections").SECTIONS[section].cells(extent):
        if each.policy in ("dualmap", *bench("settings").RIVALS):
            measured_.setdefault(each.policy, set()).add(each.name.replace(each.policy, "POLICY"))
    ours = {name for name in measured_["dualmap"] if not any(each in name for each in ONLY_OURS)}
    assert ours
    for policy in bench("settings").RIVALS:
        assert ours <= measured_[policy]


# Cells that compare ``dualmap`` with itself or with a bound.
ONLY_OURS = ("with session ids", "4 routers", "instances at 7.6/s", "instances at 121.6/s", "instances at 243.2/s")


@pytest.mark.parametrize("change", [(4, 8), (8, 4), (8, 9)])
def test_share_of_moved_keys_matches_theory(bench: Bench, change: tuple[int, int]) -> None:
    elasticity = bench("sections.elasticity")
    found, expected = elasticity.remapped(*change), elasticity.expected_to_move(*change)
    assert found == pytest.approx({**expected, "modulo": found["modulo"]}, abs=0.01)


def test_two_candidates_balance_load_as_well_as_four(bench: Bench) -> None:
    deviations = {d: bench("sections.choices").deviation(8, d)["deviation"] for d in (1, 2, 4)}
    assert deviations[1] > 10 * deviations[2]
    assert deviations[2] - deviations[4] < 2


def test_several_candidates_rule_prefers_cached_member_within_slo(bench: Bench) -> None:
    settings, choices = bench("settings"), bench("sections.choices")
    from dualmap_sim.experiment import run_experiment
    from dualmap_sim.workloads.catalog import Workload

    experiment = replace(
        settings.Extent().experiment("tool_agent", "7b", 0, choices.OfSeveral.name, 1.0),
        workload=Workload(requests=60),
        warmup=10,
    )
    for candidates, most in ((1, 1), (8, 8)):
        with choices.known(candidates):
            records = run_experiment(experiment).records
        by_key: dict[int, set[str | None]] = {}
        for record in records:
            by_key.setdefault(record.arrival.chain.hashes[1], set()).add(record.endpoint)
        assert max(map(len, by_key.values())) <= most
    assert len({record.endpoint for record in records}) > 1


def test_tool_agent_key_lengths_match_hot_prefix_lengths(bench: Bench) -> None:
    found = bench("sections.keys").key_lengths(bench("settings").Extent(quick=True), "tool_agent", "dualmap_paper")
    shares = {length: of / found["requests"] for length, of in found["lengths"].items()}
    assert shares["13"] == pytest.approx(0.378, abs=0.02)


def test_table_row_without_a_value_for_each_head_is_an_error(bench: Bench) -> None:
    with pytest.raises(ValueError, match="3 values under 2 heads"):
        bench("tables").table(("a", "b"), [["1", "2", "3"]])


@pytest.mark.parametrize(("others", "told"), [((2.0, 1.9), "in all 1 of them"), ((3.0, 2.5), "`dualmap_paper` 3.00")])
def test_page_names_windows_where_dualmap_is_not_ahead(
    bench: Bench, tmp_path: Path, others: tuple[float, float], told: str
) -> None:
    extent, chats = bench("settings").Extent(quick=True), bench("sections.chats").MADE
    results = bench("results").Results(tmp_path)
    for policy, rate in zip(("dualmap", "dualmap_paper", "lmetric"), (2.5, *others), strict=True):
        results.put(chats.cell(extent, "default", "7b", 0, policy), measured(bench, goodput_qps=rate))
    assert told in chats.not_ahead(results, extent)


def test_table_values_show_spread_or_a_dash_if_missing(bench: Bench) -> None:
    tables = bench("tables")
    assert tables.Spread.of([1.0, None, 3.0]).show(1) == "2.0 (1.0-3.0)"
    assert tables.Spread.of([None]).show() == "-"
    assert tables.change(1.1, 1.0) == "+10.0 %"
    assert tables.change(None, 1.0) == tables.ratio(1.0, None) == tables.number(None) == "-"
