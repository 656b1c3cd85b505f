"""How far an epoch has come: what is done, in any order, and what a later one need not do again."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shmloader.sampling.progress import Progress, numbers_of, runs_of


def done_of(progress):
    return set(range(progress.position)) | set(progress.ahead)


@given(st.data())
def test_what_is_done_is_known_over_any_number_of_resumes(data):
    count = data.draw(st.integers(0, 20))
    progress = Progress()
    expected: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        # What is drawn after a resume: all that is not done, in order.
        drawn = [number for number in range(count) if number not in expected]
        order = data.draw(st.permutations(range(len(drawn))))
        for seq in order[: data.draw(st.integers(0, len(drawn)))]:
            progress.done(seq)
            expected.add(drawn[seq])
            assert done_of(progress) == expected
            assert progress.position not in progress.ahead
        progress = Progress(progress.position, progress.ahead)


@given(st.data())
def test_in_order_what_was_given_ahead_is_passed_over(data):
    given_before = data.draw(st.sets(st.integers(1, 12)))
    progress = Progress(0, frozenset(given_before))
    drawn = [number for number in range(14) if number not in given_before]
    for seq, number in enumerate(drawn):
        progress.done_until(seq)
        assert done_of(progress) == given_before | set(drawn[: seq + 1])
        assert progress.position > number
        assert progress.position not in progress.ahead


def test_what_did_not_reach_the_user_is_taken_back():
    progress = Progress()
    progress.done(0)
    mark = progress.mark()
    progress.done(2)
    progress.done(1)
    progress.go_back(mark)
    assert (progress.position, progress.ahead) == (1, frozenset())


@given(st.data())
def test_what_was_noted_since_the_mark_is_taken_back(data):
    progress = Progress(2, frozenset(data.draw(st.sets(st.integers(3, 12)))))
    in_order = data.draw(st.booleans())
    left = data.draw(st.permutations(range(8)))
    note = progress.done_until if in_order else progress.done
    for seq in sorted(left) if in_order else left:
        mark, before = progress.mark(), done_of(progress)
        note(seq)
        progress.go_back(mark)
        assert done_of(progress) == before
        note(seq)


@given(st.sets(st.integers(0, 40)))
def test_runs_have_the_same_numbers(numbers):
    runs = runs_of(numbers)
    assert numbers_of(runs) == numbers
    assert all(left[1] < right[0] for left, right in itertools.pairwise(runs))


def test_one_late_ticket_costs_the_others_nothing():
    progress = Progress()
    for seq in range(1, 200_000):  # seconds, and not hours
        progress.done(seq)
    assert runs_of(progress.ahead) == [[1, 200_000]]
    again = Progress(0, progress.ahead)
    again.done_until(0)
    for seq in range(1, 1000):
        again.done_until(seq)
    assert again.position == 200_999
