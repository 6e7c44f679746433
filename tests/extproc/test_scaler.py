"""Tests of the KEDA scaler over gRPC, with the metadata of a ScaledObject."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import pytest

import builders
from dualmap.pools.pool import Model, Pool
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.autoscaling.pool_demand import PoolDemand
from dualmap_extproc.autoscaling.scaler import MetadataError, Scaler, Trigger, read_trigger
from dualmap_extproc.names import SCALER_SERVICE
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker, Refused
from dualmap_extproc.settings import Limits
from dualmap_extproc.transport.processor import ExternalProcessor
from dualmap_extproc.transport.server import GrpcServers
from dualmap_extproc.wire import external_scaler_pb2 as wire
from extproc.envoy_messages import crowded_pool
from extproc.transports import selected
from waiting import until

POOL = builders.pool(2)
EMPTY = replace(crowded_pool("empty", members=0, hold_when_empty=True, max_held=1), model=Model(name="other"))
ANSWER_S = 30.0


def reference(pool: str = "qwen", *, namespace: str = "llm", **metadata: str) -> wire.ScaledObjectRef:
    return wire.ScaledObjectRef(name="scaled", namespace=namespace, scaler_metadata={"pool": pool, **metadata})


@dataclass
class Running:
    """A router's scaler on a free port, with a client."""

    channel: grpc.aio.Channel
    servers: GrpcServers
    scaler: Scaler
    picker: Picker
    demand: PoolDemand
    now: list[float]
    answers: list[Picked | Refused] = field(default_factory=list)

    def ask(self, pool: Pool, text: str = "hello") -> Picked | Refused | AnswerLater:
        body = json.dumps({"model": pool.model.name, "prompt": text, "stream": True}).encode()
        return self.picker.pick(self.now[0], body, None, self.now[0], headers={}, resume=self.answers.append)

    def stream(self, asked: wire.ScaledObjectRef) -> Any:
        return self.channel.unary_stream(
            f"/{SCALER_SERVICE}/StreamIsActive",
            request_serializer=wire.ScaledObjectRef.SerializeToString,
            response_deserializer=wire.IsActiveResponse.FromString,
        )(asked)

    async def is_active(self, asked: wire.ScaledObjectRef) -> bool:
        answer: wire.IsActiveResponse = await self._call("IsActive", wire.IsActiveResponse.FromString, asked)
        return answer.result

    async def spec(self, asked: wire.ScaledObjectRef) -> wire.MetricSpec:
        answer = await self._call("GetMetricSpec", wire.GetMetricSpecResponse.FromString, asked)
        (spec,) = answer.metric_specs
        return spec

    async def value(self, asked: wire.ScaledObjectRef) -> float:
        request = wire.GetMetricsRequest(scaled_object_ref=asked, metric_name="s0-whatever")
        answer = await self._call("GetMetrics", wire.GetMetricsResponse.FromString, request)
        (metric,) = answer.metric_values
        assert metric.metric_value >= metric.metric_value_float > metric.metric_value - 1
        return metric.metric_value_float

    async def _call(self, method: str, read: Callable[[bytes], Any], message: Any) -> Any:
        call = self.channel.unary_unary(
            f"/{SCALER_SERVICE}/{method}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=read,
        )
        return await call(message, timeout=ANSWER_S)


@asynccontextmanager
async def running(
    *pools: Pool, shares: bool = False, repeat_s: float = 600.0, port: str = "grpc"
) -> AsyncIterator[Running]:
    now = [1000.0]
    demand = Demand(lambda: now[0])
    demand.set_pools(pools)
    observations = FanOut()
    demand.subscribe(observations)
    picker = Picker(Limits(), observations.report, id_prefix="r")
    picker.set_pools(now[0], pools)
    pool_demand = PoolDemand(demand, picker.statuses, picker.pool, replicated=shares, clock=lambda: now[0])
    scaler = Scaler(pool_demand, repeat_s=repeat_s)
    processor = ExternalProcessor(picker, observations.report, Limits())
    handlers = (scaler.handler(),)
    servers = GrpcServers(
        processor, services=handlers, plain=handlers, access_log=(), limits=Limits(), transport=selected()
    )
    ports = await servers.start("127.0.0.1", grpc_port=0, health_port=0, als_port=0, certificates=None)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{getattr(ports, port)}") as channel:
        try:
            yield Running(channel, servers, scaler, picker, pool_demand, now)
        finally:
            await servers.close()


@pytest.fixture
async def router() -> AsyncIterator[Running]:
    async with running(POOL, EMPTY) as router:
        yield router


async def next_word(stream: Any) -> bool | None:
    """Return a stream's next message, or None at its end."""
    async with asyncio.timeout(ANSWER_S):
        word = await stream.read()
    return None if word is grpc.aio.EOF else word.result


async def error(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


class TestMetadata:
    def test_metadata_with_only_the_pool_has_defaults(self):
        assert read_trigger(reference()) == Trigger(pool="llm/qwen", metric="desired_replicas", target=1.0)

    def test_metadata_can_set_every_field(self):
        asked = reference("other/qwen", metric="in_flight_requests", target="12.5", scalerAddress="dualmap-router:9002")
        assert read_trigger(asked) == Trigger(pool="other/qwen", metric="in_flight_requests", target=12.5)

    @pytest.mark.parametrize(
        ("pool", "metadata", "said"),
        [
            ("", {}, "metadata pool: '' is not accepted; give NAME or NAMESPACE/NAME"),
            ("a/b/c", {}, "metadata pool: 'a/b/c' is not accepted"),
            ("/b", {}, "metadata pool: '/b' is not accepted"),
            (
                "qwen",
                {"metric": "Desired"},
                "metadata metric: 'Desired' is not accepted; give one of desired_replicas, ",
            ),
            ("qwen", {"target": "many"}, "metadata target: 'many' is not accepted; give a number from 0.001 to 1e+12"),
            ("qwen", {"target": "0"}, "metadata target: '0' is not accepted"),
            ("qwen", {"target": "nan"}, "metadata target: 'nan' is not accepted"),
            ("qwen", {"target": "1e999"}, "metadata target: '1e999' is not accepted"),
            ("qwen", {"target": "1e300"}, "metadata target: '1e300' is not accepted"),
            ("qwen", {"target": "1_0"}, "metadata target: '1_0' is not accepted"),
            ("qwen", {"target": " 2 "}, "metadata target: ' 2 ' is not accepted"),
            ("a" * 1000 + "/", {}, "a...' is not accepted"),
        ],
    )
    def test_metadata_invalid_value_is_named_in_the_error(self, pool, metadata, said):
        with pytest.raises(MetadataError, match="metadata") as caught:
            read_trigger(reference(pool, **metadata))
        assert said in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("transport")
class TestCalls:
    async def test_scaler_answers_on_the_health_port_too(self):
        """With mutual TLS, KEDA has no certificate for the gRPC port."""
        async with running(POOL, EMPTY, port="health") as router:
            assert (await router.spec(reference())).target_size_float == 1.0

    async def test_scaler_pool_has_a_default_target(self, router):
        spec = await router.spec(reference())
        assert (spec.metric_name, spec.target_size, spec.target_size_float) == ("desired_replicas", 1, 1.0)
        assert await router.value(reference()) == 0.0
        assert not await router.is_active(reference())

    async def test_scaler_target_can_be_any_number(self, router):
        spec = await router.spec(reference(metric="pending_prefill_tokens", target="1500.5"))
        assert (spec.target_size, spec.target_size_float) == (1501, 1500.5)

    async def test_scaler_returns_the_value_of_each_metric(self, router):
        asked = [router.ask(POOL, builders.text_of(1000, f"prompt {n}")) for n in range(3)]
        assert await router.value(reference(metric="in_flight_requests")) == 3.0
        assert await router.value(reference(metric="pending_prefill_tokens")) == 3000.0
        assert 0.0 < await router.value(reference()) < 1.0
        assert await router.value(reference(metric="slo_attainment")) == 1.0
        router.now[0] += POOL.slo.ttft_s + 1.0
        router.picker.first_token(router.now[0], asked[0].request_id)
        assert await router.value(reference(metric="slo_attainment")) == 0.0
        router.ask(EMPTY)
        assert await router.value(reference("empty", metric="held_requests")) == 1.0

    @pytest.mark.parametrize("method", ["is_active", "spec", "value", "stream"])
    async def test_scaler_unknown_pool_or_invalid_metadata_is_an_error(self, router, method):
        def call(asked: wire.ScaledObjectRef) -> Any:
            return router.stream(asked).read() if method == "stream" else getattr(router, method)(asked)

        code, details = await error(call(reference("nobody")))
        assert (code, details.split(";")[0]) == (grpc.StatusCode.NOT_FOUND, "this router serves no pool llm/nobody")
        assert (await error(call(reference("qwen", namespace="elsewhere"))))[0] is grpc.StatusCode.NOT_FOUND
        code, details = await error(call(reference(metric="nothing")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("metadata metric: 'nothing' is not accepted")

    async def test_scaler_metric_without_default_requires_a_target(self, router):
        code, details = await error(router.spec(reference(metric="held_requests")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "metadata target: is missing; give how much held_requests one instance shall have"

    async def test_scaler_with_unknown_demand_returns_unavailable(self):
        async with running(POOL, shares=True) as router:
            for call in (router.value, router.is_active):
                code, details = await error(call(reference()))
                assert (code, "unreachable" in details) == (grpc.StatusCode.UNAVAILABLE, True)
            assert (await router.spec(reference())).target_size_float == 1.0
            router.demand.exchanged()
            assert await router.value(reference()) == 0.0


@pytest.mark.usefixtures("transport")
class TestStream:
    async def test_scaler_stream_sends_the_state_and_every_change(self, router):
        stream = router.stream(reference())
        assert await next_word(stream) is False
        picked = router.ask(POOL)
        assert await next_word(stream) is True
        router.picker.finished(router.now[0], picked.request_id, None)
        router.now[0] += 60.0
        assert await next_word(stream) is False

    async def test_scaler_stream_repeats_the_active_state(self):
        async with running(POOL, repeat_s=0.05) as router:
            stream = router.stream(reference())
            assert await next_word(stream) is False
            router.ask(POOL)
            assert [await next_word(stream) for _ in range(3)] == [True] * 3

    async def test_scaler_stream_first_request_activates_an_empty_pool(self, router):
        stream = router.stream(reference("empty"))
        assert await next_word(stream) is False

        assert isinstance(router.ask(EMPTY), AnswerLater)

        assert await next_word(stream) is True
        assert await router.is_active(reference("empty"))
        assert 0.0 < await router.value(reference("empty")) <= 1.0
        beyond = router.ask(EMPTY)
        assert isinstance(beyond, Refused)
        assert (beyond.status, beyond.retry_after_s) == (503, 600)
        router.picker.set_pools(router.now[0], (POOL, replace(EMPTY, members=builders.members(1))))
        (answer,) = router.answers
        assert isinstance(answer, Picked)

    async def test_scaler_stream_rejected_request_activates_the_pool(self):
        cold = crowded_pool("cold", members=0)
        async with running(cold) as router:
            stream = router.stream(reference("cold"))
            assert await next_word(stream) is False
            refused = router.ask(cold)
            assert isinstance(refused, Refused)
            assert (refused.status, refused.retry_after_s) == (503, 600)
            assert await next_word(stream) is True

    async def test_scaler_stream_of_another_pool_gets_no_message(self, router):
        quiet = router.stream(reference())
        assert await next_word(quiet) is False
        waking = router.stream(reference("empty"))
        assert await next_word(waking) is False
        router.ask(EMPTY)
        assert await next_word(waking) is True
        router.ask(POOL)
        assert await next_word(quiet) is True

    async def test_scaler_stream_sends_nothing_while_demand_is_unknown(self):
        """KEDA before 2.20 scales to zero on "inactive"."""
        async with running(POOL, shares=True) as router:
            stream = router.stream(reference())
            await until(lambda: router.scaler.streams == 1)
            router.ask(POOL)
            assert await next_word(stream) is True

    async def test_scaler_stream_sends_the_state_after_demand_is_known(self):
        async with running(POOL, shares=True) as router:
            stream = router.stream(reference())
            await until(lambda: router.scaler.streams == 1)
            router.demand.exchanged()
            assert await next_word(stream) is False

    async def test_scaler_stream_ends_when_the_router_drains(self, router):
        stream = router.stream(reference())
        assert await next_word(stream) is False
        router.scaler.end_streams()
        assert await next_word(stream) is None
        assert await stream.code() is grpc.StatusCode.OK
        late = router.stream(reference())
        assert [await next_word(late), await next_word(late)] == [False, None]

    async def test_scaler_stream_ends_when_the_pool_is_removed(self, router):
        stream = router.stream(reference("empty"))
        assert await next_word(stream) is False
        router.picker.set_pools(router.now[0], (POOL,))
        code, _ = await error(stream.read())
        assert code is grpc.StatusCode.NOT_FOUND

    async def test_scaler_stream_of_disconnected_client_is_removed(self, router):
        stream = router.stream(reference())
        assert await next_word(stream) is False
        assert router.scaler.streams == 1
        stream.cancel()
        await until(lambda: router.scaler.streams == 0)
