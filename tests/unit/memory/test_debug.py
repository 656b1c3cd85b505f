"""The checks of SHMLOADER_DEBUG: sums, poison, and when they are asked for."""

import pytest

from shmloader.memory.debug import POISON, checksum, is_debugging, poison
from shmloader.memory.slot import Slot


@pytest.fixture
def slot():
    slot = Slot.create(1 << 16)
    yield slot
    slot.close()


def test_a_checksum_is_that_of_the_used_bytes_and_no_others(slot):
    slot.mapping[:1000] = bytes(range(250)) * 4
    before = checksum(slot, 1000)
    slot.mapping[1000] = 7
    assert checksum(slot, 1000) == before
    slot.mapping[999] ^= 1
    assert checksum(slot, 1000) != before
    assert checksum(slot, 0) == 0


def test_poison_covers_what_was_used_and_no_more(slot):
    poison(slot, 1000)
    assert slot.mapping[:1001] == bytes([POISON]) * 1000 + b"\0"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_the_variable_is_read_once(value, expected, monkeypatch):
    monkeypatch.delenv("SHMLOADER_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("SHMLOADER_DEBUG", value)
    is_debugging.cache_clear()
    try:
        assert is_debugging() is expected
        monkeypatch.setenv("SHMLOADER_DEBUG", "0" if expected else "1")
        assert is_debugging() is expected
    finally:
        is_debugging.cache_clear()
