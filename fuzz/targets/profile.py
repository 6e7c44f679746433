"""Fuzzes the readers of engines' answers, and the router that uses them. An engine may answer anything."""

import json
from contextlib import suppress
from typing import Final

from dualmap.engines.profile import (
    ADAPTERS_MAX,
    DIALECTS,
    EVENT_SOURCES_MAX,
    NAME_MAX,
    EngineProfile,
    read_event_sources,
    read_metrics,
    read_models,
    read_server_info,
    read_version,
)
from dualmap.engines.profiles import DISCOVERED_LENGTH_MAX, POOL_ADAPTERS_MAX
from dualmap.pools.pool import Member, Model, Pool
from dualmap.router import PoolRouter
from fuzz.choices import Choices

_DOCUMENT_READERS: Final = (read_version, read_models, read_event_sources, read_server_info)
_POOL: Final = Pool(
    namespace="llm", name="fuzz", model=Model(name="m"), members=(Member(id="m-0", address="10.0.0.1", port=8000),)
)
_METRICS: Final = tuple(
    name
    for dialect in DIALECTS.values()
    for name in (dialect.running, dialect.waiting, dialect.cache, dialect.sleep, dialect.block_tokens, dialect.blocks)
    if name
)
_LABELS: Final = (
    "",
    '{sleep_state="awake"}',
    '{block_size="16",num_gpu_blocks="9"}',
    '{block_size="None",num_gpu_blocks="9"}',
    '{page_size="16",num_pages="1"}',
    '{kv_cache_size_tokens="7",block_size="1",num_gpu_blocks="99999999999"}',
    '{a="\\"}"}',
    '{a="',
)
_VALUES: Final = ("0", "1", "2.5", "-1", "NaN", "+Inf", "1e308", "x", "", "1 1795312800000", "0 x")
_KEYS: Final = (
    *("data", "id", "parent", "max_model_len", "version", "0", "1", "x", "enable_kv_cache_events", "endpoint"),
    *("replay_endpoint", "topic", "kv_events", "endpoint_port_base", "dp_size", "max_total_num_tokens", "page_size"),
)


def check(data: bytes) -> None:
    """Check that any answer gives a profile within bounds, and that a router can use it.

    The input is used three times: as a page, as JSON, and as choices that build a page and a document.
    """
    choices = Choices(data)
    profiles = [
        read_metrics(engine, page) for engine in DIALECTS for page in (data, data + b"\n", _page(Choices(data)))
    ]
    documents = [_value(choices, depth=4)]
    with suppress(ValueError, RecursionError):
        documents.append(json.loads(data))
    profiles += [read(document) for read in _DOCUMENT_READERS for document in documents]
    router, joined = PoolRouter(_POOL), EngineProfile()
    for now, profile in enumerate(profiles):
        joined = joined.also(profile)
        for each in (profile, joined):
            _check_profile(each)
            router.on_profile(100.0 * now, "m-0", each)
        assert 0 < router.pool.engine.max_model_len <= DISCOVERED_LENGTH_MAX
        assert len(router.pool.model.adapters) <= POOL_ADAPTERS_MAX
        assert router.pool.model.names[0] == "m"
        assert len(set(router.pool.model.names)) == len(router.pool.model.names)


def _check_profile(profile: EngineProfile) -> None:
    hash(profile)
    assert profile.version.isprintable()
    assert all(0 < len(each) <= NAME_MAX and each.isprintable() for each in profile.adapters)
    assert len(profile.adapters) <= ADAPTERS_MAX
    assert len(profile.event_sources) <= EVENT_SOURCES_MAX
    for source in profile.event_sources:
        assert all(port is None or 0 < port < 2**16 for port in (source.port, source.replay_port))
    for count in (profile.waiting, profile.running, profile.cache_tokens):
        assert count is None or count >= 0
    for size in (profile.block_tokens, profile.kv_tokens, profile.max_model_len):
        assert size is None or size > 0
    assert (profile.waiting is None) == (profile.running is None)


def _page(choices: Choices) -> bytes:
    lines = []
    while choices.more:
        lines.append(f"{choices.pick(_METRICS)}{choices.pick(_LABELS)} {choices.pick(_VALUES)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _value(choices: Choices, depth: int) -> object:
    match choices.number() % (8 if depth else 6):
        case 0:
            return None
        case 1:
            return choices.flag()
        case 2:
            return choices.number(size=8) - 2**16
        case 3:
            return choices.text()
        case 4:
            return choices.pick(("tcp://*:5557", "tcp://*:0", "tcp://*:99999", "ipc://x", "m", "0.32.0"))
        case 5:
            return 1.5
        case 6:
            return [_value(choices, depth - 1) for _ in range(choices.number() % 5)]
        case _:
            return {choices.pick(_KEYS): _value(choices, depth - 1) for _ in range(choices.number() % 7)}
