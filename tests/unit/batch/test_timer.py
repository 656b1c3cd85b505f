"""Which bytes of a batch are counted."""

import numpy as np
import torch

from shmloader.batch.timer import bytes_of


def test_bytes_are_those_of_tensors_and_arrays_in_containers():
    batch = {"a": torch.zeros(10), "b": [np.zeros(3), (torch.zeros(2, dtype=torch.int8), "text")]}
    assert bytes_of(batch) == 40 + 24 + 2
    assert bytes_of("text") == bytes_of([]) == 0


def test_a_container_that_contains_itself_is_counted_once():
    batch: list[object] = [torch.zeros(10)]
    batch.append(batch)
    batch.append({"again": batch})
    assert bytes_of(batch) == 40
