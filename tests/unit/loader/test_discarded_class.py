"""A loader notices where a framework builds another one, or uses it without its callback."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator

import pytest
from torch.utils.data import BatchSampler

from shmloader import DataLoader, ShardedDataLoader
from shmloader.loader.rebuilt import RebuiltLoaderWarning, note_callback


def read_as(module: str, loader: DataLoader) -> object:
    """Read the attribute as code of that module does."""
    return eval("loader.worker_init_fn", {"__name__": module}, {"loader": loader})


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("accelerate.data_loader", r"accelerate builds .*integrations\.accelerate\.prepare"),
        ("ray.train.torch.train_loop_utils", r"Ray Train builds .*integrations\.ray\.prepare"),
    ],
)
def test_a_framework_that_reads_the_arguments_is_named_with_its_remedy_once(module, text):
    loader = DataLoader([1], worker_init_fn=print)
    with pytest.warns(RebuiltLoaderWarning, match=text):
        assert read_as(module, loader) is print
    assert read_as(module, loader) is print


def test_other_code_reads_it_without_a_warning():
    loader = DataLoader([1], worker_init_fn=print)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_as("lightning.pytorch", loader) is print
        loader.worker_init_fn = len
        assert vars(loader)["worker_init_fn"] is len
        assert pickle.loads(pickle.dumps(loader)).worker_init_fn is len
        assert copy.copy(loader).worker_init_fn is len


def called_as(module: str, code: str, loader: DataLoader) -> None:
    """Run code of that module, which has the loader."""
    exec(code, {"__name__": module, "loader": loader})


LIGHTNING = ["lightning.pytorch", "pytorch_lightning"]


@pytest.mark.parametrize("package", LIGHTNING)
def test_that_lightning_saves_states_without_the_callback_is_told_once(package):
    module = f"{package}.utilities.combined_loader"
    loader = DataLoader([1])
    with pytest.warns(UserWarning, match=r"Lightning saves .*LoaderCallback\(\) to the callbacks"):
        called_as(module, "states = [one.state_dict() for one in [loader]]", loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called_as(module, "loader.state_dict()", loader)
        other = DataLoader([1])
        other.state_dict()
        note_callback(other)
        called_as(module, "loader.state_dict()", other)


@pytest.mark.parametrize("package", LIGHTNING)
def test_that_lightning_cuts_epochs_that_roll_over_is_told_once_and_from_the_second_on(package):
    module = f"{package}.utilities.combined_loader"
    loaders = [DataLoader([1], last_batch="rollover") for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in loaders:
            called_as(module, "iter(loader)", loader)
        note_callback(loaders[1])
        called_as(module, "iter(loader)", loaders[1])
        iter(loaders[2])
    with pytest.warns(UserWarning, match="Lightning ends each epoch after as many batches"):
        called_as(module, "iter(loader)", loaders[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called_as(module, "iter(loader)", loaders[0])


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


def test_a_loader_whose_constructor_failed_has_no_such_attribute():
    with pytest.raises(AttributeError, match="no attribute 'worker_init_fn'"):
        DataLoader.__new__(DataLoader).worker_init_fn  # noqa: B018
