"""Tests of the comparison of token counts."""

from dualmap.prompts.api import Api
from dualmap.prompts.parity import CLASSES_MAX, WINDOW, TokenClass, TokenParity

CHAT = TokenClass(model="m", api=Api.CHAT, has_tools=False)
TOOLS = CHAT._replace(has_tools=True)


def test_parity_trusts_a_class_without_comparisons() -> None:
    assert TokenParity().trusts(CHAT)


def test_parity_below_99_percent_is_not_trusted() -> None:
    parity = TokenParity()
    for _ in range(WINDOW - 2):
        parity.compare(CHAT, 7, 7)
    one = parity.compare(CHAT, 7, 8)
    assert (one.equal, one.trusted, one.changed) == (False, True, False)
    two = parity.compare(CHAT, 7, 8)
    assert (two.trusted, two.changed) == (False, True)
    assert (parity.trusts(CHAT), parity.trusts(TOOLS), parity.distrusted) == (False, True, (CHAT,))


def test_parity_trusts_another_source_of_a_class() -> None:
    parity = TokenParity()
    for _ in range(2):
        parity.compare(CHAT, 1, 2)
    renewed = CHAT._replace(source=1)
    assert (parity.trusts(CHAT), parity.trusts(renewed)) == (False, True)
    assert parity.compare(renewed, 7, 7).trusted


def test_parity_is_trusted_again_after_equal_counts() -> None:
    parity = TokenParity()
    parity.compare(CHAT, 1, 2)
    parity.compare(CHAT, 1, 2)
    changes = [parity.compare(CHAT, 7, 7).changed for _ in range(WINDOW)]
    assert parity.trusts(CHAT)
    assert changes.count(True) == 1


def test_class_with_a_few_mismatches_changes_only_once() -> None:
    parity = TokenParity()
    changes = [parity.compare(CHAT, 7, 7 + (number % 70 == 0)).changed for number in range(2000)]
    assert changes.count(True) == 1
    assert not parity.trusts(CHAT)


def test_parity_keeps_a_bounded_number_of_classes() -> None:
    parity = TokenParity()
    for number in range(CLASSES_MAX + 1):
        each = CHAT._replace(model=str(number))
        parity.compare(each, 1, 2)
        parity.compare(each, 1, 2)
    assert len(parity.distrusted) == CLASSES_MAX
