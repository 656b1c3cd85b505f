"""Load a Hugging Face dataset, whose batches are read from its Arrow buffers.

If the columns are numbers, lists of numbers, and texts without a format, the loader makes no single
samples: it copies the rows of a batch with one indexing operation. The batches are those of torch's
loader.
"""

import sys

import torch

from shmloader import DataLoader

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
    numbers = ["label", "values"]
    dataset = dataset.with_format("torch", columns=numbers, output_all_columns=True)
    dataset = dataset.shuffle(seed=0)
    seen = torch.zeros(ROWS, dtype=torch.bool)
    with DataLoader(dataset, batch_size=256, shuffle=True, num_workers=2) as loader:
        for batch in loader:
            assert torch.equal(batch["values"][:, 1] * 2, batch["label"].float())
            assert batch["text"][0] == f"row {batch['label'][0]}"
            seen[batch["label"]] = True
    print(f"{len(loader)} batches, {int(seen.sum()):,} of {ROWS:,} rows seen")


if __name__ == "__main__":
    main()
