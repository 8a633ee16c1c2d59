"""Sizes in bytes."""

import pytest

from omni_offload.config import format_bytes, parse_bytes
from omni_offload.errors import OffloadConfigError


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (17, 17),
        (2**40, 2**40),
        ("12GiB", 12 * 2**30),
        ("800MiB", 800 * 2**20),
        ("1 KiB", 1024),
        ("  2TiB ", 2 * 2**40),
        ("1.5GiB", 3 * 2**29),
        ("0.1KiB", 102),
        ("3kb", 3000),
        ("3MB", 3_000_000),
        ("2GB", 2_000_000_000),
        ("1TB", 10**12),
        ("7B", 7),
    ],
)
def test_a_size_is_an_int_or_a_number_with_a_unit(value, size):
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", [True, False, -1, 1.5, None, "", "12", "GiB", "12 gigs", "-3GiB", "1e3MiB", "12G", [1], b"1GiB"])
def test_anything_else_is_an_error_that_quotes_it(value):
    with pytest.raises(OffloadConfigError) as caught:
        parse_bytes(value)
    assert repr(value) in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (800 * 2**20, "800 MiB"),
        (12 * 2**30, "12 GiB"),
        (3 * 2**41, "6 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit(size, text):
    assert format_bytes(size) == text
