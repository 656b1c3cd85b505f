"""The worker numbers that an executor's processes get."""

from __future__ import annotations

from shmloader.pools.process_numbers import ProcessNumbers


def test_the_smallest_number_is_offered_that_neither_a_process_nor_a_task_has() -> None:
    numbers = ProcessNumbers()
    assert [numbers.offer() for _ in range(4)] == [0, 1, 2, 3]
    numbers.note(1)  # the second task's process took it
    numbers.take_back(1)
    numbers.take_back(0)  # the first task's process had a number before
    assert numbers.offer() == 0
    assert numbers.offer() == 4


def test_a_number_that_a_process_takes_late_is_not_offered_again() -> None:
    numbers = ProcessNumbers()
    assert numbers.offer() == 0
    numbers.take_back(0)  # the task was given up
    numbers.note(0)
    numbers.note(1)
    assert numbers.offer() == 2
