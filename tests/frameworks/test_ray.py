"""Ray Train's own `prepare_data_loader`, which builds a loader of torch's class, says so."""

from __future__ import annotations

import importlib
import types
import warnings

import pytest
import ray.train
import torch

import shmloader
from shmloader.loader.rebuilt import RebuiltLoaderWarning
from tests.frameworks.support import Rows

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

# The public function and its present implementation.
MODULE = "ray.train.v2.torch.train_loop_utils"


@pytest.fixture
def group(tmp_path):
    """A process group of this process, which a `DistributedSampler` asks for."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("count", "kind"), [(1, shmloader.DataLoader), (2, None)])
def test_with_several_workers_of_rays_the_discarded_class_is_told_once(
    count, kind, group, monkeypatch
):
    context = types.SimpleNamespace(get_world_size=lambda: count, get_world_rank=lambda: 0)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    prepare = importlib.import_module(MODULE).prepare_data_loader
    loader = shmloader.DataLoader(Rows(), 8, on_error="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = [prepare(loader, move_to_device=False) for _ in range(2)]
    told = [one for one in caught if one.category is RebuiltLoaderWarning]
    assert {type(one) for one in prepared} == {kind or torch.utils.data.DataLoader}
    assert len(told) == (0 if kind else 1)
    assert all("integrations.ray.prepare_data_loader(loader)" in str(one.message) for one in told)
