"""Which worker gets a ticket: torch's two rules, and that any will do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.engine.routing import Pace, Router, pick_idle


@pytest.mark.parametrize("worker_count", [1, 2, 3, 5, 8])
def test_in_order_ticket_i_goes_to_worker_i_mod_n(worker_count):
    router = Router(worker_count, window=2 * worker_count, in_order=True)
    # Whatever they have to do: content must not depend on speed.
    loads = [[(i * 7 + w * 3) % 5 for w in range(worker_count)] for i in range(50)]
    picked = [router.pick([True] * worker_count, load) for load in loads]
    assert picked == [i % worker_count for i in range(50)]


def test_a_restarted_router_begins_at_worker_0():
    router = Router(3, window=6, in_order=True)
    router.pick([True] * 3, [0] * 3)
    router.restart()
    assert router.pick([True] * 3, [0] * 3) == 0


@pytest.mark.parametrize("in_order", [True, False])
def test_inactive_workers_are_passed_over(in_order):
    router = Router(4, window=8, in_order=in_order)
    active = [True, False, True, False]
    assert [router.pick(active, [0] * 4) for _ in range(5)] == [0, 2, 0, 2, 0]


@pytest.mark.parametrize("in_order", [True, False])
def test_with_no_active_worker_nobody_is_picked(in_order):
    assert Router(3, window=6, in_order=in_order).pick([False] * 3, [0] * 3) is None


def test_in_any_order_a_worker_with_its_share_of_the_window_is_passed_over():
    router = Router(3, window=6, in_order=False)
    assert router.pick([True] * 3, [2, 1, 0]) == 1
    assert router.pick([True] * 3, [2, 2, 0]) == 2


def test_in_any_order_the_share_grows_when_others_are_inactive():
    router = Router(3, window=6, in_order=False)
    assert router.pick([True, False, False], [5, 0, 0]) == 0
    assert router.pick([True, True, False], [3, 2, 0]) == 1


def test_where_all_have_their_share_the_least_loaded_worker_is_picked():
    router = Router(3, window=4, in_order=False)
    assert router.pick([True] * 3, [2, 1, 1]) == 1
    # The window does not divide: the next round goes on from there.
    assert router.pick([True] * 3, [1, 1, 1]) == 2


@given(
    worker_count=st.integers(1, 5),
    prefetch=st.integers(1, 4),
    answers=st.lists(st.integers(0, 99), max_size=60),
)
def test_in_any_order_no_worker_ever_has_more_than_its_share(worker_count, prefetch, answers):
    window = worker_count * prefetch
    router = Router(worker_count, window, in_order=False)
    load = [0] * worker_count
    for _ in range(window):
        load[router.pick([True] * worker_count, load)] += 1
    assert load == [prefetch] * worker_count
    for answer in answers:
        busy = [worker_id for worker_id in range(worker_count) if load[worker_id]]
        answering = busy[answer % len(busy)]
        load[answering] -= 1
        picked = router.pick([True] * worker_count, load)
        assert picked == answering, "the only one below its share"
        load[picked] += 1


@pytest.mark.parametrize(
    ("candidates", "in_flight", "limit", "asking", "picked"),
    [
        ([0, 1, 2], [0, 0, 0], 1, (), 0),
        ([0, 1, 2], [1, 0, 0], 1, (), 1),
        ([0, 2], [1, 0, 0], 1, (), 2),
        ([0, 1, 2], [1, 1, 1], 1, (), None),
        ([0, 1, 2], [1, 1, 1], 2, (), 0),
        ([0, 1, 2], [2, 1, 0], 2, (), 2),
        ([0, 1, 2], [2, 2, 2], 2, (), None),
        ([], [0, 0, 0], 2, (), None),
        ([0, 1, 2], [1, 1, 1], 1, {1}, 1),
        ([0, 1, 2], [1, 1, 0], 1, {1}, 2),
        ([0, 1, 2], [1, 2, 1], 1, {1}, None),
        ([0, 1, 2], [2, 2, 2], 2, {1}, None),
        ([0, 2], [1, 1, 1], 1, {1}, None),
    ],
)
def test_any_worker_is_the_one_with_the_fewest_tasks(candidates, in_flight, limit, asking, picked):
    assert pick_idle(candidates, in_flight, limit, asking) == picked


def test_a_worker_holds_one_task_until_batches_are_known_to_be_short():
    pace = Pace()
    assert pace.task_limit == 1
    pace.note(100e-6)
    assert pace.task_limit == 2


def test_a_slow_batch_among_short_ones_leaves_one_task_for_a_while():
    pace = Pace()
    limits = []
    for elapsed_s in [*[300e-6] * 20, 60e-3, *[300e-6] * 60]:
        pace.note(elapsed_s)
        limits.append(pace.task_limit)
    shy = limits.count(1)
    assert limits == [2] * 20 + [1] * shy + [2] * (61 - shy)
    assert 10 < shy < 50


def test_long_batches_leave_one_task():
    pace = Pace()
    for _ in range(50):
        pace.note(10e-3)
    assert pace.task_limit == 1
