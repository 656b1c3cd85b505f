"""The table by which ranks see how many tasks the workers of their host have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from shmloader.pools.host_loads import MOST_ROWS, Loads

WORKERS = 3


def made() -> Loads:
    owner = Loads(WORKERS)
    os.close(owner.fd)
    return owner


@contextlib.contextmanager
def mapped_twice() -> Iterator[tuple[Loads, Loads]]:
    """A table as its owner has it, and as another process would."""
    owner = Loads(WORKERS)
    rank = Loads(WORKERS, owner.fd)
    os.close(owner.fd)
    yield owner, rank


def test_each_rank_sees_the_tasks_of_the_others() -> None:
    with mapped_twice() as (owner, rank):
        rows = [owner.take_row(set()), owner.take_row({0}), owner.take_row({0, 1})]
        assert rows == [0, 1, 2]
        for row, worker_id in ((0, 0), (1, 0), (1, 2), (1, 2)):
            rank.note_sent(row, worker_id)
        for each in (owner, rank):
            assert each.of_others(0) == [1, 0, 2]
            assert each.of_others(1) == [1, 0, 0]
            assert each.of_others(2) == [2, 0, 2]


def test_a_task_that_is_made_counts_no_more() -> None:
    with mapped_twice() as (owner, rank):
        row = owner.take_row(set())
        rank.note_sent(row, 1)
        rank.note_sent(row, 1)
        owner.note_made(row, 1)
        assert rank.of_others(-1) == [0, 1, 0]


def test_tasks_that_are_awaited_no_more_do_not_count() -> None:
    with mapped_twice() as (owner, rank):
        row = owner.take_row(set())
        for worker_id in range(WORKERS):
            rank.note_sent(row, worker_id)
        rank.forget(row, 1)
        assert rank.of_others(-1) == [1, 0, 1]
        owner.forget(row)
        assert rank.of_others(-1) == [0, 0, 0]


def test_a_row_is_taken_again_and_what_is_made_late_of_its_old_tasks_does_not_count() -> None:
    owner = made()
    row = owner.take_row(set())
    owner.note_sent(row, 0)
    assert owner.take_row(set()) == row
    owner.note_made(row, 0)
    assert owner.of_others(-1) == [0, 0, 0]


def test_without_a_free_row_only_the_others_are_seen() -> None:
    owner = made()
    assert owner.take_row(set(range(MOST_ROWS))) == -1
    assert owner.take_row(set(range(MOST_ROWS - 1))) == MOST_ROWS - 1
    owner.note_sent(MOST_ROWS - 1, 2)
    owner.note_sent(-1, 2)  # which would be the last row
    owner.note_made(-1, 2)
    owner.forget(-1)
    assert owner.of_others(-1) == [0, 0, 1]
