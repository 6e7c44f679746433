"""A capacity plan as JSON for programs, and as text for people."""

from collections.abc import Iterator

from dualmap_cli.plan.result import CapacityPlan
from dualmap_sim.planning.capacity import Share, Size


def plan_document(plan: CapacityPlan) -> dict[str, object]:
    """Return the JSON document of ``dualmap plan --json``."""
    return {
        "instances": plan.instances,
        "instances_low": plan.low,
        "instances_high": plan.high,
        "slo_attainment": _share(plan.size.slo_attainment),
        "next": [{"instances": each.instances, "slo_attainment": _share(each.slo_attainment)} for each in plan.smaller],
        "settings": [
            {"field": each.field, "now": each.now, "proposed": each.proposed, "gain": each.gain}
            for each in plan.changes
        ],
        "autoscaling": {"instance_hours_share": plan.autoscaled, "saved_share": 1 - plan.autoscaled},
        "cache_doubled": {"instances": plan.cache_doubled},
        "believable": None if plan.was is None else plan.was.believable,
        "warnings": list(plan.warnings),
    }


def plan_text(plan: CapacityPlan, *, attainment: float, slo_ttft_s: float) -> str:
    """Return a plan as text."""
    return "\n".join(_lines(plan, attainment, slo_ttft_s))


def _share(share: Share) -> dict[str, float]:
    return {"value": share.value, "low": share.low, "high": share.high}


def _lines(plan: CapacityPlan, attainment: float, slo_ttft_s: float) -> Iterator[str]:
    between = f"{plan.low} or more" if plan.high is None else f"{plan.low} to {plan.high}"
    yield (
        f"{plan.instances} instances serve {attainment:.1%} of the requests within {slo_ttft_s:g} s "
        f"(engines within the fit's intervals: {between})."
    )
    yield ""
    yield f"{'instances':>9}  {'within SLO':>10}  range"
    for size in (plan.size, *plan.smaller):
        yield _size(size)
    yield ""
    if plan.changes:
        yield f"Settings with {max(1, plan.instances - 1)} instances, each alone:"
        for each in plan.changes:
            yield f"  {each.field}: {each.now} -> {each.proposed}, {each.gain:+.1%} within the SLO"
    else:
        yield "No other setting that was tried attains more."
    yield f"An autoscaler without delay runs {plan.autoscaled:.0%} of these instance hours on this traffic."
    yield f"With caches twice as large: {plan.cache_doubled} instances."


def _size(size: Size) -> str:
    share = size.slo_attainment
    return f"{size.instances:>9}  {share.value:>10.1%}  {share.low:.1%} to {share.high:.1%}"
