"""Ray Train with two training processes: the adapter keeps the class, and cuts the samples."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def loop(config: dict[str, Any]) -> None:
    import shmloader
    from shmloader.integrations.ray import prepare_data_loader

    dataset = torch.utils.data.TensorDataset(torch.arange(20))
    loader = prepare_data_loader(
        shmloader.DataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=1, seed=3, worker_restarts=1
        )
    )
    seen = torch.cat([batch for (batch,) in loader])
    facts = {"class": type(loader).__name__, "restarts": loader.worker_restarts}
    rank = ray.train.get_context().get_world_rank()
    torch.save({"seen": seen, **facts}, f"{config['folder']}/{rank}.pt")


def test_the_adapter_keeps_the_class_and_divides_the_samples(tmp_path):
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(rank["class"] == "DataLoader" and rank["restarts"] == 1 for rank in ranks)
    assert sorted(torch.cat([rank["seen"] for rank in ranks]).tolist()) == list(range(20))
