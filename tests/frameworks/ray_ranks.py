"""A program that trains with Ray Train on two processes, and writes what each of them loaded.

Argument: a folder. Each rank writes `<rank>.json`.
"""

import os
import sys
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Runs in each of Ray's processes, which get this function pickled by value."""
    import json
    from pathlib import Path

    import ray.train

    import shmloader
    from shmloader.integrations.ray import prepare_data_loader
    from tests.frameworks.support import Rows, engines

    loader = prepare_data_loader(
        shmloader.DataLoader(
            Rows(config["length"]), 4, shuffle=True, num_workers=1, seed=7, worker_restarts=1
        )
    )
    seen = []
    with engines() as used:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            seen.append([int(row) for batch in loader for row in batch[0][:, 0]])
    found = {
        "seen": seen,
        "engines": sorted(used),
        "class": type(loader).__module__,
        "options": [loader.seed, loader.worker_restarts],
    }
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    folder, length = sys.argv[1], int(sys.argv[2])
    environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "length": length},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
