"""What one tenant learns about another tenant's prompts from the receipts, through the real Envoy and router."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from xxhash import xxh3_64_intdigest

from crafted_prompts import BLOCK_TOKENS, crafted_ids
from dualmap.prompts.blocks import chain_root
from dualmap_extproc.envoy.config.settings import Mode
from harness.clients import Reply
from harness.deployment import Deployment
from harness.documents import document, member_of, receipt
from harness.shared_engines import SharedEngines

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.always_picked]

VICTIM, ATTACKER = "tenant-b", "tenant-a"
PROMPT = list(range(1000, 1640))


@pytest_asyncio.fixture(loop_scope="session", scope="module", name="tenants")
async def _tenants(
    shared_engines: SharedEngines, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    members = [member_of(shared_engines.left), member_of(shared_engines.right)]
    pools = {
        fields.lower(): document(
            fields.lower(), members, routing={"receiptFields": fields, "prefix": {"blockTokens": BLOCK_TOKENS}}
        )
        for fields in ("Full", "Chosen")
    }
    async with Deployment(pools, mode=Mode.STREAMED, directory=tmp_path_factory.mktemp("tenants")) as deployment:
        yield deployment


async def complete(tenants: Deployment, pool: str, token_ids: list[int], *, salt: str) -> Reply:
    """Request a completion of token ids as a tenant."""
    body = {"model": f"{pool}-model", "prompt": token_ids, "cache_salt": salt}
    reply = await tenants.ask(body, path="/v1/completions")
    assert reply.status == 200
    return reply


def unkeyed_root(salt: str) -> int:
    """Return the root of a chain without a key: a hash that everyone can compute."""
    parts = (b"full-model", b"", salt.encode())
    return xxh3_64_intdigest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def root_of_the_public_key(salt: str) -> int:
    return chain_root(model="full-model", cache_salt=salt)


@pytest.mark.parametrize("root", [unkeyed_root, root_of_the_public_key])
async def test_crafted_prompt_matches_no_prompt_of_another_tenant(engines, tenants, root) -> None:
    await complete(tenants, "full", PROMPT, salt=VICTIM)
    again = await complete(tenants, "full", PROMPT, salt=VICTIM)
    crafted = crafted_ids(PROMPT, root(VICTIM), root(ATTACKER))
    attack = await complete(tenants, "full", crafted, salt=ATTACKER)

    assert receipt(again)["matched"] == str(len(PROMPT))
    assert receipt(attack)["matched"] == "0"


async def test_receipt_chosen_hides_that_another_client_sent_the_prompt(engines, tenants) -> None:
    replies = [await complete(tenants, "chosen", PROMPT, salt="shared") for _ in range(3)]

    for reply in replies:
        assert receipt(reply).keys() == {"policy", "chosen", "prompt"}
        assert receipt(reply)["prompt"] == str(len(PROMPT))
        assert receipt(reply)["chosen"] in ("left", "right")
