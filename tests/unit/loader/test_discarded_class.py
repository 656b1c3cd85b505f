"""A loader notices where a framework builds another one from its attributes."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

from shmloader import DataLoader
from shmloader.loader.rebuilt import RebuiltLoaderWarning


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


def test_a_loader_whose_constructor_failed_has_no_such_attribute():
    with pytest.raises(AttributeError, match="no attribute 'worker_init_fn'"):
        DataLoader.__new__(DataLoader).worker_init_fn  # noqa: B018
