"""The Huffman code of header strings (RFC 7541 section 5.2 and appendix B), decoded bytewise."""

from typing import Final

# The bytes with codes of each length, in the order of their codes. Codes of a length count up from the codes before
# them; the last code of 30 bits is EOS.
_BYTES_BY_LENGTH: Final = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\x00$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\\xc3\xd0",
    20: b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2",
    21: b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6",
    22: bytes.fromhex("818485868892 9a9ca0a3a4a9aaadb2b5b9babbbdbec4c6e4e8e9"),
    23: bytes.fromhex("0187898a8b8c8d8f93959697989b9d9ea5a6a8aeafb4b6b7bcbfc5e7ef"),
    24: bytes.fromhex("098e9091949fabced7e1eced"),
    25: b"\xc7\xcf\xea\xeb",
    26: bytes.fromhex("c0c1c8c9cacdd2d5dadbeef0f2f3ff"),
    27: bytes.fromhex("cbccd3d4d6dddedff1f4f5f6f7f8fafbfcfdfe"),
    28: bytes.fromhex("02030405060708 0b0c0e0f101112131415171819 1a1b1c1d1e1f7fdcf9"),
    30: b"\n\r\x16",
}


class HuffmanError(ValueError):
    """The string contains EOS, or its padding is not the beginning of EOS or longer than 7 bits."""


def _tree() -> tuple[list[list[int]], list[bool]]:
    """Return the code tree, and for each node whether a string may end there.

    A node has two children. A child is the number of a node, or ``~byte`` of a leaf, or ``_EOS``.
    """
    nodes = [[0, 0]]

    def insert(code: int, length: int, leaf: int) -> None:
        node = 0
        for shift in range(length - 1, 0, -1):
            bit = code >> shift & 1
            if nodes[node][bit] == 0:
                nodes.append([0, 0])
                nodes[node][bit] = len(nodes) - 1
            node = nodes[node][bit]
        nodes[node][code & 1] = leaf

    code = length_before = 0
    for length, symbols in _BYTES_BY_LENGTH.items():
        code <<= length - length_before
        length_before = length
        for byte in symbols:
            insert(code, length, ~byte)
            code += 1
    insert(code, length_before, _EOS)
    ends = [False] * len(nodes)
    node = 0
    for _ in range(8):
        ends[node] = True
        node = nodes[node][1]
    return nodes, ends


_EOS: Final = ~256
_NODES, _ENDS = _tree()


class _Steps(dict[int, tuple[int, bytes]]):
    """What a byte does at a node: the key is ``node << 8 | byte``, the value the next node and the decoded bytes.

    Steps are computed when they are first needed, because few of the 65 792 occur.
    """

    def __missing__(self, key: int) -> tuple[int, bytes]:
        node, byte = key >> 8, key & 0xFF
        out = bytearray()
        for shift in range(7, -1, -1):
            node = _NODES[node][byte >> shift & 1]
            if node < 0:
                if node == _EOS:
                    raise HuffmanError("EOS in a string")
                out.append(~node)
                node = 0
        step = self[key] = (node, bytes(out))
        return step


_STEPS: Final = _Steps()


def decode(data: bytes) -> bytes:
    """Return the decoded string. Raises HuffmanError."""
    node = 0
    out = []
    steps = _STEPS
    for byte in data:
        node, piece = steps[node << 8 | byte]
        out.append(piece)
    if not _ENDS[node]:
        raise HuffmanError("invalid padding")
    return b"".join(out)
