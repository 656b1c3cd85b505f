"""In Ray Train's processes, `install()` runs the loader that Ray prepares on our engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.needed import needed
from tests.commands import output_of

needed("ray.train.torch")

pytestmark = pytest.mark.timeout(400)

PROGRAM = """
import os, sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from tests.cluster.test_ray_train import train

variables = {name: os.environ[name] for name in ("PYTHONPATH", "SHMLOADER_TEST_CLUSTER")}
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
TorchTrainer(
    train,
    train_loop_config={"folder": sys.argv[1]},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1]),
).fit()
ray.shutdown()
"""


def train(config: dict[str, Any]) -> None:
    """Run on a rank: load the same batches without and with `install()`."""
    import ray.train.torch
    import torch.utils.data

    import shmloader
    from tests.frameworks.support import Rows, engines, seed_everything

    found = {}
    for how in ("torch", "ours"):
        if how == "ours":
            shmloader.install()
        seed_everything()
        loader = torch.utils.data.DataLoader(Rows(), 4, shuffle=True, num_workers=1)
        prepared = ray.train.torch.prepare_data_loader(loader)
        with engines() as used:
            rows = [row for _ in range(2) for batch in prepared for row in batch[0].tolist()]
        found[how] = rows, sorted(used)
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(found))


def test_on_two_processes_the_batches_are_those_of_torch(tmp_path) -> None:
    output_of("-c", PROGRAM, tmp_path, limit_s=360)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in ranks:
        assert (rank["torch"][1], rank["ours"][1]) == (["torch"], ["shmloader"])
        assert rank["ours"][0] == rank["torch"][0]
    indices = [{index for index, _ in rank["ours"][0]} for rank in ranks]
    assert indices[0] | indices[1] == set(range(20))
