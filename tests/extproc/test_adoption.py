"""Tests of the adoption of pools: Envoys receive a version first, and the picker waits for Envoys if requests are
queued.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from dualmap.pools.pool import Pool
from dualmap_extproc.app import adoption
from dualmap_extproc.app.adoption import Adoption
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.engines.kv_events import KvEvents
from dualmap_extproc.engines.profiles import EngineProfiles
from dualmap_extproc.envoy.discovery.service import Discovery
from dualmap_extproc.errors import Refused
from dualmap_extproc.kv_stores.stores import KvStores
from dualmap_extproc.request.observations import FanOut
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.tokens.sources import PoolTokenizers
from extproc.envoy_messages import chat, crowded_pool, pool


class Engines(EngineProfiles):
    """Records the pools, and asks no engine."""

    def __init__(self) -> None:
        self.pools: list[tuple[Pool, ...]] = []

    def set_pools(self, pools: Sequence[Pool]) -> None:
        self.pools.append(tuple(pools))


class Tokenizers(PoolTokenizers):
    """Records the pools, and reads no tokenizer."""

    def __init__(self) -> None:
        self.pools: list[tuple[Pool, ...]] = []

    def set_pools(self, pools: Sequence[Pool]) -> None:
        self.pools.append(tuple(pools))


class Stores(KvStores):
    """Records the pools, and asks no store."""

    def __init__(self) -> None:
        self.pools: list[tuple[Pool, ...]] = []

    def set_pools(self, pools: Sequence[Pool]) -> None:
        self.pools.append(tuple(pools))


class Events(KvEvents):
    """Records the pools, and opens no socket."""

    def __init__(self) -> None:
        self.pools: list[tuple[Pool, ...]] = []

    def set_pools(self, pools: Sequence[Pool]) -> None:
        self.pools.append(tuple(pools))


class Adopted:
    """The adoption of pools, and the times at which Envoys received the pools."""

    def __init__(self, *pools: Pool) -> None:
        self.demand = Demand()
        self.metrics = Metrics(version="1", replica_id="r")
        self.picker = Picker(Limits(), FanOut().report, id_prefix="r")
        self.discovery = Discovery(self.metrics)
        self.resumed: asyncio.Queue[Picked | Refused] = asyncio.Queue()
        self.engines = Engines()
        self.tokenizers = Tokenizers()
        self.events = Events()
        self.kv_stores = Stores()
        self.adoption = Adoption(
            self.metrics,
            self.demand,
            self.discovery,
            self.engines,
            self.tokenizers,
            self.kv_stores,
            self.events,
            self.picker,
        )
        self.adoption.adopt(pools)

    def hold(self) -> None:
        held = self.picker.pick(1.0, chat(), None, 1.0, headers={}, resume=self.resumed.put_nowait)
        assert isinstance(held, AnswerLater)

    def versions(self) -> list[int]:
        return [status.ring_version for status in self.picker.statuses()]

    def members(self) -> set[str]:
        return {member.endpoint for each in self.picker.pools for member in each.members}


async def test_pool_update_reaches_engine_discovery():
    adopted = Adopted(pool())
    adopted.adoption.adopt(())
    assert adopted.engines.pools == adopted.kv_stores.pools == [(pool(),), ()]


async def test_pool_update_without_queued_requests_applies_at_once():
    adopted = Adopted(pool(members=2))

    adopted.adoption.adopt((pool(members=4),))
    assert len(adopted.members()) == 4
    adopted.adoption.adopt((pool(members=0),))
    assert adopted.members() == set()


async def test_pool_update_with_queued_requests_waits_for_envoys(monkeypatch):
    monkeypatch.setattr(adoption, "NOTICE_S", 0.05)
    adopted = Adopted(crowded_pool(members=0, hold_when_empty=True))
    adopted.hold()

    adopted.adoption.adopt((replace(crowded_pool(members=1), ring_version=7),))
    assert adopted.members() == set()
    # GET /pools shows the version that the picker uses.
    assert adopted.versions() == [crowded_pool(members=0).ring_version]

    assert isinstance(await asyncio.wait_for(adopted.resumed.get(), 30.0), Picked)
    assert adopted.members() == {"10.0.0.0:8000"}
    assert adopted.versions() == [7]


async def test_pool_update_reaches_engine_discovery_after_the_picker(monkeypatch):
    """The picker would ignore the profile of a member that it does not know."""
    monkeypatch.setattr(adoption, "NOTICE_S", 0.05)
    adopted = Adopted(crowded_pool(members=0, hold_when_empty=True))
    adopted.hold()
    adopted.adoption.adopt((crowded_pool(members=1),))
    assert adopted.engines.pools == [(crowded_pool(members=0, hold_when_empty=True),)]

    await asyncio.wait_for(adopted.resumed.get(), 30.0)
    assert adopted.engines.pools[-1] == (crowded_pool(members=1),)


async def test_pool_update_while_waiting_applies_newest_pools_on_time(monkeypatch):
    monkeypatch.setattr(adoption, "NOTICE_S", 0.2)
    adopted = Adopted(crowded_pool(members=0, hold_when_empty=True))
    adopted.hold()

    adopted.adoption.adopt((crowded_pool(members=1),))
    # A later version does not delay the first version, so that frequent changes do not delay requests.
    monkeypatch.setattr(adoption, "NOTICE_S", 3600.0)
    adopted.adoption.adopt((crowded_pool(members=3), pool("other", model="o")))

    assert isinstance(await asyncio.wait_for(adopted.resumed.get(), 30.0), Picked)
    assert [len(each.members) for each in adopted.picker.pools] == [3, 4]


async def test_pool_update_of_an_emptied_pool_applies_at_once(monkeypatch):
    monkeypatch.setattr(adoption, "NOTICE_S", 0.01)
    empty = crowded_pool(members=0, hold_when_empty=True)
    adopted = Adopted(empty)
    adopted.hold()
    adopted.adoption.adopt((crowded_pool(members=1),))

    adopted.adoption.adopt((replace(empty, ring_version=9),))
    await asyncio.sleep(0.05)

    assert adopted.members() == set()
    assert adopted.resumed.empty()


async def test_pool_update_with_only_new_addresses_waits_for_envoys(monkeypatch):
    monkeypatch.setattr(adoption, "NOTICE_S", 0.05)
    adopted = Adopted(crowded_pool(members=1))
    first = adopted.picker.pick(1.0, chat("long " * 10_000), None, 1.0, headers={}, resume=adopted.resumed.put_nowait)
    assert isinstance(first, Picked)
    adopted.hold()
    (member,) = crowded_pool(members=1).members
    moved = replace(crowded_pool(members=1), members=(replace(member, address="10.9.9.9"),))

    adopted.adoption.adopt((moved,))
    assert adopted.members() == {"10.0.0.0:8000"}

    picked = await asyncio.wait_for(adopted.resumed.get(), 30.0)
    assert isinstance(picked, Picked)
    assert picked.destination == "10.9.9.9:8000"
