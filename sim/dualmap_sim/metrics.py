"""The simulated engine's ``/metrics`` page: vLLM's metric names, computed from the engine model at each scrape.

Names and labels are those of vLLM 0.32. Only the metrics that routers and autoscalers read are exported. Durations are
wall-clock seconds: model seconds divided by the server's speed.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap_sim.engine import Engine, Finished, FirstToken

_LABELS: Final = ("engine", "model_name")
_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class _EngineCollector(Collector):
    """Gauges and counters that the engine model computes."""

    def __init__(self, engine: Engine, labels: tuple[str, str], asleep: Callable[[], bool]) -> None:
        self._engine = engine
        self._labels = labels
        self._asleep = asleep
        self._started_s = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its current value."""
        engine, config = self._engine, self._engine.config
        prompt, cached = engine.prompt_tokens_total, engine.cached_tokens_total
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", engine.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            labels=(*_LABELS, "reason"),
        )
        by_reason.add_metric((*self._labels, "capacity"), engine.waiting)
        by_reason.add_metric((*self._labels, "deferred"), 0)
        yield by_reason
        yield self._gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            engine.kv_tokens_held / engine.memory_tokens,
        )
        yield self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.", prompt)
        yield self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.", cached)
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", prompt)
        yield self._counter("prompt_tokens_cached", "Number of cached prompt tokens.", cached)
        yield self._counter(
            "generation_tokens", "Number of generation tokens processed.", engine.generated_tokens_total
        )
        yield self._counter("num_preemptions", "Cumulative number of preemption from the engine.", 0)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=("block_size", "enable_prefix_caching", "engine", "kv_cache_size_tokens", "num_gpu_blocks"),
        )
        # In vLLM, one memory holds the KV of requests and the prefix cache. So it does here with KV events. Else, the
        # prefix cache may be larger.
        caches = config.cache_tokens >= config.block_tokens
        blocks = (config.cache_tokens if caches else config.kv_memory_tokens) // config.block_tokens
        info.add_metric(
            (str(config.block_tokens), str(caches), self._labels[0], str(engine.memory_tokens), str(blocks)), 1
        )
        yield info
        sleep = GaugeMetricFamily("vllm:engine_sleep_state", "Engine sleep state.", labels=(*_LABELS, "sleep_state"))
        for state, holds in (("awake", not self._asleep()), ("weights_offloaded", self._asleep()), ("discard_all", 0)):
            sleep.add_metric((*self._labels, state), holds)
        yield sleep
        started = "Start time of the process since unix epoch in seconds."
        yield GaugeMetricFamily("process_start_time_seconds", started, value=self._started_s)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


class EngineMetrics:
    """One engine's metrics registry. ``speed`` is the number of model seconds per wall-clock second."""

    def __init__(self, engine: Engine, *, model: str, speed: float, asleep: Callable[[], bool] = lambda: False) -> None:
        self._speed = speed
        self._registry = CollectorRegistry()
        labels = ("0", model)
        self._registry.register(_EngineCollector(engine, labels, asleep))
        self._ttft = self._histogram(
            "time_to_first_token", "Histogram of time to first token in seconds.", _TTFT_BUCKETS
        ).labels(*labels)
        self._queue = self._histogram(
            "request_queue_time", "Histogram of time spent in WAITING phase for request.", _REQUEST_BUCKETS
        ).labels(*labels)
        self._e2e = self._histogram(
            "e2e_request_latency", "Histogram of e2e request latency in seconds.", _REQUEST_BUCKETS
        ).labels(*labels)
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            ("engine", "finished_reason", "model_name"),
            registry=self._registry,
        )
        self._ended = {reason: success.labels("0", reason, model) for reason in ("stop", "length", "abort")}

    def first_token(self, event: FirstToken) -> None:
        """Count the end of a prefill."""
        self._ttft.observe((event.at_s - event.arrived_s) / self._speed)
        self._queue.observe((event.prefill_started_s - event.arrived_s) / self._speed)

    def finished(self, event: Finished, reason: str) -> None:
        """Count the end of a request; ``reason`` is its finish reason, ``stop`` or ``length``."""
        self._e2e.observe((event.at_s - event.arrived_s) / self._speed)
        self._ended[reason].inc()

    def aborted(self) -> None:
        """Count a request that its client aborted."""
        self._ended["abort"].inc()

    def render(self) -> bytes:
        """Return the metrics page in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}_seconds", text, _LABELS, buckets=buckets, registry=self._registry)
