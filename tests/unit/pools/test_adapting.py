"""How many workers there should be, by what a consumer sees of a made-up machine."""

import pytest

from shmloader.pools.adapting import PERIOD_NS, Adapter


def run(
    adapter: Adapter, *, load_s: float, step_s: float, cores: int, periods: int, present: int = 0
) -> list[int]:
    """The numbers of workers, period after period of an epoch, where batches take so long.

    Workers beyond the cores make nothing faster. ``present`` workers are there from the beginning.
    """
    adapter.begin(present)
    counts, now = [], 0
    for _ in range(periods):
        until = now + PERIOD_NS
        while now < until:
            every = max(step_s, load_s / min(adapter.count, cores))
            now += int(every * 1e9)
            adapter.count_batch(now, int(max(0.0, every - step_s) * 1e9))
        counts.append(adapter.count)
    return counts


def test_it_goes_up_while_that_helps_and_stays_there() -> None:
    counts = run(Adapter(1, 16), load_s=0.05, step_s=0.01, cores=16, periods=60)
    assert counts[-1] == 5
    assert counts == sorted(counts)


def test_a_trial_that_does_not_help_is_the_last_one_of_its_epoch() -> None:
    adapter = Adapter(2, 16)
    for _ in range(3):
        counts = run(adapter, load_s=0.1, step_s=0.01, cores=4, periods=60)
        assert max(counts) == 5
        assert set(counts[counts.index(5) + 8 :]) == {4}
    assert run(adapter, load_s=0.1, step_s=0.01, cores=8, periods=60)[-1] == 8


def test_with_persistent_workers_the_next_trial_is_one_more_than_are_there() -> None:
    adapter = Adapter(1, 4)
    assert run(adapter, load_s=0.1, step_s=0.01, cores=1, periods=30)[-1] == 1
    counts = run(adapter, load_s=0.1, step_s=0.01, cores=8, periods=60, present=2)
    assert counts[-1] == 4


def test_a_trial_goes_on_in_the_next_epoch() -> None:
    adapter = Adapter(4, 16)
    for _ in range(20):
        (*_, count) = run(adapter, load_s=0.1, step_s=0.01, cores=4, periods=4)
        assert count <= 5


@pytest.mark.parametrize("most", [1, 3])
def test_it_keeps_to_the_limit(most) -> None:
    assert max(run(Adapter(1, most), load_s=1.0, step_s=0.0, cores=16, periods=100)) == most


@pytest.mark.parametrize(("load_s", "count"), [(0.01, 8), (0.079, 8), (0.1, 10), (0.15, 15)])
def test_it_finds_about_as_many_as_the_step_needs(load_s, count) -> None:
    found = run(Adapter(8, 16), load_s=load_s, step_s=0.01, cores=16, periods=200)[-1]
    assert count - 1 <= found <= count


def test_an_epoch_begins_without_a_verdict_on_the_time_between() -> None:
    adapter = Adapter(2, 4)
    adapter.begin(2)
    assert adapter.count_batch(10**12, 10**12) == 2
    assert adapter.count_batch(2 * 10**12, 0) == 2
