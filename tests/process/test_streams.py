"""Streams of shards in worker processes: killed workers, devices, and ranks that wait."""

import contextlib
import functools
import os
import signal
from itertools import chain

import torch

from shmloader import DataLoader, ShardedDataLoader
from shmloader.streams import Shards
from tests.late import switched_on, to_host
from tests.process.support import in_thread

SIZES = {f"shard-{number}": 3 + number * 5 % 11 for number in range(15)}


def open_shard(path):
    number = int(path.partition("-")[2])
    return (1_000 * number + each for each in range(SIZES[path]))


def make_stream(function=None, *, store=None):
    stream = Shards(list(SIZES), open_shard, seed=1, readers=5, store=store).shuffle(6)
    return (stream if function is None else stream.map(function)).batch(4)


EXPECTED = [batch.tolist() for batch in make_stream()]


def die_once(record):
    """Kill the worker at one record, unless a file says that it was killed before."""
    if record == EXPECTED[7][1]:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(os.environ["DIED"], os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
    return record


def test_a_replaced_worker_goes_on_where_the_killed_one_was(tmp_path, monkeypatch):
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    loader = DataLoader(make_stream(die_once), batch_size=None, num_workers=2, worker_restarts=1)
    assert [batch.tolist() for batch in loader] == EXPECTED
    assert loader.stats().restarts == 1


def rank_of(rank, ranks, store, **options):
    stream = make_stream(store=store)
    return ShardedDataLoader(stream, batch_size=None, rank=rank, world_size=ranks, **options)


def test_ranks_with_devices_keep_the_order_and_end_together():
    store = torch.distributed.HashStore()
    with switched_on():
        loaders = [
            rank_of(rank, 4, store, num_workers=1, device="late", timeout=120) for rank in range(4)
        ]
        steps = [[to_host(each).tolist() for each in step] for step in zip(*loaders, strict=True)]
    batches = list(chain(*steps))
    assert batches[: len(EXPECTED)] == EXPECTED


def test_a_rank_waits_for_a_late_rank():
    """Ranks that are not in step wait, and still get the same batches."""
    store = torch.distributed.HashStore()
    found = {}

    def iterate(rank):
        found[rank] = [batch.tolist() for batch in rank_of(rank, 3, store, timeout=0)]

    with contextlib.ExitStack() as stack:
        for rank in range(3):
            stack.enter_context(in_thread(functools.partial(iterate, rank)))
    batches = list(chain(*zip(*map(found.get, range(3)), strict=True)))
    assert batches[: len(EXPECTED)] == EXPECTED
