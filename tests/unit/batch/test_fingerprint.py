"""Fingerprints are equal for equal samples, and differ for others."""

import collections
import datetime as dt
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from shmloader.batch.fingerprint import fingerprint, fingerprint_of

LARGE = torch.arange(300_000, dtype=torch.int32).reshape(3, 100, 1000)
Pair = collections.namedtuple("Pair", "image label")


class Odd(torch.Tensor):
    """A tensor class whose every operation fails."""

    @classmethod
    def __torch_function__(cls, *_):
        raise AssertionError("an operation")


DIFFERENT = [
    None, True, False, 0, 1, -1, 1.5, 2j, "", "a", "b", "\udc00", b"a", bytearray(b"a"),
    [], [1], [1, 2], [2, 1], (1, 2), {"a": 1}, {"a": 2}, {"b": 1}, [[1], 2], Pair(1, 2),
    "x" * 5000, "x" * 4999 + "y", "y" + "x" * 4999, "x" * 5001, {1}, {1, 2}, {"a", "b", "c"},
    collections.OrderedDict(a=1), dt.date(2020, 1, 1),
    np.array([None, 1], object), torch.nn.Parameter(torch.ones(5)),
    np.float32(1), np.zeros(3), np.ones(3), np.zeros(3, np.float32), np.zeros((0, 2)),
    torch.zeros(3), torch.zeros(4), torch.tensor(1), torch.tensor(1, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.cfloat).conj(), torch.ones(2).as_subclass(Odd),
    torch.zeros(2).as_subclass(Odd), torch.empty(3, device="meta"),
    LARGE, LARGE + 1, LARGE.flip(0), LARGE[:, ::2, ::3], LARGE[:, ::2, 1::3],
]  # fmt: skip


def test_other_samples_have_other_fingerprints():
    found = [fingerprint(sample) for sample in DIFFERENT]
    assert not [sample for at, sample in enumerate(DIFFERENT) if found.index(found[at]) != at]
    assert all(0 <= value < 1 << 32 for value in found)


@pytest.mark.parametrize("change", [0, 299_999, 17])
def test_both_ends_and_the_size_of_a_large_array_count(change):
    other = LARGE.clone()
    other.view(-1)[change] += 1
    assert fingerprint(other) != fingerprint(LARGE)
    assert fingerprint(LARGE.clone()) == fingerprint(LARGE)
    assert fingerprint(LARGE.numpy()) != fingerprint(LARGE.numpy()[:2])


def test_some_samples_of_a_batch_and_their_number_count():
    tries = [], [1], [1, 2], [0, 2], [1, 3], [1, 1, 2], [1] * 9, [1] * 8 + [2], [2] + [1] * 8
    assert len(set(map(fingerprint_of, tries))) == len(tries)


def test_values_that_a_process_makes_anew_count_alike_whether_or_not_they_are_one_object():
    one = {"name": ["x"]}
    for first, second in [
        ([one, one], [one, {"name": ["x"]}]),
        ({"b", "a"}, {"d", "c"}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (open, print),
        (object(), object()),
    ]:
        assert fingerprint([first]) == fingerprint([second])


def test_samples_of_unknown_types_or_that_are_endless_raise_nothing():
    circular: list[object] = []
    circular.append(circular)
    wide: list[object] = [0]
    for _ in range(9):
        wide = [wide] * 9
    for sample in (circular, wide, lambda: 0, sys.stdout, 10**5000):
        assert fingerprint([sample]) == fingerprint([sample])


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process():
    program = (
        "from tests.unit.batch.test_fingerprint import DIFFERENT, fingerprint\n"
        "print([fingerprint(sample) for sample in DIFFERENT])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE, check=True, timeout=60,
    )  # fmt: skip
    assert run.stdout.decode().strip() == str([fingerprint(sample) for sample in DIFFERENT])
