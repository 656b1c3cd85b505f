"""A stream with everything, stopped and gone on with on other workers and ranks, three times.

A cell is the numbers of workers and ranks before the first stop, and those after it. They are drawn
for the second and the third stop. ``make test`` runs a few cells, ``make test-full`` some more, and
``make streams-matrix`` all.
"""

import functools
import itertools
import random

import pytest

from shmloader.streams import Shards, mix
from shmloader.streams.formats import between
from tests.resume.kinds import IS_WHOLE
from tests.streams.support import run_ranks

COUNTS = (1, 2, 5, 8)
PLACES = list(itertools.product(COUNTS, COUNTS))  # workers, ranks
CELLS = list(itertools.product(PLACES, PLACES))  # before, after
READERS = 64


class Numbers:
    """Shards of numbers, which say by their names how many they have."""

    seeks = True

    def count(self, path):
        return 5 + int(path) * 7 % 23

    def read(self, path, numbers):
        yield from (1_000 * int(path) + each for each in between(numbers, 0, self.count(path)))


def is_kept(record):
    return record % 10 not in {2, 5, 8}


def make_stream(store=None):
    def shards(first, count):
        paths = [str(first + number) for number in range(count)]
        return Shards(paths, Numbers(), seed=first, readers=READERS, store=store)

    web = shards(0, 80).shuffle(9).filter(is_kept)
    code = shards(100, 70).filter(is_kept).shuffle(6, rolling=True)
    return mix({web: 0.7, code: 0.3}, stop="all").shuffle(10).batch(3)


@functools.cache
def unbroken():
    return [batch.tolist() for batch in make_stream()]


@pytest.mark.sampled(3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "after"), CELLS if IS_WHOLE else random.Random(1).sample(CELLS, 16), ids=str
)
def test_the_order_is_the_same_on_any_workers_and_ranks(before, after):
    draw, expected, got, state = random.Random(repr((before, after))), unbroken(), [], None
    places = [before, after, *draw.choices(PLACES, k=2)]
    for number, (workers, world_size) in enumerate(places):
        is_last = number == len(places) - 1
        left = (len(expected) - len(got)) // world_size
        steps = len(expected) if is_last else draw.randint(0, left // 2)
        batches, states = run_ranks(make_stream, world_size, workers, steps, state)
        state = draw.choice(states)
        got += batches
    assert got[: len(expected)] == expected
    # The last step of all is filled up.
    assert len(got) - len(expected) < world_size
    assert all(batch == expected[-1] for batch in got[len(expected) :])
