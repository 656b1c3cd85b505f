"""The engine's words, which begin as torch's do."""

import pytest

from shmloader.engine.answers import Death
from shmloader.engine.scheduler import Ticket
from shmloader.engine.wording import (
    describe_death,
    describe_end,
    describe_indices,
    describe_ticket,
    describe_timeout,
)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([2624, 2625, 2626], "indices 2624 to 2626"),
        ((5, 6), "indices 5 to 6"),
        ([-1, 0, 1], "indices -1 to 1"),
        ([7], "indices 7"),
        ([3, 1, 2], "indices 3, 1, 2"),
        ([1, 1], "indices 1, 1"),
        ([], "no indices"),
        (list(range(0, 20, 2)), "10 indices: 0, 2, 4, 6, 8, 10, 12, 14, …"),
        (list(range(0, 16, 2)), "indices 0, 2, 4, 6, 8, 10, 12, 14"),
        (["a", ("b", 1)], "indices 'a', ('b', 1)"),
        (17, "index 17"),
        ("key", "index 'key'"),
        (None, "index None"),
    ],
)
def test_indices_are_told_in_a_few_words(indices, text):
    assert describe_indices(indices) == text


def test_a_long_index_does_not_make_a_long_text():
    assert len(describe_indices("x" * 10_000)) < 100
    assert len(describe_indices(["x" * 10_000] * 10_000)) < 500


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (-9, "DataLoader worker (pid 812) is killed by signal: Killed. "),
        (-11, "DataLoader worker (pid 812) is killed by signal: Segmentation fault. "),
        (3, "DataLoader worker (pid 812) exited unexpectedly with exit code 3. Details are lost"),
        (0, "DataLoader worker (pid 812) exited unexpectedly with exit code 0. "),
        (None, "DataLoader worker (pid 812) exited unexpectedly. "),
        (-60, "DataLoader worker (pid 812) is killed by signal: "),
        (-7, "DataLoader worker (pid 812) is killed by signal: Bus error. It is possible that"),
    ],
)
def test_a_worker_s_end_is_told_in_torch_s_words(exit_code, text):
    assert describe_end(Death(812, exit_code)).startswith(text)


def test_a_death_says_what_the_worker_had_to_load():
    ticket = Ticket(41, 3, 0, list(range(2624, 2688)))
    assert describe_death(3, Death(812, -9), ticket) == (
        "DataLoader worker (pid 812) is killed by signal: Killed. "
        "Worker 3 was loading batch 41 (indices 2624 to 2687)."
    )
    assert describe_death(3, Death(812, -9), None).endswith("Worker 3 had no batch to load.")


def test_a_timeout_names_time_batch_and_worker():
    ticket = Ticket(41, 3, 0, [7])
    assert describe_ticket(ticket) == "batch 41 (indices 7)"
    assert describe_timeout(5.0, [(ticket, 812)]) == (
        "DataLoader timed out after 5 seconds. "
        "Batch 41 (indices 7) is with worker 3 (pid 812). "
        "No batch is lost: next() may be called again."
    )
    assert describe_timeout(0.25, []).startswith("DataLoader timed out after 0.25 seconds. No")
