"""Fuzzes the loading of pool files, from bytes to a routed request: an invalid file must not stop the router."""

import tempfile
from pathlib import Path
from random import Random
from typing import Final

import yaml

from dualmap.pools.pool import Pool
from dualmap.prompts.blocks import chain_blocks, chain_root
from dualmap.requests import Decision, Queued, Rejection, Request
from dualmap.router import PoolRouter
from dualmap_extproc.pools.file import PoolFileError, load_pool_files
from fuzz import trees

# The maximum length of a one-line message. A message quotes at most 80 characters of a value.
_MESSAGE_LENGTH: Final = 2000
_TEXT: Final = b"what is fuzzing? " * 50
_WORDS: Final = (
    *("apiVersion", "kind", "InferencePool", "List", "InferencePoolList", "items", "metadata", "name"),
    *("namespace", "spec", "model", "aliases", "engine", "type", "vLLM", "port", "prefillTokensPerSecond"),
    *("cacheTokens", "kvEvents", "enabled", "replayPort", "slo", "ttft", "attainment", "routing", "policy"),
    *("dualmap", "receiptHeader", "ring", "algorithm", "Rendezvous", "VirtualNodes", "seed", "virtualNodes"),
    *("prefix", "blockTokens", "initialBlocks", "maxBlocks", "window", "spill", "sloFraction", "prefillWeight"),
    *("activeKvWeight", "rebalance", "decodeStall", "queue", "dispatchWindow", "Unlimited", "maxHeld"),
    *("maxWait", "order", "Deadline", "holdWhenEmpty", "session", "header", "ttl", "migration", "hotRatio"),
    *("cooldown", "status", "version", "members", "id", "address", "state", "Active", "Draining", "weight"),
    *("since", "10.0.0.1", "::1", "5s", "500ms", "1h", "least_loaded", "replicas"),
)


def check(data: bytes) -> None:
    """Check that any bytes are usable pools, or are rejected with a one-line message that names file and field."""
    with tempfile.NamedTemporaryFile(prefix="pool-", suffix=".yaml") as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        try:
            pools = load_pool_files([path])
        except PoolFileError as error:
            _check_message(error, path)
            return
        assert load_pool_files([path]) == pools
    assert pools
    for pool in pools:
        _check_routes(pool)


def mutate(data: bytes, random: Random) -> bytes | None:
    """Mutate a pool file as YAML; return None if it is not YAML, or if it is too large."""
    try:
        documents = list(yaml.load_all(data, Loader=yaml.CSafeLoader))
        at = random.randrange(len(documents))
        documents[at] = trees.mutate(documents[at], random, _WORDS)
        return yaml.dump_all(documents, Dumper=yaml.CSafeDumper, allow_unicode=True, sort_keys=False).encode()
    # PyYAML's conversions raise various exceptions (see dualmap_extproc.pools.file).
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None


def _check_message(error: PoolFileError, path: Path) -> None:
    text = str(error)
    assert text.startswith(str(path))
    assert error.field
    assert error.accepted
    assert error.accepted in text
    assert error.field in text or error.field in ("file", "document")
    assert text.isprintable(), "a refusal that breaks the line, or the terminal, it is shown in"
    assert len(text) <= _MESSAGE_LENGTH


def _check_routes(pool: Pool) -> None:
    """Route one request through a pool with any settings, and check that no state remains."""
    router = PoolRouter(pool)
    root = chain_root(model=pool.model.name)
    chain = chain_blocks(_TEXT, root=root, block_tokens=pool.routing.prefix.block_tokens)
    outcome = router.on_request(1.0, Request(id="r", chain=chain, arrived_s=1.0)).answer
    endpoints = {member.endpoint for member in pool.members}
    match outcome:
        case Decision():
            assert outcome.endpoints
            assert set(outcome.endpoints) <= endpoints
            outcome.receipt.header()
            router.on_first_token(1.5, "r")
            assert router.on_finished(2.0, "r", None).answer is not None
        case Queued():
            assert router.status().held == 1
            router.on_aborted(1.5, "r")
        case Rejection():
            assert not any(member.weight and member.state == "Active" for member in pool.members)
    status = router.status()
    assert status.held == 0
    assert all(each.in_flight == 0 and each.pending_prefill_tokens == 0 for each in status.endpoints)
