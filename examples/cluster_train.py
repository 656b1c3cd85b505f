"""Train on two processes of Ray Train, lose one of them, and continue from the last checkpoint.

    pip install 'ray[train]'
    python examples/cluster_train.py
    python examples/cluster_train.py --executor    # batches are made by tasks of the cluster

Each process has a ShardedDataLoader, which finds its rank and the world size in the process group
that Ray Train has made. A checkpoint holds the loader's state beside the network's. In the second
epoch rank 1 fails. Ray Train starts both processes again, and they continue from the last
checkpoint. The program counts the samples that all ranks together have trained on, and checks that
each sample of the last epoch comes exactly once.
"""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import Tensor, nn

from shmloader import ShardedDataLoader
from shmloader.cluster import RayExecutor

SAMPLES = 512
GLOBAL_BATCH = 32
EPOCHS = 2
CHECKPOINT_STEPS = 5
FAILS_AT = (1, 13)  # epoch and step


class Points:
    """Random points of 8 numbers, each with the sum of its numbers, plus noise, and its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        point = torch.randn(8)
        return point, point.sum() + 0.01 * torch.randn(()), index


def train(config: dict[str, Any]) -> None:
    """Train on one rank. Runs in each process of Ray Train."""
    checkpoint = ray.train.get_checkpoint()
    loader = ShardedDataLoader(
        Points(),
        batch_size=GLOBAL_BATCH // dist.get_world_size(),
        shuffle=True,
        num_workers=2,
        executor=RayExecutor() if config["executor"] else None,
    )
    network = prepare_model(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    first_epoch, seen, resumed_at = 0, Counter(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            # This is safe, because the file is our own. It has a Counter beside the tensors.
            saved = torch.load(Path(folder, "state.pt"), weights_only=False)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        first_epoch, resumed_at, seen = saved["epoch"], saved["at"], saved["seen"]

    for epoch in range(first_epoch, EPOCHS):
        since: list[int] = []  # the indices that this rank has got since the last report
        steps_before = resumed_at[1] if resumed_at and epoch == first_epoch else 0
        for step, (points, sums, indices) in enumerate(loader, steps_before + 1):
            loss = nn.functional.mse_loss(network(points).squeeze(1), sums)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            since += indices.tolist()
            if checkpoint is None and (epoch, step) == FAILS_AT and loader.rank == 1:
                raise RuntimeError("this rank fails")
            is_last = step == SAMPLES // GLOBAL_BATCH
            if step % CHECKPOINT_STEPS == 0 or is_last:
                of_ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(of_ranks, since)
                since = []
                for indices_of_rank in of_ranks:
                    seen.update(indices_of_rank)
                metrics = {"epoch": epoch, "loss": loss.item(), "resumed_at": resumed_at}
                metrics |= {"world_size": loader.world_size}
                metrics |= {"seen": len(seen), "most": max(seen.values())}
                if is_last:
                    seen.clear()
                state = {
                    "network": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "epoch": epoch + is_last,
                    "at": (epoch + 1, 0) if is_last else (epoch, step),
                    "seen": seen,
                }
                report(metrics, state)
    loader.close()


def report(metrics: dict[str, Any], state: dict[str, Any]) -> None:
    """Report to Ray Train. Rank 0 saves one checkpoint for all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--executor", action="store_true", help="make batches by Ray's tasks")
    options = parser.parse_args()
    # Two CPUs are for the training processes, and two for tasks that make batches.
    ray.init(num_cpus=4, include_dashboard=False)
    with tempfile.TemporaryDirectory(prefix="cluster_train-") as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"executor": options.executor},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        )
        metrics = trainer.fit().metrics
    ray.shutdown()
    assert metrics is not None
    epoch, step = metrics["resumed_at"]
    print(f"{metrics['world_size']} ranks, continued in epoch {epoch} after step {step}.")
    assert (metrics["epoch"], metrics["seen"], metrics["most"]) == (EPOCHS - 1, SAMPLES, 1), metrics
    print(f"All {SAMPLES} samples of the last epoch were trained on, each once.")


if __name__ == "__main__":
    main()
