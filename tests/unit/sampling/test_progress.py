"""How far an epoch has come: what is done, in any order, and what a later one need not do again."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shmloader.sampling.progress import Progress


def done_of(progress):
    ahead = itertools.chain.from_iterable(range(*run) for run in progress.ahead)
    return {*range(progress.position), *ahead}


@given(st.data())
def test_what_is_done_is_known_over_any_number_of_resumes(data):
    unit = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(0, 20)) * unit
    progress = Progress(unit=unit)
    expected: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        # What is drawn after a resume: all that is not done, in order.
        numbers = range(0, count, unit)
        drawn = list(progress.left_to_do(iter(numbers[progress.start // unit :])))
        assert drawn == [number for number in numbers if number not in expected]
        order = data.draw(st.permutations(range(len(drawn))))
        for seq in order[: data.draw(st.integers(0, len(drawn)))]:
            mark, before = (progress.position, progress.ahead), done_of(progress)
            progress.done(seq)
            progress.go_back(mark)
            assert done_of(progress) == before
            progress.done(seq)
            expected |= {*range(drawn[seq], drawn[seq] + unit)}
            assert done_of(progress) == expected
            assert progress.position not in {first for first, _ in progress.ahead}
        progress = Progress.load(progress.dump(), unit)


@given(st.sets(st.integers(1, 12)))
def test_in_order_what_was_given_ahead_is_passed_over(given_before):
    progress = Progress(0, tuple((number, number + 1) for number in sorted(given_before)))
    drawn = [number for number in range(14) if number not in given_before]
    for seq, number in enumerate(drawn):
        progress.done_until(seq)
        assert done_of(progress) == given_before | set(drawn[: seq + 1])
        assert progress.position > number


def test_one_late_ticket_costs_the_others_nothing():
    progress = Progress()
    for seq in range(1, 200_000):  # seconds, and not hours
        progress.done(seq)
    assert progress.ahead == ((1, 200_000),)
    again = Progress.load(progress.dump())
    for seq in range(1000):
        again.done_until(seq)
    assert again.position == 200_999
