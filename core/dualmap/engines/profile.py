"""What one engine says about itself, and the readers of the engine's answers.

``dualmap_extproc.engines`` asks an engine. Each reader here turns one answer into an EngineProfile that contains only
the facts of this answer. No reader raises an error: an answer that cannot be read gives a profile with a reason.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Final, Self

from dualmap.engines.samples import Sample, SampleFinder, Samples, total

ADAPTERS_MAX: Final = 256
"""The most adapters of one engine that the router serves."""
NAME_MAX: Final = 253
"""The longest name of an adapter, as in ``spec.model.adapters``."""
MODELS_MAX: Final = 1024
"""The most models of one engine's list. The models of a longer list are not known."""
EVENT_SOURCES_MAX: Final = 256
_VERSION_MAX: Final = 64
_NAMES_SHOWN: Final = 3
_TOKENS_MAX: Final = 10**10
_LENGTH_MAX: Final = 10**8
_BLOCK_MAX: Final = 2**20
_REQUESTS_MAX: Final = 10**6
# An endpoint of ZeroMQ such as tcp://*:5557 or tcp://[::]:5557.
_ENDPOINT_PORT: Final = re.compile(r"tcp://[^/ ]{1,253}:([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """The ports on which one data-parallel rank publishes KV cache events; None for a port that is not known."""

    rank: int
    port: int | None
    replay_port: int | None
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """What an engine says about itself. None, an empty text or an empty tuple stands for a fact that is not known.

    ``engine`` is the type of the engine that answered. ``kv_tokens`` is the amount of KV that all requests in flight
    can use, and ``cache_tokens`` the amount that the engine can keep for reuse. ``models`` are the names of all models
    that the engine lists, and ``adapters`` are the LoRA adapters among them. ``waiting`` and ``running`` count the
    engine's requests, whatever their source. ``kv_usage`` is the share of ``kv_tokens`` that these requests use.
    ``ranks`` are the engine's data-parallel ranks, each with its own cache. ``started_s`` is the start time of the
    engine's process, in seconds since 1970 on the engine's clock. ``publishes`` is whether the engine publishes KV
    events, and ``event_sources`` says where. ``at_s`` is the time at which the router read the
    load (``waiting``, ``running`` and ``kv_usage``), on the router's clock. Two profiles with the same ``at_s`` contain
    the same observation of the load. ``mismatch`` says what the member's pool names and the engine does not serve.
    ``reason`` says what could not be read.
    """

    engine: str = ""
    version: str = ""
    block_tokens: int | None = None
    kv_tokens: int | None = None
    cache_tokens: int | None = None
    max_model_len: int | None = None
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    ranks: tuple[int, ...] = ()
    asleep: bool | None = None
    started_s: float | None = None
    event_sources: tuple[EventSource, ...] = ()
    publishes: bool | None = None
    at_s: float | None = field(default=None, compare=False)
    mismatch: str = ""
    reason: str = ""

    @property
    def problem(self) -> str:
        """What does not fit the pool, what could not be read, or that the engine sleeps; empty if none of these."""
        problem = "; ".join(each for each in (self.mismatch, self.reason) if each)
        return problem or ("the engine is asleep" if self.asleep else "")

    def lacks(self, name: str) -> bool:
        """Whether the engine's list of models is known and does not contain a name; an empty name stands for any."""
        return bool(name) and bool(self.models) and name not in self.models

    def served_instead(self, names: Iterable[str]) -> str:
        """Return which of the names the engine lacks, and what it lists instead; empty if it lacks none."""
        unlisted = [each for each in names if self.lacks(each)]
        if not unlisted:
            return ""
        adapters = frozenset(self.adapters)
        own = [each for each in self.models if each not in adapters]
        return f"serves [{_few(own)}], not {_few(unlisted)}"

    @property
    def events_problem(self) -> str:
        """That the engine publishes no KV events; empty if it does, or if this is not known."""
        return "the engine reports no KV events" if self.publishes is False else ""

    @property
    def used_tokens(self) -> int | None:
        """The KV tokens that the engine's requests use; None if they are not known."""
        if self.kv_usage is None or self.kv_tokens is None:
            return None
        return math.ceil(self.kv_usage * self.kv_tokens)

    def also(self, other: "EngineProfile") -> Self:
        """Return these facts with those of another answer, which has precedence; the reasons are joined."""
        known = {name: value for name in _FACTS if (value := getattr(other, name)) not in (None, "", ())}
        reasons = (self.reason, other.reason)
        return replace(self, **known, reason="; ".join(each for each in reasons if each))

    def failed(self, reason: str) -> Self:
        """Return the facts that stay valid while the engine does not answer: all but its load."""
        return replace(self, waiting=None, running=None, kv_usage=None, at_s=None, reason=reason)


NO_PROFILE: Final = EngineProfile()
_FACTS: Final = tuple(each.name for each in fields(EngineProfile) if each.name != "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an engine of type ``engine`` names its metrics; ``path`` is the path of the page.

    An engine that has the metric ``cache`` describes its memory in the metric's labels. ``rank`` is the label with the
    data-parallel rank.
    """

    engine: str
    path: str
    running: str
    waiting: str
    usage: str
    rank: str = ""
    cache: str = ""
    sleep: str = ""
    block_tokens: str = ""
    blocks: str = ""
    kv_tokens: str = ""


DIALECTS: Final[Mapping[str, Dialect]] = {
    "vLLM": Dialect(
        engine="vLLM",
        path="/metrics",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        usage="vllm:kv_cache_usage_perc",
        rank="engine",
        cache="vllm:cache_config_info",
        sleep="vllm:engine_sleep_state",
        block_tokens="block_size",
        blocks="num_gpu_blocks",
        kv_tokens="kv_cache_size_tokens",
    ),
    "SGLang": Dialect(
        engine="SGLang",
        path="/metrics",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        usage="sglang:token_usage",
        rank="dp_rank",
        cache="sglang:cache_config_info",
        block_tokens="page_size",
        blocks="num_pages",
    ),
    "TensorRTLLM": Dialect(
        engine="TensorRTLLM",
        path="/prometheus/metrics",
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        usage="trtllm_kv_cache_utilization",
        block_tokens="trtllm_kv_cache_tokens_per_block",
        blocks="trtllm_kv_cache_max_blocks",
    ),
}
"""The metrics of each type of engine. Engines of type Generic have no known metrics."""

_STARTED: Final = "process_start_time_seconds"


def _names(dialect: Dialect) -> tuple[str, ...]:
    own = (dialect.running, dialect.waiting, dialect.usage, dialect.cache, dialect.sleep)
    sizes = () if dialect.cache else (dialect.block_tokens, dialect.blocks)
    return tuple(name for name in (*own, *sizes, _STARTED) if name)


_FINDERS: Final = {engine: SampleFinder(_names(dialect)) for engine, dialect in DIALECTS.items()}
_RUNNING: Final = SampleFinder(dialect.running for dialect in DIALECTS.values())


def read_metrics(engine: str, page: bytes, *, at_s: float | None = None) -> EngineProfile:
    """Read the metrics page of an engine of type ``engine``, which must be in DIALECTS; the page is of ``at_s``."""
    dialect = DIALECTS[engine]
    samples = _FINDERS[engine].find(page)
    if samples is None:
        return EngineProfile(reason=f"{dialect.path} ends before its last line")
    running, waiting = total(samples.get(dialect.running, ())), total(samples.get(dialect.waiting, ()))
    if running is None or waiting is None:
        running_of = _RUNNING.find(page) or {}
        others = [each.engine for each in DIALECTS.values() if each is not dialect and each.running in running_of]
        if others:
            return EngineProfile(engine=others[0], reason=f"{dialect.path} is that of {others[0]}, not of {engine}")
        missing = dialect.running if running is None else dialect.waiting
        return EngineProfile(reason=f"{dialect.path} has no valid {missing}")
    return replace(
        _memory(dialect, samples),
        engine=engine,
        waiting=min(waiting, _REQUESTS_MAX),
        running=min(running, _REQUESTS_MAX),
        kv_usage=_usage(samples.get(dialect.usage, ())),
        ranks=_ranks(dialect, samples[dialect.running]),
        asleep=_asleep(samples.get(dialect.sleep, ())),
        started_s=_started_s(samples.get(_STARTED, ())),
        at_s=at_s,
    )


def read_version(document: object) -> EngineProfile:
    """Read the answer of ``/version``: an object with the version as text."""
    version = document.get("version") if isinstance(document, Mapping) else None
    text = _version(version)
    return EngineProfile(version=text) if text else EngineProfile(reason="/version has no valid version")


def read_models(document: object) -> EngineProfile:
    """Read the answer of ``/v1/models``: the names, the longest prompt, and the adapters, which have a ``parent``."""
    models = document.get("data") if isinstance(document, Mapping) else None
    if not isinstance(models, list):
        return EngineProfile(reason="/v1/models has no list of models")
    lengths: list[int] = []
    names: dict[str, None] = {}
    adapters: dict[str, None] = {}
    for model in islice(models, MODELS_MAX):
        if not isinstance(model, Mapping):
            continue
        length, parent, name = _whole(model.get("max_model_len"), _LENGTH_MAX), model.get("parent"), model.get("id")
        if length is not None:
            lengths.append(length)
        if isinstance(name, str) and _is_name(name):
            names[name] = None
            if isinstance(parent, str) and parent:
                adapters[name] = None
    more = len(adapters) > ADAPTERS_MAX
    return EngineProfile(
        max_model_len=max(lengths, default=None),
        models=tuple(names) if len(models) <= MODELS_MAX else (),
        adapters=tuple(adapters)[:ADAPTERS_MAX],
        reason=f"/v1/models has {len(adapters)} adapters, of which {ADAPTERS_MAX} are served" if more else "",
    )


def read_event_sources(document: object) -> EngineProfile:
    """Read the answer of vLLM's ``/kv_event_sources``: the publisher's configuration by data-parallel rank.

    A vLLM without ``--kv-events-config`` answers with an empty object.
    """
    if not isinstance(document, Mapping):
        return EngineProfile(reason="/kv_event_sources is no object")
    sources: list[EventSource] = []
    for key, source in islice(document.items(), EVENT_SOURCES_MAX):
        if not isinstance(source, Mapping) or not (key.isascii() and key.isdecimal() and len(key) < 6):
            return EngineProfile(reason="/kv_event_sources has an unknown form")
        if source.get("enable_kv_cache_events") is True:
            sources.append(
                EventSource(
                    rank=int(key),
                    port=_port_of(source.get("endpoint")),
                    replay_port=_port_of(source.get("replay_endpoint")),
                    topic=_topic(source.get("topic")),
                )
            )
    is_whole = len(document) <= EVENT_SOURCES_MAX
    return EngineProfile(
        event_sources=tuple(sorted(sources, key=lambda each: each.rank)),
        publishes=True if sources else False if is_whole else None,
    )


def read_server_info(document: object) -> EngineProfile:
    """Read the answer of SGLang's ``/server_info``: version, KV memory, longest prompt and event publisher."""
    if not isinstance(document, Mapping):
        return EngineProfile(reason="/server_info is no object")
    kv_tokens = _whole(document.get("max_total_num_tokens"), _TOKENS_MAX)
    sources = _sglang_sources(document.get("kv_events"))
    # Releases that do not report their publisher have no such key.
    is_off = "kv_events" in document and document["kv_events"] is None
    return EngineProfile(
        version=_version(document.get("version")),
        block_tokens=_whole(document.get("page_size"), _BLOCK_MAX),
        kv_tokens=kv_tokens,
        cache_tokens=0 if document.get("disable_radix_cache") is True else kv_tokens,
        max_model_len=_whole(document.get("context_length"), _LENGTH_MAX),
        event_sources=sources,
        publishes=True if sources else False if is_off else None,
    )


def _memory(dialect: Dialect, samples: Samples) -> EngineProfile:
    """Return the tokens of a block, the KV memory, and the part of it that keeps KV for reuse."""
    if not dialect.cache:
        block = _block(samples.get(dialect.block_tokens, ()))
        # One sample for each rank, each with its own memory and the same block.
        sizes = [_blocks_tokens(block, total([each])) for each in samples.get(dialect.blocks, ())]
        memory = min(sum(each for each in sizes if each is not None), _TOKENS_MAX)
        return EngineProfile(block_tokens=block, kv_tokens=memory, cache_tokens=memory) if memory else NO_PROFILE
    block_tokens, kv_tokens, cache_tokens = None, 0, 0
    for sample in samples.get(dialect.cache, ()):
        block, blocks = (_digits(sample.label(name)) for name in (dialect.block_tokens, dialect.blocks))
        size = _blocks_tokens(block, blocks)
        if size is None:
            continue
        # One sample for each data-parallel rank, each with its own memory. With several groups of layers, each token
        # takes several blocks, so the size in tokens is smaller than that of the blocks.
        block_tokens = block
        kv_tokens += min(size, _digits(sample.label(dialect.kv_tokens)) or size)
        cache_tokens += 0 if sample.label("enable_prefix_caching") == "False" else size
    if block_tokens is None:
        return NO_PROFILE
    kv_tokens, cache_tokens = min(kv_tokens, _TOKENS_MAX), min(cache_tokens, _TOKENS_MAX)
    return EngineProfile(block_tokens=block_tokens, kv_tokens=kv_tokens, cache_tokens=cache_tokens)


def _block(samples: Sequence[Sample]) -> int | None:
    """Return the tokens of a block, which all samples must agree on."""
    return total(samples[:1]) if len({each.value for each in samples}) == 1 else None


def _blocks_tokens(block: int | None, blocks: int | None) -> int | None:
    """Return the tokens that blocks can hold; engines keep one block as a placeholder."""
    if not block or not blocks or block > _BLOCK_MAX or block * blocks > _TOKENS_MAX:
        return None
    return block * (blocks - 1) or None


def _ranks(dialect: Dialect, samples: Sequence[Sample]) -> tuple[int, ...]:
    """Return the data-parallel ranks in order. An engine without the label has rank 0 only."""
    return tuple(sorted({_digits(each.label(dialect.rank)) or 0 for each in samples}))


def _usage(samples: Sequence[Sample]) -> float | None:
    """Return the mean over the data-parallel ranks, whose memories have the same size."""
    values = [each.value for each in samples]
    return sum(values) / len(values) if values and all(0.0 <= value <= 1.0 for value in values) else None


def _asleep(samples: Sequence[Sample]) -> bool | None:
    awake = [each.value for each in samples if b'sleep_state="awake"' in each.text]
    return not any(awake) if awake else None


def _started_s(samples: Sequence[Sample]) -> float | None:
    started_s = samples[0].value if samples else math.nan
    return started_s if 0 < started_s < 1e12 else None


def _sglang_sources(value: object) -> tuple[EventSource, ...]:
    events = value if isinstance(value, Mapping) else {}
    base, ranks = _whole(events.get("endpoint_port_base"), 65_535), _whole(events.get("dp_size"), EVENT_SOURCES_MAX)
    replay = _whole(events.get("replay_endpoint_port_base"), 65_535)
    if base is None:
        return ()
    return tuple(
        EventSource(
            rank=rank,
            port=base + rank,
            replay_port=None if replay is None else replay + rank,
            topic=_topic(events.get("topic")),
        )
        for rank in range(ranks or 1)
        if base + rank <= 65_535 and (replay or 0) + rank <= 65_535
    )


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _version(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= _VERSION_MAX and value.isprintable() else ""


def _topic(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= NAME_MAX else ""


def _is_name(text: str) -> bool:
    return 0 < len(text) <= NAME_MAX and text.isprintable()


def _whole(value: object, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most else None


def _digits(text: str) -> int | None:
    """Return a label's value as a number; labels also hold words such as "None"."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else None


def _port_of(endpoint: object) -> int | None:
    match = _ENDPOINT_PORT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    return int(match[1]) if match and 0 < int(match[1]) <= 65_535 else None
