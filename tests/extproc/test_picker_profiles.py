"""Tests of what the picker does with the profiles of engines."""

from dataclasses import replace

import builders
from dualmap.engines.profile import EngineProfile
from dualmap.pools.pool import Model
from dualmap_extproc.request.picked import Picked
from extproc.desks import Desk
from extproc.envoy_messages import chat


class TestPicker:
    def test_discovered_adapter_is_routed_under_its_own_key(self) -> None:
        desk = Desk(builders.pool(2))
        assert desk.refused(chat(model="sql")) == 404
        desk.picker.on_profile(1.0, "llm/qwen", "m-0", EngineProfile(adapters=("sql",)))
        of_adapter, of_model = desk.pick(chat(model="sql")), desk.pick(chat(model="m"))
        assert isinstance(of_adapter, Picked)
        assert of_adapter.decision is not None
        assert of_model.decision is not None
        assert of_adapter.decision.receipt.key.hash != of_model.decision.receipt.key.hash

    def test_engine_cannot_take_the_name_of_another_pool(self) -> None:
        mine = replace(builders.pool(1), name="a", model=Model(name="mine"))
        theirs = replace(builders.pool(2), name="b", model=Model(name="theirs"))
        desk = Desk(mine, theirs)
        desk.picker.on_profile(1.0, "llm/a", "m-0", EngineProfile(adapters=("theirs",)))
        for _ in range(2):
            desk.pick(chat(model="theirs"))
        (mine_now,), (theirs_now,) = desk.picker.statuses(["llm/a"]), desk.picker.statuses(["llm/b"])
        assert sum(each.in_flight for each in mine_now.endpoints) == 0
        assert sum(each.in_flight for each in theirs_now.endpoints) == 2

    def test_discovered_length_bounds_prompts(self) -> None:
        desk = Desk(builders.pool(1))
        desk.picker.on_profile(1.0, "llm/qwen", "m-0", EngineProfile(max_model_len=100))
        assert desk.picker.bounds["m"].tokens == 100
        receipt = desk.pick(chat(model="m", text="x" * 4000)).receipt
        assert receipt is not None
        assert "prompt=100," in receipt

    def test_profile_of_an_unknown_pool_is_ignored(self) -> None:
        desk = Desk(builders.pool(1))
        desk.picker.on_profile(1.0, "llm/gone", "m-0", EngineProfile(adapters=("sql",)))
        assert desk.refused(chat(model="sql")) == 404
