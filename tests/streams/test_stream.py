"""Methods of streams: packs, lengths, random numbers, warnings, bad input, and any chain."""

import json
import pickle
import warnings
from collections.abc import Callable
from itertools import count as counting
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmloader
from shmloader import DataLoader, ShardedDataLoader
from shmloader.streams import Shards, Stream, mix
from shmloader.streams.stages import Guard, Run
from tests.streams.made_streams import (
    MadeFormat,
    batches_of,
    groups,
    is_wanted,
    paths,
    plain,
    reader_of,
    rest_of,
    streams,
)


class Lengths(MadeFormat):
    """Shards of records of log-normal lengths, 400 on average and at most 2,048."""

    def _read(self, path: str, number: int) -> list[int]:
        (seed,) = np.random.SeedSequence([number, *path.encode()]).generate_state(1)
        length = np.random.default_rng(seed).lognormal(np.log(400) - 0.5, 1)
        return [1] * int(np.clip(length, 1, 2048))


def source(counts: list[int], **options: Any) -> Shards:
    given = {"seed": 1, "readers": 2} | options
    return Shards(paths("a", counts), MadeFormat(), **given)


# Packs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [2048, 8192, 32768])
def test_packs_are_full(max_tokens: int) -> None:
    stream = Shards(paths("a", [3000]), Lengths(), seed=0, readers=1).pack(max_tokens, collate=list)
    sizes = [sum(len(record) for _, record in batch) for batch, _ in batches_of(stream, 0, 10_000)]
    assert max(sizes) <= max_tokens
    last = min(sizes)  # what is left at the end; packs of a window come in a random order
    assert (sum(sizes) - last) / (len(sizes) - 1) / max_tokens > 0.985


def test_a_window_is_read_further_if_it_does_not_fill_a_pack() -> None:
    stream = Shards(paths("a", [500]), Lengths(), seed=0, readers=1)
    stream = stream.pack(16384, window=5, collate=list)
    sizes = [sum(len(record) for _, record in batch) for batch, _ in batches_of(stream, 0)]
    assert min(sizes[:-1]) > 0.85 * 16384


def test_packs_go_on_where_few_records_of_a_window_fit() -> None:
    # The first run leaves seven records to the second one, which packs only five of these.
    lengths = [6] * 17 + [2] * 4 + [1] * 6 + [5] * 40
    stream = Shards(["one"], lambda _: ([0] * one for one in lengths), seed=0, readers=1)
    stream = stream.pack(10, window=17, collate=list)
    whole = batches_of(stream, 0)
    keys = [key for batch, _ in whole for key, _ in batch]
    assert len(keys) == len(set(keys)) == len(lengths)
    assert any(state[2] > 1 for _, state in whole)
    for at in range(1, len(whole)):
        rest = [batch for batch, _ in whole[at:]]
        assert rest_of(stream, 0, at, whole[at - 1][1], at, 100) == rest


def test_records_that_are_too_long_are_raised_cut_or_left_out() -> None:
    def read(too_long: Any, **options: Any) -> list[Any]:
        stream = source([9, 9]).pack(6, too_long=too_long, collate=list, **options)
        return [one for batch, _ in batches_of(stream, 0) for _, one in batch]

    raised = [one for one in read("raise") if isinstance(one, str)]
    assert len(raised) == 3
    assert "tokens is longer than max_tokens=6: give more max_tokens" in raised[0]
    cut = [len(one) for one in read("truncate")]
    assert sorted(cut) == [1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert sorted(map(len, read("drop"))) == [1, 2, 3, 4, 5, 6]
    no_sequence = read("truncate", length=lambda _: 50)
    assert all("no tensor, array or list of that length" in one for one in no_sequence)


def test_packs_are_collated_for_attention_by_default() -> None:
    stream = source([5, 5]).map(lambda record: {"input_ids": torch.tensor(record)}).pack(12)
    batch = next(iter(DataLoader(stream, batch_size=None)))
    assert batch["input_ids"].shape[0] == 1
    assert batch["cu_seq_lens_q"][-1] == batch["input_ids"].shape[1] <= 12


@pytest.mark.parametrize(
    ("record", "length", "text"),
    [
        ({"text": "a"}, None, "input_ids"),
        (7, None, r"has no len\(\)"),
        ([1], lambda _: None, "not 'NoneType'"),
    ],
)
def test_a_length_that_is_none_is_an_error_of_the_record(
    record: Any, length: Any, text: str
) -> None:
    stream = source([1, 1]).map(lambda _: record).pack(9, length=length, collate=list)
    loader = DataLoader(stream, batch_size=None)
    with pytest.raises((TypeError, KeyError), match=text):
        next(iter(loader))


# Random numbers -------------------------------------------------------------------------------


def noisy(record: Any) -> list[float]:
    """Add a random number of numpy, of torch and of the sample's own generator."""
    own = shmloader.sample_rng()
    assert own is not None
    return [*record, np.random.random(), float(torch.rand(())), own.random()]


def read(stream: Stream, **options: Any) -> list[Any]:
    return list(DataLoader(stream.batch(4, collate=list), batch_size=None, seed=3, **options))


def test_random_numbers_do_not_depend_on_when_a_function_is_applied() -> None:
    late = source([9, 9]).map(noisy).shuffle(5)
    early = source([9, 9]).map(noisy).filter(bool).shuffle(5)
    assert read(late) == read(early) == read(late, num_workers=2)


def test_random_numbers_differ_between_functions_records_and_sources() -> None:
    a = source([9, 9])
    twice = [one[-6:] for batch in read(a.map(noisy).map(noisy)) for one in batch]
    numbers = [number for one in twice for number in one]
    mixed = mix({a.map(noisy): 1, source([9, 9]).map(noisy): 1}, stop="all")
    numbers += [number for batch in read(mixed) for one in batch for number in one[-3:]]
    outer = mix({a: 1}).map(noisy)
    numbers += [number for batch in read(outer) for one in batch for number in one[-3:]]
    # The first of the two functions and the first source have the same place in their streams.
    assert len(numbers) == 18 * (6 + 6 + 3)
    assert len(set(numbers)) == len(numbers)


# Lengths --------------------------------------------------------------------------------------


def test_the_length_is_that_of_the_batches() -> None:
    assert len(source([9, 5, 7]).batch(4)) == 3 + 3
    assert len(source([9, 5, 7], shuffle_shards=False).batch(4)) == 4 + 2
    assert len(source([9, 5]).batch(4, drop_last=True)) == 3
    assert len(source([9, 5]).shuffle(3).take(7)) == 7
    assert len(source([9, 5]).skip(4).map(len)) == 10


@pytest.mark.parametrize("last_batch", ["pad", "discard"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loader_has_as_many_batches_as_it_says(
    world_size: int, last_batch: Literal["pad", "discard"]
) -> None:
    store = torch.distributed.HashStore()
    stream = source([9, 5, 7, 30, 2, 2, 1, 6, 6], readers=4, store=store).batch(4, collate=list)
    assert stream.batch_counts(0) != stream.batch_counts(1)
    ranks = [
        ShardedDataLoader(
            stream, batch_size=None, rank=rank, world_size=world_size, last_batch=last_batch
        )
        for rank in range(world_size)
    ]
    for _ in range(3):
        lengths = [len(loader) for loader in ranks]
        iterators = [iter(loader) for loader in ranks]
        steps = 0
        while None not in [next(iterator, None) for iterator in iterators]:
            steps += 1
            assert [len(loader) for loader in ranks] == lengths
        assert lengths == [steps] * world_size


def test_a_loader_that_makes_the_batches_has_a_length_too() -> None:
    stream = source([9, 5])
    for drop_last in (False, True):
        loader = DataLoader(stream, batch_size=4, drop_last=drop_last, collate_fn=list)
        assert len(loader) == len(list(loader)) == 5 - 2 * drop_last
    filtered = DataLoader(stream.filter(bool).batch(4, collate=list), batch_size=None)
    with pytest.raises(TypeError, match="keeps"):
        len(filtered)
    assert len(list(filtered)) == 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda stream: stream.filter(bool).batch(2), r"filter\(\) keeps"),
        (lambda stream: stream.pack(9), "number of packs"),
        (lambda stream: stream.repeat(), "repeated has no length"),
        (lambda stream: mix({stream: 1}), "known only with stop='all'"),
        (lambda _: Shards(["b0/3/all"], MadeFormat(), seed=0, readers=1), "b0/3/all is broken"),
        (lambda _: Shards(["b"], list, seed=0, readers=1), "not known without reading"),
        (lambda _: Shards(["s3://b/3/"], MadeFormat(), seed=0, readers=1), "remote shards"),
    ],
)
def test_a_length_that_is_not_known_is_a_type_error(change: Any, text: str) -> None:
    stream = change(source([4, 4]))
    with pytest.raises(TypeError, match=text):
        len(stream)
    assert stream  # all the same


def test_a_reader_without_records_ends_though_it_is_repeated_without_end() -> None:
    stream = source([9, 9]).filter(lambda record: False).repeat().batch(2, collate=list)
    assert batches_of(stream, 0) == []
    # After a pass with records, too: the state says whether the pass had any.
    taken = source([4, 4], shuffle_shards=False).repeat().take(20)
    whole = batches_of(taken, 0)
    assert len(whole) == 10
    for at in range(1, 10):
        assert rest_of(taken, 0, at, whole[at - 1][1], at, 20) == [one for one, _ in whole[at:]]


# Shuffles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_one_batch_is_read_ahead_to_know_whether_there_is_one(drop_last: bool) -> None:
    seen: list[Any] = []
    stream = source([40, 40]).filter(lambda record: not seen.append(record))
    reader = reader_of(stream.batch(10, collate=list, drop_last=drop_last), 0)
    group, found = reader.make(1)
    assert len(group or ()) == 10
    assert (found.known, found.is_all, len(seen)) == (2, False, 20)
    for expected in [(3, False), (4, False), (4, True)]:
        found = reader.make(1)[1]
        assert (found.known, found.is_all) == expected
    assert len(seen) == 40


def test_a_rolling_shuffle_has_a_small_state() -> None:
    stream = source([40_000, 40_000]).shuffle(10_000, rolling=True).batch(64, collate=list)
    reader = reader_of(stream, 0)
    for _ in range(20):
        _, found = reader.make(1)
    state = json.dumps(found.state)
    assert len(state) < 30_000
    following = [plain(reader.make(1)[0]) for _ in range(3)]
    assert rest_of(stream, 0, 20, json.loads(state), 20, 3) == following


def test_a_shuffle_by_windows_has_a_state_of_integers() -> None:
    stream = source([4000, 4000]).shuffle(1000).batch(64, collate=list)
    _, found = reader_of(stream, 1).make(1)
    assert found.state == (0, 64, (0, 0))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_rolling_shuffle_warns_where_a_format_cannot_seek(suffix: str) -> None:
    stream = Shards(["a" + suffix], MadeFormat(seeks=bool(suffix)), seed=0, readers=1)
    with pytest.warns(UserWarning, match="read only from their beginnings"):
        stream.shuffle(9, rolling=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream.shuffle(9)
        source([3, 3]).shuffle(9, rolling=True)


def test_a_function_after_a_shuffle_is_not_called_for_batches_that_are_passed_over() -> None:
    calls = counting()
    stream = source([90, 90]).map(lambda record: (next(calls), record)[1]).shuffle(20).batch(5)
    rest_of(stream, 0, 0, None, 10, 1)
    assert next(calls) == 5


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda stream: stream.map(3), "a function is needed, but got 3"),
        (lambda stream: stream.filter(None), "a function is needed"),
        (lambda stream: stream.shuffle(0), "count"),
        (lambda stream: stream.shuffle(5, rolling=2), "rolling"),
        (lambda stream: stream.take(-1), "count"),
        (lambda stream: stream.batch(0), "size"),
        (lambda stream: stream.batch(2, collate=3), "a function is needed"),
        (lambda stream: stream.batch(2).batch(2), "makes batches already"),
        (lambda stream: stream.batch(2).pack(2), "makes batches already"),
        (lambda stream: stream.batch(2).filter(bool), r"only map\(\) is possible"),
        (lambda stream: stream.pack(0), "max_tokens"),
        (lambda stream: stream.pack(9, window=0), "window"),
        (lambda stream: stream.pack(9, too_long="split"), "'raise', 'truncate' or 'drop'"),
        (lambda stream: stream.pack(9, length=3), "a function is needed"),
    ],
)
def test_bad_arguments_are_refused(change: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        change(source([3, 3]))


def test_a_stream_is_not_changed_by_its_methods() -> None:
    stream = source([9, 9])
    stream.map(len).shuffle(3).batch(2)
    assert not stream.is_batched
    assert len(batches_of(stream, 0)) == 9


# Chains: they go on exactly from any of their positions ----------------------------------------

READERS = 2
MOST = 60


def shards_of(name: str = "a") -> Stream:
    return Shards(paths(name, [19, 14, 0, 17, 18, 21], [3]), MadeFormat(), seed=1, readers=READERS)


EACH: dict[str, Callable[[], Stream]] = {
    "windows": lambda: shards_of().shuffle(7).batch(3),
    "rolling": lambda: shards_of().shuffle(7, rolling=True).batch(3),
    "take": lambda: shards_of().take(40).batch(3),
    "skip": lambda: shards_of().skip(6).batch(3),
    "repeat": lambda: shards_of().shuffle(5).repeat().take(150).batch(3),
    "filter": lambda: shards_of().filter(is_wanted).shuffle(4).batch(3),
    "pack": lambda: shards_of().pack(14, window=6, collate=list),
    "mix": lambda: mix({shards_of(): 2, shards_of("b"): 1}, stop="all").shuffle(5).batch(3),
    "tokens": lambda: mix({shards_of(): 2, shards_of("b"): 1}, by="tokens").batch(3),
    "number": lambda: mix({shards_of(): 2, shards_of("b").shuffle(3): 1}, stop=90).batch(4),
}


@pytest.mark.parametrize("name", EACH)
def test_each_stage_goes_on_from_every_position(name: str) -> None:
    stream = EACH[name]()
    for reader in range(READERS):
        whole = batches_of(stream, reader, MOST)
        assert len(whole) > 3
        for at in range(1, len(whole)):
            rest = [batch for batch, _ in whole[at:]]
            assert rest_of(stream, reader, at, whole[at - 1][1], at, len(rest) + 1) == rest


slow_data = settings(
    max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@slow_data
@given(streams(READERS), groups(), st.integers(0, READERS - 1), st.data())
def test_a_reader_goes_on_from_any_position_to_any_batch(
    stream: Stream, group: Any, reader: int, data: st.DataObject
) -> None:
    stream = group(stream)
    whole = batches_of(stream, reader, MOST)
    batches = [batch for batch, _ in whole]
    at = data.draw(st.integers(0, len(whole)), "position")
    first = data.draw(st.integers(at, len(whole)), "batch")
    state = whole[at - 1][1] if at else None
    rest = rest_of(stream, reader, at, state, first, MOST - first)
    assert rest == batches[first:]


@slow_data
@given(streams(READERS), st.integers(0, READERS - 1), st.data())
def test_a_stage_finds_its_records_again(stream: Stream, reader: int, data: st.DataObject) -> None:
    def begin() -> Any:
        return stream.stage(Run(reader, READERS, 0, Guard()))

    stage = begin()
    items = [item for item, _ in zip(stage, range(MOST), strict=False)]
    keys = data.draw(st.permutations(list(dict.fromkeys(key for key, _ in items))))
    found = dict(begin().again(keys))
    expected = dict(plain(items))
    assert {key: plain([(key, one)])[0][1] for key, one in found.items()} == expected


@slow_data
@given(streams(READERS), groups())
def test_a_stream_goes_through_pickle(stream: Stream, group: Any) -> None:
    stream = group(stream)
    other = pickle.loads(pickle.dumps(stream))
    assert batches_of(other, 1, MOST) == batches_of(stream, 1, MOST)
    assert other.facts() == stream.facts()


@slow_data
@given(streams(READERS), groups())
def test_a_length_is_right_where_it_is_known(stream: Stream, group: Any) -> None:
    stream = group(stream)
    try:
        counts = stream.batch_counts(0)
    except TypeError:
        return
    for reader, count in enumerate(counts):
        made = len(batches_of(stream, reader, 10_000))
        # A mix that repeats its streams ends early only if none of them has records.
        assert made == count or ("stop=40" in stream.facts() and made < count)
