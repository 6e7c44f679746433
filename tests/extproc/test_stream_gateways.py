"""Streams behind gateways of others: any model's name, objectives, one destination, and the conformance hooks."""

from dataclasses import replace

import pytest

from dualmap.pools.pool import Model, Objectives
from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Prompt
from dualmap_extproc.request.observations import PickNotFollowed, Routed, ServedElsewhere
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.request.reading import LargeBody, read_large
from dualmap_extproc.settings import Gateway, Limits
from extproc.envoy_messages import (
    BUFFERED,
    DUPLEX,
    NO_WAIT,
    Conversation,
    Recorder,
    chat,
    crowded_pool,
    destination,
    headers_set,
    pool,
    refused_with,
    request_body,
    request_headers,
    response_headers,
    with_subset,
)

HOOKS = Gateway(conformance_hooks=True)
ANY_MODEL = replace(pool(), model=Model(name=""))


def pick(talk: Conversation, body: bytes, **headers: str) -> str | None:
    talk.again()
    (first, *_) = talk.send(request_headers(DUPLEX, **headers), request_body(body))
    return destination(first)


def keys(talk: Conversation) -> list[int]:
    return [each.decision.receipt.key.hash for each in talk.observer.of(Routed)]


class TestAnyModel:
    def test_every_model_name_is_served(self) -> None:
        talk = Conversation(ANY_MODEL)
        assert all(pick(talk, chat(model=name)) for name in ("a", "meta/b", "c:d"))

    def test_names_that_differ_share_no_keys(self) -> None:
        talk = Conversation(ANY_MODEL)
        for name in ("a", "b", "a"):
            pick(talk, chat("x" * 4096, model=name))
        first, second, third = keys(talk)
        assert first == third != second

    def test_longer_name_than_any_model_is_unknown(self) -> None:
        talk = Conversation(ANY_MODEL)
        assert refused_with(talk.send(request_headers(DUPLEX), request_body(chat(model="m" * 4097)))) == 404

    def test_large_body_with_any_model_is_read(self) -> None:
        bounds = Conversation(ANY_MODEL).picker.bounds
        large = LargeBody(chunks=(chat("x" * 4096, model="a"),), api=Api.CHAT, bounds=bounds)
        assert isinstance(read_large(large), Prompt)


class TestObjectives:
    def crowded(self, *objectives: tuple[str, int]) -> Conversation:
        return Conversation(replace(crowded_pool(max_held=1), objectives=Objectives(objectives)))

    def test_objective_of_a_request_gives_its_priority(self) -> None:
        talk = self.crowded(("batch", -1))
        pick(talk, chat("x" * 40_000))
        talk.again()
        assert talk.send(request_headers(DUPLEX, x_gateway_inference_objective="batch"), request_body(chat("a"))) == []
        talk.again()
        assert talk.send(request_headers(DUPLEX), request_body(chat("b"))) == []
        assert refused_with(talk.delivered) == 429
        assert talk.held == 1

    def test_unknown_objective_has_no_effect(self) -> None:
        talk = self.crowded(("urgent", 5))
        pick(talk, chat("x" * 40_000))
        talk.again()
        assert talk.send(request_headers(DUPLEX), request_body(chat("a"))) == []
        talk.again()
        answers = talk.send(request_headers(DUPLEX, x_gateway_inference_objective="other"), request_body(chat("b")))
        assert refused_with(answers) == 429


class TestDestination:
    def test_pick_lists_both_members_of_the_pair(self) -> None:
        assert len((pick(Conversation(), chat()) or "").split(",")) == 2

    def test_single_destination_lists_one_member(self) -> None:
        talk = Conversation(gateway=Gateway(single_destination=True))
        assert len((pick(talk, chat()) or "").split(",")) == 1
        talk.again()
        (answer,) = talk.send(request_headers(DUPLEX, method="GET", end=True))
        assert len((destination(answer) or "").split(",")) == 1

    @pytest.mark.parametrize(("position", "count"), [(0, 0), (1, 0), (None, 1)])
    def test_served_endpoint_outside_the_pick_is_counted(self, position: int | None, count: int) -> None:
        talk = Conversation()
        picked = (pick(talk, chat()) or "").split(",")
        talk.send(response_headers(served="10.9.9.9:1" if position is None else picked[position]))
        assert len(talk.observer.of(PickNotFollowed)) == count
        assert len(talk.observer.of(ServedElsewhere)) == (position == 1)


class TestConformanceHooks:
    @pytest.mark.parametrize("config", [DUPLEX, NO_WAIT])
    def test_header_selects_the_endpoint(self, config) -> None:
        for n in range(4):
            talk = Conversation(gateway=HOOKS)
            headers = request_headers(config, test_epp_endpoint_selection=f"10.0.0.{n}")
            (answer, *_) = talk.send(with_subset(headers, ["10.0.0.9"]), request_body(chat()))
            assert destination(answer) == f"10.0.0.{n}:8000"
            assert headers_set(answer)["x-echo-set-header"] == f"x-conformance-test-served-endpoint:10.0.0.{n}:8000"

    def test_header_selects_the_endpoint_of_a_get(self) -> None:
        talk = Conversation(gateway=HOOKS)
        (answer,) = talk.send(
            request_headers(DUPLEX, method="GET", end=True, test_epp_endpoint_selection="10.0.0.2:8000")
        )
        assert destination(answer) == "10.0.0.2:8000"

    def test_header_without_a_member_is_refused(self) -> None:
        talk = Conversation(gateway=HOOKS)
        headers = request_headers(DUPLEX, test_epp_endpoint_selection="10.0.0.9")
        assert refused_with(talk.send(headers, request_body(chat()))) == 503

    def test_response_names_the_served_endpoint(self) -> None:
        talk = Conversation(gateway=HOOKS)
        pick(talk, chat())
        (answer,) = talk.send(response_headers(served="10.0.0.1:8000"))
        assert headers_set(answer)["x-conformance-test-served-endpoint"] == "10.0.0.1:8000"
        pick(talk, chat())
        (answer,) = talk.send(response_headers())
        assert headers_set(answer)["x-conformance-test-served-endpoint"] == "not reported"

    def test_headers_have_no_effect_without_the_hooks(self) -> None:
        talk = Conversation()
        (answer, *_) = talk.send(request_headers(DUPLEX, test_epp_endpoint_selection="10.0.0.9"), request_body(chat()))
        assert destination(answer)
        assert "x-echo-set-header" not in headers_set(answer)
        (answer,) = talk.send(response_headers(served="10.0.0.1:8000"))
        assert headers_set(answer).keys() == {"x-dualmap-decision"}


class TestUnknownPools:
    """Before the first ``set_pools``, a request may be for any pool."""

    def talk(self) -> Conversation:
        return Conversation(picker=Picker(Limits(), Recorder().report, id_prefix="r"))

    @pytest.mark.parametrize("config", [DUPLEX, NO_WAIT, BUFFERED])
    def test_request_before_the_pools_are_known_gets_503(self, config) -> None:
        talk = self.talk()
        assert refused_with(talk.send(request_headers(config), request_body(chat()))) == 503

    def test_get_of_a_model_before_the_pools_are_known_gets_503(self) -> None:
        get = request_headers(DUPLEX, method="GET", end=True)
        path = next(each for each in get.request_headers.headers.headers if each.key == ":path")
        path.raw_value = b"/v1/models/m"
        assert refused_with(self.talk().send(get)) == 503

    def test_drain_before_the_pools_are_known_answers_503(self) -> None:
        talk = self.talk()
        talk.picker.stop_queueing(1.0)
        assert refused_with(talk.send(request_headers(DUPLEX), request_body(chat()))) == 503

    def test_request_without_any_pool_for_it_gets_404(self) -> None:
        talk = self.talk()
        talk.picker.set_pools(1.0, ())
        assert refused_with(talk.send(request_headers(DUPLEX), request_body(chat()))) == 404
