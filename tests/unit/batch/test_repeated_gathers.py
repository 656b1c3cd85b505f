"""A batch with the layout of the last one is gathered by one call, which finds all rows itself."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from shmloader import TokenBlocks
from shmloader.arrow import ArrowTable
from shmloader.batch.arrays import ArrayFetcher, Arrays
from shmloader.batch.collator import Timer
from shmloader.memory import rows as rows_module
from shmloader.memory.arena import Arena
from shmloader.memory.flat import FlatLayout, FlatReader
from shmloader.memory.rows import RowSource
from shmloader.memory.writer import SlotWriter
from shmloader.sampling.indices import IndexArray
from tests.parity.compare import assert_same

pytestmark = pytest.mark.skipif(
    rows_module._gather_fields is None, reason="installed without a compiler"
)

LENGTH = 40
NUMBERS = np.arange(LENGTH * 6).reshape(LENGTH, 6)


def in_chunks(values: Any, kind: Any, cuts: tuple[int, ...] = (0, 1, 9, 9, 31, LENGTH)) -> Any:
    """Return a column in chunks, of which every other one is a slice of a longer array."""
    whole = pa.array(values, kind)
    slices = [whole[start:stop] for start, stop in itertools.pairwise(cuts)]
    return pa.chunked_array(
        [one if n % 2 else pa.array(one.to_pylist(), kind) for n, one in enumerate(slices)]
    )


def make_table(lists: Any = NUMBERS.tolist()) -> ArrowTable:  # noqa: B008 - never changed
    columns = {
        "ids": in_chunks(lists, pa.list_(pa.int32())),
        "mask": in_chunks(lists, pa.large_list(pa.uint8()), (0, 20, LENGTH)),
        "pair": in_chunks(NUMBERS[:, :2].tolist(), pa.list_(pa.float64(), 2)),
        "id": in_chunks(NUMBERS[:, 0], pa.int64()),
        "one": pa.chunked_array([pa.array(NUMBERS[:, 1], pa.float32())]),
    }
    return ArrowTable(pa.table(columns), format="torch")


DATASETS: dict[str, Callable[[], Any]] = {
    "an array": lambda: NUMBERS,
    "tensors": lambda: TensorDataset(torch.from_numpy(NUMBERS), torch.arange(LENGTH) > 5),
    "a subset": lambda: Subset(TensorDataset(torch.from_numpy(NUMBERS)), range(LENGTH)[::-1]),
    "subsets": lambda: StackDataset(a=Subset(NUMBERS, [*range(1, LENGTH), 0]), b=NUMBERS[:, 1]),
    "blocks": lambda: TokenBlocks(NUMBERS.astype(np.uint16).reshape(-1), 6),
    "a table": make_table,
    "a subset of a table": lambda: Subset(make_table(), range(LENGTH)[::-1]),
}


class Worker:
    """A worker's fetcher with one slot."""

    def __init__(self, dataset: Any) -> None:
        self.arena = Arena.create(1 << 20, 1)
        self.writer, self._dataset = SlotWriter(self.arena), dataset
        self._fetcher = ArrayFetcher(Arrays(dataset, self.writer), self, Timer())
        self.was_left = False

    def fetch(self, indices: list[int]) -> Any:
        """Make a batch that is not gathered."""
        self.was_left = True
        return default_collate([self._dataset[index] for index in indices])

    def batch(self, indices: Any) -> Any:
        self.was_left = False
        self.writer.open(self.writer.slot)
        made = self._fetcher.fetch(IndexArray(np.array(indices, np.int32)))
        if isinstance(made, FlatLayout):
            made = FlatReader(made).read(self.writer.slot, None)
        self.writer.part()
        return made


@pytest.fixture
def make():
    made = []

    def make_worker(dataset: Any) -> Worker:
        made.append(Worker(dataset))
        return made[-1]

    yield make_worker
    for one in made:
        one.arena.close()


@pytest.mark.parametrize("name", DATASETS)
def test_the_rows_are_those_of_the_samples(name, make, monkeypatch):
    dataset = DATASETS[name]()
    worker, samples = make(dataset), [dataset[index] for index in range(LENGTH)]
    worker.batch([0, 5, 39])
    # Only the one call gathers from now on.
    monkeypatch.setattr(RowSource, "write", None)
    monkeypatch.setattr(RowSource, "copy", None)

    @given(st.lists(st.integers(0, LENGTH - 1), min_size=3, max_size=3))
    def check(indices):
        batch = worker.batch(indices)
        assert not worker.was_left
        assert_same(batch, default_collate([samples[index] for index in indices]))

    check()


def test_a_batch_of_another_size_or_of_lists_of_another_length_is_not_repeated(make):
    lists = NUMBERS.tolist()
    lists[7] = lists[7][:2]
    dataset = make_table(lists)
    worker = make(dataset)
    for indices in ([0, 1, 2], [3, 4], [5, 6, 8, 39], [9, 10, 11, 12]):
        assert_same(worker.batch(indices), default_collate([dataset[one] for one in indices]))
        assert not worker.was_left
    with pytest.raises(RuntimeError, match="equal size"):
        worker.batch([3, 4, 7, 5])
    assert worker.was_left
    assert_same(worker.batch([7, 7]), default_collate([dataset[7], dataset[7]]))


@pytest.mark.parametrize("change", ["set", "transpose", "move"])
def test_a_tensor_that_has_changed_in_place_is_read_as_it_is(change, make):
    tensor = torch.arange(36).view(6, 6)
    dataset = TensorDataset(tensor)
    worker = make(dataset)
    worker.batch([0, 1])
    if change == "set":
        tensor.set_(torch.arange(36, 72).view(6, 6))
    elif change == "transpose":
        tensor.t_()
    else:
        tensor.untyped_storage().resize_(1 << 20)
    tensor[3] += 100
    for indices in ([3, 0], [5, 3]):
        assert_same(worker.batch(indices), default_collate([dataset[one] for one in indices]))


def test_a_batch_behind_another_one_in_its_slot_is_not_repeated(make):
    worker = make(TensorDataset(torch.arange(12)))
    worker.batch([1, 2])
    worker.writer.open(worker.writer.slot)
    layouts = [worker._fetcher.fetch(IndexArray(np.array(indices))) for indices in ([3, 4], [5, 6])]
    batches = [FlatReader(one).read(worker.writer.slot, None) for one in layouts]
    assert [batch[0].tolist() for batch in batches] == [[3, 4], [5, 6]]
    assert worker.batch([7, 8])[0].tolist() == [7, 8]


def test_fields_without_an_index_for_each_row_are_refused():
    gather = rows_module._gather_fields
    table = np.zeros((1, 13), np.int64)
    for at in (np.arange(3, dtype=np.int16), np.arange(4)):
        with pytest.raises(ValueError, match="no int32 or int64 for each row"):
            gather(0, table, 3, at)
    assert not gather(0, table, 3, np.arange(3))  # of no types
