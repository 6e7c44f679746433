"""A decision and its reasons, as a router that has just started would take it; ``explain`` is the command.

The request walks the very path it would walk in a router: the same Picker, over routers that have seen nothing yet.
"""

from dualmap.pool import Pool
from dualmap.receipt import Receipt
from dualmap.requests import Completion, Decision, FirstToken
from dualmap_extproc.errors import Refused, body_too_large
from dualmap_extproc.picker import Picker
from dualmap_extproc.settings import Limits


class _Recorder:
    """An observer that keeps the one decision it is told of."""

    def __init__(self) -> None:
        self.decision: Decision | None = None

    def routed(self, pool: str, decision: Decision) -> None:
        self.decision = decision

    def routed_bodiless(self, pool: str) -> None: ...

    def refused(self, refused: Refused) -> None: ...

    def decided(self, seconds: float) -> None: ...

    def first_token(self, pool: str, first_token: FirstToken) -> None: ...

    def finished(self, pool: str, completion: Completion) -> None: ...

    def rejected(self, pool: str, completion: Completion) -> None: ...

    def aborted(self, pool: str, completion: Completion) -> None: ...

    def expired(self, pool: str, completion: Completion) -> None: ...

    def measured(self, pool: str, completion: Completion) -> None: ...

    def served_elsewhere(self, pool: str) -> None: ...


def decide(pools: tuple[Pool, ...], body: bytes) -> Receipt | Refused:
    """Return the receipt a router that has just started would give a request body."""
    limits = Limits()
    if len(body) > limits.body_bytes:
        return body_too_large(limits.body_bytes)
    recorder = _Recorder()
    picker = Picker(limits, recorder, id_prefix="explain")
    picker.set_pools(0.0, pools)
    outcome = picker.pick(0.0, body, None, 0.0)
    if isinstance(outcome, Refused):
        return outcome
    assert recorder.decision is not None, "a pick is always reported"
    return recorder.decision.receipt


def in_words(receipt: Receipt) -> str:
    """Return a receipt as a short text for people."""
    key = receipt.key
    lines = [
        f"{receipt.chosen} ({receipt.address}) gets this request of pool {receipt.pool}.",
        f"Because {receipt.reason} (policy {receipt.policy}, rule {receipt.rule}).",
        f"Key: {key.blocks} blocks, {key.tokens} of the prompt's {receipt.prompt_tokens} tokens ({key.hash:016x}).",
        f"Pair: {' and '.join(receipt.pair)}, by ring 1 and ring 2.",
        "Candidates:",
    ]
    for each in receipt.candidates:
        lines += [
            f"  {each.id} ({each.state}): holds {each.matched_tokens} tokens of the prompt,",
            f"    {each.pending_tokens} prefill tokens pending, {each.in_flight} requests in flight;"
            f" predicted TTFT {each.ttft_s:.3f} s",
        ]
    return "\n".join(lines)
