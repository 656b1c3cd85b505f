"""How many workers there should be, by what a consumer sees of a made-up machine."""

import itertools

import pytest

from shmloader.pools.adapting import PERIOD_NS, Adapter


def run(adapter: Adapter, *, load_s: float, step_s: float, cores: int, periods: int) -> list[int]:
    """The numbers of workers, period after period, where batches take so long.

    Workers beyond the cores make nothing faster.
    """
    counts, now = [], 0
    for _ in range(periods):
        until = now + PERIOD_NS
        while now < until:
            every = max(step_s, load_s / min(adapter.count, cores))
            now += int(every * 1e9)
            wait = int(max(0.0, every - step_s) * 1e9)
            adapter.count_batch(now, wait, int(load_s * 1e9))
        counts.append(adapter.count)
    return counts


def test_it_goes_up_while_that_helps_and_stays_there() -> None:
    counts = run(Adapter(1, 16), load_s=0.05, step_s=0.01, cores=16, periods=60)
    assert counts[-1] == 5
    assert counts == sorted(counts)


def test_it_takes_back_what_does_not_help_and_tries_ever_more_rarely() -> None:
    counts = run(Adapter(2, 16), load_s=0.1, step_s=0.01, cores=4, periods=400)
    assert set(counts[20:]) == {4, 5}
    tries = [now for now, (a, b) in enumerate(itertools.pairwise(counts)) if b > a == 4]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_after_a_try_that_helped_it_tries_as_often_as_at_first() -> None:
    adapter = Adapter(2, 16)

    def gaps_on(cores: int) -> list[int]:
        adapter.begin()
        counts = run(adapter, load_s=0.1, step_s=0.01, cores=cores, periods=400)
        steps = enumerate(itertools.pairwise(counts))
        tries = [now for now, (a, b) in steps if b > a == cores]
        return [b - a for a, b in itertools.pairwise(tries)]

    first = gaps_on(4)
    assert first[-1] > 8 * first[0]
    assert gaps_on(5)[0] == first[0]


def test_it_goes_down_where_nobody_waits() -> None:
    counts = run(Adapter(8, 16), load_s=0.01, step_s=0.02, cores=16, periods=60)
    assert counts[-1] in (1, 2)
    assert all(a >= b for a, b in itertools.pairwise(counts))


def test_one_that_is_missed_comes_back() -> None:
    """Two workers do for the step's speed; one would not."""
    counts = run(Adapter(2, 16), load_s=0.018, step_s=0.01, cores=16, periods=40)
    assert counts[-1] == 2


@pytest.mark.parametrize("most", [1, 3])
def test_it_keeps_to_the_limit(most) -> None:
    assert max(run(Adapter(1, most), load_s=1.0, step_s=0.0, cores=16, periods=100)) == most


def test_an_epoch_begins_without_a_verdict_on_the_time_between() -> None:
    adapter = Adapter(2, 4)
    adapter.begin()
    assert adapter.count_batch(10**12, 10**12, 0) == 2
    assert adapter.count_batch(2 * 10**12, 0, 0) == 2
