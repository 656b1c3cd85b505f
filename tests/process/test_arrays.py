"""Datasets that are arrays are gathered, and give torch's batches, bit for bit."""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import shmloader
from shmloader.batch import arrays as arrays_module
from shmloader.batch.arrays import ArrayFetcher, Arrays, find_columns, may_be_columns
from shmloader.batch.collator import Timer
from shmloader.memory.arena import Arena
from shmloader.memory.flat import FlatLayout, FlatReader
from shmloader.memory.writer import SlotWriter
from shmloader.sampling.indices import IndexArray
from tests.parity.compare import TorchLoader, assert_private_tensors, assert_same
from tests.process.support import Calls

LENGTH = 23
ROWS = np.arange(LENGTH * 6, dtype=np.float32).reshape(LENGTH, 2, 3)


class Plain:
    """What torch does, and a mark that it was asked."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.asked = False

    def fetch(self, indices: list[int]) -> Any:
        self.asked = True
        getitems = getattr(self.dataset, "__getitems__", None)
        samples = getitems(indices) if getitems else [self.dataset[index] for index in indices]
        return default_collate(samples)


@pytest.fixture
def arena():
    made = Arena.create(64 << 20, 1)
    yield made
    made.close()


def fetched(dataset: Any, indices: Any, arena: Arena) -> tuple[Any, bool]:
    """What a worker's fetcher makes of a batch, and whether it was gathered."""
    writer, plain, slot = SlotWriter(arena), Plain(dataset), arena.slots[0]
    fetcher = ArrayFetcher(Arrays(dataset, writer), plain, Timer())
    writer.open(slot)
    batch = fetcher.fetch(indices)
    if isinstance(batch, FlatLayout):
        batch = FlatReader(batch).read(slot, None)
    writer.part()
    return batch, not plain.asked


def fetched_here(dataset: Any, indices: Any) -> tuple[Any, bool]:
    plain = Plain(dataset)
    batch = ArrayFetcher(Arrays(dataset), plain, Timer()).fetch(indices)
    return batch, not plain.asked


NUMPY_DTYPES = ["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
TORCH_DTYPES = [
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.float16,
    torch.complex64,
]


def memory_map(mode: str) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        ROWS.tofile(file)
        file.flush()
        return np.memmap(file.name, ROWS.dtype, mode, shape=ROWS.shape)


frozen = ROWS.copy()
frozen.flags.writeable = False
DATASETS: dict[str, Any] = {
    **{f"numpy {name}": ROWS.astype(name) for name in NUMPY_DTYPES},
    **{f"numpy {name}, scalars": ROWS[:, 0, 0].astype(name) for name in NUMPY_DTYPES},
    **{f"{dtype}": TensorDataset(torch.from_numpy(ROWS).to(dtype)) for dtype in TORCH_DTYPES},
    "read-only": frozen,
    "shared": shmloader.share(ROWS),
    **{f"memory map, {mode}": memory_map(mode) for mode in ("r", "r+", "c")},
    "part of a memory map": memory_map("r")[:, 1:, ::2],
    "memory map beside a tensor": StackDataset(memory_map("r"), torch.arange(LENGTH)),
    "turned": ROWS.T.copy().T,
    "every other": np.arange(LENGTH * 4).reshape(LENGTH, 4)[:, ::2],
    "broadcast": np.broadcast_to(np.arange(3), (LENGTH, 3)),
    "unaligned": np.frombuffer(b"x" + ROWS.tobytes(), np.uint8)[1:].view("f4").reshape(LENGTH, 6),
    "no elements": np.empty((LENGTH, 0, 2)),
    "tensor": torch.arange(LENGTH),
    "tensor, turned": torch.arange(LENGTH * 3).view(3, LENGTH).T,
    "tensors": TensorDataset(
        torch.from_numpy(ROWS), torch.arange(LENGTH), torch.arange(LENGTH) > 5
    ),
    "tuple": StackDataset(ROWS, np.arange(LENGTH), torch.arange(LENGTH)),
    "dict": StackDataset(image=ROWS, label=np.arange(LENGTH)),
    "subset": Subset(TensorDataset(torch.from_numpy(ROWS)), [3, 22, -1, 0, 3, *range(18)]),
    "subset of a subset": Subset(Subset(ROWS, range(22, -1, -1)), np.arange(LENGTH)),
    "subset by a tensor": Subset(ROWS, torch.arange(LENGTH).flip(0)),
    "subset of a dict": Subset(StackDataset(a=ROWS, b=ROWS[:, 0]), tuple(range(LENGTH))),
    "subsets side by side": StackDataset(Subset(ROWS, range(LENGTH)), ROWS),
    "one tensor many times": StackDataset(*[torch.arange(LENGTH)] * 5),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", DATASETS)
def test_it_is_gathered_and_the_same_as_torch_s(name, arena):
    dataset = DATASETS[name]
    plain = Plain(dataset)
    # The last one begins and ends as a range does.
    for indices in ([0, 5, 3, 22, 5], [7], list(range(4, 12)), list(range(LENGTH)), [4, 9, 6, 7]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of read-only arrays
            expected = plain.fetch(indices)
        given_as = [indices, IndexArray(np.array(indices, np.int32)), IndexArray(np.array(indices))]
        if indices == list(range(indices[0], indices[0] + len(indices))):
            given_as.append(range(indices[0], indices[-1] + 1))
        for one in given_as:
            for batch, was_gathered in (fetched(dataset, one, arena), fetched_here(dataset, one)):
                assert was_gathered
                assert_same(batch, expected)
                assert_private_tensors(batch)
    assert may_be_columns(dataset)


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(-tensor[index] for tensor in self.tensors)


class Made(TensorDataset):
    """Its tensors are made when they are asked for."""

    @property
    def tensors(self) -> Any:
        return (torch.arange(LENGTH),)

    @tensors.setter
    def tensors(self, _: Any) -> None: ...


class OwnArray(np.ndarray):
    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index] * 2


def with_getitems() -> TensorDataset:
    dataset = TensorDataset(torch.arange(LENGTH))
    dataset.__getitems__ = lambda indices: [torch.tensor(0) for _ in indices]
    return dataset


OTHERS: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: Own(torch.arange(LENGTH)),
    "a subclass with torch's methods": lambda: Made(torch.arange(LENGTH)),
    "an array of a subclass": lambda: np.arange(LENGTH).view(OwnArray),
    "a subclass below a subset": lambda: Subset(Own(torch.arange(LENGTH)), range(LENGTH)),
    "methods of its own": with_getitems,
    "a dataset of one's own": lambda: Calls(torch.tensor, LENGTH),
    "side by side with one": lambda: StackDataset(TensorDataset(torch.arange(LENGTH)), ROWS),
    "texts": lambda: np.array(["a", "b"] * LENGTH),
    "bools as indices": lambda: Subset(ROWS, [True] * 20),
    "whole tensors as indices": lambda: Subset(ROWS, [torch.tensor(n) for n in range(LENGTH)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_torch_s_own_is_left_to_torch(name, arena):
    dataset = OTHERS[name]()
    indices = [1, 0, 5]
    array = IndexArray(np.array(indices))
    for batch, was_gathered in (fetched(dataset, array, arena), fetched_here(dataset, array)):
        assert not was_gathered
        assert_same(batch, Plain(dataset).fetch(indices))


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(LENGTH, requires_grad=True),
        torch.eye(LENGTH).to_sparse(),
        torch.ones(LENGTH, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(LENGTH)),
        ROWS[:, ::-1],
        ROWS.astype(">f4"),
        ROWS.astype("u2"),
        np.arange(3, dtype=np.uint64),
        np.float32(1),
        np.array(5),
        np.zeros(3, dtype="M8[s]"),
        np.zeros(3, dtype=[("a", "i4")]),
    ],
    ids=str,
)
def test_rows_that_torch_makes_something_else_of_are_no_columns(rows):
    assert find_columns(rows) is None


@pytest.mark.sampled(26)
@pytest.mark.parametrize(
    "indices", [[0, LENGTH], [-1, 0], [-LENGTH - 1], [2**70], [True, 0], [], [1.0], ["a"], (1, 2)]
)
@pytest.mark.parametrize("name", ["tensors", "numpy i8", "subset", "dict"])
def test_indices_that_are_not_there_or_no_numbers_are_torch_s_matter(indices, name, arena):
    dataset = DATASETS[name]

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return type(error), str(error)

    expected = outcome(lambda: Plain(dataset).fetch(indices))
    for found in (
        outcome(lambda: fetched(dataset, indices, arena)[0]),
        outcome(lambda: fetched_here(dataset, indices)[0]),
    ):
        if isinstance(expected, tuple):
            assert found == expected
        else:
            assert_same(found, expected)


def test_a_worker_takes_no_memory_of_its_own_for_a_memory_map(tmp_path):
    path, row = tmp_path / "rows", 1_024
    with path.open("wb") as file:
        file.truncate(96 << 20)
    rows = np.memmap(path, np.uint8, "r", shape=(96 << 10, row))
    loader = shmloader.DataLoader(
        rows, batch_size=1_024, shuffle=True, num_workers=1, multiprocessing_context="fork"
    )
    with loader:
        batches = iter(loader)
        process = psutil.Process(batches._workers[0].pid)
        for number, batch in enumerate(batches):
            assert batch.shape == (1_024, row)
            if number == len(loader) - 2:
                own = sum(part.private_dirty for part in process.memory_maps())
    assert own < 48 << 20


@pytest.fixture
def gathered(monkeypatch):
    counted = []
    gather = arrays_module.Arrays.gather

    def counting(self: Any, columns: Any, indices: Any) -> Any:
        counted.append(len(indices))
        return gather(self, columns, indices)

    monkeypatch.setattr(arrays_module.Arrays, "gather", counting)
    return counted


HERE: dict[str, dict[str, Any]] = {
    "in-process": {},
    "threads": {"num_workers": 2, "thread_pool": True},
    "a thread that stays": {"num_workers": 1, "thread_pool": True, "persistent_workers": True},
}


@pytest.mark.parametrize("where", HERE)
def test_the_main_process_gathers_too(where, gathered):
    dataset = Subset(TensorDataset(torch.arange(20), torch.arange(20.0)), list(range(19, 3, -1)))
    options: dict[str, Any] = {"batch_size": 5, **HERE[where]}
    with shmloader.DataLoader(dataset, **options) as loader:
        batches = list(loader)
        assert sorted(gathered) == [1, 5, 5, 5]
        assert_same(batches, list(TorchLoader(dataset, batch_size=5)))
        assert loader.stats().samples == 16
        del gathered[:]
        # A copy of the numbers was made for the first epoch; the next one is to see this.
        dataset.indices[:2] = [4, 4]
        assert_same(list(loader), list(TorchLoader(dataset, batch_size=5)))
        assert sorted(gathered) == [1, 5, 5, 5]
        del batches
    seeded = {"seed": 3, "shuffle": True}
    expected = list(shmloader.DataLoader(Own(torch.arange(9)), 4, **seeded))
    del gathered[:]
    with shmloader.DataLoader(TensorDataset(torch.arange(9)), **seeded, **options) as loader:
        assert [-sample for (batch,) in loader for sample in batch.tolist()] == [
            sample for (batch,) in expected for sample in batch.tolist()
        ]
    assert sorted(gathered) == [4, 5]


def changes_tensors(loader_class: Any) -> Iterator[Any]:
    dataset = TensorDataset(torch.arange(12), torch.zeros(12))
    batches = iter(loader_class(dataset, 2))
    yield next(batches)
    dataset.tensors[1][:] = 5
    yield next(batches)
    dataset.tensors = (torch.arange(12, 24),)
    yield next(batches)
    dataset.tensors = (torch.ones(12, requires_grad=True),)
    stacked = next(batches)[0]
    assert stacked.requires_grad
    yield stacked.detach()
    dataset.tensors = (torch.arange(10),)
    yield from batches


def changes_a_subset(loader_class: Any) -> Iterator[Any]:
    rows = np.arange(12)
    subset = Subset(StackDataset(one=rows, other=torch.arange(12)), range(12))
    batches = iter(loader_class(subset, 2))
    yield next(batches)
    rows += 1
    yield next(batches)
    subset.dataset.datasets["other"] = torch.arange(12, 24)
    yield next(batches)
    subset.indices = [3] * 12
    yield next(batches)
    subset.dataset = Subset(subset.dataset, range(5, 12))
    yield from batches


@pytest.mark.parametrize("walk", [changes_tensors, changes_a_subset])
def test_without_workers_what_is_put_into_a_dataset_is_seen_at_once(walk, gathered):
    def walked(loader_class: Any) -> list[Any]:
        found: list[Any] = []
        try:
            found.extend(walk(loader_class))
        except IndexError as error:
            found.append(str(error))
        return found

    ours = walked(shmloader.DataLoader)
    # Rows that require a gradient are stacked; a row that is not there is not gathered.
    assert len(gathered) == (4 if walk is changes_tensors else 6)
    assert_same(ours, walked(TorchLoader))


def changes_in_place(loader_class: Any, change: Callable[[torch.Tensor], Any]) -> list[Any]:
    rows = torch.arange(12.0).view(6, 2).clone()
    batches = iter(loader_class(rows, sampler=[4, 1, 5, 0], batch_size=2))
    first = next(batches)
    change(rows)
    second = next(batches)
    return [first, second.requires_grad, second.detach()]


@pytest.mark.parametrize(
    "change",
    [
        torch.Tensor.requires_grad_,
        lambda rows: setattr(rows, "data", torch.ones(6, 3)),
        lambda rows: rows.resize_(100, 50).zero_(),
        lambda rows: rows.resize_(6, 1),
    ],
    ids=["needs a gradient", "other data", "larger", "smaller"],
)
def test_without_workers_what_a_tensor_becomes_is_seen_at_once(change):
    assert_same(
        changes_in_place(shmloader.DataLoader, change), changes_in_place(TorchLoader, change)
    )


@pytest.mark.parametrize("where", HERE)
def test_neither_the_rows_nor_a_batch_that_was_gathered_are_kept_from_being_resized(
    where, gathered
):
    rows = torch.arange(12.0)
    with shmloader.DataLoader(rows, sampler=[3, 1, 2, 0], batch_size=4, **HERE[where]) as loader:
        (batch,) = loader
    assert gathered == [4]
    assert batch.resize_(400)[:4].tolist() == [3, 1, 2, 0]
    assert rows.resize_(400)[:12].tolist() == list(range(12))


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 1), (1, 2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("is_last", [False, True], ids=["in order", "channels last"])
def test_channels_that_are_last_stay_so_in_the_main_process(shape, is_last, where, gathered):
    rows = torch.rand(6, *shape)
    if is_last:
        rows = rows.movedim(2, -1).contiguous().movedim(-1, 2)
    options: dict[str, Any] = {"sampler": [5, 2, 4], "batch_size": 2}
    with shmloader.DataLoader(rows, **options, **HERE[where]) as loader:
        assert_same(list(loader), list(TorchLoader(rows, **options)))
    assert is_last or sorted(gathered) == [1, 2]


def doubled(samples: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.stack(samples) * 2


def test_a_user_who_changed_what_collate_makes_of_tensors_is_asked(monkeypatch, gathered):
    loader = shmloader.DataLoader(torch.arange(4), 2)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, doubled)
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    monkeypatch.undo()
    assert gathered == []


def doubling_in_collate(worker_id: int) -> None:
    default_collate_fn_map[torch.Tensor] = doubled


def test_a_worker_whose_collate_was_changed_is_asked_and_gets_lists_of_indices():
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = shmloader.DataLoader
    rows = TensorDataset(torch.arange(4))
    batches = list(loader(rows, 2, worker_init_fn=doubling_in_collate, **options))
    assert [batch.tolist() for (batch,) in batches] == [[0, 2], [4, 6]]


def change(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.tensors = (info.dataset.tensors[0] * 0 + worker_id,)


def test_where_more_is_asked_of_a_worker_it_is_done():
    rows = torch.arange(8)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
    loader = shmloader.DataLoader
    by_worker = list(loader(TensorDataset(rows), worker_init_fn=change, **options))
    assert [batch.tolist() for (batch,) in by_worker] == [[0] * 4, [1] * 4]
    own = list(
        loader(
            TensorDataset(rows),
            collate_fn=lambda samples: [-sample[0] for sample in samples],
            **options,
        )
    )
    assert [int(sample) for batch in own for sample in batch] == [-n for n in range(8)]
    shuffled = loader(TensorDataset(rows), seed=3, shuffle=True, on_error="skip", **options)
    expected = loader(TensorDataset(rows), seed=3, shuffle=True, batch_size=4)
    assert_same(list(shuffled), list(expected))
    with pytest.raises(IndexError, match="Caught IndexError in DataLoader worker process 0"):
        list(loader(TensorDataset(rows), sampler=[5, 9], **options))
