"""An agentic workload in a closed loop, after the EAR paper (section 2): a turn starts when the previous turn ends.

Tools answer at once, so the speed of the system decides when the next request arrives. Only the starts of sessions are
given; they are a Poisson process. Session sizes are extremely unequal, and random sizes would vary too much with few
sessions. So the sizes are quantiles of the published shares of input tokens. A session's prompt grows turn by turn, up
to the model's context. The prompt begins with a system prompt that all agents of a kind share. Then it has files that
all sessions of a project share. ``draws`` provides the random numbers, and ``statistics`` measures the result.

All requests of a workload are planned together. So a shorter workload is not the beginning of a longer workload.
"""

from bisect import bisect
from functools import partial
from itertools import accumulate, count, islice, pairwise
from math import ceil, log
from random import Random
from typing import Final

from dualmap_sim.presets import PRESETS, TRACE_BLOCK_TOKENS
from dualmap_sim.workloads.draws import Deck, LogNormal
from dualmap_sim.workloads.statistics import (
    Asked,
    arrival_cv,
    ideal_block_hit_rate,
    input_per_output,
    input_tokens_mean,
    intra_session_share,
    own_session_hit_rate,
    session_share,
)
from dualmap_sim.workloads.trace import Trace, TraceRequest

INPUT_TOKENS_MEAN: Final = 33_600
CONTEXT_TOKENS: Final = PRESETS["agent"].input_tokens_max
"""The maximum length of a prompt with its answer."""
_LONGEST_PROMPT_TOKENS: Final = CONTEXT_TOKENS - 2048
_REQUESTS_PER_S: Final = 2.0
"""The nominal rate; ``Trace.at_rate`` scales it."""

TOP_SHARES: Final = ((0.01, 0.465), (0.05, 0.665), (0.10, 0.746), (0.25, 0.875), (0.50, 0.960), (1.0, 1.0))
"""Pairs of a share of the sessions, from the largest, and their share of all input tokens (EAR paper, section 2.1)."""
_WITHIN_TOP: Final = 0.75
"""The exponent of a power law for input tokens within the largest 1 % of sessions. No source has this exponent."""

_ONE_TURN_TOKENS: Final = 10_000
_TURNS_POWER: Final = 0.656
"""A session of s tokens in total has (s / 10,000) ** 0.656 turns: one for a median session, dozens for the largest.

The two numbers are fitted to the mean prompt, and to the share of tokens that sessions reuse from themselves.
"""
_MEAN_OF_LONGEST: Final = 0.65
"""Ratio of a session's mean prompt to its last prompt, unless the context limit ends the growth earlier."""
_FIRST_OF_LONGEST: Final = 0.05
"""The minimum ratio of the first prompt to the last prompt."""

_AGENT_KINDS: Final = 3
_PROJECTS: Final = 5
_PROJECT_SKEW: Final = 0.8
_COMMON_OF_FIRST: Final = 0.12
"""Share of a session's first prompt that other sessions share: the agent's system prompt and the project's files."""
_ANSWER: Final = LogNormal(median=333, sigma=0.8)
_GROWTH: Final = LogNormal(median=1.0, sigma=0.5)
_STRATA: Final = 200

ASKED: Final = (
    *(
        Asked(f"input tokens of the top {top * 100:.0f} % of sessions", share, partial(session_share, top=top))
        for top, share in TOP_SHARES[:-1]
    ),
    Asked("input tokens, mean", INPUT_TOKENS_MEAN, input_tokens_mean),
    Asked("input tokens per output token", 75, input_per_output),
    Asked("ideal hit rate, whole blocks", 0.803, ideal_block_hit_rate),
    Asked("ideal hit rate, each session by itself", 0.796, own_session_hit_rate),
    Asked("reused from the same session, of all reused", 0.932, intra_session_share),
    Asked("coefficient of variation of arrivals", 1, arrival_cv),
)
"""Target figures: shares and reuse from EAR's production trace of 1.3 million sessions, mean input from its tests."""


def agentic_workload(requests: int, *, seed: int = 0, zipf: float | None = None) -> Trace:
    """Return a closed loop of ``requests`` requests. Equal arguments give equal traces on any machine.

    With ``zipf``, the input tokens of sessions follow Zipf's law with this exponent instead of TOP_SHARES; 0 makes all
    sessions equally large.
    """
    rng = Random(seed)
    projects = _Projects(rng)
    answers, growths = Deck(rng, strata=_STRATA), Deck(rng, strata=_STRATA)
    plan = _plan(requests, zipf)
    rng.shuffle(plan)
    sessions_per_s = len(plan) * _REQUESTS_PER_S / requests
    made: list[TraceRequest] = []
    begun_s = 0.0
    for number, (tokens, turns) in enumerate(plan):
        prompts = _prompts(tokens, turns, [_GROWTH.at(growths.draw()) for _ in range(turns - 1)])
        blocks = projects.blocks(prompts)
        for turn, prompt in enumerate(prompts):
            after = prompts[turn + 1] if turn + 1 < turns else CONTEXT_TOKENS + 1
            made.append(
                TraceRequest(
                    arrival_s=begun_s,
                    blocks=tuple(blocks[: -(-prompt // TRACE_BLOCK_TOKENS)]),
                    input_tokens=prompt,
                    output_tokens=min(answers.tokens(_ANSWER), after - prompt - 1),
                    session=number,
                    turn=turn,
                )
            )
        begun_s += rng.expovariate(sessions_per_s)
    return Trace(name="agentic", block_tokens=TRACE_BLOCK_TOKENS, requests=tuple(made), closed_loop=True)


def _plan(requests: int, zipf: float | None) -> list[tuple[float, int]]:
    """Return each session's input tokens and turns, largest first, with ``requests`` turns in total.

    A larger number of sessions means smaller sessions with fewer turns. The search finds the largest number of sessions
    with at most ``requests`` turns.
    """
    fewest, too_many = 1, requests + 1
    while too_many - fewest > 1:
        sessions = (fewest + too_many) // 2
        if sum(_turns(tokens) for tokens in _sizes(sessions, requests, zipf)) <= requests:
            fewest = sessions
        else:
            too_many = sessions
    plan = [(tokens, _turns(tokens)) for tokens in _sizes(fewest, requests, zipf)]
    missing = requests - sum(turns for _, turns in plan)
    if fewest == 1:
        return [(plan[0][0], requests)]
    more, extra = divmod(missing, fewest)
    return [(tokens, turns + more + (rank < extra)) for rank, (tokens, turns) in enumerate(plan)]


def _sizes(sessions: int, requests: int, zipf: float | None) -> list[float]:
    if zipf is None:
        shares = [_share_of_largest(rank / sessions) for rank in range(sessions + 1)]
        parts = [more - less for less, more in pairwise(shares)]
    else:
        weights = [rank**-zipf for rank in range(1, sessions + 1)]
        total = sum(weights)
        parts = [weight / total for weight in weights]
    return [part * requests * INPUT_TOKENS_MEAN for part in parts]


def _share_of_largest(top: float) -> float:
    """Return the largest sessions' share of all input tokens, for a share ``top`` (0 to 1) of the sessions.

    Power functions interpolate TOP_SHARES.
    """
    known, share = TOP_SHARES[0]
    if top <= known:
        return share * float((top / known) ** _WITHIN_TOP)
    (low, low_share), (high, high_share) = next(pair for pair in pairwise(TOP_SHARES) if top <= pair[1][0])
    return low_share * float((top / low) ** (log(high_share / low_share) / log(high / low)))


def _turns(tokens: float) -> int:
    needed = ceil(tokens / (_LONGEST_PROMPT_TOKENS * (1 + _MEAN_OF_LONGEST) / 2))
    return max(1, needed, round(float((tokens / _ONE_TURN_TOKENS) ** _TURNS_POWER)))


def _prompts(tokens: float, turns: int, growths: list[float]) -> list[int]:
    """Return the lengths of a session's prompts: ``tokens`` in total, increasing in proportion to ``growths``.

    The mean determines the last prompt. The first prompt then follows from the total.
    """
    mean = tokens / turns
    if turns == 1:
        return [min(round(mean), _LONGEST_PROMPT_TOKENS)]
    grown = [part / sum(growths) for part in accumulate(growths, initial=0.0)]
    last = min(mean / _MEAN_OF_LONGEST, _LONGEST_PROMPT_TOKENS)
    mean_grown = sum(grown) / turns
    first = max((mean - last * mean_grown) / (1 - mean_grown), last * _FIRST_OF_LONGEST)
    return [round(first + (last - first) * part) + turn for turn, part in enumerate(grown)]


class _Projects:
    """The common prefixes of sessions: a system prompt per kind of agent, then files per project."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._unused = count()
        kinds = [next(self._unused) for _ in range(_AGENT_KINDS)]
        self._common = [[kinds[project % _AGENT_KINDS]] for project in range(_PROJECTS)]
        self._popularity = list(accumulate(rank**-_PROJECT_SKEW for rank in range(1, _PROJECTS + 1)))

    def blocks(self, prompts: list[int]) -> list[int]:
        """Return the blocks of a session with these prompts, enough for the longest prompt."""
        common = self._common[bisect(self._popularity, self._rng.random() * self._popularity[-1])]
        shared = max(1, round(prompts[0] * _COMMON_OF_FIRST / TRACE_BLOCK_TOKENS))
        common.extend(islice(self._unused, max(0, shared - len(common))))
        own = -(-max(prompts) // TRACE_BLOCK_TOKENS) - shared
        return [*common[:shared], *islice(self._unused, max(0, own))]
