"""What kopf is told: how long a deleted pool is held at the longest, and what not to watch or write."""

import itertools
from typing import Any

from controlplane.operator_objects import pool_body
from dualmap_operator.handlers import drain_deadline_s, make_registry, make_settings
from dualmap_operator.keeper import Keepers
from dualmap_operator.reading import read_time


def deleted(**spec: Any) -> dict[str, Any]:
    body = pool_body(**spec)
    body["metadata"]["deletionTimestamp"] = "2026-11-20T08:00:00Z"
    return {"apiVersion": "serving.dualmap.dev/v1alpha1", "kind": "InferencePool", **body}


def test_a_deleted_pool_is_let_go_soon_after_its_drain_timeout() -> None:
    began_s = read_time("2026-11-20T08:00:00Z")
    assert began_s is not None

    assert drain_deadline_s(deleted(drain={"timeout": "1m"})) == began_s + 60 + 30
    assert drain_deadline_s(deleted()) == began_s + 600 + 30


def test_a_pool_that_cannot_be_read_is_let_go_too() -> None:
    began_s = read_time("2026-11-20T08:00:00Z")
    assert began_s is not None

    assert drain_deadline_s(deleted(workload={})) == began_s + 600 + 30


def test_kopf_holds_pools_by_our_finalizer_and_watches_and_posts_nothing_else() -> None:
    settings = make_settings()

    assert settings.persistence.finalizer == "serving.dualmap.dev/drain"
    assert settings.scanning.disabled
    assert not settings.posting.enabled
    # The API takes whole seconds only.
    assert isinstance(settings.watching.server_timeout, int)


def test_kopf_never_gives_up_on_the_api_server() -> None:
    backoffs = make_settings().networking.error_backoffs

    assert not isinstance(backoffs, float)
    assert max(itertools.islice(backoffs, 10_000)) == 2.0


def test_pools_alone_have_handlers() -> None:
    registry = make_registry(Keepers(lambda *_: None))  # type: ignore[arg-type,return-value]  # unused
    registries = (registry._indexing, registry._watching, registry._spawning, registry._changing)
    selectors = {selector for each in registries for selector in each.get_all_selectors()}

    assert {(each.group, each.version, each.any_name) for each in selectors} == {
        ("serving.dualmap.dev", "v1alpha1", "inferencepools")
    }
