"""Batches as a pickle and arrays, as an executor sends them."""

from typing import Any

import numpy as np
import pytest
import torch

from shmloader.pools.executor_task import pack_batch, unpack_batch
from tests.parity.compare import assert_same


def _batch() -> dict[str, Any]:
    image = torch.arange(40_000, dtype=torch.float32).reshape(4, 100, 100)
    return {
        "image": image,
        "part of it": image[1:3, ::2],
        "array": np.arange(6).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "texts": ["a", "b"],
    }


def test_arrays_that_come_are_not_copied_again() -> None:
    body, order, arrays, starts = pack_batch(torch.zeros(100_000))
    batch: Any = unpack_batch(body, order, arrays, starts)
    assert batch.data_ptr() == arrays[0].ctypes.data


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_batch_can_be_changed_and_is_aligned_whatever_the_executor_gives(is_read_only) -> None:
    body, order, arrays, starts = pack_batch(_batch())
    given = []
    for array in arrays:
        odd = np.empty(array.nbytes + 1, np.uint8)[1:]
        odd[:] = array
        odd.flags.writeable = not is_read_only
        given.append(odd)
    batch: Any = unpack_batch(body, order, given, starts)
    assert_same(batch, _batch())
    assert batch["image"].data_ptr() % 16 == 0
    batch["image"] += 1
    batch["array"] += 1


def test_what_the_next_batch_overwrites_is_not_sent() -> None:
    kept = torch.zeros(3)
    packed = pack_batch(kept)
    kept += 1
    assert_same(unpack_batch(*packed), torch.zeros(3))
