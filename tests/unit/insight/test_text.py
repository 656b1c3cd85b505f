"""Durations, sizes and numbers as text."""

from __future__ import annotations

import pytest

from shmloader.insight.text import counted, seconds, size


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"),
        (5e-9, "5 ns"),
        (1.234e-5, "12.3 µs"),
        (9.996e-4, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (123.456, "123.46 s"),
    ],
)
def test_a_duration_has_the_unit_that_fits(duration_s, text) -> None:
    assert seconds(duration_s) == text


def test_sizes_and_numbers() -> None:
    assert [size(one) for one in (0, 999, 1_500, 2e6)] == ["0 B", "999 B", "1.5 kB", "2.0 MB"]
    assert counted(1, "batch", "batches") == "1 batch"
    assert counted(2_000, "batch", "batches") == "2,000 batches"
    assert counted(0, "core") == "0 cores"
