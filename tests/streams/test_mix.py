"""Mixes: shares of samples and of tokens, ends, schedules, and bad input."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from shmloader.streams import Shards, Stream, mix
from tests.streams.made_streams import MadeFormat, batches_of, paths, plain, reader_of

WINDOW, POINT = 1000, 10


def source(name: str, count: int, *, readers: int = 2, **options: Any) -> Stream:
    return Shards(paths(name, [count] * readers), MadeFormat(), seed=1, readers=readers, **options)


def drawn(stream: Stream, reader: int = 0) -> list[int]:
    """Return from which source each record of a reader comes."""
    return [key[0] for batch, _ in batches_of(stream, reader, 10_000) for key, _ in batch]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1), (98, 1, 1), (5, 4, 3, 2, 1), (1e-9, 3e-9)])
def test_shares_of_samples_hold_in_every_thousand_of_the_whole_order(
    weights: tuple[float, ...],
) -> None:
    names = "abcdefgh"[: len(weights)]
    sources = [source(name, 128, readers=64) for name in names]
    stream = mix(list(zip(sources, weights, strict=True)), stop=128 * 64).batch(64)
    readers = [reader_of(stream, reader) for reader in range(64)]
    order: list[int] = []
    for _ in range(2):
        for reader in readers:
            group, _ = reader.make(1)
            assert group is not None
            order += (key[0] for key, _ in group)
    assert len(order) == 128 * 64
    for number, weight in enumerate(weights):
        counts = np.cumsum([0, *(each == number for each in order)])
        off = (counts[WINDOW:] - counts[:-WINDOW]) - WINDOW * weight / sum(weights)
        assert np.abs(off).max() <= POINT


def test_shares_of_tokens_hold_where_lengths_differ() -> None:
    long = source("a", 400).map(lambda record: [0] * (500 + len(record)))
    stream = mix({long: 0.6, source("b", 3000): 0.4}, by="tokens")
    tokens = [0, 0]
    for group, _ in batches_of(stream, 1, 2500):
        for key, record in group:
            tokens[key[0]] += len(record)
            assert abs(tokens[0] - 0.6 * sum(tokens)) < 2 * 509  # the longest record
    assert sum(tokens) > 30_000


def test_tokens_are_those_of_a_field_or_what_length_says() -> None:
    fields = source("a", 90).map(lambda record: {"id": 1, "input_ids": record * 10})
    plain_ones = source("b", 900)
    by_field = drawn(mix({fields: 1, plain_ones: 1}, by="tokens"))
    by_length = mix({fields: 1, plain_ones: 1}, by="tokens", length=lambda _: 7)
    assert by_field.count(1) > 5 * by_field.count(0)
    assert abs(drawn(by_length).count(0) - 90) <= 1


def test_readers_do_not_draw_a_rare_source_at_the_same_time() -> None:
    weights = {source("a", 99, readers=32): 98, source("b", 99, readers=32): 2}
    for stream in (mix(weights), mix(weights, by="tokens", length=lambda _: 1000)):
        firsts = [drawn(stream, reader).index(1) for reader in range(32)]
        assert len(set(firsts)) > 20


def test_a_mix_ends_with_its_first_source_with_all_or_after_a_number() -> None:
    a, b = source("a", 10), source("b", 100)
    first = drawn(mix({a: 1, b: 1}))
    assert first.count(0) == 10
    assert abs(first.count(1) - 10) <= 1
    both = drawn(mix({a: 1, b: 1}, stop="all"))
    assert (both.count(0), both.count(1)) == (10, 100)
    number = mix({a: 1, b: 1}, stop=81)
    assert [len(drawn(number, reader)) for reader in range(2)] == [41, 40]
    assert abs(drawn(number).count(0) - 20) <= 1
    assert len(number) == 81


def test_sources_that_repeat_have_the_orders_of_further_epochs() -> None:
    a = Shards(paths("a", [3] * 8), MadeFormat(), seed=1, readers=2)
    keys = [key for batch, _ in batches_of(mix({a: 1}, stop=72), 0) for key, _ in batch]
    passes = [[key[2:] for key in keys if key[1] == turn] for turn in range(3)]
    assert list(map(len, passes)) == [12, 12, 12]
    for turn, found in enumerate(passes):
        reader, expected = reader_of(a, 0, turn), list[Any]()
        while (group := reader.make(1)[0]) is not None:
            expected += (key[1:] for key, _ in group)
        assert found == expected


def test_weights_change_at_a_sample_of_the_mix() -> None:
    a, b, c = (source(name, 300) for name in "abc")
    stream = mix({a: 1, b: 1, c: 1}, schedule={200: {b: 1}, 300: {a: 3, c: 1}})
    for reader in range(2):
        found = drawn(stream, reader)
        assert set(found[:100]) == {0, 1, 2}
        assert set(found[100:150]) == {1}
        assert set(found[150:]) == {0, 2}
        assert abs(found[150:250].count(0) - 75) <= 2


def test_records_are_named_by_their_source() -> None:
    bad = Shards(paths("b", [5, 5], [3]), MadeFormat(), seed=0, readers=2, shuffle_shards=False)
    inner = mix({source("c", 50): 1, bad: 1}, stop="all")
    stream = mix({source("a", 50): 1, inner: 1}, stop="all")
    stage = reader_of(stream, 1)._groups
    items = list(islice(stage, 100))
    (key,) = {key for ((key, _),) in map(plain, items) if key[:2] == (1, 1) and key[-1] == 3}
    assert stage.describe(key) == "record 3 of shard b1/5/3"


def test_the_same_records_of_two_sources_have_their_own_keys() -> None:
    a = source("a", 5)
    stream = mix({a: 1, a.map(len): 1}, stop="all").shuffle(4, rolling=True)
    keys = [key for batch, _ in batches_of(stream, 0) for key, _ in batch]
    assert len(set(keys)) == 10


@pytest.mark.parametrize(
    ("weights", "options", "text"),
    [
        ({}, {}, "at least one stream"),
        ([(None, 1)], {}, "stream 0 is None"),
        ("a:0", {}, "weight 0 in weights should be above 0, but is 0"),
        ("a:-1", {}, "above 0"),
        ("a:nan", {}, "above 0"),
        ("a:x", {}, "should be a number"),
        ("a:1 a:2", {}, "stream 1 in weights is given twice"),
        ("a:1 batched:1", {}, "stream 1 in weights makes batches"),
        ("a:1 many:1", {}, r"have \[2, 3\]: give all of them readers=2"),
        ("a:1", {"by": "bytes"}, "by should be"),
        ("a:1", {"stop": 0}, "stop"),
        ("a:1", {"stop": "never"}, "stop should be 'first', 'all' or a number"),
        ([source("a", 3)], {}, "a dict of streams to weights, or a list of such pairs"),
        ("a:1", {"length": len}, "by='tokens' only"),
        ("a:1", {"schedule": {5: {}}}, r"schedule\[5\] should have a weight"),
        ("a:1", {"schedule": {-5: {}}}, "a sample in schedule"),
        ("a:1", {"schedule": {5: "other:1"}}, r"schedule\[5\] has .* which weights do not have"),
    ],
)
def test_bad_input_is_refused(weights: Any, options: dict[str, Any], text: str) -> None:
    known = {name: source(name, 3) for name in ("a", "other")}
    known |= {"batched": source("b", 3).batch(2), "many": source("c", 3, readers=3)}

    def read(given: Any) -> Any:
        if not isinstance(given, str):
            return given
        pairs = [pair.split(":") for pair in given.split()]
        return [(known[name], weight if weight == "x" else float(weight)) for name, weight in pairs]

    if "schedule" in options:
        schedule = {step: read(given) for step, given in options["schedule"].items()}
        options = {"schedule": schedule}
    with pytest.raises((TypeError, ValueError), match=text):
        mix(read(weights), **options)
