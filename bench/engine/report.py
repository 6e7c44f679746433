"""Reports the fitted model's errors in tables, by scenario, on the half of a recording that was not used for the fit.

Next to each error is a *floor*: the difference between two runs of the same request, one in each half. An error near
its floor cannot be distinguished from noise.

On a shared machine some groups run faster than others. So groups are replayed a second time *at their own rate*: the
model is slowed by the best factor for the group. The remaining error comes from the form of the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from bench.engine.fit import fit
from bench.engine.recording import Group, Recording, Seen
from bench.engine.replay import Replayed, replay

from dualmap_sim.presets import EngineConfig, slowed

RATES: Final = tuple(0.6 + 0.02 * step for step in range(56))
"""Possible ratios of a group's real times to the predicted times. The search selects the best ratio."""
RATED_REQUESTS: Final = 4
"""Minimum number of requests for a rate of their own, because a factor fits few requests under any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One mode of the model, fitted to one half of a recording, with its predictions for the other half."""

    mode: str
    config: EngineConfig
    replayed: tuple[Replayed, ...]
    at_own_rate: tuple[Replayed, ...]
    """The requests of groups with at least ``RATED_REQUESTS``, each group replayed at its own rate."""
    rates: tuple[tuple[str, float], ...]
    """The scenario of each group in ``at_own_rate``, and the ratio of the group's real times to the predicted times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The model's relative errors: median and p90 of the absolute errors, median of the signed errors."""

    requests: int
    median: float
    p90: float
    bias: float


def halves(recording: Recording) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Return the groups of the even rounds, for the fit, and the groups of the odd rounds, for the predictions."""
    return (
        tuple(group for group in recording.groups if group.round % 2 == 0),
        tuple(group for group in recording.groups if group.round % 2 == 1),
    )


def fit_and_replay(recording: Recording) -> tuple[Fitted, Fitted]:
    """Fit both modes of the model (whole and chunked prefills) to one half, and replay the other half.

    Raises FitError.
    """
    fitted_to, predicted = halves(recording)
    step_tokens = recording.tokens("step_tokens")
    modes = (("whole prefills", None), (f"{step_tokens} tokens a step", step_tokens))
    first, second = (_fitted(mode, fit(recording, fitted_to, chunk_tokens=tokens), predicted) for mode, tokens in modes)
    return first, second


def _fitted(mode: str, config: EngineConfig, predicted: Sequence[Group]) -> Fitted:
    rated = [(group, own_rate(config, group)) for group in predicted if len(counted(group)) >= RATED_REQUESTS]
    return Fitted(
        mode=mode,
        config=config,
        replayed=tuple(each for group in predicted for each in replay(config, group)),
        at_own_rate=tuple(each for group, rate in rated for each in replay(slowed(config, rate), group)),
        rates=tuple((group.scenario, rate) for group, rate in rated),
    )


def counted(group: Group) -> list[Seen]:
    """Return the requests without the setup requests."""
    return [seen for seen in group.requests if not seen.setup]


def own_rate(config: EngineConfig, group: Group) -> float:
    """Return the group's ratio of real times to predicted times: the ratio with the lowest mean error."""
    return min(RATES, key=lambda rate: fmean(abs(each.ttft_error) for each in replay(slowed(config, rate), group)))


def errors(values: Iterable[float]) -> Errors:
    """Summarise at least one relative error."""
    signed = list(values)
    absolute = sorted(abs(value) for value in signed)
    return Errors(
        requests=len(signed),
        median=median(absolute),
        p90=absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))],
        bias=median(signed),
    )


def by_scenario(replayed: Iterable[Replayed]) -> dict[str, list[Replayed]]:
    """Return the requests of every scenario, in the order of the recording."""
    scenarios: dict[str, list[Replayed]] = {}
    for each in replayed:
        scenarios.setdefault(each.group.scenario, []).append(each)
    return scenarios


def floor(recording: Recording, scenario: str) -> float | None:
    """Return the median relative difference between TTFTs of the same request in a fitted and a predicted round.

    The result is None if each round draws new requests.
    """
    if scenario.startswith("poisson"):
        return None
    fitted_to, predicted = (
        [seen for group in half if group.scenario == scenario for seen in counted(group)] for half in halves(recording)
    )
    return median(abs(again.ttft_s / before.ttft_s - 1) for before, again in zip(fitted_to, predicted, strict=False))


def markdown(recording: Recording, fitted: Sequence[Fitted]) -> str:
    """Return the report as text."""
    parts = [_facts(recording)]
    for each in fitted:
        parts += [f"### Model with {each.mode}", _parameters(each.config), _table(recording, each)]
    return "\n\n".join(parts)


def _facts(recording: Recording) -> str:
    engine, machine = recording.engine, recording.machine
    probes = sorted(group.probe_s for group in recording.groups)
    low, high = probes[len(probes) // 10], probes[-1 - len(probes) // 10]
    lines = [
        f"{engine['version']} ({engine['options']})",
        f"machine: {machine['cores']} x {machine['cpu']}, load average {machine['load_before']} before and "
        f"{machine['load_after']} after, {machine['at']}",
        f"noise: the probe, alone and always alike, took {1000 * median(probes):.0f} ms (median of {len(probes)}; "
        f"p10 {1000 * low:.0f}, p90 {1000 * high:.0f})",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _parameters(config: EngineConfig) -> str:
    prefill, decode = config.prefill, config.decode
    assert decode is not None
    load = f"{prefill.load_tokens_per_s:.3g}" if prefill.load_tokens_per_s < 1e9 else "infinite"
    return (
        f"`o` {prefill.overhead_s:.4f} s, `r` {prefill.tokens_per_s:.0f} tokens/s, `a` {prefill.attention:.3g}, "
        f"`l` {load} tokens/s; `d0` {decode.step_s:.4f} s, `d1` {decode.per_kv_token_s:.3g} s, "
        f"`d2` {decode.per_request_s:.3g} s"
    )


def _table(recording: Recording, fitted: Fitted) -> str:
    lines = [
        "| scenario | requests | TTFT, median s | error, median % | p90 % | with its sign % | floor % "
        "| own rate | at it, median % | p90 % | time to the last token, error, median % | cached tokens as predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rated = by_scenario(fitted.at_own_rate)
    for name, replayed in by_scenario(fitted.replayed).items():
        rates = [rate for scenario, rate in fitted.rates if scenario == name]
        lines.append(_row(name, replayed, rated.get(name, []), rates, floor(recording, name)))
    lines.append(_row("all", fitted.replayed, fitted.at_own_rate, [rate for _, rate in fitted.rates], None))
    return "\n".join(lines)


def _row(
    name: str, replayed: Sequence[Replayed], rated: Sequence[Replayed], rates: Sequence[float], floor: float | None
) -> str:
    ttft, total = errors(each.ttft_error for each in replayed), errors(each.total_error for each in replayed)
    own = errors(each.ttft_error for each in rated) if rated else None
    right = sum(each.cached_tokens == each.seen.cached_tokens for each in replayed)
    cells = [
        name,
        str(ttft.requests),
        f"{median(each.seen.ttft_s for each in replayed):.2f}",
        *(_percent(value) for value in (ttft.median, ttft.p90, ttft.bias, floor)),
        f"{min(rates):.2f}-{max(rates):.2f}" if rates else "-",
        *(_percent(value) for value in ((own.median, own.p90) if own else (None, None))),
        _percent(total.median),
        f"{right} of {len(replayed)}",
    ]
    return f"| {' | '.join(cells)} |"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
