"""Fingerprints are equal for equal samples, and differ for others."""

import collections
import dataclasses
import datetime as dt
import decimal
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from shmloader.batch.dataset_checkpoint import chained
from shmloader.batch.fingerprint import fingerprint, fingerprint_of

LARGE = torch.arange(300_000, dtype=torch.int32).reshape(3, 100, 1000)
Pair = collections.namedtuple("Pair", "image label")


class Hostile:
    """An object whose code must not run."""

    def __init__(self, value):
        object.__setattr__(self, "value", value)

    def __getattribute__(self, name):
        raise AssertionError(name)

    def __getattr__(self, name):
        raise AssertionError(name)

    def __eq__(self, other):
        raise AssertionError("==")

    __hash__ = None


@dataclasses.dataclass
class Named:
    value: int


class Words(collections.UserDict):
    pass


class Text(str):
    __slots__ = ()


class Odd(torch.Tensor):
    """A tensor class whose every operation fails."""

    @classmethod
    def __torch_function__(cls, *_):
        raise AssertionError("an operation")


def nested(depth, value):
    for _ in range(depth):
        value = [value]
    return value


DIFFERENT = [
    None, True, False, 0, 1, -1, 1.5, 2j, "", "a", "b", "\udc00", b"a", bytearray(b"a"),
    [], [1], [1, 2], [2, 1], (1, 2), {"a": 1}, {"a": 2}, {"b": 1}, [[1], 2], Pair(1, 2),
    "x" * 5000, "x" * 4999 + "y", "y" + "x" * 4999, "x" * 5001, {1}, {2}, {1, 2},
    frozenset({1}), Hostile(1), Hostile(2), Named(1), Named(2), Words(a=1), Words(a=2),
    collections.OrderedDict(a=1),
    collections.defaultdict(int, a=1), Text("a"), decimal.Decimal(1), decimal.Decimal(2),
    pathlib.Path("a"), pathlib.Path("b"), dt.date(2020, 1, 1), dt.date(2020, 1, 2),
    range(3), range(4), 10**5000, 10**5000 + 1, -(10**5000), 2**63, 2**64, ...,
    [1] * 32 + [2] * 8, [1] * 32 + [3] * 8, [1] * 40 + [2], nested(6, 1), nested(6, 2),
    dict.fromkeys(range(100), 1), dict.fromkeys(range(101), 1),
    np.array([None, 1], object), torch.nn.Parameter(torch.ones(5)),
    torch.tensor([1.0, 2.0]).to_sparse(), torch.tensor([1.0, 3.0]).to_sparse(),
    np.float32(1), np.int64(1), np.zeros(3), np.ones(3), np.zeros(3, np.float32), np.zeros((0, 2)),
    np.array("ab"), np.array(["ab", "cd"]), np.datetime64("2020-01-01"), np.array([None], object),
    torch.zeros(3), torch.zeros(4), torch.ones(3, requires_grad=True), torch.tensor(1),
    torch.tensor(1, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.cfloat).conj(),
    torch.eye(3).to_sparse(), torch.empty(3, device="meta"),
    LARGE, LARGE + 1, LARGE.flip(0), LARGE[:, ::2, ::3],
    LARGE[:, ::2, 1::3], LARGE[0].expand(2, 100, 1000),
]  # fmt: skip


def test_other_samples_have_other_fingerprints():
    found = [fingerprint(sample) for sample in DIFFERENT]
    twice = [sample for at, sample in enumerate(DIFFERENT) if found.index(found[at]) != at]
    assert not twice
    assert len(set(found)) == len(found)
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


def test_large_and_odd_samples_take_little_time_and_raise_nothing():
    deep = nested(2000, 1)
    circular = []
    circular.append(circular)
    wide = [[[[0] * 32] * 32] * 32] * 32
    odd = torch.ones(3).as_subclass(Odd)
    inner = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for sample in (deep, circular, wide, odd, inner, print, Odd, dict.fromkeys(range(99), wide)):
        assert fingerprint([sample]) == fingerprint([sample])


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process():
    program = (
        "from tests.unit.batch.test_fingerprint import DIFFERENT, fingerprint\n"
        "print([fingerprint(sample) for sample in DIFFERENT])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True,
        timeout=60,
    )  # fmt: skip
    assert run.stdout.decode().strip() == str([fingerprint(sample) for sample in DIFFERENT])


def test_the_order_of_fingerprints_counts():
    assert chained(chained(0, 1), 2) != chained(chained(0, 2), 1)
