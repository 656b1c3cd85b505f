"""What a rank of a run finds about the dataset that it shares, for tests of what starts ranks."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmloader import ShardedDataLoader, share_on_host
from shmloader.memory.segment import find_segment
from shmloader.memory_maps import address_of
from tests.process.one_pool import Report

COUNT = 20_000


class Texts(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.builder = os.getpid()
        self.texts = [f"{number:07}" for number in range(COUNT)]
        self.array = np.arange(COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(self.texts[index]), int(self.array[index])


def find(dataset: Any) -> dict[str, Any]:
    segment = find_segment(*address_of(dataset.array))
    assert segment is not None
    return {
        "builder": dataset.builder,
        "file": os.fstat(segment.sealed.file.fileno()).st_ino,
        "pid": os.getpid(),
    }


def totals(batches: Any) -> list[int]:
    found = [0, 0]
    for texts, numbers in batches:
        found[0] += int(texts.sum())
        found[1] += int(numbers.sum())
    return found


def run_rank(folder: Path, rank: int, ranks: int) -> None:
    """Take the dataset, have workers read it, and write what was found."""
    dataset = share_on_host(Texts)
    found = find(dataset)
    with ShardedDataLoader(dataset, 1_000, True, num_workers=1, seed=1) as loader:
        found["totals"] = totals(loader)
    write(folder, rank, ranks, found)


def write(folder: Path, rank: int, ranks: int, found: dict[str, Any]) -> None:
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    Report(folder, rank, ranks).meet("written")


def check(folder: Path, ranks: int) -> int:
    """Check what the ranks have found. Returns the process that built the dataset."""
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    (builder,) = {rank["builder"] for rank in found}
    assert builder in {rank["pid"] for rank in found}
    assert len({rank["pid"] for rank in found}) == ranks
    assert len({rank["file"] for rank in found}) == 1
    expected = COUNT * (COUNT - 1) // 2
    assert [sum(each) for each in zip(*(rank["totals"] for rank in found), strict=True)] == [
        expected
    ] * 2
    return int(builder)
