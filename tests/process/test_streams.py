"""Streams of shards in worker processes: killed workers, devices, failures, and ranks that wait."""

import contextlib
import os
import signal
import threading
from itertools import chain

import pytest
import torch

from shmloader import DataLoader, ShardedDataLoader
from shmloader.streams import Shards
from tests.late import switched_on, to_host

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


def test_batches_arrive_on_a_device():
    with switched_on():
        loader = DataLoader(make_stream(), batch_size=None, num_workers=2, device="late")
        assert [to_host(batch).tolist() for batch in loader] == EXPECTED


def test_ranks_with_devices_keep_the_order_and_end_together():
    store = torch.distributed.HashStore()
    with switched_on():
        loaders = [
            ShardedDataLoader(
                make_stream(store=store),
                batch_size=None,
                rank=rank,
                world_size=4,
                num_workers=1,
                device="late",
                timeout=120,
            )
            for rank in range(4)
        ]
        steps = [[to_host(each).tolist() for each in step] for step in zip(*loaders, strict=True)]
    batches = list(chain(*steps))
    assert batches[: len(EXPECTED)] == EXPECTED


def fail_at_one(record):
    if record == EXPECTED[7][1]:
        raise KeyError("no label")
    return record


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failure_names_record_and_shard_and_the_epoch_goes_on(num_workers):
    loader = DataLoader(make_stream(fail_at_one), batch_size=None, num_workers=num_workers)
    iterator, batches = iter(loader), []
    for _ in EXPECTED:
        try:
            batches.append(next(iterator).tolist())
        except KeyError as error:
            number, shard = EXPECTED[7][1] % 1_000, EXPECTED[7][1] // 1_000
            notes = "".join(error.__notes__)
            assert f"ecord {number} of shard shard-{shard} failed" in notes
            state = loader.state_dict()
            batches.append(None)
    assert next(iterator, None) is None
    assert batches == [*EXPECTED[:7], None, *EXPECTED[8:]]
    again = DataLoader(make_stream(fail_at_one), batch_size=None)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == EXPECTED[8:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_record_is_left_out_and_counted(num_workers):
    loader = DataLoader(
        make_stream(fail_at_one), batch_size=None, num_workers=num_workers, on_error="skip"
    )
    found = [batch.tolist() for batch in loader]
    bad = EXPECTED[7][1]
    assert found == [*EXPECTED[:7], [one for one in EXPECTED[7] if one != bad], *EXPECTED[8:]]
    assert loader.failures.total == 1
    assert loader.failures[0].index == f"record {bad % 1_000} of shard shard-{bad // 1_000}"


def test_a_rank_waits_for_a_late_rank():
    """Ranks that are not in step wait, and still get the same batches."""
    store = torch.distributed.HashStore()
    found = {}

    def iterate(rank):
        loader = ShardedDataLoader(
            make_stream(store=store), batch_size=None, rank=rank, world_size=3, timeout=0
        )
        found[rank] = [batch.tolist() for batch in loader]

    threads = [threading.Thread(target=iterate, args=[rank]) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = list(chain(*zip(*map(found.get, range(3)), strict=True)))
    assert batches[: len(EXPECTED)] == EXPECTED
