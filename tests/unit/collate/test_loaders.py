"""The same batches from both loaders, with and without workers, written straight into the slot."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader
from shmloader.collate import AsList, Fields, Jagged, Pack, Pad, Ragged, RaggedBatch, Stack
from tests.parity.compare import assert_same
from tests.unit.collate.support import KINDS, as_kind
from tests.unit.memory.support import installed, open_bench, tensors_of

LENGTHS = [9000, 5, 0, 7000, 12, 8000, 1, 3]  # some fields are lent, some are copied out
LISTS = [list(range(length)) for length in LENGTHS]

COLLATES = {
    "Pad": lambda: Fields(
        x=Pad(-1, "left", with_mask=True, with_lengths=True), id=Stack(), s=AsList()
    ),
    "Pack": lambda: Fields(x=Pack(), id=Stack()),
    "Pack, fixed": lambda: Fields(x=Pack(fixed_tokens=30_000, fixed_sequences=9), id=Stack()),
    "Jagged": lambda: Fields(x=Jagged(), id=Stack()),
}


class Texts(Dataset):
    """Dicts with samples of a kind; with "ragged", batches by fields."""

    def __init__(self, kind):
        self.x = as_kind(LISTS, kind)

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"x": self.x[index], "id": index, "s": str(index)}


class Columns(Texts):
    """The same, by fields."""

    def __getitems__(self, indices):
        x = Ragged(self.x.values, self.x.starts[indices], self.x.lengths[indices])
        return RaggedBatch({"x": x, "id": np.array(indices), "s": [*map(str, indices)]})


@pytest.mark.parametrize("kind", ["list", "array", "ragged"])
@pytest.mark.parametrize("name", COLLATES)
def test_both_loaders_make_the_same_batches(kind, name):
    dataset = (Columns if kind == "ragged" else Texts)(kind)
    options = {"batch_size": 4, "collate_fn": COLLATES[name]()}
    expected = list(TorchLoader(Texts("array"), **options))
    assert_same(list(DataLoader(dataset, num_workers=2, **options)), expected)
    if kind == "list":
        assert_same(list(TorchLoader(dataset, num_workers=1, **options)), expected)
    else:
        assert_same(list(DataLoader(dataset, **options)), expected)


@pytest.mark.parametrize("name", COLLATES)
def test_a_pickled_function_makes_the_same_batches(name):
    samples = list(Texts("tensor"))
    copy = pickle.loads(pickle.dumps(COLLATES[name]()))
    assert_same(copy(samples), COLLATES[name]()(samples))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COLLATES)
def test_a_worker_writes_large_fields_into_the_slot_once(kind, name):
    """Writing the batch to the slot copies nothing: what collate put there is only referred to."""
    with open_bench() as bench, installed(bench.writer):
        samples = (Columns if kind == "ragged" else Texts)(kind)
        batch = samples.__getitems__(range(8)) if kind == "ragged" else list(samples)
        bench.writer.is_offered = True
        made = COLLATES[name]()(batch)
        del made["id"]  # numbers have no memory that could be written to
        used_bytes = bench.writer.used_bytes
        bench.encode(made)
        assert bench.writer.used_bytes == used_bytes
        parts = tensors_of(made)
        nested = [each for each in parts if each.is_nested]
        parts += [part for each in nested for part in (each.values(), each.offsets())]
        for each in parts:
            if not each.is_nested:
                assert bench.writer.offset_of(each.data_ptr(), each.nbytes) is not None
        del made, parts, nested, each


def test_an_error_has_the_index_of_the_sample_in_the_dataset():
    samples = [{"x": torch.ones(2)}, {"x": torch.ones(1)}, {"x": torch.ones(1, 1)}]
    loader = DataLoader(samples, 2, sampler=[0, 1, 1, 2], num_workers=1, collate_fn=Fields(x=Pad()))
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="field 'x': sample 1 of the batch is a float32") as caught:
        next(batches)
    text = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    assert "Sample 1 of the batch is index 2 of the dataset." in text
    del batches


class Unindexed(IterableDataset):
    def __iter__(self):
        return iter([[1], 2])


def test_an_error_has_no_index_where_samples_have_none():
    with pytest.raises(ValueError, match="sample 1 of the batch is a number") as caught:
        list(DataLoader(Unindexed(), 2, collate_fn=Pad()))
    assert "of the dataset" not in "".join(getattr(caught.value, "__notes__", []))
