"""A loader's samplers, as frameworks read, wrap and iterate them, and loaders made anew."""

import copy
import inspect
import itertools
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from shmloader import DataLoader, ShardedDataLoader

LENGTH = 23


def read(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def make(kind=DataLoader, *, shuffle=True, **options):
    return kind(torch.arange(LENGTH), 4, shuffle=shuffle, seed=3, **options)


@pytest.mark.parametrize("drop_last", [False, True])
def test_sampler_and_batch_sampler_are_the_order_that_is_delivered(drop_last) -> None:
    loader = make(drop_last=drop_last)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        indices, batches = list(loader.sampler), list(loader.batch_sampler)
        assert sorted(indices) == list(range(LENGTH))
        assert [*itertools.chain(*batches)] == indices[: sum(map(len, batches))]
        assert read(loader) == batches
        assert loader.sampler.epoch == loader.epoch == epoch + 1


def test_frameworks_know_its_kind() -> None:
    assert isinstance(make().sampler, RandomSampler)
    assert type(make().batch_sampler) is BatchSampler
    assert isinstance(make(shuffle=False).sampler, SequentialSampler)
    assert type(make(shuffle=False).batch_sampler) is BatchSampler


@pytest.mark.parametrize("seed", [None, 3])
def test_iterating_the_samplers_disturbs_no_epoch(seed) -> None:
    def epochs(disturb):
        torch.manual_seed(1)
        generator = None if seed is not None else torch.Generator().manual_seed(2)
        loader = DataLoader(torch.arange(LENGTH), 4, shuffle=True, seed=seed, generator=generator)
        found = []
        for _ in range(3):
            for batch in loader:
                found.append(batch.tolist())
                if disturb:
                    state = generator and generator.get_state()
                    list(loader.batch_sampler)
                    next(iter(loader.batch_sampler))
                    if generator is not None:
                        generator.set_state(state)
        return found

    assert epochs(disturb=True) == epochs(disturb=False)


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_an_order_of_its_own(kind, way) -> None:
    expected = make(kind)
    epochs = [read(expected) for _ in range(3)]
    loader = make(kind)
    assert read(loader) == epochs[0]
    copied = way(loader)
    assert copied.sampler is not loader.sampler
    assert copied.batch_sampler.sampler is copied.sampler
    begun = iter(loader)  # epoch 1, while the copy has its own
    first = next(begun).tolist()
    assert [read(copied), read(copied)] == epochs[1:]
    assert [first, *read(begun)] == epochs[1]
    assert loader.sampler.epoch == loader.epoch == 2
    assert read(loader) == epochs[2]


class Counting:
    """A sampler that counts its epochs as it is iterated."""

    epoch = 0

    def set_epoch(self, epoch) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.epoch += 1
        return iter(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


def test_a_sampler_that_counts_by_itself_does_not_overrule_the_epoch_that_was_named() -> None:
    loader = DataLoader(torch.arange(LENGTH), 4, sampler=Counting(), seed=1)
    first = iter(loader)
    loader.set_epoch(9)
    next(first)  # only now the sampler is told of epoch 0, and counts on
    iter(loader)
    assert loader.state_dict()["epoch"] == 9


def test_the_sampler_told_of_the_next_number_before_the_first_epoch_names_it() -> None:
    # As Lightning does where it goes on after a checkpoint at the end of epoch 0: it tells the
    # samplers the number, and calls no load_state_dict.
    whole = make()
    epochs = [read(whole) for _ in range(3)]
    for number in range(3):
        for tell in (lambda x: x.sampler, lambda x: x.batch_sampler, lambda x: x):
            loader = make()
            tell(loader).set_epoch(number)
            assert loader.epoch == loader.sampler.epoch == number
            assert read(loader) == epochs[number]
            tell(loader).set_epoch(number)  # and once more
            assert read(loader) == epochs[number]
    loader.sampler.set_epoch(1)
    loader.set_epoch(0)  # the later call counts, and it counts on from there
    assert [read(loader), read(loader), loader.epoch] == [*epochs[:2], 2]


def test_a_samplers_own_next_number_before_the_first_epoch_counts() -> None:
    def distributed():
        sampler = DistributedSampler(range(LENGTH), 1, 0, seed=5)
        return DataLoader(torch.arange(LENGTH), 4, sampler=sampler, seed=1)

    whole = distributed()
    epochs = [read(whole) for _ in range(2)]
    loader = distributed()
    loader.sampler.set_epoch(1)
    assert loader.epoch == 1
    assert read(loader) == epochs[1]


class Skipping(BatchSampler):
    """A batch sampler without the first batches of another: as accelerate's SkipBatchSampler."""

    def __init__(self, batch_sampler, skip_batches) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self):
        for number, batch in enumerate(self.batch_sampler):
            if number >= self.skip_batches:
                yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


@pytest.mark.parametrize("rebuild", [DataLoader, torch.utils.data.DataLoader])
def test_batches_that_a_framework_skips_are_those_that_were_delivered(rebuild) -> None:
    whole = make()
    epochs = [read(whole) for _ in range(2)]
    loader = make()
    loader.sampler.set_epoch(1)
    rest = rebuild(loader.dataset, batch_sampler=Skipping(loader.batch_sampler, 2))
    assert read(rest) == epochs[1][2:]
    assert read(loader) == epochs[1]


def test_it_is_iterated_inside_a_running_epoch_as_that_epoch() -> None:
    loader = make()
    read(loader)
    iterator = iter(loader)
    next(iterator)
    assert loader.sampler.epoch == 1
    running = list(loader.batch_sampler)
    loader.sampler.set_epoch(7)
    assert loader.sampler.epoch == 7
    assert list(loader.batch_sampler) != running
    assert loader.epoch == 1  # the one that is iterated
    assert [batch.tolist() for batch in iterator] == running[1:]
    assert loader.epoch == 7


def test_a_loaded_state_of_another_epoch_than_the_sampler_is_told_is_discarded(caplog) -> None:
    whole = make()
    epochs = [read(whole) for _ in range(3)]
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    other.sampler.set_epoch(0)
    assert read(other) == epochs[0][1:]
    other.load_state_dict(state)
    other.sampler.set_epoch(2)
    assert read(other) == epochs[2]
    assert "set_epoch(2)" in caplog.text


# What torch's own loader has beside its arguments.
EXTRAS = {
    name
    for name in vars(torch.utils.data.DataLoader(range(3)))
    if name not in inspect.signature(torch.utils.data.DataLoader).parameters
}


def attributes(loader):
    return {name for name in vars(loader) if not name.startswith("_")} - EXTRAS


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DataLoader, {}),
        (DataLoader, {"seed": 1, "shuffle": True, "drop_last": True}),
        (DataLoader, {"num_workers": "auto", "seed": 1}),
        (ShardedDataLoader, {}),
        (ShardedDataLoader, {"rank": 1, "world_size": 2, "shuffle": True}),
        (ShardedDataLoader, {"last_batch": "keep"}),
    ],
)
def test_the_public_attributes_are_arguments_before_and_after_an_epoch(kind, options) -> None:
    with kind(torch.arange(LENGTH), 4, **options) as loader:
        parameters = set(inspect.signature(kind).parameters)
        assert attributes(loader) <= parameters
        for _ in loader:
            break
        loader.stats()
        loader.state_dict()
        assert attributes(loader) <= parameters
        # And the other way round: each argument can be read.
        for name in parameters - {"shuffle"}:
            getattr(loader, name)


def from_attributes(loader, batch_sampler):
    """As ignite does, which keeps all but what a batch sampler replaces."""
    replaced = {"batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"}
    names = [name for name in vars(loader) if not name.startswith("_") and name not in replaced]
    options = {name: getattr(loader, name) for name in names}
    return type(loader)(**options, batch_sampler=batch_sampler)


def predicting(loader):
    """As Lightning does to predict: its wrapper is its own iterator, which iter() begins anew."""
    batches = loader.batch_sampler
    remade = type(batches)(loader.sampler, batch_size=batches.batch_size, drop_last=False)
    return remake(loader, batch_sampler=AsLightnings(remade), batch_size=1, sampler=None)


def distributed(loader, sampler):
    """As Lightning does under ddp: another sampler, and batch samplers of its own classes."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        return remake(loader, sampler=sampler, batch_sampler=None)
    remade = type(batches)(sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
    return remake(loader, batch_sampler=remade, batch_size=1, sampler=None)


def remake(loader, **replaced):
    parameters = inspect.signature(type(loader).__init__).parameters
    options = {
        name: value
        for name, value in vars(loader).items()
        if name in parameters and parameters[name].default is not value
    }
    if replaced.get("batch_sampler") is not None:
        options["drop_last"] = False
    return type(loader)(**{**options, "shuffle": False, **replaced})


class AsLightnings:
    """A wrapper with the attributes of what it wraps."""

    def __init__(self, inner) -> None:
        self.__dict__.update(vars(inner))
        self.inner = inner

    def __iter__(self):
        self.items = iter(self.inner)
        return self

    def __next__(self):
        return next(self.items)

    def __len__(self) -> int:
        return len(self.inner)


class Reproducible(BatchSampler):
    """A batch sampler that lists another's batches first, as ignite's."""

    def __init__(self, batch_sampler) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = batch_sampler.sampler

    def __iter__(self):
        yield from list(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


OPTIONS = {
    "plain": {},
    "seeded": {"seed": 3, "shuffle": True},
    "in order": {"seed": 3},
    "drop_last": {"seed": 3, "shuffle": True, "drop_last": True},
}
OF_SHARDS = {
    **OPTIONS,
    "keep": {"seed": 3, "last_batch": "keep"},
    "discard": {"seed": 3, "shuffle": True, "last_batch": "discard"},
    "both": {"seed": 3, "drop_last": True, "last_batch": "discard"},
}
CELLS = pytest.mark.parametrize(
    ("kind", "name"),
    [*((DataLoader, name) for name in OPTIONS), *((ShardedDataLoader, name) for name in OF_SHARDS)],
)


def made(kind, name):
    if kind is ShardedDataLoader and name == "plain":
        return kind(torch.arange(LENGTH), 4)
    return kind(torch.arange(LENGTH), 4, **OF_SHARDS[name])


@CELLS
def test_a_loader_made_anew_to_predict_delivers_every_sample_once(kind, name) -> None:
    loader = made(kind, name)
    remade = predicting(loader)
    assert type(remade) is kind
    for _ in range(2):
        found = [*itertools.chain(*read(remade))]
        if kind is ShardedDataLoader:  # its sampler is what the rank delivers
            assert set(found) <= set(range(LENGTH))
            assert len(found) == len(loader.sampler)
        else:
            assert sorted(found) == list(range(LENGTH))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_loader_made_anew_for_ranks_keeps_what_happens_to_the_last_batch(name) -> None:
    def rank_of(number):
        sampler = DistributedSampler(range(LENGTH), 2, number, shuffle=False)
        return distributed(made(DataLoader, name), sampler)

    for number in range(2):
        loader, own = rank_of(number), [index % LENGTH for index in range(number, 24, 2)]
        assert type(loader) is DataLoader
        first = [*itertools.chain(*read(loader))]
        assert first == own  # 12 samples in 3 batches
    # With batches of 5, there is something to discard.
    sampler = DistributedSampler(range(LENGTH), 2, 0, shuffle=False)
    loader = distributed(DataLoader(torch.arange(LENGTH), 5, **OPTIONS[name]), sampler)
    sizes = [[len(batch) for batch in read(loader)] for _ in range(2)]
    assert sizes == [[5, 5] if name == "drop_last" else [5, 5, 2]] * 2


@CELLS
def test_a_loader_made_anew_from_its_attributes_delivers_the_same(kind, name) -> None:
    expected = made(kind, name)
    loader = made(kind, name)
    remade = from_attributes(loader, Reproducible(loader.batch_sampler))
    assert type(remade) is kind
    for _ in range(2):
        assert read(remade) == read(expected)


@pytest.mark.parametrize(("kind", "options"), [(DataLoader, {"seed": 1}), (ShardedDataLoader, {})])
def test_a_loader_made_anew_from_an_auto_loader_has_its_number_of_workers(kind, options) -> None:
    loader = kind(torch.arange(LENGTH), 4, num_workers="auto", **options)
    remade = from_attributes(loader, Reproducible(loader.batch_sampler))
    assert remade.num_workers == loader.num_workers


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("epoch", ValueError, "^epoch attribute should not be set after .* is initialized"),
        ("failures", AttributeError, "failures|setter"),
        ("seed", ValueError, "^seed attribute should not be set after .* is initialized"),
        ("last_batch", ValueError, "^last_batch attribute should not be set after"),
    ],
)
def test_an_attribute_without_an_effect_cannot_be_set(name, error, text) -> None:
    for kind in (ShardedDataLoader, DataLoader)[: 1 if name == "last_batch" else 2]:
        loader = kind(torch.arange(LENGTH), 4)
        with pytest.raises(error, match=text):
            setattr(loader, name, 1)
        loader.something = 1  # the user's own
        loader.timeout = 0
        assert read(loader) == read(kind(torch.arange(LENGTH), 4))


def test_a_subclass_may_have_attributes_of_these_names() -> None:
    class Own(DataLoader):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            self.rank, self.seed, self.epoch = "rank", 5, 7

    loader = Own(torch.arange(LENGTH), 4)
    assert (loader.rank, loader.seed, loader.epoch) == ("rank", 5, 7)
    assert len(read(loader)) == 6


class Noting:
    """As Lightning's to predict, which has the attributes of a batch sampler that it wraps."""

    __module__ = "lightning.overrides"

    def __init__(self, batches: BatchSampler, *, keeps: bool) -> None:
        self.__dict__.update(vars(batches))
        self.wrapped = batches if keeps else batches.__iter__

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.wrapped if isinstance(self.wrapped, BatchSampler) else self.wrapped())


def test_to_predict_a_sharded_loader_leaves_out_what_it_is_padded_with_or_says_that_it_does_not():
    def predicted(*, keeps: bool) -> list[int]:
        found = []
        for rank in range(2):
            loader = ShardedDataLoader(range(5), 2, rank=rank, world_size=2)
            batches = BatchSampler(loader.sampler, 2, drop_last=False)
            noting = Noting(batches, keeps=keeps)
            remade = ShardedDataLoader(range(5), batch_sampler=noting, rank=rank, world_size=2)
            found += [int(row) for batch in remade for row in batch]
        return sorted(found)

    assert predicted(keeps=True) == [0, 1, 2, 3, 4]
    with pytest.warns(UserWarning, match="this release of Lightning is not known"):
        assert len(predicted(keeps=False)) > 5
