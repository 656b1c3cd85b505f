"""What share() gives crosses to any process of multiprocessing's as a handle, and is there once."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import shmloader
from tests.process.support import Calls

pytestmark = pytest.mark.timeout(120)

ANSWER_S = 100
BULK = 32 << 20


def make() -> dict:
    return {
        "array": np.arange(BULK // 8, dtype=np.int64),
        "tensor": torch.arange(BULK // 8),
        "texts": [f"line {number} " * 10 for number in range(50_000)],
        "table": {f"key {number}": (number, str(number)) for number in range(2_000)},
    }


def private_bytes() -> int:
    """Memory of this process's own: what it has written, and what is nobody else's.

    A page of a segment that no other process has looked at yet is not its own for that.
    """
    total, is_segment = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value, *_ = line.split()
        if not name.endswith(":"):
            is_segment = "memfd:" in line
        elif name == ("Anonymous:" if is_segment else "Private_Dirty:"):
            total += int(value) << 10
    return total


def read_all(value: dict) -> dict:
    """Touch all of it; what it is, and how much memory of its own that took."""
    before = private_bytes()
    found = {
        "array": int(value["array"].sum()),
        "tensor": int(value["tensor"].sum()),
        "texts": sum(map(len, value["texts"])),
        "one": value["texts"][-1],
        "key": value["table"]["key 1999"],
        "slice": list(value["texts"][3:5]),
    }
    return {**found, "took": private_bytes() - before}


def child(value: dict, channel) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that torch counts on
    found = read_all(value)
    value["tensor"][0] = -5  # its own: copied on write
    found["own"] = int(value["tensor"][0])
    channel.send(found)
    # By a queue's way, back to where it came from: the memory that is mapped there already.
    channel.send((value["array"][5:8], value["texts"][1:3], value["table"]))
    channel.recv()
    channel.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_started_process_reads_it_and_takes_no_memory_for_it(method):
    context = multiprocessing.get_context(method)
    plain = make()
    twin = shmloader.share(plain)
    expected = read_all(plain)
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(twin, theirs))
    with ours:
        with theirs:
            process.start()
        assert ours.poll(ANSWER_S), "the child says nothing"
        found = ours.recv()
        array, texts, table = ours.recv()
        ours.send("done")
        process.join(ANSWER_S)
    assert process.exitcode == 0
    process.close()
    assert found.pop("took") < BULK // 4
    assert found.pop("own") == -5
    expected.pop("took")
    assert found == expected
    assert int(twin["tensor"][0]) == 0
    assert array.tolist() == [5, 6, 7]
    assert array.ctypes.data == twin["array"][5:].ctypes.data
    assert list(texts) == plain["texts"][1:3]
    assert table == plain["table"]


def open_handle(handle) -> tuple:
    return os.getpid(), handle[-1], len(handle)


def test_a_pool_that_runs_already_is_sent_handles():
    texts = [f"line {number}" for number in range(2_000)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        twin = shmloader.share(texts)
        for part in (twin, twin[:100], twin[5:50:3]):
            pid, last, length = pool.apply_async(open_handle, (part,)).get(ANSWER_S)
            assert (last, length) == (part[-1], len(part))
            assert pid != os.getpid()
        pool.terminate()
        pool.join()


class Lines:
    """A dataset that says how much memory of its own its worker has."""

    def __init__(self, texts) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return index, len(self.texts[index]), private_bytes() if index % 50_000 == 0 else 0


@pytest.mark.slow
def test_a_loader_s_workers_share_a_list_and_do_not_grow():
    texts = ["x" * (40 + number % 160) for number in range(200_000)]
    expected = sum(map(len, texts))
    dataset = shmloader.share(Lines(texts))
    del texts
    loader = shmloader.DataLoader(
        dataset, batch_size=1_000, num_workers=2, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    private = []
    with loader:
        for _ in range(2):
            total = 0
            for _, lengths, own in loader:
                total += int(lengths.sum())
                private.append(int(own.max()))
            assert total == expected
    seen = [own for own in private if own]
    # Touched one by one as Python objects, they would have been copied: 30 MB and more.
    assert seen[-1] - seen[0] < 12 << 20


@pytest.mark.parametrize("kind", [shmloader.DataLoader, torch.utils.data.DataLoader])
def test_what_a_worker_wrote_to_an_array_is_in_its_batch(kind):
    rows = shmloader.share(np.zeros((8, 1_000)), writable=True)

    def change(index: int) -> np.ndarray:
        rows[index] += index
        return rows[index]

    loader = kind(
        Calls(change, 8), batch_size=None, collate_fn=only_itself, num_workers=1,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert [batch[-1] for batch in loader] == list(range(8))
    assert not rows.any()


def only_itself(sample):
    return sample


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_samples_that_nothing_collates_become_what_they_were():
    rows = {
        "numbers": np.arange(20.0).reshape(4, 5),
        "texts": np.array([["a"], ["b"], ["c"], ["d"]]),
    }
    found = []
    for shared in (rows, shmloader.share(rows)):
        dataset = Calls(
            lambda index, shared=shared: [shared["numbers"][index], shared["texts"][index]], 4
        )
        loader = shmloader.DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        found.append(list(loader))
    for (numbers, texts), (plain_numbers, plain_texts) in zip(*found, strict=True):
        assert type(numbers) is torch.Tensor
        assert torch.equal(numbers, plain_numbers)
        assert isinstance(texts, np.ndarray)
        assert texts.tolist() == plain_texts.tolist()


def test_under_torch_s_own_loader_it_works_as_well():
    twin = shmloader.share(torch.arange(100))
    loader = torch.utils.data.DataLoader(
        Calls(twin.__getitem__, 100), batch_size=10, num_workers=1, multiprocessing_context="fork"
    )
    assert [batch.tolist() for batch in loader][3] == list(range(30, 40))
