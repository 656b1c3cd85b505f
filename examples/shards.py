"""Stream records from shards, stop in the middle, and resume with the very next batch.

A shard is a file of records that is read from beginning to end. The program writes some shards, and
reads two epochs of them without a stop. Then it reads them again, stops after some batches, and
continues with a new loader from the saved state. Both ways must deliver the same records.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import shmloader

WIDTH = 16  # float32 numbers of a record
RECORD_BYTES = 4 * WIDTH
EPOCHS = 2


class Shards(IterableDataset[Tensor]):
    """The records of all shards. Each epoch reads the shards in another order."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> "ShardIterator":
        info = shmloader.get_worker_info()
        worker, count = (0, 1) if info is None else (info.id, info.num_workers)
        # The loader seeds torch's generator in each worker, and saves that seed in its state.
        order = torch.randperm(len(self.paths[worker::count])).tolist()
        return ShardIterator([self.paths[worker::count][number] for number in order])


class ShardIterator:
    """Reads one shard after the other. Its state is small: the shards' names and a position."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.shard, self.record = 0, 0
        self._records = self._read()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        return next(self._records)

    def _read(self) -> Iterator[Tensor]:
        while self.shard < len(self.paths):
            with self.paths[self.shard].open("rb") as file:
                file.seek(self.record * RECORD_BYTES)
                while data := file.read(RECORD_BYTES):
                    self.record += 1
                    yield torch.frombuffer(bytearray(data), dtype=torch.float32)
            self.shard, self.record = self.shard + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"names": [path.name for path in self.paths], "at": [self.shard, self.record]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        by_name = {path.name: path for path in self.paths}
        self.paths = [by_name[name] for name in state["names"]]
        self.shard, self.record = state["at"]


def write_shards(folder: Path, shard_count: int, records: int) -> list[Path]:
    paths = []
    for shard in range(shard_count):
        first = torch.arange(shard * records, (shard + 1) * records, dtype=torch.float32)
        path = folder / f"shard-{shard:04}.bin"
        path.write_bytes(first.unsqueeze(1).repeat(1, WIDTH).numpy().tobytes())
        paths.append(path)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--shards", type=int, default=8, help="files to write (%(default)s)")
    add("--records", type=int, default=500, help="records of a file (%(default)s)")
    add("--num-workers", type=int, default=2, help="worker processes (%(default)s)")
    options = parser.parse_args()
    if min(options.shards, options.records, options.num_workers) < 1:
        parser.error("--shards, --records and --num-workers are numbers from 1 up")

    def make(paths: list[Path]) -> shmloader.DataLoader[Tensor]:
        return shmloader.DataLoader(
            Shards(paths), batch_size=32, num_workers=options.num_workers, seed=0
        )

    def read(loader: shmloader.DataLoader[Tensor], most: int | None = None) -> list[int]:
        """Return the number of each record, up to the end or to `most` batches."""
        numbers: list[int] = []
        batches = 0
        while loader.epoch < EPOCHS:
            for batch in loader:
                numbers += batch[:, 0].int().tolist()
                batches += 1
                if batches == most:
                    return numbers
        return numbers

    with tempfile.TemporaryDirectory(prefix="shards-") as name:
        paths = write_shards(Path(name), options.shards, options.records)
        with make(paths) as loader:
            unbroken = read(loader)
        stop_at = max(1, len(unbroken) // 32 * 2 // 3)  # in the second epoch
        with make(paths) as loader:
            before = read(loader, stop_at)
            state = json.dumps(loader.state_dict())
        print(f"Stopped after {stop_at} batches; the state has {len(state):,} bytes")
        with make(paths) as loader:
            loader.load_state_dict(json.loads(state))
            after = read(loader)
    print(f"{len(before):,} records before the stop, {len(after):,} after it")
    if before + after != unbroken:
        print("They differ from those of a run without a stop.")
        return 1
    print(f"They are the {len(unbroken):,} records of a run without a stop, in the same order.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
