from collections.abc import Iterable
from dataclasses import replace

import pytest

from dualmap.pools.pool import Pool
from dualmap_extproc.envoy.discovery.endpoints import assignments_of
from dualmap_extproc.envoy.discovery.subscriptions import (
    MAX_NAMES,
    Conversation,
    Rejection,
    Snapshot,
    SubscriptionError,
)
from dualmap_extproc.names import CLUSTER_LOAD_ASSIGNMENT_TYPE, CLUSTER_TYPE
from dualmap_extproc.wire import discovery_pb2
from extproc.discovery_messages import LLAMA, QWEN, answer_to, hosts, pool, request


def of(pools: Iterable[Pool]) -> Snapshot:
    return Snapshot(assignments=assignments_of(pools), clusters={})


def whole(*names: str, version: str = "1") -> Snapshot:
    """A snapshot with clusters; ``version`` is the router's, whose clusters differ by it."""
    return Snapshot(
        assignments=assignments_of([pool(name.removeprefix("llm/"), 1) for name in names]),
        clusters={name: f"{name} {version}".encode() for name in names},
    )


def endpoints_only() -> Conversation:
    return Conversation(only=CLUSTER_LOAD_ASSIGNMENT_TYPE)


def ack(conversation: Conversation, response: discovery_pb2.DiscoveryResponse, *names: str) -> None:
    assert conversation.on_request(answer_to(response, *names)) is None


def due(conversation: Conversation, snapshot: Snapshot) -> discovery_pb2.DiscoveryResponse:
    response = conversation.respond(snapshot)
    assert response is not None
    return response


def values(response: discovery_pb2.DiscoveryResponse, type_url: str) -> set[str]:
    assert response.type_url == type_url
    assert {each.type_url for each in response.resources} <= {type_url}
    return {each.value.decode() for each in response.resources}


class TestEndpoints:
    def test_eds_sends_no_response_to_an_ack(self) -> None:
        conversation, snapshot = endpoints_only(), of([pool()])
        conversation.on_request(request(QWEN))
        response = due(conversation, snapshot)
        assert hosts(response) == {QWEN: ["10.0.0.1:8000", "10.0.0.2:8000"]}
        assert response.type_url == CLUSTER_LOAD_ASSIGNMENT_TYPE
        ack(conversation, response, QWEN)
        assert conversation.respond(snapshot) is None

    def test_eds_sends_nothing_before_the_first_request(self) -> None:
        assert endpoints_only().respond(of([pool()])) is None

    def test_eds_answers_the_first_request_at_any_version(self) -> None:
        first, snapshot = endpoints_only(), of([pool()])
        first.on_request(request(QWEN))
        version = due(first, snapshot).version_info
        again = endpoints_only()
        again.on_request(request(QWEN, version=version, nonce="41"))
        assert due(again, snapshot).version_info == version

    def test_eds_sends_a_change_once_with_new_version_and_nonce(self) -> None:
        conversation = endpoints_only()
        conversation.on_request(request(QWEN))
        first = due(conversation, of([pool(count=2)]))
        changed = of([pool(count=3)])
        second = due(conversation, changed)
        assert first.version_info != second.version_info
        assert first.nonce != second.nonce
        assert conversation.respond(changed) is None
        # A return to the earlier state is also a change.
        assert due(conversation, of([pool(count=2)])).version_info == first.version_info

    def test_eds_sends_no_response_if_the_resources_are_equal(self) -> None:
        conversation = endpoints_only()
        conversation.on_request(request(QWEN))
        due(conversation, of([pool(ring_version=1)]))
        members = tuple(replace(member, weight=7) for member in pool().members)
        assert conversation.respond(of([pool(ring_version=2, members=members)])) is None

    def test_eds_sends_only_changed_and_subscribed_resources(self) -> None:
        conversation = endpoints_only()
        conversation.on_request(request(QWEN, LLAMA))
        assert hosts(due(conversation, of([pool(), pool("llama", 1), pool("other", 1)]))).keys() == {
            QWEN,
            LLAMA,
        }
        assert hosts(due(conversation, of([pool(), pool("llama", 2), pool("other", 2)]))).keys() == {LLAMA}

    def test_eds_answers_an_added_name_with_only_its_resource(self) -> None:
        conversation, snapshot = endpoints_only(), of([pool(), pool("llama", 1)])
        conversation.on_request(request(QWEN))
        response = due(conversation, snapshot)
        ack(conversation, response, QWEN, LLAMA)
        assert hosts(due(conversation, snapshot)).keys() == {LLAMA}

    def test_eds_sends_a_name_dropped_and_added_again(self) -> None:
        conversation, snapshot = endpoints_only(), of([pool(), pool("llama", 1)])
        conversation.on_request(request(QWEN, LLAMA))
        response = due(conversation, snapshot)
        ack(conversation, response, QWEN)
        assert conversation.respond(snapshot) is None
        ack(conversation, response, QWEN, LLAMA)
        assert hosts(due(conversation, snapshot)).keys() == {LLAMA}

    def test_eds_does_not_resend_a_rejected_version(self) -> None:
        conversation, snapshot = endpoints_only(), of([pool()])
        conversation.on_request(request(QWEN))
        response = due(conversation, snapshot)
        rejection = conversation.on_request(request(QWEN, nonce=response.nonce, version="old", error="malformed IP"))
        assert rejection == Rejection(type_url=CLUSTER_LOAD_ASSIGNMENT_TYPE, version="old", reason="malformed IP")
        assert conversation.respond(snapshot) is None
        assert conversation.respond(of([pool(count=1)])) is not None

    def test_eds_ignores_ack_of_an_older_response(self) -> None:
        conversation = endpoints_only()
        conversation.on_request(request(QWEN))
        first = due(conversation, of([pool(count=1)]))
        changed = of([pool(count=2)])
        due(conversation, changed)
        assert conversation.on_request(request(nonce=first.nonce, error="late")) is None
        assert conversation.respond(changed) is None
        # An accepted empty list of names would end the subscription.
        assert conversation.respond(of([pool(count=3)])) is not None

    def test_eds_sends_no_endpoints_of_removed_or_unknown_pool(self) -> None:
        conversation = endpoints_only()
        conversation.on_request(request(QWEN, "llm/unknown"))
        assert hosts(due(conversation, of([pool()]))) == {
            QWEN: ["10.0.0.1:8000", "10.0.0.2:8000"],
            "llm/unknown": [],
        }
        assert hosts(due(conversation, of([]))) == {QWEN: []}

    def test_eds_version_is_independent_of_order(self) -> None:
        versions = set()
        for names in ((QWEN, LLAMA), (LLAMA, QWEN, LLAMA)):
            for pools in ([pool(), pool("llama", 1)], [pool("llama", 1), pool()]):
                conversation = endpoints_only()
                conversation.on_request(request(*names))
                versions.add(due(conversation, of(pools)).version_info)
        assert len(versions) == 1

    def test_eds_rejects_other_types_and_too_many_names(self) -> None:
        with pytest.raises(SubscriptionError, match="ClusterLoadAssignment"):
            endpoints_only().on_request(discovery_pb2.DiscoveryRequest(type_url="type.googleapis.com/other"))
        with pytest.raises(SubscriptionError, match=str(MAX_NAMES)):
            endpoints_only().on_request(request(*(str(n) for n in range(MAX_NAMES + 1))))
        endpoints_only().on_request(discovery_pb2.DiscoveryRequest(resource_names=[QWEN]))


class TestAggregatedDiscovery:
    """Clusters and endpoints on one stream (ADS)."""

    def begun(self, snapshot: Snapshot, *names: str) -> Conversation:
        """Return the conversation of an Envoy that has applied a complete snapshot."""
        conversation = Conversation()
        conversation.on_request(request(of=CLUSTER_TYPE))
        ack(conversation, due(conversation, snapshot))
        if names:
            conversation.on_request(request(*names))
            ack(conversation, due(conversation, snapshot), *names)
        assert conversation.respond(snapshot) is None
        return conversation

    def test_ads_sends_clusters_then_endpoints(self) -> None:
        conversation = self.begun(whole(QWEN), QWEN)
        both = whole(QWEN, LLAMA)
        clusters = due(conversation, both)
        assert values(clusters, CLUSTER_TYPE) == {"llm/qwen 1", "llm/llama 1"}
        assert conversation.respond(both) is None, "Envoy has not taken up the clusters yet"
        # Envoy requests a new cluster's endpoints before it acknowledges the cluster.
        conversation.on_request(request(QWEN, LLAMA, nonce="1"))
        endpoints = due(conversation, both)
        assert hosts(endpoints).keys() == {LLAMA}
        ack(conversation, endpoints, QWEN, LLAMA)
        ack(conversation, clusters)
        assert conversation.respond(both) is None

    def test_ads_response_omits_a_removed_cluster(self) -> None:
        conversation = self.begun(whole(QWEN, LLAMA), QWEN, LLAMA)
        assert values(due(conversation, whole(LLAMA)), CLUSTER_TYPE) == {"llm/llama 1"}

    def test_ads_sends_an_empty_set_of_clusters(self) -> None:
        conversation = self.begun(whole())
        conversation.on_request(request(of=CLUSTER_TYPE))
        assert conversation.respond(whole()) is None, "it was said once"

    def test_ads_sends_endpoints_again_for_a_changed_cluster(self) -> None:
        """Envoy uses a changed cluster when it has the endpoints; otherwise it uses the cluster without endpoints after
        a timeout.
        """
        conversation = self.begun(whole(QWEN, LLAMA), QWEN, LLAMA)
        newer = whole(QWEN, LLAMA, version="2")
        assert due(conversation, newer).type_url == CLUSTER_TYPE
        assert hosts(due(conversation, newer)).keys() == {QWEN, LLAMA}

    def test_ads_rejected_clusters_do_not_delay_other_resources(self) -> None:
        conversation = self.begun(whole(QWEN), QWEN)
        changed = whole(QWEN, LLAMA)
        refusal = answer_to(due(conversation, changed), error="no such policy")
        rejection = conversation.on_request(refusal)
        assert rejection == Rejection(type_url=CLUSTER_TYPE, version="", reason="no such policy")
        conversation.on_request(request(QWEN, LLAMA))
        assert hosts(due(conversation, changed)).keys() == {LLAMA}
        assert conversation.respond(changed) is None

    def test_ads_rejects_an_unknown_type(self) -> None:
        for type_url in ("", "type.googleapis.com/envoy.config.listener.v3.Listener"):
            with pytest.raises(SubscriptionError, match="ClusterLoadAssignment"):
                Conversation().on_request(discovery_pb2.DiscoveryRequest(type_url=type_url))
