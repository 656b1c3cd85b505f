"""Make batches on a Dask cluster: here, on two processes of this machine.

    pip install 'dask[distributed]'
    python examples/cluster_dask.py

On a real cluster, give the scheduler's address: ``distributed.Client("tcp://scheduler:8786")``.
"""

import time

import distributed
import numpy as np
import torch

import shmloader.cluster


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
    with (
        # Each process has one thread, so it makes one batch at a time.
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = shmloader.cluster.DaskExecutor(client)
        loader = shmloader.DataLoader(Images(), executor=executor, **options)
        for batch, expected in zip(loader, local, strict=True):
            assert torch.equal(batch, expected)
        print(loader.stats())
    print("Dask made the batches that local workers make, in the same order.")


if __name__ == "__main__":
    main()
