"""Tests that the owner of a pool knows the blocks of an asked prompt's token ids, which the frame does not contain."""

import builders
from dualmap.engines.events import Batch, Stored
from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.source import SourceState, SourceStatus
from dualmap.engines.token_chain import pack_tokens, token_root
from dualmap.ownership.messages import Answer, Message
from dualmap.pools.pool import Engine, KvEvents
from dualmap.prompts.blocks import chain_blocks
from dualmap.requests import Asked, Decision, Request
from dualmap.shared_router import SharedRouter
from dualmap_extproc.peers.codec import decode_frame, encode_message

KEY = b"k" * 32
IDS = list(range(1, 1026))
LIVE = SourceStatus(state=SourceState.LIVE, sequence=0)


class Routers:
    """Two routers of a pool, whose messages pass through the codec."""

    def __init__(self) -> None:
        pool = builders.pool(4, policy="min_ttft", engine=Engine(kv_events=KvEvents(enabled=True)))
        self.sent: list[tuple[str, str, bytes]] = []
        self.routers = {
            name: SharedRouter(
                pool, name=name, send=lambda to, message, by=name: self._send(by, to, message), hash_key=KEY
            )
            for name in ("a-1", "b-1")
        }
        for router in self.routers.values():
            router.on_routers(0.0, self.routers)
            events = Stored(hashes=tuple(range(40)), parent=None, tokens=pack_tokens(IDS[:640]), block_tokens=16)
            router.on_kv_events("m-2", 0, [Batch(events=(events,))], LIVE)

    def _send(self, by: str, to: str, message: Message) -> None:
        self.sent.append((by, to, encode_message("llm/chat", message)))

    def deliver(self) -> list[Message]:
        delivered: list[Message] = []
        while self.sent:
            by, to, frame = self.sent.pop(0)
            (((_, message),),) = [decode_frame(frame).messages]
            self.routers[to].on_message(0.0, by, message)
            delivered.append(message)
        return delivered


def test_owner_decides_by_reported_blocks_of_an_asked_prompt():
    both = Routers()
    owner = both.routers["a-1"].owner
    (asking,) = both.routers.keys() - {owner}
    prompt = PromptTokens(pack_tokens(IDS), root=token_root(model=builders.MODEL, key=KEY))
    text = chain_blocks(pack_tokens(IDS), root=7, block_tokens=128, exact=True)
    request = Request(id=f"{asking}-0", chain=text, arrived_s=0.0, tokens=prompt)

    answer = both.routers[asking].on_request(0.0, request).answer

    assert isinstance(answer, Asked)
    answered = both.deliver()[-1]
    assert isinstance(answered, Answer)
    assert isinstance(answered.outcome, Decision)
    receipt = answered.outcome.receipt
    assert (receipt.chosen, receipt.matched_tokens, receipt.source) == ("m-2", 640, "events")
