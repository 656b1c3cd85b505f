"""Streams of made-up shards, which may have bad records, and what tests compare of them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from shmloader.errors import ShardError
from shmloader.streams import Shards, Stream, mix
from shmloader.streams.formats import between
from shmloader.streams.reader import Reader, Reading
from shmloader.streams.stages import Failed, Guard, Item, Run


class MadeFormat:
    """Shards whose paths say what they have: "name/number of records/bad,records".

    Records are lists of 1 to 9 numbers. A shard whose bad records are "all" is broken.
    """

    def __init__(self, *, seeks: bool = True) -> None:
        self.seeks = seeks

    def read(self, path: str, numbers: Sequence[int]) -> Iterator[Any]:
        for number in between(numbers, 0, self.count(path)):
            yield self._read(path, number)

    def count(self, path: str) -> int:
        _, count, bad = path.split("/")
        if bad == "all":
            raise ShardError(f"shard {path} is broken", path)
        return int(count)

    def _read(self, path: str, number: int) -> list[int]:
        name, _, bad = path.split("/")
        if str(number) in bad.split(","):
            raise ShardError(f"record {number} of shard {path} is bad", path, number)
        first = sum(name.encode()) * 1000 + number
        return [first] * (1 + first % 9)

    def __repr__(self) -> str:
        return "MadeFormat()"


def paths(name: str, counts: Sequence[int], bad: Sequence[int] = ()) -> list[str]:
    """Return paths of shards with these numbers of records; every one has the bad ones."""
    text = ",".join(map(str, bad))
    return [f"{name}{each}/{count}/{text}" for each, count in enumerate(counts)]


def add_one(record: list[int]) -> list[int]:
    return [number + 1 for number in record]


def fail_at_times(record: list[int]) -> list[int]:
    if record[0] % 13 == 0:
        raise ValueError(f"no {record[0]}")
    return record


def is_wanted(record: list[int]) -> bool:
    if record[0] % 17 == 0:
        raise KeyError(record[0])
    return record[0] % 3 > 0


def steps() -> st.SearchStrategy[Any]:
    """Return a strategy of functions that add a step to a stream."""
    counts = st.integers(1, 12)
    return st.one_of(
        st.sampled_from(
            [
                lambda stream: stream.map(add_one),
                lambda stream: stream.map(fail_at_times),
                lambda stream: stream.filter(is_wanted),
            ]
        ),
        counts.map(lambda count: lambda stream: stream.shuffle(count)),
        counts.map(lambda count: lambda stream: stream.shuffle(count, rolling=True)),
        st.integers(0, 60).map(lambda count: lambda stream: stream.take(count)),
        st.integers(0, 20).map(lambda count: lambda stream: stream.skip(count)),
        # Without an end, a stage above that keeps nothing would search for ever.
        st.integers(0, 300).map(lambda count: lambda stream: stream.repeat().take(count)),
    )


def groups() -> st.SearchStrategy[Any]:
    """Return a strategy of functions that make a stream of batches of one of records."""
    sizes, flags = st.integers(1, 7), st.booleans()
    return st.one_of(
        st.just(lambda stream: stream),
        st.tuples(sizes, flags).map(
            lambda args: lambda stream: stream.batch(args[0], drop_last=args[1], collate=list)
        ),
        st.tuples(st.integers(5, 30), sizes, st.sampled_from(["raise", "truncate", "drop"])).map(
            lambda args: (
                lambda stream: stream.pack(
                    args[0], window=args[1] * 4, too_long=args[2], collate=list
                )
            )
        ),
    )


@st.composite
def streams(draw: st.DrawFn, readers: int, depth: int = 2) -> Stream:
    """Return any stream of records."""
    kind = draw(st.integers(0, 2)) if depth else 0
    stream: Stream
    if kind < 2:
        counts = draw(st.lists(st.integers(0, 9), min_size=readers, max_size=readers + 4))
        bad = draw(st.lists(st.integers(0, 8), max_size=2))
        names = paths(draw(st.sampled_from("abcd")), counts, bad)
        if draw(st.integers(0, 3)) == 0:
            names[0] = names[0].rpartition("/")[0] + "/all"
        seed, is_shuffled = draw(st.integers(0, 5)), draw(st.booleans())
        stream = Shards(names, MadeFormat(), seed=seed, readers=readers, shuffle_shards=is_shuffled)
    else:
        sources = draw(st.lists(streams(readers, depth - 1), min_size=1, max_size=3))
        weights = draw(st.lists(st.floats(0.05, 5), min_size=3, max_size=3))
        pairs = list(zip(sources, weights, strict=False))
        schedule = {draw(st.integers(0, 30)): pairs[::-1][:2]} if draw(st.booleans()) else None
        stop = draw(st.sampled_from(["first", "all", 40]))
        by = draw(st.sampled_from(["samples", "tokens"]))
        stream = mix(pairs, by=by, stop=stop, schedule=schedule)
    for step in draw(st.lists(steps(), max_size=3)):
        stream = step(stream)
    return stream


def plain(group: list[Item] | None) -> Any:
    """Return what tests compare of a batch."""
    if group is None:
        return None
    return [(key, str(one.problem) if type(one) is Failed else one) for key, one in group]


def reader_of(stream: Stream, reader: int, epoch: int = 0) -> Reader:
    return stream.begin(Run(reader, stream.readers, epoch, Guard()))


def made_by(reader: Reader, most: int) -> Iterator[tuple[Any, Any]]:
    """Yield the next batches of a reader, each with the position after it."""
    for _ in range(most):
        group, facts = reader.make(1)
        if group is None:
            return
        yield plain(group), facts.state


def batches_of(stream: Stream, reader: int, most: int = 100) -> list[tuple[Any, Any]]:
    """Return the batches of a reader, each with the position after it, as JSON has it."""
    found = made_by(reader_of(stream, reader), most)
    return [(batch, json.loads(json.dumps(state))) for batch, state in found]


def rest_of(stream: Stream, reader: int, at: int, state: Any, first: int, most: int) -> list[Any]:
    """Return the batches of a reader from ``first`` on, made from an earlier position."""
    opened = reader_of(stream, reader)
    opened.go_to(at, state)  # a reader that is near would pass over batches instead
    opened.seek(Reading(0, reader, first, at, state))
    return [batch for batch, _ in made_by(opened, most)]
