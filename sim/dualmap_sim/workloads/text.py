"""Prompts spelled out: the same block id always gives the same bytes, so equal ids become equal prompt prefixes.

The replay sends this text through the router, which hashes bytes, to engines that count four bytes as a token
(``dualmap.prompts.blocks.BYTES_PER_TOKEN``).
"""

from hashlib import shake_128

from dualmap.prompts.blocks import BYTES_PER_TOKEN
from dualmap_sim.workloads.trace import TraceRequest

_HEX_DIGITS_PER_BYTE = 2


def block_text(block: int, *, tokens: int) -> str:
    """Return the first ``tokens`` tokens of a block: hexadecimal digits, which JSON carries as they are.

    The digits come from an extendable-output function, so fewer tokens are a prefix of more.
    """
    length = tokens * BYTES_PER_TOKEN // _HEX_DIGITS_PER_BYTE
    return shake_128(b"block %d" % block).hexdigest(length)


def prompt_text(request: TraceRequest, *, block_tokens: int) -> str:
    """Return a request's prompt: exactly ``input_tokens`` tokens at ``BYTES_PER_TOKEN`` bytes each."""
    full, rest_tokens = divmod(request.input_tokens, block_tokens)
    texts = [block_text(block, tokens=block_tokens) for block in request.blocks[:full]]
    if rest_tokens:
        texts.append(block_text(request.blocks[full], tokens=rest_tokens))
    return "".join(texts)
