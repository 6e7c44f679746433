"""Tests of the emulated cluster's DNS names."""

import struct

import pytest

from emulated_cluster.services.names import Found, read_question, resolve, write_answer

A, AAAA = 1, 28
SERVICES = {
    "team/web": {"spec": {"clusterIP": "10.0.0.7"}},
    "team/members": {"spec": {"clusterIP": "None"}},
    "team/other": {"spec": {"type": "ExternalName", "externalName": "web.team.svc.cluster.local"}},
    "team/away": {"spec": {"type": "ExternalName", "externalName": "example.org"}},
}
MEMBERS = [
    {"addresses": ["10.244.0.1"], "conditions": {"ready": True}, "hostname": "web-0"},
    {"addresses": ["10.244.0.2"], "conditions": {"ready": False}, "hostname": "web-1"},
    {"addresses": ["10.244.0.3"], "conditions": {}},
]
SLICES = {"team/members": [{"endpoints": MEMBERS}, {"endpoints": None}]}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("web.team.svc.cluster.local", Found(addresses=("10.0.0.7",))),
        ("WEB.team.svc.cluster.local.", Found(addresses=("10.0.0.7",))),
        ("members.team.svc.cluster.local", Found(addresses=("10.244.0.1", "10.244.0.3"))),
        ("web-0.members.team.svc.cluster.local", Found(addresses=("10.244.0.1",))),
        ("other.team.svc.cluster.local", Found(alias="web.team.svc.cluster.local", addresses=("10.0.0.7",))),
        ("away.team.svc.cluster.local", Found(alias="example.org")),
        ("web-1.members.team.svc.cluster.local", None),
        ("x.web.team.svc.cluster.local", None),
        ("web.elsewhere.svc.cluster.local", None),
        ("web", None),
        ("web.team", None),
    ],
)
def test_dns_name_resolves_to_its_records(name: str, found: Found | None) -> None:
    assert resolve(name, SERVICES, SLICES) == found


def test_dns_response_contains_question_and_records() -> None:
    message = asked("other.team.svc.cluster.local", A)
    question = read_question(message)
    assert question is not None
    assert (question.name, question.kind) == ("other.team.svc.cluster.local", A)

    answer = write_answer(message, question, resolve(question.name, SERVICES, SLICES), udp=True)

    number, flags, *counts = struct.unpack_from("!6H", answer)
    assert (number, flags & 0x800F, counts) == (7, 0x8000, [1, 2, 0, 0])
    assert answer[12:].startswith(message[12:])
    assert answer.endswith(b"\3web\4team\3svc\7cluster\5local\0" + struct.pack("!2HIH", A, 1, 5, 4) + b"\x0a\0\0\7")


@pytest.mark.parametrize(("name", "kind", "code"), [("web", AAAA, 0), ("nowhere", A, 3)])
def test_dns_name_without_record_differs_from_unknown_name(name: str, kind: int, code: int) -> None:
    message = asked(f"{name}.team.svc.cluster.local", kind)
    question = read_question(message)
    assert question is not None

    answer = write_answer(message, question, resolve(question.name, SERVICES, SLICES), udp=True)

    _, flags, *counts = struct.unpack_from("!6H", answer)
    assert (flags & 0xF, counts) == (code, [1, 0, 0, 0])


def test_dns_response_too_long_for_udp_is_truncated() -> None:
    message = asked("members.team.svc.cluster.local", A)
    question = read_question(message)
    assert question is not None
    many = Found(addresses=tuple(f"10.244.0.{number}" for number in range(100)))

    short = write_answer(message, question, many, udp=True)
    whole = write_answer(message, question, many, udp=False)

    assert len(short) <= 512
    assert struct.unpack_from("!6H", short)[1] & 0x200
    assert struct.unpack_from("!6H", whole)[3] == 100


@pytest.mark.parametrize("message", [b"", bytes(12), b"\0\7\x80\0\0\1" + bytes(20), b"\0\7\0\0\0\1\0\0\0\0\0\0\5ab"])
def test_dns_message_without_question_is_recognized(message: bytes) -> None:
    assert read_question(message) is None


def asked(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)
