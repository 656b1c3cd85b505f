"""A drop-in in the rest, too: typing, copying, threads, start methods, batches kept for ever."""

import contextlib
import copy
import io
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader
from tests.parity.compare import (
    assert_private_tensors,
    assert_same,
    both_outcomes,
    run_both,
    run_ours,
    run_torch,
    seed_everything,
)
from tests.parity.data import Dice, Made, Squares, dice_collate, draw_some, only
from tests.parity.objects import WHOLE, floats
from tests.parity.ways import THREE, WAYS, WORKERS, Make, compared, with_both_classes
from tests.process.support import WatchedLock, in_thread, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def test_the_class_is_torchs_and_takes_a_type_in_brackets() -> None:
    class OfInts(DataLoader[int]):
        pass

    assert issubclass(OfInts, TorchLoader)
    assert DataLoader.__name__ == "DataLoader"
    for cls in (OfInts, DataLoader[int]):
        assert [batch.tolist() for batch in cls(range(4), batch_size=2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("way", THREE)
def test_a_subclass_may_set_attributes_before_and_override_methods(way: str) -> None:
    def go(base: Any) -> list[Any]:
        class Doubling(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.dataset = "replaced by the base class"
                self.batch_size = "too"
                self.epochs = 0
                super().__init__(*args, **kwargs)

            def __iter__(self) -> Iterator[Any]:
                self.epochs += 1
                return (batch * 2 for batch in super().__iter__())

            def __len__(self) -> int:
                return super().__len__() * 100

        loader = Doubling(range(5), batch_size=2, **WAYS[way])
        out = [batch.tolist() for _ in range(2) for batch in loader]
        return [out, loader.epochs, len(loader), loader.batch_size]

    ours, theirs = both_outcomes(go)
    assert ours == theirs
    assert theirs.value == [[[0, 2], [4, 6], [8]] * 2, 2, 300, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", THREE)
@pytest.mark.parametrize(
    "clone",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy],
    ids=["pickled", "copied", "deeply copied"],
)
def test_a_loader_can_be(clone: Any, way: str) -> None:
    def go(cls: Any) -> list[Any]:
        loader = cls(Squares(9), batch_size=2, shuffle=True, **WAYS[way])
        twin = clone(loader)
        assert type(twin) is cls
        assert twin.batch_size == 2
        with pytest.raises(ValueError, match="batch_size"):
            twin.batch_size = 5
        seed_everything(1)
        mine = list(loader)
        seed_everything(1)
        return [mine, list(twin), list(twin)]

    ours, theirs = both_outcomes(go)
    assert_same(ours.value[:2], theirs.value[:2])
    assert_same(ours.value[0], ours.value[1])
    assert len(ours.value[2]) == 5


@pytest.mark.parametrize("way", THREE)
def test_an_iterator_cannot_be_pickled(way: str) -> None:
    iterator = iter(DataLoader([1, 2], **WAYS[way]))
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iterator)


@with_both_classes(lambda found: found.value[2:] == [2, True, True])
def test_the_iterator_has_what_others_read(cls: Any) -> list[Any]:
    seed_everything()
    loader = cls([1, 2, 3], num_workers=2)
    iterator = iter(loader)
    found = [len(iterator), iterator._base_seed, len(iterator._workers)]
    found += [worker.is_alive() for worker in iterator._workers]
    iterator._shutdown_workers()
    return found


def in_threads(*functions: Callable[[], object]) -> None:
    """Run functions on a thread each, at once, to their ends."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(in_thread(function))


def squares(size: int = 9, **options: Any) -> Make:
    return lambda: {"dataset": Squares(size), "batch_size": 2, **options}


@compared(lambda: {"dataset": Dice(), "batch_size": 4, "shuffle": True}, WORKERS)
def test_a_loader_can_be_iterated_in_another_thread(loader: Any) -> list[Any]:
    seen: list[Any] = []
    in_threads(lambda: seen.extend([*loader, *loader]))
    return seen


@compared(squares(), THREE)
def test_an_iterator_made_in_one_thread_may_be_used_in_another(loader: Any) -> list[Any]:
    iterator = iter(loader)
    seen = [next(iterator)]
    in_threads(lambda: seen.extend(iterator))
    return seen


@compared(squares(4, shuffle=True), ["two workers"])
def test_a_loader_can_be_made_in_the_consumer_of_another(loader: Any) -> list[Any]:
    seen = []
    for batch in loader:
        dataset = Made(lambda n, b=batch: b["square"] + n, 3)
        seen.append((batch, list(type(loader)(dataset, batch_size=2, num_workers=1))))
    return seen


@compared(lambda: {"dataset": range(5), "collate_fn": only}, ["in-process", "one worker"])
def test_a_dataset_may_use_an_in_process_loader(loader: Any) -> list[Any]:
    inner = Made(lambda n: list(type(loader)(Squares(3 + n), batch_size=2)), 5)
    return list(type(loader)(inner, collate_fn=only, num_workers=loader.num_workers))


def test_threads_can_iterate_one_loader_at_once() -> None:
    def drive(loader: Any) -> list[Any]:
        results: list[list[Any]] = [[], [], []]
        in_threads(*(lambda result=result: result.extend(loader) for result in results))
        return results

    expected = run_torch(squares(num_workers=1), list)
    for result in run_ours(squares(num_workers=1), drive):
        assert_same(result, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_thread_that_begins_an_epoch_is_not_disturbed_by_one_that_begins_another(
    num_workers: int,
) -> None:
    begun, other_is_on = threading.Event(), threading.Event()

    class Batches:
        def __iter__(self) -> Iterator[list[int]]:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                wait_until(lambda: other_is_on.is_set() or lock.is_waited_for.is_set())
            return iter([[n] for n in range(6)])

    loader = DataLoader(Squares(6), batch_sampler=Batches(), num_workers=num_workers)
    lock = WatchedLock(loader._parts.begin_lock)
    loader._parts._lock = os.getpid(), lock
    found: list[Any] = []
    with in_thread(lambda: found.extend(loader)):
        assert begun.wait(20)
        batches = iter(loader)
        first = [next(batches) for _ in range(4)]
        other_is_on.set()
    assert_same(found, [*first, *batches])
    assert len(found) == 6


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    begun, go_on, main_pid = threading.Event(), threading.Event(), os.getpid()

    class Batches:
        def __iter__(self) -> Iterator[list[int]]:
            if os.getpid() == main_pid:
                begun.set()
                assert go_on.wait(20)
            return iter([[0], [1]])

    loader = DataLoader(Squares(2), batch_sampler=Batches())
    with in_thread(lambda: list(loader)):
        assert begun.wait(20)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os._exit(len(list(loader)))
        status = os.waitpid(pid, 0)[1]
        go_on.set()
    assert os.waitstatus_to_exitcode(status) == 2


def test_batches_of_one_loader_may_be_the_dataset_of_the_next() -> None:
    first = list(DataLoader(Squares(9), batch_size=2, num_workers=1))
    expected = list(TorchLoader(Squares(9), batch_size=2))
    second = list(DataLoader(first, batch_size=None, num_workers=2))
    assert_same(second, expected)


def test_grad_mode_of_the_consumer_does_not_matter() -> None:
    with torch.no_grad():
        run_both(squares(num_workers=1))
    with torch.inference_mode():
        batches = run_ours(squares(num_workers=1), list)
    assert torch.equal(batches[0]["index"], torch.arange(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("as_object", [False, True], ids=["by name", "by object"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_start_method_is_given(method: str, as_object: bool) -> None:
    context = multiprocessing.get_context(method) if as_object else method
    options = {
        "batch_size": 3, "shuffle": True, "num_workers": 2, "collate_fn": dice_collate,
        "worker_init_fn": draw_some, "multiprocessing_context": context,
    }  # fmt: skip
    assert run_both(lambda: {"dataset": Dice(), **options})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_other_start_methods_send_objects_of_many_kinds(method: str) -> None:
    options = {"collate_fn": only, "multiprocessing_context": method, **WAYS["one worker"]}
    assert run_both(lambda: {"dataset": ByName(6), "persistent_workers": True, **options})


class ByName(Squares):
    """Samples from the table of objects, found by name in the worker."""

    CASES = ("a dataclass", "two views of one storage", "a tensor subclass")

    def __getitem__(self, index: int) -> Any:
        return WHOLE[self.CASES[index % 3]](index)


def images(size: int = 40, side: int = 96) -> dict[str, Any]:
    """Batches of some 600 KB, above every limit for small fields."""

    def sample(n: int) -> dict[str, Any]:
        return {"image": floats(side, side, start=n), "label": n, "small": np.full(3, n)}

    return {"dataset": Made(sample, size), "batch_size": 16, **WAYS["two workers"]}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [8, 400])
def test_all_batches_may_be_kept(size: int) -> None:
    theirs = run_torch(lambda: images(size, 48), list)
    ours = run_ours(lambda: images(size, 48), list)
    assert_same(ours, theirs)
    for batch in ours:
        assert_private_tensors(batch)
    spans = [b["image"].untyped_storage().data_ptr() for b in ours]
    assert len(set(spans)) == len(spans)


@compared(lambda: images(160, 64), ["two workers", "two persistent workers"], quick=1)
def test_what_is_kept_stays_while_the_loader_goes_on(loader: Any) -> list[Any]:
    """Slots go round many times, and others are written over by the user."""
    kept: list[Any] = []
    for _ in range(3):
        for number, batch in enumerate(loader):
            if number % 3 == 0:
                kept.append(batch)
            elif number % 3 == 1:
                kept.append((batch["image"].numpy()[2:4], batch["label"]))
            else:
                kept.append(batch["image"].clone())
                batch["image"].fill_(-1)
                batch["small"].add_(100)
    return kept


def test_saving_a_tensor_saves_its_own_bytes_only() -> None:
    def drive(loader: Any) -> tuple[list[int], list[Any]]:
        sizes, loaded = [], []
        for part in next(iter(loader)).values():
            file = io.BytesIO()
            torch.save(part, file)
            sizes.append(file.tell())
            file.seek(0)
            loaded.append(torch.load(file))
        return sizes, loaded

    (sizes, ours), (torchs, theirs) = run_ours(images, drive), run_torch(images, drive)
    assert sizes == pytest.approx(torchs, abs=200)
    assert_same(ours, theirs)


@compared(images, ["two workers"])
def test_a_batch_can_be_pickled_copied_and_shared_on(loader: Any) -> list[Any]:
    batch = next(iter(loader))
    copies = [pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)]
    copies.append(batch["image"].clone().share_memory_())
    return [*copies, batch["image"].share_memory_().is_shared()]


def test_a_batch_reaches_another_process() -> None:
    def drive(loader: Any) -> list[float]:
        batch = next(iter(loader))
        context = torch.multiprocessing.get_context("fork")
        queue, answers = context.SimpleQueue(), context.SimpleQueue()
        process = context.Process(target=answer, args=(queue, answers), daemon=True)
        process.start()
        queue.put(batch["image"])
        result = answers.get()
        process.join(30)
        return [result, float(batch["image"].double().sum())]

    theirs = run_torch(images, drive)
    ours = run_ours(images, drive)
    resource_sharer.stop(10)  # torch's way of sending a tensor started it
    assert ours == theirs
    assert ours[0] == ours[1]


def answer(queue: Any, answers: Any) -> None:
    torch.set_num_threads(1)  # the parent's thread pool is not here
    answers.put(float(queue.get().double().sum()))


class Touchy:
    """Raises a KeyError for every name that it does not know."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class TouchySampler(Touchy):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class TouchyData(Touchy, Made):
    pass


class TouchyStream(TouchySampler, IterableDataset):
    pass


class TouchyCollate(Touchy):
    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples)


TOUCHY: dict[str, Any] = {
    "sampler": lambda: {"dataset": Squares(6), "sampler": TouchySampler(5, 0, 3)},
    "batch sampler": lambda: {
        "dataset": Squares(6), "batch_sampler": TouchySampler([1, 2], [5]),
    },
    "sampler in torch's": lambda: {
        "dataset": Squares(6), "batch_sampler": BatchSampler(TouchySampler(4, 2, 1), 2, False),
    },
    "dataset": lambda: {"dataset": TouchyData(torch.tensor), "batch_size": None},
    "dataset asked for __getitems__": lambda: {"dataset": TouchyData(int), "batch_size": 2},
    "subset": lambda: {"dataset": Subset(TouchyData(torch.tensor), [3, 1]), "batch_size": None},
    "iterable dataset": lambda: {"dataset": TouchyStream(*range(5)), "batch_size": 2},
    "collate function": lambda: {"dataset": Made(int, 6), "collate_fn": TouchyCollate()},
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", TOUCHY)
def test_an_attribute_that_raises_is_one_that_is_not_there(kind, workers) -> None:
    batches = run_both(lambda: {**TOUCHY[kind](), "num_workers": workers})
    # For __getitems__ torch does ask, and hands on what is raised.
    assert bool(batches) == (kind != "dataset asked for __getitems__")


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "iterable dataset"])
@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_an_attribute_that_raises_does_not_hinder_a_state(kind, options) -> None:
    loader = DataLoader(**TOUCHY[kind](), **options)
    batches = iter(loader)
    next(batches)
    again = DataLoader(**TOUCHY[kind](), **options)
    again.load_state_dict(loader.state_dict())
    assert_same(list(again), list(batches))


def test_a_subclass_may_copy_itself_deeply_by_copy() -> None:
    class Copied(DataLoader):
        def __deepcopy__(self, memo: Any) -> Any:
            return copy.copy(self)

    twin = copy.deepcopy(Copied(Squares(9), batch_size=3))
    assert len(list(twin)) == 3
