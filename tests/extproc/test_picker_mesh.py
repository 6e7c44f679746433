"""Tests of pickers of several routers: the owner of a pool decides for all of them, and each decides without it."""

import asyncio

import pytest

from dualmap.ownership.messages import Declined
from dualmap.ownership.missed_answers import ANSWER_TIMEOUT_S, MISSES_MAX
from dualmap.prompts.blocks import PUBLIC_KEY
from dualmap_extproc.app.hash_key import client_key
from dualmap_extproc.errors import Refused
from dualmap_extproc.request.ending import AccessLogEntry
from dualmap_extproc.request.observations import Abandoned, Enqueued, RemotelyDecided, Routed
from dualmap_extproc.request.orphans import KEPT_MAX, KEPT_S
from dualmap_extproc.request.picked import AnswerLater, Picked
from dualmap_extproc.transport.deadlines import keep_deadlines
from extproc.envoy_messages import chat, crowded_pool, pool
from extproc.router_meshes import MeshDesk, RouterMesh

LONG = chat("long " * 10_000)


def results(desk) -> list[str]:
    return [each.result for each in desk.observer.of(RemotelyDecided)]


def crowded(**queue) -> RouterMesh:
    """Return routers whose only engine is busy, so that new requests queue at the owner."""
    mesh = RouterMesh(crowded_pool(**queue))
    assert isinstance(mesh.owner.ask(LONG, now=1.0), Picked)
    return mesh


def test_picker_asks_the_owner_and_answers_later():
    mesh = RouterMesh()
    asker = mesh.others[0]

    assert isinstance(asker.ask(now=1.0), AnswerLater)
    assert asker.picker.has_waiting
    mesh.deliver(1.0)

    (picked,) = asker.resumed
    assert isinstance(picked, Picked)
    assert picked.request_id.startswith(asker.name)
    assert (asker.in_flight, mesh.owner.in_flight) == (0, 1)
    assert not asker.picker.has_waiting
    assert results(asker) == ["answered"]
    (routed,) = asker.observer.of(Routed)
    assert routed.queued_s is None
    assert asker.observer.of(Enqueued) == []


def test_picker_of_the_owner_decides_at_once():
    mesh = RouterMesh()
    assert isinstance(mesh.owner.ask(now=1.0), Picked)
    assert results(mesh.owner) == []


def test_routers_that_ask_one_owner_share_its_index():
    mesh = RouterMesh()
    body = chat("common " * 500)
    for desk in mesh.others:
        desk.ask(body, now=1.0)
        mesh.deliver(1.0)
    first, second = (desk.resumed[0].decision.receipt for desk in mesh.others)
    assert first.chosen == second.chosen
    assert second.matched_tokens > first.matched_tokens == 0


def test_request_ends_in_the_owners_accounts():
    mesh = RouterMesh()
    asker = mesh.others[0]
    asker.ask(now=1.0)
    mesh.deliver(1.0)
    asker.picker.access_log(2.0, AccessLogEntry(request_id=asker.resumed[0].request_id, status=200))
    mesh.deliver(2.0)
    assert mesh.owner.in_flight == 0


def test_picker_decides_without_an_answer_in_time():
    mesh = RouterMesh()
    asker = mesh.others[0]
    mesh.loses = lambda sender, receiver: True
    now = 1.0
    for number in range(MISSES_MAX):
        asker.ask(now=now)
        deadline_s = asker.picker.next_deadline()
        assert deadline_s == now + ANSWER_TIMEOUT_S
        asker.picker.on_deadline(deadline_s)
        assert isinstance(asker.resumed[number], Picked)
        now = deadline_s + 0.01

    assert isinstance(asker.ask(now=now), Picked)
    assert results(asker) == ["timeout"] * MISSES_MAX + ["local"]
    assert asker.in_flight == MISSES_MAX + 1


def test_picker_counts_a_request_as_queued_from_the_owners_word_on():
    mesh = crowded(max_wait_s=50.0)
    asker = mesh.others[0]
    assert isinstance(asker.ask(now=2.0), AnswerLater)
    assert asker.observer.of(Enqueued) == []
    mesh.deliver(2.0)

    (queued,) = asker.observer.of(Enqueued)
    assert queued.now > 2.0
    assert (asker.held, mesh.owner.held) == (0, 1)
    first = mesh.owner.observer.of(Routed)[0].decision.request_id
    mesh.owner.picker.finished(5.0, first, None)
    mesh.deliver(5.0)

    assert isinstance(asker.resumed[0], Picked)
    assert asker.observer.of(Routed)[0].queued_s == pytest.approx(3.0, abs=0.01)


def test_abandoned_question_has_no_time_in_the_queue():
    mesh = crowded()
    asker = mesh.others[0]
    asked = asker.ask(now=2.0)
    asker.picker.aborted(2.0, asked.request_id)
    mesh.deliver(2.0)
    assert [each.queued_s for each in asker.observer.of(Abandoned)] == [None]
    assert mesh.owner.held == 0


def test_abandoned_request_leaves_the_owners_queue():
    mesh = crowded()
    asker = mesh.others[0]
    asked = asker.ask(now=2.0)
    mesh.deliver(2.0)
    asker.picker.aborted(3.0, asked.request_id)
    mesh.deliver(3.0)
    assert asker.observer.of(Abandoned)[0].queued_s > 0.9
    assert mesh.owner.held == 0


def test_access_log_entry_of_an_asked_request_is_ignored():
    mesh = RouterMesh()
    asker = mesh.others[0]
    asked = asker.ask(now=1.0)
    asker.picker.access_log(1.0, AccessLogEntry(request_id=asked.request_id, status=200))
    mesh.deliver(1.0)
    assert isinstance(asker.resumed[0], Picked)


def test_lost_owner_loses_no_request():
    mesh = crowded(max_wait_s=50.0)
    lost, others = mesh.owner, mesh.others
    others[0].ask(now=2.0)
    mesh.deliver(2.0)
    others[1].ask(now=3.0)
    mesh.lose(3.0, lost.name)
    mesh.deliver(3.0)

    assert all(isinstance(each, Picked) for desk in others for each in desk.resumed)
    assert sum(len(desk.resumed) for desk in others) + sum(desk.held for desk in others) == 2
    assert mesh.owner.in_flight + mesh.owner.held == 2


def test_owner_that_ends_returns_queued_requests_to_their_routers():
    mesh = crowded(max_wait_s=50.0)
    ending, asker = mesh.owner, mesh.others[0]
    asker.ask(now=2.0)
    mesh.deliver(2.0)

    ending.picker.stop_queueing(3.0)
    mesh.deliver(3.0)

    assert isinstance(asker.resumed[0], Picked)
    assert ending.held == 0
    # The next router of the pool decides.
    assert results(asker) == ["answered", "answered"]


def test_ending_owner_of_a_pool_without_members_refuses_no_other_routers_request():
    mesh = RouterMesh(crowded_pool(members=0, hold_when_empty=True))
    ending, asker = mesh.owner, mesh.others[0]
    asker.ask(now=2.0)
    mesh.deliver(2.0)

    ending.picker.stop_queueing(3.0)
    mesh.deliver(3.0)

    assert asker.resumed == []
    assert sum(each.held for each in mesh.others) == 1


def test_router_that_ends_decides_what_it_has_asked():
    mesh = RouterMesh()
    asker = mesh.others[0]
    asker.ask(now=1.0)
    asker.picker.stop_queueing(1.001)
    assert isinstance(asker.resumed[0], Picked)
    mesh.deliver(1.001)
    assert (asker.in_flight, mesh.owner.in_flight) == (1, 0)


def test_new_pool_knows_the_routers_at_once():
    first, second = pool(), pool(name="second", model="other")
    mesh = RouterMesh(first)
    for desk in mesh.desks.values():
        desk.picker.set_pools(1.0, (first, second))
    kinds = [type(desk.ask(chat(model="other"), now=2.0)) for desk in mesh.desks.values()]
    assert sorted(kind.__name__ for kind in kinds) == ["AnswerLater", "AnswerLater", "Picked"]


def test_question_about_an_unknown_pool_is_declined():
    mesh = RouterMesh()
    owner, asker = mesh.owner, mesh.others[0]
    owner.picker.set_pools(0.5, ())
    sent = []
    asker.ask(now=1.0)
    post = mesh.post
    mesh.post = lambda *given: (sent.append(given[3]), post(*given))
    mesh.deliver(1.0)
    assert any(isinstance(each, Declined) for each in sent)
    assert isinstance(asker.resumed[0], Picked)
    # Another router serves the pool, and decides.
    assert results(asker) == ["answered"]


def test_removed_pool_returns_other_routers_queued_requests():
    mesh = crowded(max_wait_s=50.0)
    asker = mesh.others[0]
    asker.ask(now=2.0)
    mesh.deliver(2.0)
    mesh.owner.picker.set_pools(3.0, ())
    mesh.deliver(3.0)
    assert isinstance(asker.resumed[0], Picked)


def test_removed_pool_takes_its_requests_from_the_owners_queue():
    mesh = crowded(max_wait_s=50.0)
    asker = mesh.others[0]
    asker.ask(now=2.0)
    mesh.deliver(2.0)
    asker.picker.set_pools(3.0, ())
    mesh.deliver(3.0)
    assert isinstance(asker.resumed[0], Refused)
    assert mesh.owner.held == 0


def test_forwarded_entry_ends_a_request_of_the_same_envoy():
    mesh = RouterMesh()
    owner = mesh.owner
    picked = [owner.picker.pick(1.0, chat(), None, 1.0, headers={}, resume=print, peer="10.0.0.9") for _ in range(2)]
    for each, sender in zip(picked, ("10.0.0.9", "10.0.0.8"), strict=True):
        entry = AccessLogEntry(request_id=each.request_id, status=200, sender=sender)
        owner.picker.access_log(2.0, entry)
    assert owner.in_flight == 1


@pytest.mark.parametrize("status", [200, 400, 500, None])
def test_entry_ends_a_request_whose_router_has_ended(status):
    mesh = RouterMesh()
    asker = mesh.others[0]
    asker.ask(now=1.0)
    mesh.deliver(1.0)
    picked = asker.resumed[0]
    served = picked.decision.endpoints[0]
    entry = AccessLogEntry(request_id=picked.request_id, status=status, served_endpoint=served, sender="10.0.0.9")
    mesh.owner.picker.on_orphan(2.0, entry)
    assert mesh.owner.in_flight == 1
    mesh.owner.picker.on_router_lost(3.0, asker.name)
    mesh.owner.picker.on_orphan(4.0, entry)
    assert mesh.owner.in_flight == 0


def handed_over(now: float) -> tuple[RouterMesh, MeshDesk, AccessLogEntry]:
    """Return routers, one that is not the owner, and the entry of its request, which is in flight at the owner."""
    mesh = RouterMesh()
    asker = mesh.others[0]
    asker.ask(now=now)
    mesh.deliver(now)
    return mesh, asker, AccessLogEntry(request_id=asker.resumed[0].request_id, status=200)


def test_entry_before_the_owner_loses_the_router_ends_the_request_at_the_loss():
    mesh, asker, entry = handed_over(1.0)
    mesh.owner.picker.on_orphan(2.0, entry)
    assert mesh.owner.in_flight == 1
    mesh.owner.picker.on_router_lost(2.0 + KEPT_S - 0.1, asker.name)
    assert mesh.owner.in_flight == 0


def test_entry_before_the_owner_hears_of_the_request_ends_it_at_the_loss():
    mesh = RouterMesh()
    asker = mesh.others[0]
    mesh.loses = lambda sender, receiver: True
    asker.ask(now=1.0)
    mesh.loses = lambda sender, receiver: False
    asker.picker.on_deadline(1.0 + ANSWER_TIMEOUT_S)
    (picked,) = asker.resumed
    new_owner = next(desk for desk in mesh.others if desk is not asker)
    new_owner.picker.on_orphan(2.0, AccessLogEntry(request_id=picked.request_id, status=200))
    mesh.set_routers(2.1, [new_owner.name])
    mesh.deliver(2.1)
    assert new_owner.in_flight == 1
    new_owner.picker.on_router_lost(2.2, asker.name)
    assert new_owner.in_flight == 0


def test_entry_long_before_the_loss_of_a_router_is_forgotten():
    mesh, asker, entry = handed_over(1.0)
    mesh.owner.picker.on_orphan(2.0, entry)
    mesh.owner.picker.on_router_lost(2.0 + KEPT_S, asker.name)
    assert mesh.owner.in_flight == 1


def test_entries_before_the_loss_of_a_router_use_bounded_memory():
    mesh, asker, entry = handed_over(1.0)
    others = [AccessLogEntry(request_id=f"{asker.name}-{number}-ff") for number in range(KEPT_MAX)]
    for each in (entry, *others):
        mesh.owner.picker.on_orphan(2.0, each)
    mesh.owner.picker.on_router_lost(2.1, asker.name)
    assert mesh.owner.in_flight == 1


def test_demand_has_each_request_once_at_its_own_router():
    mesh = crowded(max_wait_s=50.0)
    asker = mesh.others[0]
    asker.ask(now=2.0)
    mesh.deliver(2.0)

    shares = {desk.name: desk.picker.demands()[0] for desk in mesh.desks.values()}

    queued = {name: status.held for name, status in shares.items()}
    in_flight = {name: sum(each.in_flight for each in status.endpoints) for name, status in shares.items()}
    assert queued == {name: int(name == asker.name) for name in mesh.desks}
    assert in_flight == {name: int(name == mesh.owner.name) for name in mesh.desks}
    assert shares[asker.name].unplaced_prefill_tokens > 0


def test_demand_of_a_router_that_does_not_decide_has_the_owners_speed():
    mesh = RouterMesh()
    asker = mesh.others[0]
    prior = asker.picker.demands()[0].endpoints[0].solo_tokens_per_second
    for number in range(80):
        now = 1.0 + 10.0 * number
        picked = mesh.owner.ask(chat(f"{number} " * 4000, stream=True), now=now)
        mesh.owner.picker.first_token(now + 4.0, picked.request_id)
        mesh.owner.picker.finished(now + 5.0, picked.request_id, None)
    asker.ask(now=1000.0)
    mesh.deliver(1000.0)
    learnt = mesh.owner.picker.statuses()[0].endpoints
    mean = sum(each.solo_tokens_per_second for each in learnt) / len(learnt)
    assert mean != pytest.approx(prior, rel=0.1)
    assert asker.picker.demands()[0].endpoints[0].solo_tokens_per_second == pytest.approx(mean)


async def test_deadline_task_wakes_for_an_unanswered_question():
    """The task would otherwise sleep for 0.9 s."""
    mesh = RouterMesh()
    asker = mesh.others[0]
    mesh.loses = lambda sender, receiver: True
    clock = asyncio.get_running_loop().time
    task = asyncio.create_task(keep_deadlines(asker.picker))
    await asyncio.sleep(0.05)
    asker.ask(now=clock())
    for _ in range(1000):
        if asker.resumed:
            break
        await asyncio.sleep(0.002)
    (decided,) = asker.observer.of(RemotelyDecided)
    task.cancel()
    assert ANSWER_TIMEOUT_S <= decided.seconds < ANSWER_TIMEOUT_S + 0.5


def test_client_key_is_shared_only_with_a_secret_hash_key():
    assert client_key(b"secret") == client_key(b"secret") != client_key(b"other")
    assert client_key(PUBLIC_KEY) != client_key(PUBLIC_KEY)
    assert len(client_key(b"secret")) == len(client_key(PUBLIC_KEY)) == 32


def test_owner_that_returns_forgets_requests_that_ended_meanwhile():
    mesh = RouterMesh()
    owner, asker = mesh.owner, mesh.others[0]
    asker.ask(now=1.0)
    mesh.deliver(1.0)
    mesh.loses = lambda sender, receiver: owner.name in (sender, receiver)
    asker.picker.on_routers(2.0, [desk.name for desk in mesh.others])
    asker.picker.access_log(3.0, AccessLogEntry(request_id=asker.resumed[0].request_id, status=200))
    mesh.deliver(3.0)
    assert owner.in_flight == 1

    mesh.loses = lambda sender, receiver: False
    mesh.set_routers(4.0, tuple(mesh.desks))
    mesh.deliver(4.0)
    assert owner.in_flight == 0
