"""The option types that several commands have."""

import click
import pytest

from dualmap_edge.options import Size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 536_870_912),
        ("1GiB", 1_073_741_824),
        ("1MB", 1_000_000),
        ("1000kB", 1_000_000),
        ("2000000", 2_000_000),
    ],
)
def test_size_option_is_read_in_bytes(text, size):
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "512 MiB", "-1MiB", "1.5GiB", "999999", "1mib", "9" * 20, "\N{ARABIC-INDIC DIGIT ONE}GB"]
)
def test_size_option_that_is_invalid_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not accepted; give at least 1MB"):
        Size().convert(text, None, None)
