"""When free slots give their memory back."""

from __future__ import annotations

from shmloader.pools.slot_reader import SlotReader


def test_while_memory_is_short_free_slots_keep_no_pages() -> None:
    reader = SlotReader(slot_bytes=1 << 20, slot_count=3, locker=None, admission=None)
    arena = reader.arena
    for slot_id in range(3):
        arena.grow(slot_id, 4096).mapping[:4096] = bytes(4096)
        arena.note_use(slot_id, 4096)
    assert not reader.wants_tidying
    reader.tidy([0, 1])
    assert [arena.touched_bytes(slot_id) for slot_id in range(3)] == [4096] * 3
    arena.is_short = True
    assert reader.wants_tidying
    reader.tidy([0, 1])
    assert [arena.touched_bytes(slot_id) for slot_id in range(3)] == [0, 0, 4096]
    arena.close()
