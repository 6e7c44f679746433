"""Recordings of simulated runs: what a router in front of simulated engines would record."""

from collections.abc import Iterator, Mapping

from xxhash import xxh3_64_intdigest

from dualmap.recordings.values import PoolChanged, RecordedOutcome, RecordedReceipt, RecordedRequest
from dualmap_sim.events import PoolChange
from dualmap_sim.experiment import Experiment, pool_of, run_experiment
from dualmap_sim.records import Record
from dualmap_sim.workloads.trace import Trace

POOL = "simulation/qwen"


def recorded(experiment: Experiment) -> list[RecordedRequest]:
    """Return the requests of an experiment in order of arrival."""
    pools = [line.pool for line in pool_lines(experiment)]
    members = {member.endpoint: member.id for pool in pools for member in pool.members}
    return list(_requests(run_experiment(experiment).records, members))


def pool_line(experiment: Experiment) -> PoolChanged:
    """Return the line about the experiment's pool at the beginning of its recording."""
    return PoolChanged(at_s=0.0, pool=pool_of(experiment))


def pool_lines(experiment: Experiment) -> list[PoolChanged]:
    """Return the lines about the experiment's pool: at the beginning, and at each change of it."""
    changes = [event for event in experiment.events if isinstance(event, PoolChange)]
    return [pool_line(experiment), *(PoolChanged(at_s=each.at_s, pool=each.pool) for each in changes)]


def _requests(records: tuple[Record, ...], members: Mapping[str, str]) -> Iterator[RecordedRequest]:
    for each in sorted(records, key=lambda record: record.arrival.at_s):
        chain, work = each.arrival.chain, each.arrival.work
        if each.endpoint is None or each.dispatched_s is None or each.finished_s is None:
            continue
        chosen = members[each.endpoint]
        receipt = RecordedReceipt(
            policy="dualmap", rule="pair-cold", pair=(chosen, chosen), chosen=chosen,
            prompt_tokens=chain.tokens, matched_tokens=0, key_blocks=1, key_tokens=1, predicted_ttft_s=0.0,
        )  # fmt: skip
        yield RecordedRequest(
            arrived_s=each.arrival.at_s,
            pool=POOL,
            model="qwen",
            streamed=True,
            prompt_tokens=chain.tokens,
            block_tokens=chain.block_tokens,
            blocks=chain.hashes,
            outcome=RecordedOutcome.OK,
            receipt=receipt,
            attempts=1,
            queued_s=each.dispatched_s - each.arrival.at_s if each.held else None,
            ttft_s=each.ttft_s,
            duration_s=each.finished_s - each.arrival.at_s,
            engine_prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
            cached_tokens=each.cached_tokens,
        )


def imported(trace: Trace) -> Iterator[RecordedRequest]:
    """Yield a trace's requests as an import, which has no measurements."""
    for each in trace.requests:
        yield RecordedRequest(
            arrived_s=each.arrival_s,
            pool=POOL,
            model="qwen",
            streamed=True,
            prompt_tokens=each.input_tokens,
            block_tokens=trace.block_tokens,
            blocks=tuple(xxh3_64_intdigest(b"%d" % block) for block in each.blocks),
            outcome=RecordedOutcome.OK,
            session=each.session,
            engine_prompt_tokens=each.input_tokens,
            output_tokens=each.output_tokens,
        )
