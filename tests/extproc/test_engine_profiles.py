"""Tests of the profiles of engines, against a scripted HTTP server and the simulated engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import Discovery, Engine, Member, Model, Pool
from dualmap_extproc.engines import client, profiles
from dualmap_extproc.engines.profiles import EngineProfiles
from dualmap_sim.http_server import EngineHttpServer
from dualmap_sim.presets import PRESETS
from dualmap_sim.server_settings import ServerSettings
from extproc.scripted_engines import HOST, METRICS, MODELS, Scripted, hang, serving, vllm
from waiting import until


def pool_of(*members: Member, type: str = "vLLM", interval_s: float = 10.0, enabled: bool = True) -> Pool:
    discovery = Discovery(enabled=enabled, interval_s=interval_s)
    return replace(builders.pool(0, engine=Engine(type=type, discovery=discovery)), members=members)


class Reports:
    """The reported profiles by member, newest last."""

    def __init__(self) -> None:
        self.of: dict[str, list[EngineProfile]] = {}

    def take(self, pool: str, member: str, profile: EngineProfile) -> None:
        assert pool == "llm/qwen"
        self.of.setdefault(member, []).append(profile)

    async def next(self, member: str = "m-0", count: int = 1) -> EngineProfile:
        """Return the profile after ``count`` further reports."""
        wanted = len(self.of.get(member, ())) + count
        await until(lambda: len(self.of.get(member, ())) >= wanted)
        return self.of[member][-1]

    async def until(self, holds: Callable[[EngineProfile], object], member: str = "m-0") -> EngineProfile:
        """Return the newest profile when it is as wanted."""
        await until(lambda: holds(self.of[member][-1]) if self.of.get(member) else False)
        return self.of[member][-1]

    async def described(self) -> EngineProfile:
        """Return a profile with the engine's pages, which the first one lacks if their answers are late."""
        return await self.until(lambda each: each.version or each.models or "/v1/models" in each.reason)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask ten times as often as usual."""
    monkeypatch.setattr(profiles, "LOAD_PERIOD_S", (0.075, 0.095))
    monkeypatch.setattr(profiles, "_TICK_S", 0.01)
    monkeypatch.setattr(profiles, "_JOIN_JITTER_S", 0.0)
    monkeypatch.setattr(profiles, "_FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(profiles, "_LAST_RETRY_S", 0.2)
    monkeypatch.setattr(client, "TIMEOUT_S", 0.3)


@asynccontextmanager
async def asking(*pools: Pool) -> AsyncIterator[tuple[EngineProfiles, Reports]]:
    reports = Reports()
    engines = EngineProfiles(reports.take)
    engines.set_pools(pools)
    try:
        yield engines, reports
    finally:
        await engines.close()


class TestProfiles:
    async def test_vllm_engine_is_described(self) -> None:
        async with serving(vllm()) as member, asking(pool_of(member)) as (_, reports):
            assert await reports.described() == EngineProfile(
                engine="vLLM",
                version="0.32.0",
                block_tokens=16,
                kv_tokens=1600,
                cache_tokens=1600,
                max_model_len=4096,
                models=("m", "sql"),
                adapters=("sql",),
                waiting=1,
                running=2,
                asleep=False,
                started_s=100.0,
                ranks=(0,),
            )

    async def test_sglang_engine_is_described(self) -> None:
        engine = Scripted(
            {
                "/metrics": "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\n",
                "/server_info": {"version": "0.5.22", "max_total_num_tokens": 9000, "page_size": 64},
                "/v1/models": MODELS,
            }
        )
        async with serving(engine) as member, asking(pool_of(member, type="SGLang")) as (_, reports):
            profile = await reports.described()
        assert (profile.engine, profile.version, profile.kv_tokens, profile.running) == ("SGLang", "0.5.22", 9000, 1)
        assert (profile.max_model_len, profile.adapters, profile.reason) == (4096, ("sql",), "")

    async def test_engine_without_metrics_is_described_by_its_other_pages(self) -> None:
        engine = vllm(metrics=None)
        async with serving(engine) as member, asking(pool_of(member)) as (_, reports):
            profile = await reports.described()
        assert (profile.version, profile.max_model_len, profile.running) == ("0.32.0", 4096, None)
        assert profile.reason == "/metrics was answered with 404"

    async def test_generic_engine_is_asked_for_its_models_only(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, type="Generic", interval_s=0.1)) as (_, reports):
            profile = await reports.next(count=3)
        assert profile == EngineProfile(engine="Generic", max_model_len=4096, models=("m", "sql"), adapters=("sql",))
        assert set(engine.asked) == {"/v1/models"}

    async def test_load_is_read_often_and_the_rest_at_intervals(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=0.5)) as (_, reports):
            await reports.next(count=11)
        assert engine.asked.count("/metrics") >= 11
        assert 2 <= engine.asked.count("/version") <= 4
        assert len(engine.peers["/metrics"]) == 1

    async def test_new_start_time_asks_for_everything_at_once(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=3600.0)) as (_, reports):
            await reports.described()
            engine.answers |= {"/metrics": METRICS % 200.0, "/version": {"version": "0.33.0"}, "/v1/models": None}
            profile = await reports.until(lambda each: each.version == "0.33.0")
        assert (profile.version, profile.started_s, profile.adapters) == ("0.33.0", 200.0, ())
        assert profile.reason == "/v1/models was answered with 404"

    async def test_page_without_an_answer_keeps_its_last_values(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=0.1)) as (_, reports):
            await reports.described()
            engine.answers["/v1/models"] = "junk"
            await until(lambda: reports.of["m-0"][-1].reason == "/v1/models is not JSON")
            assert reports.of["m-0"][-1].adapters == ("sql",)

    async def test_silent_engine_keeps_its_facts_without_its_load(self) -> None:
        async with serving(vllm()) as member, asking(pool_of(member)) as (_, reports):
            await reports.next()
            engine_gone = member
        async with asking(pool_of(engine_gone)) as (_, reports):
            profile = await reports.next()
        assert profile.reason.startswith("/metrics: no connection")
        assert (profile.running, profile.kv_tokens) == (None, None)

    async def test_engine_that_hangs_later_keeps_its_facts(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member)) as (_, reports):
            await reports.described()
            engine.answers["/metrics"] = hang
            profile = await reports.until(lambda each: each.reason)
        assert profile.reason == "/metrics was not answered within 0.3 s"
        assert (profile.version, profile.kv_tokens, profile.running, profile.asleep) == ("0.32.0", 1600, None, False)

    async def test_silent_engine_is_asked_less_often(self) -> None:
        engine = vllm(metrics=None, version=None)
        clock = asyncio.get_running_loop().time
        async with serving(engine) as member, asking(pool_of(member)) as (_, _reports):
            began_s = clock()
            await asyncio.sleep(1.5)
            await until(lambda: engine.asked.count("/metrics") >= 5)
            took_s = clock() - began_s
        # In 1.5 s, an engine that answers is asked 17 times.
        assert engine.asked.count("/metrics") <= 10 * took_s / 1.5

    async def test_engine_that_was_silent_for_long_is_soon_known_again(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=3600.0)) as (_, reports):
            await reports.next()
            del engine.answers["/metrics"]
            asked = engine.asked.count("/metrics")
            await until(lambda: engine.asked.count("/metrics") >= asked + 6)
            engine.answers["/metrics"] = METRICS % 200.0
            await until(lambda: reports.of["m-0"][-1].started_s == 200.0)

    async def test_engine_of_another_type_is_named(self) -> None:
        async with serving(vllm()) as member, asking(pool_of(member, type="SGLang")) as (_, reports):
            profile = await reports.described()
        assert "/metrics is that of vLLM, not of SGLang" in profile.reason
        assert "/server_info was answered with 404" in profile.reason

    async def test_engine_without_a_name_of_its_pool_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = vllm()
        async with serving(engine) as member:
            of = replace(pool_of(member, interval_s=0.1), model=Model(name="m", aliases=("small",), adapters=("x",)))
            async with asking(of) as (engines, reports):
                profile = await reports.described()
                assert (profile.mismatch, profile.reason) == ("serves [m], not small", "")
                engine.answers["/v1/models"] = {"data": [{"id": "other"}]}
                await until(lambda: reports.of["m-0"][-1].mismatch == "serves [other], not m, small")
                engine.answers["/v1/models"] = {"data": [{"id": "other"}, {"id": "m"}]}
                engines.set_pools([replace(of, model=Model(name="m"))])
                await until(lambda: reports.of["m-0"][-1].mismatch == "")
        assert [each.message for each in caplog.records] == ["Engine does not fit its pool"] * 2

    async def test_mismatch_that_outlasts_restarts_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = vllm(**{"v1/models": {"data": [{"id": "other"}]}})
        models = engine.answers["/v1/models"]
        async with serving(engine) as member:
            of = pool_of(member, interval_s=0.1)
            async with asking(of) as (engines, reports):
                assert (await reports.described()).mismatch == "serves [other], not m"
                # The engine's process starts again, and serves its list of models only later.
                del engine.answers["/v1/models"]
                engine.answers["/metrics"] = METRICS % 200.0
                await until(lambda: reports.of["m-0"][-1].mismatch == "")
                engine.answers["/v1/models"] = models
                await until(lambda: reports.of["m-0"][-1].mismatch != "")
                # The pod's container restarts.
                reports.of["m-0"].clear()
                engines.set_pools([replace(of, members=(replace(member, incarnation="again"),))])
                await until(lambda: [each for each in reports.of["m-0"] if each.mismatch])
        assert [each.message for each in caplog.records] == ["Engine does not fit its pool"]

    async def test_long_list_of_models_names_nothing(self) -> None:
        engine = vllm(**{"v1/models": {"data": [{"id": f"o{n}"} for n in range(1025)]}})
        async with serving(engine) as member, asking(pool_of(member)) as (_, reports):
            profile = await reports.described()
        assert (profile.models, profile.mismatch) == ((), "")

    async def test_program_that_is_no_engine_is_named(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=0.1)) as (_, reports):
            await reports.described()
            known = dict(engine.answers)
            engine.answers.clear()
            await until(lambda: reports.of["m-0"][-1].mismatch)
            profile = reports.of["m-0"][-1]
            assert profile.mismatch == "no vLLM engine answers: /metrics and /v1/models are not there"
            assert (profile.models, profile.adapters) == ((), ())
            engine.answers |= known
            await until(lambda: reports.of["m-0"][-1].models == ("m", "sql"))
            assert reports.of["m-0"][-1].mismatch == ""

    @pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
    async def test_engine_that_lacks_one_page_fits_its_pool(self, path: str) -> None:
        engine = vllm()
        del engine.answers[path]
        async with serving(engine) as member, asking(pool_of(member)) as (_, reports):
            profile = await reports.described()
        assert profile.reason == f"{path} was answered with 404"
        assert profile.mismatch == ""

    async def test_event_sources_are_optional(self) -> None:
        source = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": ""}
        engine = vllm(kv_event_sources={"0": source})
        async with serving(engine) as member, asking(pool_of(member)) as (_, reports):
            (found,) = (await reports.described()).event_sources
        assert (found.rank, found.port, found.replay_port) == (0, 5557, None)

    async def test_pools_without_discovery_are_not_asked(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, enabled=False)):
            await asyncio.sleep(0.3)
        assert engine.asked == []

    async def test_removed_member_is_asked_no_more(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member)) as (engines, reports):
            await reports.next()
            engines.set_pools([pool_of(member)])  # The same member is asked on.
            await reports.next()
            engines.set_pools([pool_of()])
            await asyncio.sleep(0)
            asked = len(engine.asked)
            await asyncio.sleep(0.3)
            assert len(engine.asked) == asked

    async def test_another_incarnation_is_asked_anew(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=3600.0)) as (engines, reports):
            await reports.next()
            engines.set_pools([pool_of(replace(member, incarnation="2"), interval_s=3600.0)])
            await reports.next(count=2)
        assert engine.asked.count("/version") == 2

    async def test_silent_members_do_not_delay_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "SILENT_AT_ONCE", 4)
        dead, alive = Scripted({"/metrics": hang}), vllm()
        async with serving(dead) as silent, serving(alive) as member:
            many = tuple(replace(silent, id=f"dead-{n}") for n in range(20))
            async with asking(pool_of(member, *many, interval_s=60.0)) as (_, reports):
                await reports.next(count=3)
                # One after the other, each report would wait for all 20 silent members.
                assert dead.asked.count("/metrics") < 40
                await until(lambda: dead.asked.count("/metrics") >= 8)
        assert dead.most_at_once == 4

    async def test_unexpected_error_is_reported_and_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> EngineProfile:
            raise RuntimeError("broken")

        async with serving(vllm()) as member, asking(pool_of(member, interval_s=0.5)) as (_, reports):
            await reports.next()
            with monkeypatch.context() as broke:
                broke.setattr(profiles, "read_metrics", broken)
                await until(lambda: reports.of["m-0"][-1].running is None)
            failed = reports.of["m-0"][-1]
            assert failed.reason == "discovery failed: RuntimeError"
            assert (failed.version, failed.kv_tokens, failed.adapters) == ("0.32.0", 1600, ("sql",))
            await until(lambda: reports.of["m-0"][-1].running == 2)

    async def test_unexpected_error_of_a_page_leaves_the_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_: object) -> EngineProfile:
            raise RuntimeError("broken")

        monkeypatch.setitem(profiles._PAGES, "vLLM", {"/version": broken, "/v1/models": profiles.read_models})
        async with serving(vllm()) as member, asking(pool_of(member)) as (_, reports):
            profile = await reports.next(count=3)
        assert (profile.running, profile.adapters) == (2, ("sql",))
        assert profile.reason == "discovery failed: RuntimeError"

    async def test_error_of_the_receiver_ends_no_task(self) -> None:
        taken: list[EngineProfile] = []

        def take(_pool: str, _member: str, profile: EngineProfile) -> None:
            taken.append(profile)
            raise RuntimeError("broken")

        async with serving(vllm()) as member:
            engines = EngineProfiles(take)
            engines.set_pools([pool_of(member)])
            await until(lambda: len(taken) >= 3)
            await engines.close()

    async def test_slow_page_does_not_delay_the_load(self) -> None:
        engine = vllm()
        async with serving(engine) as member, asking(pool_of(member, interval_s=0.1)) as (_, reports):
            await reports.next()
            engine.answers["/v1/models"] = hang
            await until(lambda: engine.asked.count("/v1/models") >= 6)
            loads = {each.at_s for each in reports.of["m-0"] if each.running == 2}
        assert None not in loads
        # An unanswered page takes as long as three loads, or fewer on a busy machine. If it delayed them, it would take
        # as long as one.
        asked = "".join({"/metrics": "l", "/v1/models": "p"}.get(path, "") for path in engine.asked)
        assert max(map(len, asked.split("p")[1:-1])) >= 3

    async def test_slow_pages_of_a_new_member_do_not_hide_its_load(self) -> None:
        async with serving(vllm(version=hang)) as member, asking(pool_of(member)) as (_, reports):
            profile = await reports.next()
            assert (profile.running, profile.version) == (2, "")
            await until(lambda: reports.of["m-0"][-1].adapters == ("sql",))
        assert len({each.at_s for each in reports.of["m-0"]}) >= 2

    async def test_slow_pages_of_many_members_do_not_delay_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "PAGES_AT_ONCE", 2)
        slow, quick = vllm(version=hang), vllm()
        async with serving(slow) as member, serving(quick) as other:
            many = tuple(replace(member, id=f"slow-{n}") for n in range(20))
            clock = asyncio.get_running_loop().time
            async with asking(pool_of(other, *many, interval_s=60.0)) as (_, reports):
                began_s = clock()
                await until(lambda: len({each.at_s for each in reports.of.get("m-0", ())}) >= 4)
                asked, took_s = slow.asked.count("/version"), clock() - began_s
        # Two members at once wait for the page, each for 0.3 s.
        assert asked <= 2 * (1 + took_s / 0.3)
        assert asked < len(many)

    async def test_load_has_the_time_of_its_answer(self) -> None:
        clock = asyncio.get_running_loop().time
        async with serving(vllm()) as member, asking(pool_of(member)) as (_, reports):
            first = await reports.next()
            second = await reports.next()
            assert first.at_s is not None
            assert second.at_s is not None
            assert first.at_s < second.at_s <= clock()

    async def test_asleep_engine_that_misses_a_scrape_stays_asleep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profiles, "ASLEEP_KEPT_S", 0.5)
        engine = vllm(metrics=METRICS.replace('"awake"} 1', '"awake"} 0') % 100.0)
        async with serving(engine) as member, asking(pool_of(member, interval_s=0.2)) as (_, reports):
            await until(lambda: bool(reports.of) and reports.of["m-0"][-1].asleep is True)
            engine.answers["/metrics"] = None
            await until(lambda: reports.of["m-0"][-1].running is None)
            assert reports.of["m-0"][-1].asleep is True
            await until(lambda: reports.of["m-0"][-1].asleep is None)

    async def test_sglang_without_its_cache_keeps_nothing(self) -> None:
        metrics = "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\n"
        engine = Scripted(
            {
                "/metrics": metrics + 'sglang:cache_config_info{page_size="64",num_pages="101"} 1\n',
                "/server_info": {"max_total_num_tokens": 9000, "disable_radix_cache": True},
            }
        )
        async with serving(engine) as member, asking(pool_of(member, type="SGLang")) as (_, reports):
            profile = await reports.next(count=2)
        assert (profile.kv_tokens, profile.cache_tokens, profile.block_tokens) == (9000, 0, 64)


class TestSimulatedEngine:
    async def test_simulated_engine_is_described(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client, "TIMEOUT_S", 10.0)
        config = replace(PRESETS["7b"], block_tokens=16, cache_tokens=160_016)
        settings = ServerSettings(
            host=HOST, port=0, model="m", config=config, speed=1.0, api_key=None, adapters=("sql",)
        )
        engine = EngineHttpServer(settings)
        address = await engine.start()
        member = Member(id="m-0", address=HOST, port=int(address.rpartition(":")[2]))
        try:
            async with asking(pool_of(member)) as (_, reports), aiohttp.ClientSession() as session:
                profile = await reports.described()
                assert profile.version.endswith("+sim")
                assert (profile.block_tokens, profile.cache_tokens, profile.kv_tokens) == (16, 160_000, 160_000)
                assert (profile.max_model_len, profile.adapters) == (config.input_tokens_max, ("sql",))
                assert (profile.waiting, profile.running, profile.asleep, profile.reason) == (0, 0, False, "")
                assert profile.started_s is not None
                await session.post(f"http://{address}/sleep")
                await until(lambda: reports.of["m-0"][-1].asleep is True)
                async with session.post(f"http://{address}/v1/completions", json={"prompt": "a"}) as response:
                    assert response.status == 503
                await session.post(f"http://{address}/wake_up")
                await until(lambda: reports.of["m-0"][-1].asleep is False)
                url = f"http://{address}/v1/completions"
                async with session.post(url, json={"model": "sql", "prompt": "a"}) as response:
                    assert (await response.json())["model"] == "sql"
        finally:
            await engine.close()
