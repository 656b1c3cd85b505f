"""Which datasets and samples run no code of the user's."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from shmloader import share
from shmloader.batch.arrays import Arrays, Column, Columns, is_plain_data
from shmloader.memory.rows import RowSource
from shmloader.sampling.indices import IndexArray


class OwnList(list):
    """May draw."""


class OwnTensor(torch.Tensor):
    """May draw."""


class OwnSubset(Subset):
    """May draw."""


class Own(Dataset):
    """Draws."""

    def __getitem__(self, index):
        return torch.rand(())

    def __len__(self):
        return 3


TENSORS = TensorDataset(torch.arange(3))
PATCHED: Any = TensorDataset(torch.arange(3))
PATCHED.__getitems__ = Own().__getitem__


@pytest.mark.parametrize(
    "dataset",
    [
        torch.arange(3),
        np.arange(3),
        share(np.arange(3)),
        [1, 2, 3],
        (1, 2, 3),
        range(3),
        TENSORS,
        Subset(TENSORS, [0, 2]),
        Subset(Subset([1, 2, 3], range(2)), np.arange(1)),
        Subset(TENSORS, share([0, 2] * 1000)),
        ConcatDataset([TENSORS, Subset(TENSORS, [1])]),
        StackDataset(TENSORS, [1, 2, 3]),
        StackDataset(a=TENSORS, b=np.arange(3)),
    ],
)
def test_datasets_of_torch_over_arrays_and_lists_run_no_code_of_the_user_s(dataset) -> None:
    assert is_plain_data(dataset)


@pytest.mark.parametrize(
    "dataset",
    [
        Own(),
        OwnList([1, 2, 3]),
        torch.arange(3).as_subclass(OwnTensor),
        TensorDataset(torch.arange(3).as_subclass(OwnTensor)),
        OwnSubset(TENSORS, [0]),
        PATCHED,
        Subset(PATCHED, [0]),
        Subset(Own(), [0]),
        Subset(TENSORS, OwnList([0])),
        ConcatDataset([TENSORS, Own()]),
        StackDataset(TENSORS, Own()),
        StackDataset(a=TENSORS, b=Own()),
    ],
)
def test_any_other_dataset_may_run_code_of_the_user_s(dataset) -> None:
    assert not is_plain_data(dataset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_indices_that_cannot_be_written_are_gathered_without_a_warning(dtype, index_dtype) -> None:
    """Those out of a message, and those of a shared array."""
    rows = torch.arange(40).to(dtype).reshape(20, 2)
    indices = np.array([7, 3, 3, 19], index_dtype)
    received = pickle.loads(pickle.dumps(IndexArray(indices))).array
    assert not received.flags.writeable
    columns = Columns(0, (), (Column(RowSource(rows)),), 20)
    assert torch.equal(Arrays(None).gather(columns, received), rows[indices])
