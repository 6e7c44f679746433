"""A fit as JSON for programs, and as text for people."""

from collections.abc import Iterator, Mapping

from dualmap_cli.engine_file import engine_document
from dualmap_cli.simulate.engine_options import PARAMETERS
from dualmap_sim.fitting.estimates import EngineFit, Estimate, Verdict
from dualmap_sim.recordings.reader import Reading


def fit_document(fit: EngineFit, reading: Reading) -> dict[str, object]:
    """Return the document of ``dualmap fit --json``. ``ttft_error`` is null if the fit could not be tested."""
    error = None
    if fit.predictions:
        error = {
            "median": fit.error_quantile(0.5),
            "p90": fit.error_quantile(0.9),
            "requests": len(fit.predictions),
        }
    damaged = [{"file": each.file, "line": each.line, "reason": each.reason} for each in reading.damaged]
    return {**engine_document(fit), "impossible": fit.impossible, "ttft_error": error, "damaged": damaged}


def fit_text(fit: EngineFit) -> str:
    """Return the parameters, one a line, the members that differ, and the errors of the predictions."""
    return "\n".join(_lines(fit))


def _lines(fit: EngineFit) -> Iterator[str]:
    yield f"pool {fit.pool}: {fit.requests:,} requests"
    if fit.impossible:
        yield f"The engine's token counts of {fit.impossible:,} of them contradict their times and are not used."
    yield ""
    yield f"{'':<6} {'value':>10}  {'90 % interval':<23} verdict  meaning"
    yield from _estimates(fit.parameters)
    for member, parameters in fit.members.items():
        yield ""
        yield f"member {member}: {next(iter(parameters.values())).reason}"
        yield from _estimates(parameters)
    unsure = {name: each for name, each in fit.parameters.items() if each.verdict is not Verdict.KNOWN}
    if unsure:
        yield ""
    for name, each in unsure.items():
        yield f"{name:<6} {each.verdict}: {each.reason}"
    yield ""
    if not fit.predictions:
        yield "The fit is not tested: the first half of the recording has too few streamed answers for a fit."
        return
    yield (
        f"An engine fitted to the first half of the recording predicts the TTFT of {len(fit.predictions):,} requests "
        f"of the second half with a median error of {fit.error_quantile(0.5):.1%} (p90 {fit.error_quantile(0.9):.1%})."
    )


def _estimates(estimates: Mapping[str, Estimate]) -> Iterator[str]:
    for name, each in estimates.items():
        interval = ""
        if each.low is not None:
            interval = f"{each.low:.4g} to {each.high:.4g}" if each.high is not None else f"{each.low:.4g} or more"
        value = "-" if each.value is None else f"{each.value:.4g}"
        yield f"{name:<6} {value:>10}  {interval:<23} {each.verdict:<8} {PARAMETERS[name].meaning}"
