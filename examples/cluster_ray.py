"""Make batches on a Ray cluster: here, on this machine.

    pip install ray
    python examples/cluster_ray.py

To connect to a real cluster, call ``ray.init("auto")``.
"""

import time

import numpy as np
import ray
import torch

import shmloader
from shmloader.cluster import RayExecutor


class Images:
    """Random images that take a few milliseconds each, as decoding a file would."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        noise = shmloader.sample_rng().integers(0, 256, (3, 64, 64), dtype=np.uint8)
        return torch.from_numpy(noise)


def main() -> None:
    options = {"batch_size": 32, "num_workers": 4, "seed": 0}
    local = [batch.clone() for batch in shmloader.DataLoader(Images(), **options)]
    ray.init(num_cpus=2, include_dashboard=False)
    loader = shmloader.DataLoader(Images(), executor=RayExecutor(), **options)
    for batch, expected in zip(loader, local, strict=True):
        assert torch.equal(batch, expected)
    print(loader.stats())
    ray.shutdown()
    print("Ray made the batches that local workers make, in the same order.")


if __name__ == "__main__":
    main()
