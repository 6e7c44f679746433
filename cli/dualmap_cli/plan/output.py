"""A capacity plan as JSON for programs, and as text for people."""

from collections.abc import Callable, Iterator, Mapping

from dualmap_cli.plan.result import CapacityPlan, Windows
from dualmap_cli.simulate.values import count_text, window_text
from dualmap_sim.planning.capacity import Size, Sizes
from dualmap_sim.planning.intervals import Share
from dualmap_sim.planning.sizes import Fleet

_WINDOWS_SHOWN = 3


def plan_document(plan: CapacityPlan) -> dict[str, object]:
    """Return the JSON document of ``dualmap plan --json``."""
    apart = bool(plan.sizes.usual.prefillers)
    autoscaled = plan.autoscaled
    return {
        **_range(plan.sizes),
        "prefill": _range(plan.sizes, lambda fleet: fleet.prefillers) if apart else None,
        "decode": _range(plan.sizes, lambda fleet: fleet.decoders) if apart else None,
        **_attained(plan.size),
        "next": [{**_counts(each.fleet), **_attained(each)} for each in plan.smaller],
        "peak": _peak(plan.windows),
        "windows": [
            {"start_s": window.start_s, "requests": window.requests, "slo_attainment": _share(share)}
            for window, share in zip(plan.windows.windows, plan.windows.shares, strict=True)
        ],
        "settings": [
            {
                "field": each.field,
                "now": each.now,
                "proposed": each.proposed,
                "gain": each.gain.value,
                "gain_low": each.gain.low,
                "gain_high": each.gain.high,
            }
            for each in plan.changes
        ],
        "autoscaling": {
            "instance_hours_share": autoscaled.value,
            "saved_share": 1 - autoscaled.value,
            "saved_share_low": 1 - autoscaled.high,
            "saved_share_high": 1 - autoscaled.low,
        },
        "cache_doubled": _range(plan.cache_doubled),
        "kv_store": None
        if plan.with_store is None
        else {**_range(plan.with_store), "fetch_tokens_per_second": plan.store_tokens_per_s},
        "believable": None if plan.was is None else plan.was.believable,
        "warnings": list(plan.warnings),
    }


def plan_text(plan: CapacityPlan, *, attainment: float, slo_ttft_s: float) -> str:
    """Return a plan as text."""
    return "\n".join(_lines(plan, attainment, slo_ttft_s))


def fleet_text(fleet: Fleet) -> str:
    """Return the number of instances, or of prefill (P) and decode (D) instances."""
    return f"{fleet.prefillers}P+{fleet.decoders}D" if fleet.prefillers else f"{fleet.instances}"


def instances_text(fleet: Fleet) -> str:
    """Return the number of instances with the noun."""
    return f"{fleet_text(fleet)} instance{'' if fleet.instances == 1 else 's'}"


def _range(sizes: Sizes, count: Callable[[Fleet], int] = lambda fleet: fleet.instances) -> dict[str, object]:
    usual = count(sizes.usual)
    return {
        "instances": usual,
        "instances_low": min(usual, count(sizes.low)),
        "instances_high": None if sizes.high is None else max(usual, count(sizes.high)),
    }


def _counts(fleet: Fleet) -> Mapping[str, object]:
    if not fleet.prefillers:
        return {"instances": fleet.instances}
    return {"instances": fleet.instances, "prefill": fleet.prefillers, "decode": fleet.decoders}


def _attained(size: Size) -> Mapping[str, object]:
    attained = {"slo_attainment": _share(size.slo_attainment)}
    return attained if size.at_peak is None else {**attained, "slo_attainment_at_peak": _share(size.at_peak)}


def _peak(windows: Windows) -> Mapping[str, object] | None:
    if windows.may_miss is None:
        return None
    return {"percentile": windows.percentile, "window_s": windows.window_s, "windows_may_miss": windows.may_miss}


def _share(share: Share) -> dict[str, float]:
    return {"value": share.value, "low": share.low, "high": share.high}


def _lines(plan: CapacityPlan, attainment: float, slo_ttft_s: float) -> Iterator[str]:
    usual = plan.sizes.usual
    kinds = f" ({usual.prefillers} prefill and {usual.decoders} decode)" if usual.prefillers else ""
    serve = "serves" if usual.instances == 1 else "serve"
    yield (
        f"{count_text(usual.instances, 'instance')}{kinds} {serve} {attainment:.1%} of the requests within "
        f"{slo_ttft_s:g} s (engines within the fit's intervals: {_between(plan.sizes)})."
    )
    yield from _window_lines(plan.windows)
    yield ""
    peak = "" if plan.size.at_peak is None else f"  {'at the peak':>11}  range"
    yield f"{'instances':>9}  {'within SLO':>10}  {'range':<{16 if peak else 5}}{peak}"
    for size in (plan.size, *plan.smaller):
        yield _size(size)
    yield ""
    if plan.changes:
        yield f"Settings with {instances_text(plan.compared)}, each alone:"
        for each in plan.changes:
            gain = each.gain
            yield (
                f"  {each.field}: {each.now} -> {each.proposed}, {gain.value:+.1%} within the SLO "
                f"({gain.low:+.1%} to {gain.high:+.1%})"
            )
    else:
        yield "No other setting that was tried attains more."
    hours = plan.autoscaled
    yield (
        f"An autoscaler without delay runs {hours.value:.0%} ({hours.low:.0%} to {hours.high:.0%}) of these instance "
        "hours on this traffic."
    )
    yield f"With caches twice as large: {_saved(plan.cache_doubled)}."
    if plan.with_store is not None:
        yield (
            f"With a KV store that forgets nothing ({plan.store_tokens_per_s:,.0f} tokens/s): "
            f"{_saved(plan.with_store)}."
        )


def _window_lines(windows: Windows) -> Iterator[str]:
    """Yield how the worst windows fare, if there are several."""
    if len(windows.shares) < 2:
        return
    allowed = "" if windows.may_miss is None else f", {windows.may_miss} of which may miss the goal"
    yield f"The worst of {len(windows.shares)} windows ({window_text(windows.window_s)}{allowed}):"
    worst = sorted(zip(windows.shares, windows.windows, strict=True), key=lambda each: each[0].value)
    for share, window in worst[:_WINDOWS_SHOWN]:
        yield f"  {_percents(share)} of {count_text(window.requests, 'request')} from {window.start_s:,.0f} s on"


def _between(sizes: Sizes) -> str:
    if sizes.high is None:
        return f"{fleet_text(sizes.low)} or more"
    return f"{fleet_text(sizes.low)} to {fleet_text(sizes.high)}"


def _saved(sizes: Sizes) -> str:
    return f"{instances_text(sizes.usual)} ({_between(sizes)})"


def _size(size: Size) -> str:
    line = f"{fleet_text(size.fleet):>9}  {size.slo_attainment.value:>10.1%}  {_interval(size.slo_attainment)}"
    if size.at_peak is None:
        return line
    return f"{line:<40}  {size.at_peak.value:>10.1%}  {_interval(size.at_peak)}"


def _percents(share: Share) -> str:
    return f"{share.value:.1%} ({_interval(share)})"


def _interval(share: Share) -> str:
    return f"{share.low:.1%} to {share.high:.1%}"
