"""What trainers and toolkits change of loaders: their classes, and attributes made already.

The classes are tried by a changed import, and under `install()`. Attributes that are replaced count
when the next epoch begins.
"""

import concurrent.futures
import contextlib
import copy
import gc
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SubsetRandomSampler
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader, ShardedDataLoader
from tests.process import loader_classes as classes
from tests.process.support import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:executor= lets any idle worker:UserWarning")

LENGTH = 10

WORKERS: dict[str, dict[str, Any]] = {
    "in process": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.fixture(params=WORKERS)
def workers(request) -> dict[str, Any]:
    return WORKERS[request.param]


@pytest.fixture(params=[*WORKERS, "threads", "executor"])
def any_workers(request) -> Iterator[dict[str, Any]]:
    if request.param in WORKERS:
        yield WORKERS[request.param]
    elif request.param == "threads":
        yield {"num_workers": 2, "thread_pool": True}
    else:
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            yield {"num_workers": 2, "executor": executor}


@contextlib.contextmanager
def by_import() -> Iterator[Any]:
    yield DataLoader
    gc.collect()


@contextlib.contextmanager
def by_install() -> Iterator[Any]:
    """Run on our engine by `install()`, with torch's class."""
    with shmloader.installed() as report:
        yield TorchLoader
        gc.collect()
    assert {one.engine for one in report.loaders} == {"shmloader"}, str(report)


@pytest.fixture(params=[by_import, by_install])
def ours(request) -> Any:
    """A block in which loaders run on our engine; it yields the base class."""
    return request.param


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def shuffled(make: Callable[[Any], Any], base: Any, workers: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    return make(base)(Numbers(LENGTH), batch_size=3, shuffle=True, **workers)


class Counted(Numbers):
    loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["loaded"]


def in_order(make: Callable[[Any], Any], base: Any, workers: dict[str, Any]) -> Any:
    return make(base)(Numbers(LENGTH), batch_size=3, **workers)


MAKES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "YOLO": lambda base, workers: shuffled(classes.detection_trainer, base, workers),
    "timm": lambda base, workers: shuffled(classes.image_trainer, base, workers),
    "timm, unbatched": lambda base, workers: classes.image_trainer(base)(
        torch.arange(5), batch_size=None, **workers
    ),
    "SpeechBrain": lambda base, workers: shuffled(classes.speech_toolkit, base, workers),
    "SpeechBrain, looped": lambda base, workers: classes.Looped(
        shuffled(classes.speech_toolkit, base, workers), 3
    ),
    "fastai": lambda base, workers: in_order(classes.notebook, base, workers),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_several_epochs_are_as_with_torch(make, ours, workers):
    loader = make(TorchLoader, workers)
    loader.ends_workers = False
    expected = [values(loader) for _ in range(3)]
    del loader
    with ours() as base:
        loader = make(base, workers)
        assert [values(loader) for _ in range(3)] == expected
        del loader


def test_an_endless_iterator_is_made_anew_in_mid_run(ours, workers):
    def run(base: Any, *, ends_workers: bool = True) -> list[Any]:
        loader = shuffled(classes.detection_trainer, base, workers)
        loader.ends_workers = ends_workers
        got = [values(loader), values(itertools.islice(loader, 2))]
        loader.reset()
        return [*got, values(loader), values(loader)]

    expected = run(TorchLoader, ends_workers=False)
    with ours() as base:
        assert run(base) == expected


@pytest.mark.parametrize("make", [classes.detection_trainer, classes.image_trainer])
@pytest.mark.parametrize("seed", [None, 5])
def test_an_endless_iterator_is_resumed(make, seed, workers):
    def loader_of(order: int) -> Any:
        torch.manual_seed(order)
        return make(DataLoader)(Numbers(LENGTH), batch_size=3, shuffle=True, seed=seed, **workers)

    loader = loader_of(7)
    assert len(values(loader)) == 4
    values(itertools.islice(loader, 2))
    state = loader.state_dict()
    # Without a seed, each pass draws a seed of its own from torch's global generator.
    later = 1 if seed is None else 5
    expected = values(itertools.islice(itertools.chain(loader, loader), 1 + later))
    other = loader_of(8)
    other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"call iter\(\) of the loader again"):
        next(other.iterator)
    other.iterator = other._get_iterator()
    assert values(itertools.islice(itertools.chain(other, other), 1 + later)) == expected


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dataset", [Numbers(LENGTH), torch.arange(LENGTH)], ids=["ints", "tensor"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_is_restored_by_iterators_that_a_toolkit_has_changed(
    dataset, shuffle, ours, workers, monkeypatch
):
    classes.patch_iterators(monkeypatch)

    def run(base: Any) -> list[Any]:
        loader = classes.speech_toolkit(base)(dataset, batch_size=3, shuffle=shuffle, **workers)
        next(iterator := iter(loader))
        next(iterator)
        position = loader.save()
        del iterator, loader
        gc.collect()
        torch.manual_seed(7)
        loader = classes.speech_toolkit(base)(dataset, batch_size=3, shuffle=shuffle, **workers)
        loader.restore(position)
        return [position, values(loader), values(loader)]

    expected = run(TorchLoader)
    assert len(expected[1]) == 2
    with ours() as base:
        assert run(base) == expected


@pytest.mark.parametrize("seed", [None, 3])
def test_an_epoch_that_a_toolkit_has_begun_has_no_state_of_ours(seed, monkeypatch):
    classes.patch_iterators(monkeypatch)
    loader = classes.speech_toolkit(DataLoader)(Numbers(LENGTH), 3, shuffle=True, seed=seed)
    expected = values(loader)
    if seed is not None:
        loader.set_epoch(0)
    loader.restore(2)
    iterator = iter(loader)
    first = next(iterator).tolist()
    assert first == expected[2] or seed is None
    with pytest.raises(RuntimeError, match="drawn batches from the sampler"):
        loader.state_dict()
    assert len(values(iterator)) == 1
    next(iter(loader))
    assert loader.state_dict()["position"] == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_only_looks_like_a_loader_runs_as_before(num_workers):
    loader = classes.FakeLoader(Numbers(LENGTH), 3, num_workers)
    expected = [values(loader), values(loader)]
    with shmloader.installed() as report:
        assert [values(loader), values(loader)] == expected
    assert report.loaders == ()


def overriding(base: Any) -> Any:
    class Overriding(base):
        """Returns an iterator that is none of torch's, around torch's."""

        made = 0

        def _get_iterator(self) -> Any:
            self.made += 1
            return map(torch.neg, super()._get_iterator())

    return Overriding


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_subclass_may_return_any_iterator(ours, num_workers):
    with ours() as base:
        loader = overriding(base)(Numbers(4), batch_size=2, num_workers=num_workers)
        assert [values(loader), values(loader)] == [[[0, -1], [-2, -3]]] * 2
        assert loader.made == 2
        assert len(loader) == 2
        del loader


def with_torchs_own_iter(base: Any) -> Any:
    """A class whose `__iter__` is written as torch's is."""

    class Copied(base):
        def __iter__(self) -> Any:
            if self.persistent_workers and self.num_workers > 0:
                if self._iterator is None:
                    self._iterator = self._get_iterator()
                else:
                    self._iterator._reset(self)
                return self._iterator
            return self._get_iterator()

    return Copied


def test_a_subclass_may_reset_the_iterator_of_persistent_workers(ours, workers):
    expected = shuffled(with_torchs_own_iter, TorchLoader, workers)
    expected = [values(expected) for _ in range(3)]
    with ours() as base:
        loader = shuffled(with_torchs_own_iter, base, workers)
        assert [values(loader) for _ in range(3)] == expected
        del loader


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("dataset", [Numbers(LENGTH), Counted(LENGTH)], ids=["plain", "a state"])
def test_an_epoch_that_began_by_a_reset_is_counted_and_resumed(seed, dataset):
    loader = with_torchs_own_iter(DataLoader)(
        dataset, batch_size=3, shuffle=True, seed=seed, **WORKERS["persistent"]
    )
    first = values(loader)
    iterator = iter(loader)
    begun = [next(iterator).tolist()]
    state = loader.state_dict()
    assert (state["epoch"], state["position"], loader.epoch) == (1, 1, 1)
    rest = values(iterator)
    assert sorted(itertools.chain(*begun, *rest)) == sorted(itertools.chain(*first))
    loader.load_state_dict(state)
    assert values(loader) == rest


def test_persistent_workers_of_an_overriding_class_keep_their_iterator():
    class Kept(DataLoader):
        made = 0

        def _get_iterator(self) -> Any:
            self.made += 1
            return super()._get_iterator()

    loader = Kept(Numbers(4), batch_size=2, **WORKERS["persistent"])
    assert loader._iterator is None
    assert [values(loader), values(loader)] == [[[0, 1], [2, 3]]] * 2
    assert loader.made == 1
    assert loader._iterator is iter(loader)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_subclass_may_decide_what_is_drawn_and_whether_it_is_batched(seed, workers):
    class Decides(DataLoader):
        drawn: Any = ((1, 2), (3,))
        batches = True

        @property
        def _auto_collation(self) -> bool:
            return self.batches

        @property
        def _index_sampler(self) -> Any:
            return [*map(list, self.drawn)] if self.batches else list(self.drawn)

    loader = Decides(Numbers(9), batch_size=4, seed=seed, **workers)
    assert values(loader) == [[1, 2], [3]]
    assert len(loader) == 2
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert values(loader) == [[3]]
    loader.drawn = ((7,),)
    assert values(loader) == [[7]]
    loader.close()
    plain = Decides(Numbers(9), batch_size=4, seed=seed, collate_fn=int)
    plain.batches, plain.drawn = False, (8, 5)
    assert [*plain] == [8, 5]


# Samples of a loader whose attributes are replaced.
COUNT = 12


class Own:
    def __init__(self, *batches: list[int]) -> None:
        self.batches = batches
        self.begun = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.begun += 1
        return iter(self.batches)


def put_by_setattr(loader: Any, name: str, value: object) -> None:
    object.__setattr__(loader, name, value)


def put_by_dict(loader: Any, name: str, value: object) -> None:
    loader.__dict__[name] = value


def put_by_unlocking(loader: Any, name: str, value: object) -> None:
    loader._DataLoader__initialized = False
    setattr(loader, name, value)
    loader._DataLoader__initialized = True


TRICKS = [put_by_setattr, put_by_dict, put_by_unlocking]


def first_of(count: int, loader: Any) -> Iterator[Any]:
    return itertools.islice(loader, count)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("put", TRICKS)
def test_a_batch_sampler_put_in_before_and_between_epochs_is_iterated(any_workers, seed, put):
    loader = DataLoader(Numbers(COUNT), 4, shuffle=True, seed=seed, **any_workers)
    first = Own([1, 2], [3])
    put(loader, "batch_sampler", first)
    assert len(loader) == 2
    assert values(loader) == [[1, 2], [3]]
    assert first.begun  # torch's iterators with workers iterate it twice
    put(loader, "batch_sampler", [[5, 6, 7]])
    assert len(loader) == 1
    assert values(loader) == [[5, 6, 7]]
    put(loader, "batch_sampler", BatchSampler(range(4), 3, drop_last=True))
    assert len(loader) == 1
    assert values(loader) == [[0, 1, 2]]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("put", TRICKS)
def test_a_sampler_put_in_is_iterated_where_samples_are_not_batched(any_workers, seed, put):
    loader = DataLoader(Numbers(COUNT), batch_size=None, seed=seed, **any_workers)
    put(loader, "sampler", [4, 2])
    assert len(loader) == 2
    assert list(loader) == [4, 2]
    put(loader, "sampler", range(7, 10))
    assert list(loader) == [7, 8, 9]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_sampler_put_into_the_batch_sampler_is_iterated(any_workers, seed):
    loader = DataLoader(Numbers(COUNT), 4, shuffle=True, seed=seed, **any_workers)
    loader.batch_sampler.sampler = [3, 1, 2]
    loader.batch_sampler.batch_size = 2
    assert len(loader) == 2
    assert values(loader) == [[3, 1], [2]]
    loader.batch_sampler.drop_last = True
    assert len(loader) == 1
    assert values(loader) == [[3, 1]]


def test_each_pass_of_an_endless_seeded_order_is_that_of_a_further_epoch():
    plain = DataLoader(Numbers(COUNT), 4, shuffle=True, seed=3)
    expected = [values(plain) for _ in range(3)]
    assert len({str(epoch) for epoch in expected}) == 3
    loader = DataLoader(Numbers(COUNT), 4, shuffle=True, seed=3)
    put_by_setattr(loader, "batch_sampler", classes.Endlessly(loader.batch_sampler))
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(9)]
    assert got == [*expected[0], *expected[1], *expected[2]]
    following, state = values(plain), loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 9)
    for other in (loader, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        other.load_state_dict(state)
        assert values(first_of(3, other)) == following


@pytest.mark.parametrize("seed", [None, 3])
def test_a_dataset_put_in_is_loaded_in_the_order_of_the_sampler(any_workers, seed):
    loader = DataLoader(Numbers(4), 2, seed=seed, **any_workers)
    put_by_setattr(loader, "dataset", torch.arange(100, 200))
    assert len(loader) == 2
    assert values(loader) == [[100, 101], [102, 103]]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda loader: classes.Endlessly(loader.batch_sampler),
        lambda _: [[1, 2, 3, 4]],
        lambda _: BatchSampler(range(COUNT), 3, drop_last=False),
        lambda _: BatchSampler(SubsetRandomSampler(range(COUNT)), 4, drop_last=False),
        lambda _: BatchSampler(range(COUNT), 4, drop_last=True),
    ],
    ids=["endless", "a list", "another size", "another sampler", "drop_last"],
)
def test_a_state_of_the_old_order_does_not_load_into_the_new_one(seed, make):
    loader = DataLoader(Numbers(COUNT), 4, shuffle=True, seed=seed)
    next(iter(loader))
    old = loader.state_dict()
    put_by_setattr(loader, "batch_sampler", make(loader))
    with pytest.raises(ValueError, match="the state does not fit this loader"):
        loader.load_state_dict(old)
    assert len([*first_of(1, loader)]) == 1
    loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("make", [list, classes.Endlessly, lambda batches: Own(*batches)])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sampler_that_differs_by_its_content_alone_is_told_by_the_first_batch(make, seed, ahead):
    loader = DataLoader(Numbers(6), batch_sampler=make([[0, 1], [2, 3], [4, 5]]), seed=seed)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    if ahead:  # a resumed epoch has what its own state began with
        loader.load_state_dict(state)
        assert len(values(first_of(1, loader))) == 1
        state = loader.state_dict()
    put_by_setattr(loader, "batch_sampler", make([[5, 4], [3, 2], [1, 0]]))
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=f"yields another batch {ahead}"):
        next(iter(loader))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_running_epoch_keeps_its_order_and_its_state(any_workers, seed):
    loader = DataLoader(Numbers(COUNT), 4, seed=seed, **any_workers)
    iterator = iter(loader)
    next(iterator)
    put_by_setattr(loader, "batch_sampler", [[1], [2]])
    assert len(loader) == 2
    assert len(iterator) == 3
    state = loader.state_dict()
    assert values(iterator) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert values(loader) == [[1], [2]]
    loader.close()
    again = DataLoader(Numbers(COUNT), 4, seed=seed)
    again.load_state_dict(state)
    assert values(again) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def ranks_of(change: Callable[[Any], object], **options: Any) -> list[list[Any]]:
    both = []
    for rank in (0, 1):
        loader = ShardedDataLoader(torch.arange(8), 2, rank=rank, world_size=2, **options)
        change(loader)
        both.append(values(loader))
        assert len(loader) == len(both[-1])
    return both


def test_a_sharded_loader_deals_the_batches_of_a_batch_sampler_that_is_put_in():
    def change(loader: Any) -> None:
        put_by_setattr(loader, "batch_sampler", [[1, 2], [3], [4], [5, 6]])

    assert ranks_of(change) == [[[1, 2], [4]], [[3], [5, 6]]]


def test_a_wrapper_of_a_ranks_share_is_not_dealt_again():
    class Reversed:
        def __init__(self, batches: Any) -> None:
            self.sampler = batches

        def __len__(self) -> int:
            return len(self.sampler)

        def __iter__(self) -> Iterator[list[int]]:
            return iter([*self.sampler][::-1])

    def change(loader: Any) -> None:
        put_by_setattr(loader, "batch_sampler", Reversed(loader.batch_sampler))

    assert ranks_of(change) == [[[4, 5], [0, 1]], [[6, 7], [2, 3]]]


def test_a_sharded_loader_refuses_samplers_of_ranks_that_are_put_in():
    loader = ShardedDataLoader(torch.arange(8), 2, rank=0, world_size=2)
    loader.batch_sampler.sampler = DistributedSampler(range(8), 2, 0)
    with pytest.raises(ValueError, match="DistributedSampler gives a part"):
        iter(loader)


def test_a_sampler_that_knows_its_loader_does_not_keep_the_workers() -> None:
    class Knows:
        loader: Any = None

        def __iter__(self) -> Any:
            return iter([n for n in range(6) if self.loader is not None])

    sampler = Knows()
    loader = DataLoader(Numbers(6), sampler=sampler, num_workers=1, batch_size=None)
    sampler.loader = loader
    batches = iter(loader)
    sampler.batches = batches  # type: ignore[attr-defined]
    assert next(batches) == 0
    pid = batches._workers[0].pid
    del batches, loader, sampler
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
