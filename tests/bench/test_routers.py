"""Tests of the benchmarks of several routers: searches, tables, messages and updates between routers."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dualmap.ownership.messages import Answer, Progress
from dualmap_extproc.peers.codec import decode_frame, encode_message
from dualmap_extproc.store.codec import decode_update, encode_update
from dualmap_sim.goodput import Goodput

ROOT = Path(__file__).parents[2]
Bench = Callable[[str], ModuleType]


@pytest.fixture(name="bench")
def _bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def test_goodput_table_has_shares_of_one_router(bench: Bench, tmp_path: Path) -> None:
    routers = bench("routers")
    cell = routers.Cell(workload="default", model="7b", variant=routers.ONE, requests=100, trace=tmp_path)
    found = [Goodput(requests_per_s=rate, runs=1, bracket=(rate, rate)) for rate in (8.0, 8.0, 7.6, 4.0, 6.0)]
    *_, row = routers.table([cell], found[:1], found[1:]).splitlines()
    assert row == "| default | 7b | 8.00 | 100.0% | 95.0% | 50.0% | 75.0% |"


def test_goodput_search_runs_the_routers_of_its_variant(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    routers, searched = bench("routers"), []
    monkeypatch.setattr(routers, "goodput", lambda experiment, **_: searched.append(experiment))
    for variant in (routers.ONE, *routers.SEVERAL):
        routers.search(routers.Cell(workload="default", model="7b", variant=variant, requests=100, trace=tmp_path))
    assert [(each.routers, each.owner_decides) for each in searched] == [
        (1, True),
        (2, True),
        (4, True),
        (8, True),
        (4, False),
    ]


def test_differences_end_with_the_owner_near_far_late_and_lost(bench: Bench) -> None:
    replicas = bench("replicas")
    usual = replicas._cases("default", 4.0, (0,), routers=4, exchange=replicas._exchange(replicas.everything, 0.1))
    cases = [case for _, (case,) in replicas._with_owner(usual)]
    assert [case.hop_delay_s for case in cases] == [0.001, 0.01, 0.001, 0.001]
    assert [case.late_hops for case in cases] == [0.0, 0.0, 0.01, 0.0]
    assert [sum(each.lost_s < 1e9 for each in case.replicas) for case in cases] == [0, 0, 0, 1]


def test_measured_messages_are_readable(bench: Bench) -> None:
    peers = bench("peers")
    for message in (peers.answer("a-0-b"), *peers.progress("a-0-b")):
        ((_, read),) = decode_frame(encode_message(peers.POOL, message)).messages
        assert isinstance(read, Answer | Progress)
        assert read == message


@pytest.mark.parametrize("rate", [1, 10])
def test_measured_updates_contain_each_prompt_once(bench: Bench, rate: int) -> None:
    peers = bench("peers")
    read = [decode_update(encode_update(update)) for update in peers.replicated(rate)]
    assert sum(len(update.placements) for update in read) == rate * peers.REPLICATED_S
    assert any(update.loads for update in read)


def test_answering_and_asking_sides_listen_to_every_event(bench: Bench) -> None:
    peers, listener = bench("peers"), importlib.import_module("dualmap_extproc.peers.peers").PeersListener
    events = [name for name in vars(listener) if not name.startswith("_")]
    assert events
    assert all(hasattr(peers.Echo, name) and hasattr(peers.Asking, name) for name in events)
