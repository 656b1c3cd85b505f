"""Transforms that a loader's seed reaches by a hook."""

import pickle
import random

import pytest

import shmloader
from shmloader.integrations.seeding import SeededTransform, seeded


class Own:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def __call__(self, value: int) -> float:
        return value + self.generator.random()


def reseed(transform: Own, seed: int) -> None:
    assert 0 <= seed < 1 << 32
    transform.generator.seed(seed)


class Samples:
    def __init__(self, transform: object) -> None:
        self.transform = pickle.loads(pickle.dumps(transform))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return self.transform(index)


def run(**options) -> list[float]:
    samples = Samples(SeededTransform(Own(), reseed))
    loader = shmloader.DataLoader(samples, batch_size=2, **options)
    return [value for batch in loader for value in batch.tolist()]


def test_the_loaders_seed_decides_what_the_transform_draws():
    assert run(seed=1) == run(seed=1) == run(seed=1, num_workers=1)
    assert run(seed=1) != run(seed=2)
    assert len({value % 1 for value in run(seed=1)}) == 8


def test_without_a_seed_the_transform_draws_as_before():
    assert run() != run()


class OfAlbumentations(Own):
    def set_random_seed(self, seed: int) -> None:
        reseed(self, seed)


class OfMonai(Own):
    def set_random_state(self, seed: int | None = None, state: object = None) -> None:
        assert seed is not None
        reseed(self, seed)


@pytest.mark.parametrize("kind", [OfAlbumentations, OfMonai])
def test_transforms_are_seeded_by_their_own_methods(kind):
    def draw(seed: int) -> list[float]:
        samples = Samples(seeded(kind()))
        return [float(x) for x in shmloader.DataLoader(samples, batch_size=None, seed=seed)]

    assert draw(1) == draw(1) != draw(2)


def test_a_transform_without_such_a_method_is_refused():
    with pytest.raises(TypeError, match="SeededTransform"):
        seeded(Own())
