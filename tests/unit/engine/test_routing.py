"""Which worker gets a ticket: torch's two rules, and that any will do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.engine.routing import Pace, pick_idle
from shmloader.engine.scheduler import Scheduler
from shmloader.engine.workers import WorkerState, WorkerTable


def workers(in_flight, has_stream=None, gone=()) -> WorkerTable:
    """Workers with so many tickets each."""
    table = WorkerTable(len(in_flight), len(in_flight))
    for worker in table:
        worker.in_flight = in_flight[worker.worker_id]
        worker.has_stream = has_stream is None or has_stream[worker.worker_id]
        if worker.worker_id in gone:
            table.move(worker.worker_id, WorkerState.LEAVING)
            table.move(worker.worker_id, WorkerState.GONE)
    return table


def router(window: int, *, in_order: bool) -> Scheduler:
    """A scheduler with slots for any number of tickets, and workers for which tests decide."""
    return Scheduler(8, window, 1000, in_order=in_order)


def picked_by(subject: Scheduler, in_flight, has_stream=None) -> int | None:
    """The worker of the next ticket, where the workers have so many."""
    del subject.workers[len(in_flight) :]
    for worker in subject.workers:
        worker.in_flight = in_flight[worker.worker_id]
        worker.has_stream = has_stream is None or has_stream[worker.worker_id]
    ticket = subject.offer([0])
    return None if ticket is None else ticket.worker_id


@pytest.mark.parametrize("worker_count", [1, 2, 3, 5, 8])
def test_in_order_ticket_i_goes_to_worker_i_mod_n(worker_count):
    subject = router(window=2 * worker_count, in_order=True)
    # Whatever they have to do: content must not depend on speed.
    loads = [[(i * 7 + w * 3) % 5 for w in range(worker_count)] for i in range(50)]
    picked = [picked_by(subject, load) for load in loads]
    assert picked == [i % worker_count for i in range(50)]


def test_a_further_epoch_begins_at_worker_0():
    subject = router(window=6, in_order=True)
    picked_by(subject, [0] * 3)
    subject.end_epoch()
    subject.start_epoch()
    assert picked_by(subject, [0] * 3) == 0


@pytest.mark.parametrize("in_order", [True, False])
def test_inactive_workers_are_passed_over(in_order):
    subject = router(window=8, in_order=in_order)
    active = [True, False, True, False]
    assert [picked_by(subject, [0] * 4, active) for _ in range(5)] == [0, 2, 0, 2, 0]


@pytest.mark.parametrize("in_order", [True, False])
def test_with_no_active_worker_nobody_is_picked(in_order):
    assert picked_by(router(6, in_order=in_order), [0] * 3, [False] * 3) is None


def test_in_any_order_a_worker_with_its_share_of_the_window_is_passed_over():
    subject = router(window=6, in_order=False)
    assert picked_by(subject, [2, 1, 0]) == 1
    assert picked_by(subject, [2, 2, 0]) == 2


def test_in_any_order_the_share_grows_when_others_are_inactive():
    subject = router(window=6, in_order=False)
    assert picked_by(subject, [5, 0, 0], [True, False, False]) == 0
    assert picked_by(subject, [3, 2, 0], [True, True, False]) == 1


def test_where_all_have_their_share_the_least_loaded_worker_is_picked():
    subject = router(window=4, in_order=False)
    assert picked_by(subject, [2, 1, 1]) == 1
    # The window does not divide: the next round goes on from there.
    assert picked_by(subject, [1, 1, 1]) == 2


@given(
    worker_count=st.integers(1, 5),
    prefetch=st.integers(1, 4),
    answers=st.lists(st.integers(0, 99), max_size=60),
)
def test_in_any_order_no_worker_ever_has_more_than_its_share(worker_count, prefetch, answers):
    window = worker_count * prefetch
    subject = router(window, in_order=False)
    load = [0] * worker_count
    for _ in range(window):
        load[picked_by(subject, load)] += 1
    assert load == [prefetch] * worker_count
    for answer in answers:
        busy = [worker_id for worker_id in range(worker_count) if load[worker_id]]
        answering = busy[answer % len(busy)]
        load[answering] -= 1
        picked = picked_by(subject, load)
        assert picked == answering, "the only one below its share"
        load[picked] += 1


@pytest.mark.parametrize(
    ("in_flight", "gone", "limit", "picked"),
    [
        ([0, 0, 0], (), 1, 0),
        ([1, 0, 0], (), 1, 1),
        ([1, 0, 0], (1,), 1, 2),
        ([1, 1, 1], (), 1, None),
        ([1, 1, 1], (), 2, 0),
        ([2, 1, 0], (), 2, 2),
        ([2, 2, 2], (), 2, None),
        ([0, 0, 0], (0, 1, 2), 2, None),
    ],
)
def test_with_dynamic_dispatch_the_worker_with_the_fewest_tasks_is_picked(
    in_flight, gone, limit, picked
):
    worker = pick_idle(workers(in_flight, gone=gone), limit)
    assert (None if worker is None else worker.worker_id) == picked


@pytest.mark.parametrize(
    ("in_flight", "limit", "loads", "picked"),
    [
        ([0, 0, 0], 1, [1, 0, 0], 1),  # not the first one, which others keep busy
        ([0, 0, 0], 1, [2, 1, 1], 1),
        ([1, 0, 0], 1, [0, 3, 2], 2),  # the first one has no room for this engine's
        ([1, 0], 2, [0, 1], 0),
        ([1, 0], 2, [0, 2], 0),  # two of its own rather than a third behind those of others
        ([1, 0], 2, [1, 1], 1),
        ([1, 1], 1, [0, 0], None),
        ([0, 0], 1, [0, 0], 0),
    ],
)
def test_among_workers_that_others_use_the_one_with_the_fewest_tasks_in_all(
    in_flight, limit, loads, picked
):
    worker = pick_idle(workers(in_flight), limit, loads)
    assert (None if worker is None else worker.worker_id) == picked


def test_workers_that_do_not_run_have_no_room_whatever_the_others_have():
    assert pick_idle(workers([0, 0], gone=[1]), 1, [5, 0]).worker_id == 0


def test_a_worker_holds_one_task_until_batches_are_known_to_be_short():
    assert Scheduler(2, 4, 2, in_order=True, is_dynamic=True).task_limit == 1
    assert Pace().note(100_000) == 2


def test_a_slow_batch_among_short_ones_leaves_one_task_for_a_while():
    pace = Pace()
    lengths_ns = [*[300_000] * 20, 60_000_000, *[300_000] * 60]
    limits = [pace.note(elapsed_ns) for elapsed_ns in lengths_ns]
    shy = limits.count(1)
    assert limits == [2] * 20 + [1] * shy + [2] * (61 - shy)
    assert 10 < shy < 50


def test_long_batches_leave_one_task():
    pace = Pace()
    assert [pace.note(10_000_000) for _ in range(50)] == [1] * 50
