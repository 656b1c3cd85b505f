"""Which datasets only hand out what they hold."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from shmloader.shared.arrays import SharedArray

_ARRAYS = (torch.Tensor, np.ndarray, np.memmap, SharedArray)
_SEQUENCES = (list, tuple, range)


def only_hands_out(dataset: Any) -> bool:
    """Whether to index a dataset runs no code of the user's, so draws no random numbers.

    Exactly these types, since a subclass may do anything: tensors, arrays, lists, tuples and ranges
    themselves, and torch's ``TensorDataset``, ``Subset``, ``ConcatDataset`` and ``StackDataset`` of
    such.
    """
    kind = type(dataset)
    if kind in _ARRAYS or kind in _SEQUENCES:
        return True
    if kind is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    if kind is Subset:
        # An index of another kind (a tensor's subclass, say) is the user's code, too.
        return type(dataset.indices) in (*_ARRAYS, *_SEQUENCES) and only_hands_out(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(only_hands_out, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(only_hands_out, parts.values() if isinstance(parts, dict) else parts))
    return False
