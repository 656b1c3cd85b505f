"""A dataset whose samples are files, and the program that writes them.

    python points.py

Of the two machines of compose.yaml, both have this module, and the one that makes batches has the
files.
"""

from pathlib import Path

import numpy as np
import torch

FILES = 1_000
FOLDER = "data"  # in the working directory


class Points:
    """Points of a plane, each in a file with its height."""

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.from_numpy(np.load(Path(FOLDER, f"{index:04}.npy")))
        return values[:2], values[2]


def main() -> None:
    Path(FOLDER).mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for index in range(FILES):
        x, y = random.normal(size=2)
        values = np.array([x, y, 3 * x - 2 * y + 1], dtype=np.float32)
        np.save(Path(FOLDER, f"{index:04}.npy"), values)


if __name__ == "__main__":
    main()
