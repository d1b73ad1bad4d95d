from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import ConfigError
from everstep.core.sizes import parse_bytes, render_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GB", 20_000_000_000),
        ("20 gb", 20_000_000_000),
        ("256MB", 256_000_000),
        ("1.5GiB", 3 * 2**29),
        ("12kB", 12_000),
        ("4KiB", 4096),
        ("2TB", 2 * 10**12),
        ("17", 17),
        ("17B", 17),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text, field="budget") == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "20XB", "1e9", "20GB/s", "1,5GB", True, -1])
def test_what_is_no_size_is_refused_with_its_field_and_an_example(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"budget is .*must be a size such as 256MB"):
        parse_bytes(text, field="budget")


def test_half_a_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole number of bytes"):
        parse_bytes("0.5", field="budget")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (999_999, "1 MB"),
     (20 * 10**9, "20 GB"), (3 * 10**18, "3000 PB")],
)  # fmt: skip
def test_bytes_are_shown_with_three_digits(num_bytes: int, text: str) -> None:
    assert render_bytes(num_bytes) == text


@given(st.integers(0, 10**18))
def test_what_is_shown_is_read_again_within_its_digits(num_bytes: int) -> None:
    again = parse_bytes(render_bytes(num_bytes), field="size")
    assert again == pytest.approx(num_bytes, rel=0.005)
