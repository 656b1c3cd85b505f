"""Streams of shards: the same batches, in the same order, on any workers and ranks."""

import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed

from shmloader import DataLoader, ShardedDataLoader
from shmloader.streams import JsonlFormat, Shards, open_jsonl
from tests.streams.support import run_ranks, write_jsonl

# A function of a path cannot seek, and there are many workers for few readers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the shards of this stream can be read only", "ignore:. workers share the . readers"
)

# Records of each shard: of very different numbers, so that readers end far apart.
SIZES = {f"shard-{number}": 1 + number * 7 % 13 for number in range(23)}


def open_shard(path):
    number = int(path.partition("-")[2])
    return (1_000 * number + each for each in range(SIZES[path]))


def is_kept(record):
    return record % 10 not in {2, 5, 8}


def double(record):
    return 2 * record


def make_stream(*, store=None, rolling=False, readers=9):
    stream = Shards(list(SIZES), open_shard, seed=3, readers=readers, store=store)
    return stream.map(double).shuffle(7, rolling=rolling).filter(is_kept).batch(4)


def wanted(**options):
    return [batch.tolist() for batch in make_stream(**options)]


def run(world_size, num_workers, *, steps=None, state=None, last_batch="pad", **options):
    make = functools.partial(make_stream, **options)
    return run_ranks(make, world_size, num_workers, steps, state, last_batch=last_batch)


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 2), (2, 1), (5, 0), (9, 0)])
def test_ranks_and_workers_share_one_order(world_size, num_workers):
    expected = wanted()
    batches, _ = run(world_size, num_workers)
    assert batches[: len(expected)] == expected
    # The last step is filled up with the last batch.
    assert batches[len(expected) :] == [expected[-1]] * (-len(expected) % world_size)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_discarding_leaves_out_only_the_end(world_size):
    expected = wanted()
    batches, _ = run(world_size, 0, last_batch="discard")
    assert batches == expected[: len(batches)]
    assert len(batches) % world_size == 0
    # It ends when fewer readers than ranks have a batch: at most that many readers' rests.
    assert len(batches) > len(expected) / 2


def resume_twice(seed, *, rolling, workers, counts=(1, 2, 3, 5, 8)):
    """Stop and resume an epoch twice, each time on other ranks and workers."""
    draw, expected, got = random.Random(seed), wanted(rolling=rolling), []
    state = None
    for is_last in (False, False, True):
        world_size, num_workers = draw.choice(counts), draw.choice(workers)
        steps = None if is_last else draw.randint(0, (len(expected) - len(got)) // world_size)
        batches, states = run(world_size, num_workers, steps=steps, state=state, rolling=rolling)
        assert all(one == states[0] for one in states) or world_size > 1
        state = draw.choice(states)
        got += batches
    assert got[: len(expected)] == expected
    assert len(got) - len(expected) < world_size


@pytest.mark.filterwarnings("ignore:.* workers share")
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 160))]
)
def test_an_epoch_resumes_on_other_ranks_and_workers(seed):
    resume_twice(seed, rolling=seed % 3 == 0, workers=(0, 0, 1) if seed < 100 else (0, 1, 2))


@pytest.mark.parametrize("position", [0, 1, 8, 9, 10, 30, -2, -1])
def test_a_state_is_small_and_json_can_write_it(position):
    expected = wanted()
    loader = DataLoader(make_stream(), batch_size=None)
    iterator = iter(loader)
    batches = [next(iterator).tolist() for _ in range(position % len(expected))]
    text = json.dumps(loader.state_dict())
    assert len(text) < 2048
    again = DataLoader(make_stream(), batch_size=None)
    again.load_state_dict(json.loads(text))
    assert [*batches, *(batch.tolist() for batch in again)] == expected


def test_the_next_epoch_has_another_order_and_the_same_records():
    loader = DataLoader(make_stream(), batch_size=None, num_workers=1, persistent_workers=True)
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    loader.close()
    assert epochs[0] == wanted()
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(chain(*epochs[0])) == sorted(chain(*epochs[1]))
    state = DataLoader(make_stream(), batch_size=None)
    state.set_epoch(1)
    assert [batch.tolist() for batch in state] == epochs[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_states_and_epochs_count_no_records(num_workers, tmp_path, monkeypatch):
    """With many shards, that takes long, and their indexes may be missing."""
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(4)]
    for path in paths:
        write_jsonl(path, 10)
    monkeypatch.setattr(JsonlFormat, "count", refuse_to_count)

    def make_loader():
        stream = Shards(paths, open_jsonl, seed=0, readers=2).batch(4, collate=str)
        return DataLoader(stream, batch_size=None, num_workers=num_workers)

    with make_loader() as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = list(iterator)
    with make_loader() as loader:
        loader.load_state_dict(state)
        assert [batch for batch in loader] == rest  # noqa: C416 - list() asks for the length


def refuse_to_count(self, path):
    raise AssertionError(f"the records of {path} are counted")


def test_a_state_of_another_stream_is_refused():
    loader = DataLoader(make_stream(), batch_size=None)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"on 9 readers.*on 8 readers"):
        DataLoader(make_stream(readers=8), batch_size=None).load_state_dict(state)


def test_texts_about_a_stream_name_its_methods():
    assert "on 9 readers, map().shuffle(7, 3).filter().batch(4, False)" in repr(make_stream())
    assert "rolling_shuffle(7, 3)" in repr(make_stream(rolling=True))


def test_threads_make_the_same_batches():
    loader = DataLoader(make_stream(), batch_size=None, num_workers=3, thread_pool=True)
    assert [batch.tolist() for batch in loader] == wanted()


def test_a_loader_may_make_the_batches():
    stream = Shards(list(SIZES), open_shard, seed=3, readers=9)
    loader = DataLoader(stream, batch_size=4, drop_last=True)
    expected = [batch.tolist() for batch in stream.batch(4, drop_last=True)]
    assert [batch.tolist() for batch in loader] == expected
    assert {len(batch) for batch in expected} == {4}


def test_records_need_no_batches():
    stream = Shards(list(SIZES), open_shard, seed=3, readers=9)
    records = list(stream)
    assert sorted(records) == sorted(chain(*map(open_shard, SIZES)))
    assert list(DataLoader(stream, batch_size=None, num_workers=1)) == records


def test_torchs_loader_shares_the_readers_among_workers():
    loader = torch.utils.data.DataLoader(make_stream(), batch_size=None, num_workers=3)
    assert [batch.tolist() for batch in loader] == wanted()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 4}, r"batch_size after its method batch\(\): give None"),
        ({"in_order": False, "num_workers": 1}, "in_order=False"),
        ({"num_workers": "auto"}, "num_workers='auto': give a number"),
        ({"on_error": lambda index, error: 0}, "a function as on_error: give 'skip'"),
        ({"shuffle": True}, r"shuffle: call its method shuffle\(\)"),
        ({"sampler": [1]}, "combined with sampler or batch_sampler"),
        ({"batch_sampler": [[1]], "batch_size": 1}, "combined with sampler or batch_sampler"),
        ({"drop_last": True}, r"drop_last here: give it to batch\(\)"),
        ({"collate_fn": list}, "collate_fn .*: give it collate="),
        ({"fetch_concurrency": 2}, "fetch_concurrency"),
        (
            {"worker_scope": "host", "num_workers": 1, "rank": 0, "world_size": 1},
            "worker_scope='host': give 'rank'",
        ),
        (
            {"last_batch": "rollover", "rank": 0, "world_size": 1},
            "last_batch should be 'keep', 'disc",
        ),
        ({"last_batch": "keep", "rank": 0, "world_size": 1}, "last_batch='keep': give 'pad'"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(arguments, text):
    make = ShardedDataLoader if "rank" in arguments else DataLoader
    with pytest.raises(ValueError, match=text):
        make(make_stream(), **{"batch_size": None, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"paths": []}, ValueError, "no shards"),
        ({"readers": 64}, ValueError, "1 shards for 64 readers"),
        ({"paths": ["a", "a"], "readers": 1}, ValueError, "given twice"),
        ({"readers": 0}, ValueError, "readers"),
        ({"paths": "a.tar"}, TypeError, "paths should be a list"),
        ({"paths": Path("a.tar")}, TypeError, "paths should be a list"),
        ({"paths": None}, TypeError, "paths should be a list"),
        ({"paths": [b"a"]}, TypeError, "a shard should be a path or an address, but is b'a'"),
        ({"cache": "folder"}, TypeError, "cache should be a ShardCache"),
        ({"open": "jsonl"}, TypeError, "open should be a format"),
    ],
)
def test_bad_shards_and_arguments_of_wrong_types_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Shards(**{"paths": ["a"], "open": open_shard, "seed": 0, **arguments})


def test_few_shards_have_a_reader_each_by_default():
    for count, readers in ((1, 1), (3, 3), (65, 64)):
        assert Shards(map(str, range(count)), open_shard, seed=0).readers == readers


def test_the_text_of_a_loader_counts_no_records():
    stream = Shards(["a"], open_jsonl, seed=0)
    stream._source_counts = lambda *_: pytest.fail("the records are counted")
    assert repr(DataLoader(stream, batch_size=None)).startswith("DataLoader(<Shards>, ")


def test_ranks_without_a_store_are_told_what_to_do():
    loader = ShardedDataLoader(make_stream(), batch_size=None, rank=0, world_size=2)
    with pytest.raises(ValueError, match="init_process_group"):
        iter(loader)


def test_a_loader_that_does_not_divide_the_stream_warns_in_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(make_stream(), batch_size=None)
    with pytest.warns(UserWarning, match="each of the 2 ranks reads all of it") as caught:
        batches = [batch.tolist() for batch in loader]
    assert batches == wanted()
    assert caught[0].filename == __file__
    next(iter(loader))  # not again


def test_more_ranks_than_readers_are_refused():
    store = torch.distributed.HashStore()
    loader = ShardedDataLoader(make_stream(store=store), batch_size=None, rank=0, world_size=10)
    with pytest.raises(ValueError, match="readers=9 for 10 ranks"):
        iter(loader)


def test_padding_counts_the_records_of_a_repeated_batch():
    expected, store = wanted(), torch.distributed.HashStore()
    loaders = [
        ShardedDataLoader(make_stream(store=store), batch_size=None, rank=rank, world_size=8)
        for rank in range(8)
    ]
    paddings = []
    for _ in zip(*loaders, strict=True):
        paddings += [loader.padding for loader in loaders]
    repeats = -len(expected) % 8
    assert repeats
    assert paddings == [0] * len(expected) + [len(expected[-1])] * repeats


def test_workers_without_readers_are_warned_of():
    loader = DataLoader(make_stream(readers=1), batch_size=None, num_workers=2)
    with pytest.warns(UserWarning, match="2 workers share the 1 readers"):
        list(loader)


def open_sized(path):
    number, size = path.split(":")
    return range(1_000 * int(number), 1_000 * int(number) + int(size))


@pytest.mark.parametrize("seed", range(40))
def test_streams_of_few_batches_end_on_all_ranks(seed):
    """Ranks end together, whatever they discard, before and after a resume on other ranks."""
    draw = random.Random(seed)
    readers = draw.randint(2, 6)
    sizes = draw.choices([1, 1, 2, 3, 5, 9, 20], k=draw.randint(readers, 12))
    paths = [f"{number}:{size}" for number, size in enumerate(sizes)]

    def make(store=None):
        return Shards(paths, open_sized, seed=1, readers=readers, store=store).batch(2)

    expected, got, state = [batch.tolist() for batch in make()], [], None
    for is_last in (False, True):
        world_size, last_batch = draw.randint(1, readers), draw.choice(["pad", "discard"])
        left = draw.randint(0, (len(expected) - len(got)) // world_size)
        steps = None if is_last else left
        batches, states = run_ranks(make, world_size, 0, steps, state, last_batch=last_batch)
        got, state = got + batches, states[-1]
        if state["position"] == 0 and got:
            break  # the epoch has ended
    shared_count = min(len(got), len(expected))
    assert got[:shared_count] == expected[:shared_count]


def test_a_state_waits_for_ranks_that_are_behind():
    """Otherwise no rank that resumes knows of a further batch, and each waits for the others."""
    store = torch.distributed.HashStore()
    make = functools.partial(make_stream, readers=2)
    ranks = [
        ShardedDataLoader(make(store=store), batch_size=None, rank=rank, world_size=2)
        for rank in range(2)
    ]
    first, second = map(iter, ranks)
    next(second)
    for _ in range(3):
        next(first)
    with ThreadPoolExecutor(1) as threads:
        state = threads.submit(ranks[0].state_dict)
        for _ in range(2):
            next(second)
        rest, _ = run_ranks(make, 2, 1, state=state.result(), timeout=20)
    expected = wanted(readers=2)
    assert rest[: len(expected) - 6] == expected[6:]
