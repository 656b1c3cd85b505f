"""Train on batches that another machine makes.

python train.py tcp://batches:8786
"""

import socket
import sys
from pathlib import Path

import distributed
import torch
from points import FILES, FOLDER, Points
from torch import nn

from shmloader import DataLoader
from shmloader.cluster import DaskExecutor


def main() -> None:
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with distributed.Client(sys.argv[1], timeout=60) as client:
        client.wait_for_workers(2, timeout=60)
        loader = DataLoader(
            Points(),
            batch_size=50,
            shuffle=True,
            num_workers=4,
            seed=0,
            executor=DaskExecutor(client),
        )
        for _ in range(3):
            for points, heights in loader:
                loss = nn.functional.mse_loss(network(points).squeeze(1), heights)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        loader.close()
    print(f"loss of the last batch: {loss.item():.1e}")
    found = "has" if Path(FOLDER).exists() else "has none of"
    print(f"{socket.gethostname()} {found} the {FILES} files, and has trained on them.")


if __name__ == "__main__":
    main()
