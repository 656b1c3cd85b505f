"""Any chain of stages goes on exactly from any of its positions."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmloader.streams import Shards, Stream, mix
from shmloader.streams.stages import Guard, Run
from tests.streams.made_streams import (
    MadeFormat,
    batches_of,
    groups,
    is_wanted,
    paths,
    plain,
    rest_of,
    streams,
)

READERS = 2
MOST = 60


def source(name: str = "a") -> Stream:
    return Shards(paths(name, [19, 14, 0, 17, 18, 21], [3]), MadeFormat(), seed=1, readers=READERS)


EACH: dict[str, Callable[[], Stream]] = {
    "windows": lambda: source().shuffle(7).batch(3),
    "rolling": lambda: source().shuffle(7, rolling=True).batch(3),
    "take": lambda: source().take(40).batch(3),
    "skip": lambda: source().skip(6).batch(3),
    "repeat": lambda: source().shuffle(5).repeat().take(150).batch(3),
    "filter": lambda: source().filter(is_wanted).shuffle(4).batch(3),
    "pack": lambda: source().pack(14, window=6, collate=list),
    "mix": lambda: mix({source(): 2, source("b"): 1}, stop="all").shuffle(5).batch(3),
    "tokens": lambda: mix({source(): 2, source("b"): 1}, by="tokens").batch(3),
    "number": lambda: mix({source(): 2, source("b").shuffle(3): 1}, stop=90).batch(4),
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
