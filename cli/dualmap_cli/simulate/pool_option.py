"""The option ``--pool``: the settings of a real pool for simulated runs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from dualmap.pools.pool import KvEvents, Pool, Tokenizer
from dualmap_sim.experiment import Experiment


def read_pool(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Pool | None:
    """Return the only pool of a file, None without a file. Raises BadParameter."""
    if value is None:
        return None
    # Imported here because the library takes a tenth of a second to load.
    from dualmap_extproc.pools.file import PoolFileError, load_pool_files

    try:
        pools = load_pool_files([value])
    except PoolFileError as error:
        raise click.BadParameter(str(error)) from error
    if len(pools) != 1:
        raise click.BadParameter(f"{str(value)!r} contains {len(pools)} pools; give a file with one pool")
    return pools[0]


def of_pool(experiment: Experiment, pool: Pool) -> Experiment:
    """Return an experiment with a pool's settings, except those in ``ignored_fields``."""
    # Shadow policies only cost time: a run shows no comparison, and other policies have runs of their own.
    routing, session = replace(pool.routing, shadow=()), pool.routing.session
    if session.migration.pull and not experiment.kv_moves:
        routing = replace(routing, session=replace(session, migration=replace(session.migration, pull=False)))
    return replace(
        experiment,
        routing=routing,
        block_tokens=routing.prefix.block_tokens,
        pool_engine=replace(pool.engine, kv_events=KvEvents(), tokenizer=Tokenizer()),
        discovery=pool.engine.discovery.enabled,
        prefill_min_tokens=pool.prefill_min_tokens,
    )


def ignored_fields(experiment: Experiment, pool: Pool) -> Iterator[str]:
    """Yield each field of a pool that has a value but no effect in an experiment, with the option that it needs."""
    if pool.engine.kv_events.enabled:
        yield "spec.engine.kvEvents"
    if pool.engine.tokenizer != Tokenizer():
        yield "spec.engine.tokenizer"
    if pool.routing.shadow:
        yield "spec.routing.shadow (give the policies to --policy)"
    if pool.kv_store.is_used and experiment.store is None:
        yield "spec.kvStore (without --kv-store)"
    if pool.routing.session.migration.pull and not experiment.kv_moves:
        yield "spec.routing.session.migration.pull (without --set pull=NUMBER)"
    if pool.prefill_pool and not experiment.prefillers:
        yield "spec.prefillPool (without --prefill-instances)"
