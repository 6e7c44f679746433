"""Tests the engine model against recordings of a real vLLM: a fit to half of the rounds predicts the other half.

The bounds are the errors of docs/engine-model.md plus a margin. The tests are deterministic. ``e2e/test_real_vllm.py``
creates a new recording. The tests import ``bench`` by name, because it is only in the source tree.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dualmap_sim.presets import DecodeCost, EngineConfig, PrefillCost, slowed

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
MODEL = EngineConfig(
    prefill=PrefillCost(overhead_s=0.03, tokens_per_s=1500.0, attention=2e-4, load_tokens_per_s=1e5),
    decode=DecodeCost(step_s=0.02, per_kv_token_s=2e-6, per_request_s=1e-3),
    kv_memory_tokens=65_536,
    cache_tokens=65_536,
    input_tokens_max=65_536,
    block_tokens=32,
)
Bench = Callable[[str], ModuleType]
WHOLE, STEPS = 0, 1
"""The model's two modes: unchunked prefills, and steps with the engine's number of tokens."""

BOUNDS = {
    # Maps a recording and a scenario to the median error of the model's TTFT: with the fitted rate, and with the
    # group's own rate.
    "vllm_chunked": {
        "alone cold": (0.12, None),
        "alone warm": (0.13, 0.11),
        "queue cold": (0.14, 0.03),
        "queue warm": (0.10, 0.06),
        "queue sharing": (0.15, 0.02),
        "decode": (0.17, 0.04),
        "poisson light": (0.13, 0.09),
        "poisson heavy": (0.19, 0.04),
    },
    "vllm_whole": {
        "alone cold": (0.09, None),
        "alone warm": (0.07, 0.07),
        "queue cold": (0.06, 0.02),
        "queue warm": (0.13, 0.02),
        "queue sharing": (0.08, 0.02),
        "decode": (0.30, 0.06),
        "poisson light": (0.40, 0.23),
        "poisson heavy": (0.26, 0.05),
    },
}


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.engine.{name}")


def seen(
    bench: Bench,
    *pieces: tuple[int, int],
    cached: int = 0,
    sent_s: float = 0.0,
    token_s: tuple[float, ...],
    wave: int = 0,
):
    return bench("recording").Seen(
        pieces=pieces, cached_tokens=cached, sent_s=sent_s, token_s=token_s, setup=False, wave=wave
    )


def group(bench: Bench, scenario: str, *requests: Any, number: int = 0):
    return bench("recording").Group(scenario=scenario, round=number, probe_s=0.25, load=1.5, requests=requests)


def recording(bench: Bench, *groups: Any):
    facts = {"version": "model", "options": "", "step_tokens": 512, "block_tokens": 32, "kv_tokens": 65_536}
    return bench("recording").Recording(engine=facts, machine={"cores": 2}, groups=groups)


def alone(bench: Bench) -> Iterator[Any]:
    """Yield requests with the model's TTFT."""
    for text, (new, cached) in enumerate([(256, 0), (1024, 0), (4000, 0), (1024, 1024), (32, 3968), (500, 2048)]):
        ttft_s = MODEL.prefill.seconds(new_tokens=new, cached_tokens=cached)
        asked = seen(bench, (text, new + cached), cached=cached, token_s=(ttft_s,))
        yield group(bench, "alone warm" if cached else "alone cold", asked)


def decoding(bench: Bench) -> Iterator[Any]:
    """Yield batches with the model's step times."""
    assert MODEL.decode is not None
    for prompt in (64, 2000):
        for batch in (1, 4, 16):
            steps_s = [MODEL.decode.steps_s(1, requests=batch, kv_tokens=batch * (prompt + n)) for n in range(1, 10)]
            times_s = tuple(accumulate(steps_s, initial=0.5))
            yield group(bench, "decode", *(seen(bench, (n, prompt), token_s=times_s) for n in range(batch)))


def test_fit_recovers_parameters_of_a_model_engine(bench: Bench) -> None:
    measured = recording(bench, *alone(bench), *decoding(bench))

    fitted = bench("fit").fit(measured, measured.groups, chunk_tokens=None)

    assert fitted.prefill.overhead_s == pytest.approx(0.03)
    assert fitted.prefill.tokens_per_s == pytest.approx(1500.0)
    assert fitted.prefill.attention == pytest.approx(2e-4)
    assert fitted.prefill.load_tokens_per_s == pytest.approx(1e5)
    assert fitted.decode.step_s == pytest.approx(0.02, rel=1e-3)
    assert fitted.decode.per_kv_token_s == pytest.approx(2e-6, rel=1e-2)
    assert fitted.decode.per_request_s == pytest.approx(1e-3, rel=1e-2)
    assert (fitted.kv_memory_tokens, fitted.block_tokens) == (65_536, 32)


def test_fit_ignores_batches_without_common_decode_steps(bench: Bench) -> None:
    apart = (seen(bench, (1, 64), token_s=(0.1, 0.2, 0.3)), seen(bench, (2, 64), token_s=(0.4, 0.5, 0.6)))
    measured = recording(bench, *alone(bench), *decoding(bench), group(bench, "decode", *apart))

    assert bench("fit").fit(measured, measured.groups, chunk_tokens=None).decode.step_s == pytest.approx(0.02, rel=1e-3)


def test_fit_rejects_too_few_requests(bench: Bench) -> None:
    measured = recording(bench, *list(alone(bench))[:4])

    with pytest.raises(bench("fit").FitError, match="alone"):
        bench("fit").fit(measured, measured.groups, chunk_tokens=None)


def test_replay_sends_the_recorded_requests_at_the_recorded_times(bench: Bench) -> None:
    first = seen(bench, (1, 320), sent_s=1.0, token_s=(1.5, 1.6))
    # The second request shares 256 cached tokens with the first request, and waits for the first request's end.
    second = seen(bench, (1, 256), (2, 2000), cached=256, sent_s=1.1, token_s=(2.0,))
    # The third request shares all tokens except the end of its third block.
    third = seen(bench, (1, 90), (3, 38), cached=64, sent_s=2.1, token_s=(3.0,), wave=1)

    one, two, three = bench("replay").replay(MODEL, group(bench, "queue", first, second, third))

    assert one.ttft_s == pytest.approx(MODEL.prefill.seconds(new_tokens=320, cached_tokens=0))
    assert two.ttft_s == pytest.approx(
        1.0 + one.ttft_s - 1.1 + MODEL.prefill.seconds(new_tokens=2000, cached_tokens=256)
    )
    assert one.total_s > two.ttft_s + 0.1, "a decode waits for the prefills"
    assert three.ttft_s == pytest.approx(MODEL.prefill.seconds(new_tokens=64, cached_tokens=64)), "it waited to be sent"
    assert [each.cached_tokens for each in (one, two, three)] == [0, 256, 64]
    assert two.ttft_error == pytest.approx(two.ttft_s / 0.9 - 1)


def test_replay_wave_starts_after_the_previous_wave_ends(bench: Bench) -> None:
    replay = bench("replay").replay
    random = Random(0)

    for _ in range(200):
        first = seen(bench, (1, random.randrange(100, 1000)), sent_s=random.random(), token_s=(1.1,))
        later = seen(bench, (2, 64), sent_s=1.0 + random.random(), token_s=(9.0,), wave=1)
        assert len(replay(slowed(MODEL, 30.0), group(bench, "queue", first, later))) == 2


def test_recording_round_trip_is_lossless(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    measured = recording(
        bench, group(bench, "decode", seen(bench, (1, 64), (2, 8), sent_s=0.1, token_s=(0.25, 0.3005)))
    )

    bench("recording").write_recording(path, measured)

    assert bench("recording").read_recording(path) == measured


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "1: the line is not JSON"),
        ("[]\n", "1: the line is not a JSON object"),
        ("{}\n", "the first line"),
        (
            '{"format": "dualmap engine recording 1", "engine": {}, "machine": {}}\n{"scenario": "x"}\n',
            "2: the line is not a valid group of requests",
        ),
    ],
)
def test_malformed_recording_is_rejected_with_its_line(bench: Bench, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text(text)

    with pytest.raises(bench("recording").RecordingError, match=said):
        bench("recording").read_recording(path)


def test_cut_prompt_is_a_prefix_and_groups_share_no_prefix(bench: Bench) -> None:
    scenarios = bench("scenarios")
    planned = list(scenarios.planned(2, tokens_per_s=1000.0))

    whole, cut = scenarios.token_ids(((7, 100), (8, 20))), scenarios.token_ids(((7, 60), (8, 20)))
    assert whole[:60] == cut[:60]
    assert whole[100:] == cut[60:]
    assert whole[60:80] != cut[60:]
    texts = [{text for wave in group.waves for ask in wave for text, _ in ask.pieces} for group in planned]
    assert sum(map(len, texts)) == len(set.union(*texts))
    assert {group.scenario for group in planned[: len(planned) // 2]} == {group.scenario for group in planned}


@pytest.fixture(name="fits", scope="module")
def _fits() -> Callable[[str], tuple[Any, Any]]:
    """Return both fits of a recording, computed once."""

    @cache
    def fits(name: str) -> tuple[Any, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT))
            read = importlib.import_module("bench.engine.recording").read_recording
            both: tuple[Any, Any] = importlib.import_module("bench.engine.report").fit_and_replay(
                read(FIXTURES / f"{name}.jsonl")
            )
            return both

    return fits


def median_errors(bench: Bench, replayed: Any) -> dict[str, float]:
    report = bench("report")
    return {
        scenario: report.errors(each.ttft_error for each in requests).median
        for scenario, requests in report.by_scenario(replayed).items()
    }


@pytest.mark.parametrize("name", BOUNDS)
def test_engine_model_predicts_vllm_within_documented_errors(bench: Bench, fits: Any, name: str) -> None:
    steps = fits(name)[STEPS]

    as_fitted, at_own_rate = median_errors(bench, steps.replayed), median_errors(bench, steps.at_own_rate)

    assert list(as_fitted) == list(BOUNDS[name])
    assert [scenario for scenario, (bound, _) in BOUNDS[name].items() if as_fitted[scenario] > bound] == []
    rated = {scenario: bound for scenario, (_, bound) in BOUNDS[name].items() if bound is not None}
    assert [scenario for scenario, bound in rated.items() if at_own_rate[scenario] > bound] == []


@pytest.mark.parametrize("name", BOUNDS)
def test_engine_model_caches_the_same_tokens_as_vllm(fits: Any, name: str) -> None:
    wrong = [
        (each.group.scenario, each.position, each.cached_tokens, each.seen.cached_tokens)
        for each in fits(name)[STEPS].replayed
        if each.cached_tokens != each.seen.cached_tokens
    ]
    assert wrong == []


def test_engine_of_another_speed_exceeds_the_error_bounds(bench: Bench, fits: Any) -> None:
    steps = fits("vllm_chunked")[STEPS]
    groups = [group for group, _ in groupby(each.group for each in steps.replayed)]
    slower = slowed(steps.config, 1.5)

    replayed = [each for group in groups for each in bench("replay").replay(slower, group)]

    errors, bounds = median_errors(bench, replayed), BOUNDS["vllm_chunked"]
    assert [scenario for scenario in bounds if errors[scenario] <= bounds[scenario][0]] == []


@pytest.mark.parametrize(("name", "scenario"), [("vllm_whole", "queue cold"), ("vllm_chunked", "decode")])
def test_engine_model_without_chunking_exceeds_the_error_bounds(
    bench: Bench, fits: Any, name: str, scenario: str
) -> None:
    one_by_one, together = (median_errors(bench, fits(name)[mode].at_own_rate)[scenario] for mode in (WHOLE, STEPS))

    assert one_by_one > 0.2
    assert together < 0.05


def test_engine_report_has_every_scenario_and_a_chart(bench: Bench, fits: Any, tmp_path: Path) -> None:
    fitted = fits("vllm_chunked")
    measured = bench("recording").read_recording(FIXTURES / "vllm_chunked.jsonl")

    text = bench("report").markdown(measured, fitted)
    bench("plot").plot(tmp_path / "picture.png", [("chunked", fitted)])

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows if row[0] in {*BOUNDS["vllm_chunked"], "all"}] == 2 * [
        *BOUNDS["vllm_chunked"],
        "all",
    ]
    assert {len(row) for row in rows} == {12}
    assert "model with 512 tokens a step" in text.lower()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["record", "--step-tokens", "512", "--out", "x"], "give either --url or --python"),
        (["record", "--url", "http://127.0.0.1:9", "--whole", "--step-tokens", "512", "--out", "x"], "--whole"),
        (["fit", str(ROOT / "pyproject.toml")], "pyproject.toml:1: the line is not JSON"),
    ],
)
def test_engine_bench_with_invalid_options_or_files_exits_2(bench: Bench, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(bench("command").engine, arguments)

    assert result.exit_code == 2
    assert said in result.stderr
