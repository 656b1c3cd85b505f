"""What share() gives, or a fork, is there once for all processes that read it."""

import gc
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


def test_under_torch_s_own_loader_it_works_as_well():
    twin = shmloader.share(torch.arange(100))
    loader = torch.utils.data.DataLoader(
        Calls(twin.__getitem__, 100), batch_size=10, num_workers=1, multiprocessing_context="fork"
    )
    assert [batch.tolist() for batch in loader][3] == list(range(30, 40))


class Grows:
    def __init__(self, count: int) -> None:
        self.records = [[number] for number in range(count)]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[int, int]:
        before = private_bytes()
        gc.collect()
        return private_bytes() - before, gc.get_freeze_count()


def worker_s_collection() -> tuple[int, int]:
    """What a full collection takes a worker with 26 MB of lists, and how much it has frozen."""
    dataset = Grows(300_000)
    with shmloader.DataLoader(dataset, num_workers=1, multiprocessing_context="fork") as loader:
        ((grown, frozen),) = loader
    return int(grown), int(frozen)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_full_collection_in_a_worker_copies_nothing(is_frozen):
    (gc.freeze if is_frozen else gc.unfreeze)()
    before = gc.get_freeze_count()
    try:
        grown, frozen = worker_s_collection()
        assert frozen > before + 300_000
        assert grown < 8 << 20
        assert before - 1_000 <= gc.get_freeze_count() <= before  # some of these have ended since
    finally:
        gc.freeze()  # as the tests before found it
