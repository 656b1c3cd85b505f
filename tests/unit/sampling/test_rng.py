"""States of the global generators are restored exactly, including a normal number in waiting."""

import random

import numpy as np
import pytest
import torch

from shmloader.sampling.rng import RngState, kept


@pytest.fixture(autouse=True)
def own_generators():
    """Restore the test process's generators by numpy's and Python's own functions."""
    source = np.random.get_bit_generator()
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    np.random.set_bit_generator(source)
    np.random.set_state(numpy)
    random.setstate(python)
    torch.set_rng_state(of_torch)


def states():
    numpy = np.random.get_state(legacy=False)
    key = numpy["state"].get("key")
    return (
        random.getstate(),
        (numpy["bit_generator"], numpy["has_gauss"], numpy["gauss"]),
        numpy["state"] if key is None else (key.tolist(), numpy["state"]["pos"]),
        torch.get_rng_state().tolist(),
    )


def draw_and_seed():
    random.gauss(0, 1), np.random.randn(), torch.randn(())
    random.seed(1), np.random.seed(1), torch.default_generator.manual_seed(1)
    random.gauss(0, 1), np.random.randn(700), torch.randn(())


@pytest.mark.parametrize("normals", [0, 1, 2, 3])
@pytest.mark.parametrize("uniforms", [0, 5, 623, 624])
def test_all_generators_are_as_before_the_block(normals, uniforms):
    np.random.seed(5)
    np.random.randint(2**31, size=uniforms)
    for _ in range(normals):
        np.random.randn(), random.gauss(0, 1), torch.randn(())
    before = states()
    with kept():
        assert states() == before  # to save them changes nothing
        draw_and_seed()
        assert states() != before
    assert states() == before
    expected = np.random.RandomState()
    expected.set_state(np.random.get_state())
    assert np.random.randn(3).tolist() == expected.randn(3).tolist()


def test_a_bit_generator_of_the_user_s_own_is_put_back_with_its_state():
    own = np.random.PCG64(3)
    np.random.set_bit_generator(own)
    np.random.randn()
    before = states()
    with kept():
        np.random.randn(4)
        np.random.set_bit_generator(np.random.MT19937(3))
    assert np.random.get_bit_generator() is own
    assert states() == before


def test_a_state_of_its_own_continues_where_it_was_left():
    def draws():
        return random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))

    alone = RngState(7, 1)
    with alone.used():
        expected = [draws() for _ in range(4)]
    before, parted = states(), RngState(7, 1)
    found = []
    for _ in range(4):
        with parted.used():
            found.append(draws())
        assert states() == before
        np.random.seed(3)
        before = states()
    assert found == expected
