"""Sizes as text: what users write, and what they are shown."""

from __future__ import annotations

import pytest

from hf_ptq.errors import UserError
from hf_ptq.sizes import exact_bytes, gigabytes, human_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("123", 123),
        ("1.5 kB", 1500),
        ("7B", 7),
        ("1TiB", 2**40),
    ],
)
def test_sizes_that_users_write(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "5 G B", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="5GB, 500MB, 2GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (999_999, "1 MB"), (1_234_567_890, "1.23 GB"), (5e15, "5 PB")]
)
def test_sizes_for_people(count, text):
    assert human_bytes(count) == text


def test_sizes_that_are_compared():
    assert exact_bytes(1_234_567_890) == "1.23 GB (1,234,567,890 bytes)"
    assert exact_bytes(126_304) == "126 kB (126,304 bytes)"
    assert gigabytes(1_234_567_890) == "1.23 GB"
    assert gigabytes(140_446_000_000) == "140.45 GB"
    assert gigabytes(2**30) == "1.07 GB"
