"""The figures of a recording as text for people."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from dualmap_sim.recordings.figures import Figures
from dualmap_sim.recordings.reader import Reading
from dualmap_sim.summary import percentile

_BARS: Final = "▁▂▃▄▅▆▇█"
_ABSENT: Final = "not in this recording"
_NAMED: Final = 10
"""At most this many pools, models and members are listed."""


def figures_text(reading: Reading, figures: Figures) -> str:
    """Return the figures, one subject a line."""
    return "\n".join(_lines(reading, figures))


def _lines(reading: Reading, figures: Figures) -> Iterator[str]:
    yield _line("requests", f"{figures.requests:,} {_period(figures)}")
    yield _line(
        "recorded", f"{_samples(reading.samples)} by {_counted(len(reading.routers), 'router')}{_lacking(figures)}"
    )
    if not figures.requests:
        return
    yield _line("rate", _rate(figures))
    yield _line("pools", _shares(figures.pools, figures.requests))
    yield _line("models", _shares(figures.models, figures.requests))
    yield _line("prompt tokens", _lengths(figures.prompt_tokens))
    yield _line("output tokens", _lengths(figures.output_tokens))
    named = figures.requests_with_session / figures.requests
    yield _line("sessions", f"{figures.sessions:,} named, with {named:.1%} of the requests")
    yield _line("reuse at best", f"{_share(figures.reuse_at_best)} of the prompt tokens, in one cache without a limit")
    hits = f"{_share(figures.hit_rate)} of the prompt tokens were cached, as engines reported"
    yield _line("hit rate", _ABSENT if figures.hit_rate is None else hits)
    yield _line("TTFT", _latencies(figures.ttft_s))
    slos = " or ".join(f"{slo_s:g} s" for slo_s in sorted(set(figures.slo_ttft_s.values())))
    within = f"{_share(figures.slo_attainment)} of streamed and refused requests had a first token within {slos}"
    yield _line("within SLO", _ABSENT if figures.slo_attainment is None else within)
    yield _line("outcomes", ", ".join(f"{name} {count:,}" for name, count in figures.outcomes.items()))
    yield from _members(figures)
    yield from _prefixes(figures)


def _line(subject: str, text: str) -> str:
    return f"{subject:<15}{text}"


def _period(figures: Figures) -> str:
    if figures.start_s is None:
        return ""
    start = datetime.fromtimestamp(figures.start_s, UTC)
    return f"in {figures.duration_s:,.1f} s from {start:%Y-%m-%d %H:%M:%S} UTC on"


def _samples(samples: Sequence[float]) -> str:
    if list(samples) == [1.0]:
        return "all sessions"
    return " and ".join(f"{sample:.4g}" for sample in samples) + " of the sessions"


def _lacking(figures: Figures) -> str:
    return "".join(
        f"; {count:,} {what}"
        for count, what in (
            (figures.unrouted, "requests found no pool and are only counted"),
            (figures.dropped, "requests could not be written"),
        )
        if count
    )


def _rate(figures: Figures) -> str:
    if figures.qps is None:
        return "all requests arrived at one time"
    width_s, counts = figures.rates()
    most = max(counts)
    bars = "".join(_BARS[min(len(_BARS) - 1, count * len(_BARS) // (most + 1))] for count in counts)
    return f"{figures.qps:.2f}/s on average, {most / width_s:.2f}/s at most over {width_s:.3g} s\n{_line('', bars)}"


def _shares(counts: Mapping[str, int], total: int) -> str:
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{name or '(not known)'} {count / total:.1%}" for name, count in ordered[:_NAMED]]
    return ", ".join(shown) + (f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else "")


def _lengths(tokens: Sequence[int]) -> str:
    if not tokens:
        return _ABSENT
    return (
        f"{sum(tokens) / len(tokens):,.0f} on average, p50 {percentile(tokens, 0.5):,.0f}, "
        f"p99 {percentile(tokens, 0.99):,.0f}, at most {tokens[-1]:,}"
    )


def _latencies(seconds: Sequence[float]) -> str:
    if not seconds:
        return _ABSENT
    return (
        f"p50 {percentile(seconds, 0.5):.3f} s, p90 {percentile(seconds, 0.9):.3f} s, "
        f"p99 {percentile(seconds, 0.99):.3f} s over {len(seconds):,} streamed answers"
    )


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1%}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _members(figures: Figures) -> Iterator[str]:
    ordered = sorted(figures.members, key=lambda each: -each.requests)
    for number, each in enumerate(ordered[:_NAMED]):
        hits = f", hit rate {_share(each.hit_rate)}" if each.hit_rate is not None else ""
        yield _line("" if number else "members", f"{each.pool} {each.member}: {each.requests:,} requests{hits}")
    if len(ordered) > _NAMED:
        yield _line("", f"and {len(ordered) - _NAMED} more")


def _prefixes(figures: Figures) -> Iterator[str]:
    for number, each in enumerate(figures.hot_prefixes):
        share = each.requests / figures.requests
        yield _line(
            "" if number else "hot prefixes",
            f"{each.tokens:,} tokens ({_counted(each.blocks, 'block')}, the last is {each.last_block:016x}) "
            f"in {each.requests:,} requests, {share:.1%}",
        )
