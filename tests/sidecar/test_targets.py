"""Which engines a request may name."""

import pytest

from dualmap_sidecar.targets import TARGETS_MAX, Allowed, Named, read_allowed, read_prefillers, read_target

ALLOWED = read_allowed(["10.0.0.0/8", "192.168.1.7:8000", "fd00::/8"])


@pytest.mark.parametrize("text", ["10.1.2.3:8000", "192.168.1.7:8000", "[fd00::1]:8000"])
def test_address_of_a_network_or_list_is_allowed(text: str) -> None:
    named = read_prefillers([text], [], ALLOWED)
    assert [str(target) for target in named.targets] == [text]
    assert not named.left_out


@pytest.mark.parametrize(
    "text",
    [
        "", "10.0.0.1", ":8000", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:08000", "10.0.0.1:+8000",
        "10.0.0.1:8000/admin", "10.0.0.1:8000?x", "10.0.0.1:8000#x", "http://10.0.0.1:8000", "//10.0.0.1:8000",
        "user@10.0.0.1:8000", "user:pass@10.0.0.1:8000", "10.0.0.1:8000@evil:80", "10.0.0.1:8000:80", "10.0.0.1 :8000",
        "010.0.0.1:8000", "10.1:8000", "0x0a000001:8000", "167772161:8000", "localhost:8000", "prefill-0.llm.svc:8000",
        "fd00::1:8000", "[fd00::1]", "[fd00::1%eth0]:8000", "[10.0.0.1]:8000", "[fd00::1:8000", "fd00::1]:8000",
        "١٠.0.0.1:8000", "10.0.0.1:８０００", "10.0.0.1:8000\n", "10.0.0.1:8000 10.0.0.2:8000",
    ],
)  # fmt: skip
def test_text_that_is_no_address_is_no_target(text: str) -> None:
    assert read_target(text) is None


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:8000", "169.254.169.254:80", "192.168.1.7:8001", "11.0.0.1:8000", "[::ffff:10.0.0.1]:8000", "[::1]:80"],
)
def test_address_outside_is_left_out(text: str) -> None:
    assert read_prefillers([text], [], ALLOWED) == Named((), 1)


def test_single_prefiller_goes_before_the_list_and_is_not_repeated() -> None:
    named = read_prefillers(["10.0.0.2:80"], ["10.0.0.2:80, 10.0.0.1:80", "10.0.0.3:80"], ALLOWED)
    assert [str(target) for target in named.targets] == ["10.0.0.2:80", "10.0.0.1:80", "10.0.0.3:80"]


@pytest.mark.parametrize("single", [["10.0.0.1:80", "10.0.0.2:80"], ["10.0.0.1:80,10.0.0.2:80"]])
def test_single_prefiller_that_is_a_list_is_left_out(single: list[str]) -> None:
    named = read_prefillers(single, ["10.0.0.3:80"], ALLOWED)
    assert [str(target) for target in named.targets] == ["10.0.0.3:80"]
    assert named.left_out == len(single)


def test_targets_above_the_limit_are_left_out() -> None:
    named = read_prefillers([], [",".join(f"10.0.0.{n}:80" for n in range(1, TARGETS_MAX + 3))], ALLOWED)
    assert (len(named.targets), named.left_out) == (TARGETS_MAX, 2)


def test_members_replace_those_before() -> None:
    allowed = Allowed()
    first, second = read_target("10.0.0.1:80"), read_target("10.0.0.2:80")
    assert first
    assert second
    allowed.set_members([first])
    assert first in allowed
    allowed.set_members([second])
    assert first not in allowed
    assert second in allowed


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "10.0.0.1/8", "prefill", "0.0.0.0/0/0"])
def test_allowed_text_that_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not|host bits"):
        read_allowed([text])
