"""Load a Hugging Face dataset by whole batches.

Such a dataset can be indexed with a list of indices, and returns a dict of columns. This is far
faster than reading row by row. So the loader gets a batch sampler as its ``sampler``, and
``batch_size=None``: each index is then a list, and what the dataset returns for it is the batch.
"""

import sys

import torch

from shmloader import BatchSampler, DataLoader, RandomSampler

try:
    from datasets import Dataset
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install datasets")

ROWS = 10_000


def main() -> None:
    dataset = Dataset.from_dict(
        {
            "label": list(range(ROWS)),
            "text": [f"row {number}" for number in range(ROWS)],
            "values": [[number, number / 2] for number in range(ROWS)],
        }
    )
    dataset = dataset.with_format("torch")
    batches = BatchSampler(RandomSampler(dataset), batch_size=256, drop_last=False)
    seen = torch.zeros(ROWS, dtype=torch.bool)
    with DataLoader(dataset, batch_size=None, sampler=batches, num_workers=2) as loader:
        for batch in loader:
            assert torch.equal(batch["values"][:, 1] * 2, batch["label"].float())
            assert batch["text"][0] == f"row {batch['label'][0]}"
            seen[batch["label"]] = True
    print(f"{len(loader)} batches, {int(seen.sum()):,} of {ROWS:,} rows seen")


if __name__ == "__main__":
    main()
