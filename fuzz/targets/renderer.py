"""Fuzzes the reader of renderers' answers, and the chain of the ids that it gives. A renderer may answer anything."""

import json
from array import array
from typing import Final

from dualmap.engines.prompt_tokens import PromptTokens
from dualmap.engines.token_chain import TOKEN_BYTES, pack_tokens, token_root
from dualmap_extproc.tokens.messages import UnsupportedRequest
from dualmap_extproc.tokens.renderer import ids_in
from fuzz.choices import Choices

_KEYS: Final = ("token_ids", "tokens", "features", "mm_hashes", "content_parts", "error", "x")
_FIELDS: Final = ("token_ids", "tokens")


def check(data: bytes) -> None:
    """Check that any answer gives ids of one prompt, or says that there are none.

    The input is used twice: as the answer, and as choices that build an answer.
    """
    for answer in (data, json.dumps(_value(Choices(data), depth=4)).encode()):
        for field in _FIELDS:
            try:
                ids = ids_in(answer, field)
            except UnsupportedRequest:
                continue
            _check_ids(ids)


def _check_ids(ids: "array[int]") -> None:
    assert ids
    packed = pack_tokens(ids)
    assert len(packed) == TOKEN_BYTES * len(ids)
    chain = PromptTokens(packed, root=token_root(model="m")).chain(2)
    assert len(chain.keys) == len(ids) // 2
    assert chain.tokens == len(ids)


def _value(choices: Choices, depth: int) -> object:
    match choices.number() % (9 if depth else 5):
        case 0:
            return None
        case 1:
            return choices.flag()
        case 2:
            return choices.number(size=8) - 2**16
        case 3:
            return choices.text()
        case 4:
            return 1.5
        case 5 | 6:
            return [_value(choices, depth - 1) for _ in range(choices.number() % 5)]
        case _:
            return {choices.pick(_KEYS): _value(choices, depth - 1) for _ in range(choices.number() % 5)}
