"""Lazy sequences: what they give, when they compute it, and what they say of a failure."""

import pickle

import numpy as np
import pytest

from shmloader import sequence
from shmloader.sequence import batch, concatenate, cycle, gather, prefetch, smap


class Noting:
    """A sequence that notes which items were asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.asked.append(index)
        return index * 10


def add(first, second):
    return first + second


def negate(number):
    return -number


CASES = [
    (lambda seq: smap(negate, seq), [0, -10, -20, -30, -40]),
    (lambda seq: smap(add, seq, range(5)), [0, 11, 22, 33, 44]),
    (lambda seq: gather(seq, [3, 1, -1, 1]), [30, 10, 40, 10]),
    (lambda seq: gather(seq, np.array([2, 0])), [20, 0]),
    (lambda seq: batch(seq, 2), [[0, 10], [20, 30], [40]]),
    (lambda seq: batch(seq, 2, drop_last=True), [[0, 10], [20, 30]]),
    (lambda seq: batch(seq, 4, False), [[0, 10, 20, 30], [40]]),
    (lambda seq: batch(seq, 3, collate_fn=sum), [30, 70]),
    (
        lambda seq: concatenate([seq, [], range(2), seq]),
        [0, 10, 20, 30, 40, 0, 1, 0, 10, 20, 30, 40],
    ),
    (lambda seq: cycle(seq, 7), [0, 10, 20, 30, 40, 0, 10]),
    (lambda seq: gather(smap(negate, seq), range(4, -1, -2)), [-40, -20, 0]),
    (lambda seq: prefetch(seq, 2), [0, 10, 20, 30, 40]),
    (
        lambda seq: prefetch(smap(negate, seq), 2, "process", max_buffered=3),
        [0, -10, -20, -30, -40],
    ),
]


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("make", "expected"), CASES)
def test_indices_slices_iteration_and_pickles(make, expected):
    lazy = make(Noting(5))
    assert len(lazy) == len(expected)
    assert list(lazy) == expected
    for index in (0, -1, len(expected) - 1, -len(expected)):
        assert lazy[index] == expected[index]
    assert lazy[np.int64(1)] == expected[1]
    for part in (slice(None), slice(1, None), slice(None, None, -1), slice(1, -1), slice(9, 20)):
        assert list(lazy[part]) == expected[part]
    assert lazy[1:][::2][0] == expected[1]
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            lazy[index]
    with pytest.raises(TypeError):
        lazy["one"]
    copy = pickle.loads(pickle.dumps(lazy))
    assert list(copy) == expected
    assert repr(lazy).endswith(f" of {len(expected)} items>")


@pytest.mark.parametrize("make", [make for make, _ in CASES[:11]])
def test_nothing_is_computed_before_it_is_asked_for_nor_kept(make):
    noting = Noting(5)
    lazy = make(noting)
    assert noting.asked == []
    first = lazy[0]
    asked = list(noting.asked)
    assert asked
    assert lazy[0] == first
    assert noting.asked == asked * 2


def fail_at_two(number):
    if number == 20:
        raise IndexError("of the function")
    return number


def test_an_item_that_fails_raises_and_does_not_end_a_loop():
    batches = batch(smap(fail_at_two, Noting(5)), 2)
    with pytest.raises(IndexError, match="of the function"):
        list(batches)
    assert batches[2] == [40]


def test_an_index_of_gather_before_the_first_item_is_told():
    lazy = gather([0, 1, 2], [-3, -4, 3])
    assert lazy[0] == 0
    for wrong in (1, 2):
        with pytest.raises(IndexError):
            lazy[wrong]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: smap(3, [1]), TypeError, ["f ", "3"]),
        (lambda: smap(negate), ValueError, ["sequences", "[]"]),
        (lambda: smap(add, [1], [1, 2]), ValueError, ["[1, 2]"]),
        (lambda: batch([1], 0), ValueError, ["k ", "=0"]),
        (lambda: batch([1], 2, drop_last=1), TypeError, ["drop_last", "=1"]),
        (lambda: batch([1], 2, collate_fn=1), TypeError, ["collate_fn", "=1"]),
        (lambda: cycle([], 2), ValueError, ["not empty"]),
        (lambda: cycle([1], -1), ValueError, ["limit", "=-1"]),
        (lambda: prefetch([1], -1), ValueError, ["nworkers", "=-1"]),
        (lambda: prefetch([1], 1, "fork"), ValueError, ["method", "'fork'"]),
        (lambda: prefetch([1], 1, max_buffered=0), ValueError, ["max_buffered", "=0"]),
        (lambda: prefetch([1], 1, start_hook=1), TypeError, ["start_hook", "=1"]),
        (lambda: prefetch([1], 1, shm_size="1MiB"), ValueError, ["shm_size"]),
        (lambda: prefetch([1], 1, "process", shm_size="x"), ValueError, ["shm_size", "'x'"]),
    ],
)
def test_a_mistake_is_told_at_once(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_public_names_are_these():
    assert sequence.__all__ == ["batch", "concatenate", "cycle", "gather", "prefetch", "smap"]
