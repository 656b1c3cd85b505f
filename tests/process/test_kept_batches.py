"""What the user keeps is never written again (I9), and never stops the loader (I5)."""

import itertools
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

import shmloader
from shmloader import DataLoader
from tests.parity.compare import assert_same
from tests.process.support import Calls, only

ROWS = 30_000


def own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def plane(index: int) -> torch.Tensor:
    return torch.full((ROWS,), float(index))


def saved_by_autograd(batch: torch.Tensor) -> Any:
    weight = torch.ones(1, requires_grad=True)
    out = weight * batch  # saves batch
    return lambda: torch.autograd.grad(out.sum(), weight, retain_graph=True)[0] / batch.numel()


# Way to keep a batch → what it is read by: its mean, which is its number.
WAYS: dict[str, Any] = {
    "itself": lambda batch: batch.mean,
    "a slice": lambda batch: batch[1:, 100:200].mean,
    "a numpy view": lambda batch: batch.numpy().mean,
    "a slice of a numpy view": lambda batch: batch.numpy()[0, 5:].mean,
    "detach": lambda batch: batch.detach().mean,
    "DLPack": lambda batch: torch.from_dlpack(batch).mean,
    "numpy by DLPack": lambda batch: np.from_dlpack(batch).mean,
    "a memoryview": lambda batch: np.asarray(memoryview(batch.numpy())).mean,
    "a storage": lambda batch: _of_storage(batch.untyped_storage()),
    "view as": lambda batch: batch.view(torch.int32).view(torch.float32).mean,
    "saved by autograd": saved_by_autograd,
    "data": lambda batch: batch.data.mean,
    "as_strided": lambda batch: batch.as_strided((10,), (3,)).mean,
    "unbind": lambda batch: batch.unbind()[1].mean,
    "parameter": lambda batch: torch.nn.Parameter(batch, requires_grad=False).mean,
    "buffer": lambda batch: torch.frombuffer(batch.numpy(), dtype=torch.float32).mean,
}


# Ways that keep one of the two rows → the row.
OF_ONE_ROW = {"a slice": 1, "a slice of a numpy view": 0, "as_strided": 0, "unbind": 1}


def _of_storage(storage: torch.UntypedStorage) -> Any:
    return lambda: torch.tensor(storage, dtype=torch.uint8).view(torch.float32).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("collate", [None, "own"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_kept_of_a_batch_is_never_written_again(way, collate) -> None:
    keep = WAYS[way]
    loader = DataLoader(
        Calls(plane, 100), batch_size=2, num_workers=2,
        collate_fn=None if collate is None else torch.stack,
    )  # fmt: skip
    # Some are kept at all times, and some are dropped, so that slots go round.
    kept: dict[int, Any] = {}
    for place, batch in enumerate(loader):
        kept[place] = keep(batch)
        del batch
        if place % 3:
            kept.pop(place - 4, None)
        for number, read in kept.items():
            assert float(read()) == 2 * number + OF_ONE_ROW.get(way, 0.5)
    assert len(kept) > 16


@pytest.mark.parametrize("collate", [None, own_collate])
def test_a_kept_label_does_not_keep_its_image_s_memory(collate) -> None:
    """Kept batches are copied out in the end; these are lent to the last."""
    loader = DataLoader(
        Calls(lambda n: (plane(n), n), 40), batch_size=2, num_workers=2, collate_fn=collate
    )
    labels = [label for _, label in loader]
    assert torch.cat(labels).tolist() == list(range(40))
    slots = loader.stats().slots
    assert (slots.lent, slots.copied) == (20, 0)


def test_the_dataset_does_not_see_what_the_user_writes_into_a_batch() -> None:
    constant = torch.ones(ROWS)
    loader = DataLoader(Calls(lambda n: constant, 40), num_workers=2, collate_fn=only)
    for batch in loader:
        assert float(batch.mean()) == 1
        batch.zero_()


KINDS: list[Any] = [
    plane,
    lambda index: {"a": torch.tensor([index]), "b": index, "c": float(index)},
    lambda index: (plane(index), index, np.full(7, index)),
    lambda index: [torch.tensor([index + other]) for other in range(300)],
    lambda index: ["text" * 50, str(index)] * 100,
    lambda index: torch.eye(50).mul(index).to_sparse(),
    lambda index: shmloader.empty((ROWS,), torch.float32).fill_(index),
    lambda index: None,
]


def mixed(index: int) -> Any:
    return KINDS[index % len(KINDS)](index)


@pytest.mark.parametrize(("make", "collate"), [(mixed, only), *((one, None) for one in KINDS[:5])])
def test_kept_batches_of_all_kinds_are_those_of_the_main_process(make, collate) -> None:
    """An epoch that is left, whose other batches are dropped, and one whose batches are kept."""
    expected = list(DataLoader(Calls(make, 40), collate_fn=collate))
    options = {"collate_fn": collate, "persistent_workers": True, "num_workers": 1}
    with DataLoader(Calls(make, 40), **options) as loader:
        first = list(itertools.islice(loader, 25))
        assert_same(list(loader), expected)
        assert_same(first, expected[:25])


def test_a_forked_child_never_sees_its_batch_change() -> None:
    context = multiprocessing.get_context("fork")
    go, looked = context.Event(), context.Event()
    results = context.SimpleQueue()

    def look(batches: list[torch.Tensor]) -> None:
        before = [float(batch.mean()) for batch in batches]
        looked.set()
        go.wait(30)
        results.put((before, [float(batch.mean()) for batch in batches]))

    loader = DataLoader(Calls(plane, 60), num_workers=2)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    child = context.Process(target=look, args=[kept])
    child.start()
    looked.wait(30)
    del kept
    for number, batch in enumerate(batches, 3):
        assert float(batch.mean()) == number
        del batch
    go.set()
    assert results.get() == ([0, 1, 2], [0, 1, 2])
    child.join(30)
    child.close()
    results.close()


def test_kept_batches_do_not_stall_a_loader_with_little_shared_memory() -> None:
    loader = DataLoader(Calls(plane, 64), num_workers=2, shm_size=8 * 128 * 1024)
    kept = list(loader)
    assert [float(batch.mean()) for batch in kept] == list(range(64))


def rows_and_more(index: int) -> dict[str, Any]:
    """Lent fields of both kinds of dtype, a field copied alone, and fields copied together."""
    return {
        "large": plane(index),
        "brain": plane(index).bfloat16(),
        "alone": torch.full((9,), index),
        "pair": [torch.full((5,), index, dtype=torch.int16) for _ in range(2)],
    }


# Tensors of a batch, each with a dtype that NumPy has.
PARTS: list[Any] = [
    lambda batch: batch["large"],
    lambda batch: batch["brain"].view(torch.int16),
    lambda batch: batch["alone"],
    lambda batch: batch["pair"][1],
]

VIEWS: list[Any] = [
    lambda tensor: tensor.numpy(),
    lambda tensor: np.asarray(memoryview(tensor[0].numpy())),
    lambda tensor: tensor.detach().numpy(),
    lambda tensor: np.from_dlpack(tensor.data),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("collate", [None, own_collate])
def test_views_of_a_batch_outlive_its_move_to_torchs_shared_memory(collate) -> None:
    loader = DataLoader(
        Calls(rows_and_more, 96), num_workers=2, collate_fn=collate, persistent_workers=True
    )
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for number, batch in enumerate(loader):
        part = PARTS[number % 4](batch)
        view = VIEWS[number // 4 % 4](part)
        kept[number] = view, view.copy()
        part.share_memory_()
        del batch, part
        if number % 3:
            kept.pop(number - 6, None)
        for seen, expected in kept.values():
            assert np.array_equal(seen, expected)
    assert len(kept) > 32
    del view, seen, kept
    # Nothing keeps a slot any more: each batch of another epoch is lent.
    for number, batch in enumerate(loader):
        part = PARTS[number % 4](batch)
        part.share_memory_()
        del batch, part
    assert loader.stats().slots.copied == 0


class Caches:
    """A collate function that keeps what it made, and says what became of it."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.kept: list[tuple[int, Any]] = []

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        number = int(samples[0][0])
        for earlier, tensor in self.kept:
            if float(tensor.mean()) != earlier:
                raise AssertionError(f"batch {earlier} has become {float(tensor.mean())}")
        made = self.make(samples)
        self.kept.append((number, made))
        if len(self.kept) > 5:
            self.kept.pop(1)
        return {"made": made, "number": number}


def by_empty(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples, out=shmloader.empty((len(samples), ROWS)))


def numpy_by_empty(samples: list[torch.Tensor]) -> np.ndarray:
    return by_empty(samples).numpy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "make", [default_collate, by_empty, numpy_by_empty, lambda s: by_empty(s)[:1]]
)
def test_what_a_collate_function_keeps_is_never_written_again(make) -> None:
    loader = DataLoader(
        Calls(plane, 60), num_workers=2, collate_fn=Caches(make), persistent_workers=True
    )
    next(iter(loader))  # worker 1 has answered, and its batch is not taken
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert batch["number"] == number
            assert float(batch["made"].mean()) == number


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_empty_called_in_a_dataset_gives_right_batches(reverse, plain) -> None:
    class Batched:
        def __len__(self) -> int:
            return 24

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            made = {index: shmloader.empty(1000).fill_(index) for index in reversed(indices)}
            return [made[index] for index in (reversed(indices) if reverse else indices)]

    loader = DataLoader(
        Batched(), batch_size=4, num_workers=2,
        collate_fn=None if plain else own_collate,
    )  # fmt: skip
    for number, batch in enumerate(loader):
        expected = [4 * number + k for k in range(4)]
        assert batch.mean(dim=1).tolist() == (expected[::-1] if reverse else expected)


def test_what_code_in_a_worker_writes_to_a_batch_later_does_not_reach_the_user() -> None:
    made: list[torch.Tensor] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        for earlier in made:
            earlier.fill_(99)
        made.append(by_empty(samples))
        return made[-1]

    loader = DataLoader(Calls(plane, 3), num_workers=1, prefetch_factor=3, collate_fn=collate)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    assert [float(batch.mean()) for batch in kept] == [0, 1, 2]


def test_the_same_tensor_twice_shares_its_memory_and_parts_are_views() -> None:
    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        made = by_empty(samples)
        return {"a": made, "b": made, "row": made[1], "back": made.flip(0), "t": made.T}

    loader = DataLoader(Calls(plane, 40), batch_size=2, num_workers=2, collate_fn=collate)
    for number, batch in enumerate(loader):
        low, high = 2 * number, 2 * number + 1
        assert batch["a"].mean(dim=1).tolist() == [low, high]
        assert batch["back"].mean(dim=1).tolist() == [high, low]
        assert batch["t"].mean(dim=0).tolist() == [low, high]
        batch["a"].fill_(-5)
        assert float(batch["b"].max()) == float(batch["row"].max()) == -5
        assert batch["t"].max() == -5
        assert batch["back"].mean(dim=1).tolist() == [high, low]


class KeepsAtItsEnd(IterableDataset):
    kept: Any = None

    def __iter__(self) -> Any:
        if self.kept is not None:
            yield self.kept.clone()
        for n in range(2):
            yield torch.full((20_000,), float(n))
        self.kept = shmloader.empty((20_000,)).fill_(-1)


def test_memory_taken_at_the_end_of_a_stream_is_never_written_again() -> None:
    loader = DataLoader(KeepsAtItsEnd(), batch_size=None, num_workers=1, persistent_workers=True)
    assert [batch[0] for batch in loader] == [0, 1]
    for _ in range(3):
        batches = [(batch.min().item(), batch.max().item()) for batch in loader]
        assert batches == [(-1, -1), (0, 0), (1, 1)]


def test_samples_in_the_slot_are_not_written_over_by_the_batch_made_of_them() -> None:
    def items(index: int) -> list[torch.Tensor]:
        made = [shmloader.empty((30_000,)).fill_(value) for value in (0, 1, 2)]
        return made[::-1]

    loader = DataLoader(Calls(items, 3), batch_size=None, collate_fn=default_collate, num_workers=1)
    for batch in loader:
        assert batch[:, 0].tolist() == [2, 1, 0]
        assert batch[:, -1].tolist() == [2, 1, 0]


def test_parts_that_are_copies_with_torch_do_not_share_memory() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        whole = default_collate(samples)
        array = np.arange(50_000)
        return {
            "t": whole, "n": whole.numpy(), "m": whole.numpy(),
            "a": torch.from_numpy(array), "b": torch.from_numpy(array), "same": whole,
        }  # fmt: skip

    loader = DataLoader(
        Calls(lambda n: torch.zeros(50_000), 2), batch_size=2, collate_fn=collate, num_workers=1
    )
    (batch,) = loader
    batch["n"][:] = 1
    batch["a"][:] = 0
    assert not batch["t"].any()
    assert not batch["m"].any()
    assert batch["b"][-1] == 49_999
    assert batch["same"] is batch["t"]


def test_code_that_keeps_every_batch_takes_no_more_shared_memory(slots: Any) -> None:
    class Generates(IterableDataset):
        def __iter__(self) -> Any:
            for n in range(60):
                batch = shmloader.empty((30_000,)).fill_(n)
                yield batch  # still in hand when the batch is answered

    loader = DataLoader(Generates(), batch_size=None, num_workers=1)
    batches = iter(loader)
    for n in range(60):
        batch = next(batches)
        assert batch.min() == batch.max() == n
    assert sum(slots.files().values()) <= 8 * (30_000 * 4 + 4096)  # no more than the slots
